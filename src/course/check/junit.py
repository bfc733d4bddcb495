"""Results as JUnit XML, for whoever collects them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from course.check.result import Exit, StageResult


def write_junit(path: Path, results: Sequence[StageResult]) -> None:
    """One suite per stage, one case per check; what was not measured is an error, never a skip."""
    root = ET.Element("testsuites", name="course")
    for result in results:
        seconds = f"{result.seconds:.2f}"
        suite = ET.SubElement(root, "testsuite", name=result.stage, time=seconds)
        properties = ET.SubElement(suite, "properties")
        for name in ("tier", "device", "model", "solution_hash", "seed"):
            ET.SubElement(properties, "property", name=name, value=str(getattr(result, name)))
        for number in result.numbers:
            value = f"{number.text} ({number.verdict.value if number.verdict else 'reported'})"
            ET.SubElement(properties, "property", name=f"number:{number.name}", value=value)
        for check in result.checks:
            case = ET.SubElement(
                suite, "testcase", classname=f"{result.stage}.{check.layer}", name=check.name,
                time=f"{check.seconds:.3f}",
            )  # fmt: skip
            if check.outcome != "passed":
                _fail(case, result)
        if result.status is not Exit.PASS and all(c.outcome == "passed" for c in result.checks):
            _fail(ET.SubElement(suite, "testcase", classname=result.stage, name="verdict"), result)
        failures = len(suite.findall("testcase/failure"))
        suite.set("tests", str(len(suite.findall("testcase"))))
        suite.set("failures", str(failures))
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.indent(root)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _fail(case: ET.Element, result: StageResult) -> None:
    failure = result.failure
    kind = failure.code.value if failure else result.status.name
    element = ET.SubElement(case, "failure", type=kind, message=str(failure or kind))
    element.text = _printable(failure.detail if failure else "")


def _printable(text: str) -> str:
    """XML 1.0 has no place for most control characters."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)
