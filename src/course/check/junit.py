"""Results as JUnit XML, for whoever collects them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from course.check.result import Exit, StageResult
from course.plain import plain


def write_junit(path: Path, results: Sequence[StageResult]) -> None:
    """One suite per stage, one case per check.

    What could not be measured, or not well enough for a verdict, is an error, never a skip.
    """
    root = ET.Element("testsuites", name="course")
    for result in results:
        seconds = f"{result.seconds:.2f}"
        suite = ET.SubElement(root, "testsuite", name=result.stage, time=seconds)
        found = {
            n: getattr(result, n) for n in ("tier", "device", "model", "solution_hash", "seed")
        }
        for number in result.numbers:
            verdict = number.verdict.value if number.verdict else "reported"
            found[f"number:{number.name}"] = f"{number.text} ({verdict})"
        properties = ET.SubElement(suite, "properties")
        for name, value in found.items():
            ET.SubElement(properties, "property", name=plain(name), value=plain(str(value)))
        for check in result.checks:
            case = ET.SubElement(
                suite, "testcase", classname=f"{result.stage}.{check.layer}",
                name=plain(check.name), time=f"{check.seconds:.3f}",
            )  # fmt: skip
            if check.outcome != "passed":
                _fail(case, result)
        if result.status is not Exit.PASS and all(c.outcome == "passed" for c in result.checks):
            _fail(ET.SubElement(suite, "testcase", classname=result.stage, name="verdict"), result)
        for name, kind in (("tests", ""), ("failures", "/failure"), ("errors", "/error")):
            suite.set(name, str(len(suite.findall(f"testcase{kind}"))))
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.indent(root)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _fail(case: ET.Element, result: StageResult) -> None:
    failure = result.failure
    kind = failure.code.value if failure else result.status.name
    said = str(failure) if failure else kind
    if failure is None and (result.missing or result.left_out):
        left = [
            f"{title} (no {name})" for name, titles in result.left_out.items() for title in titles
        ]
        said = "not measured: " + ", ".join([*result.missing, *left])
    unmeasured = result.status in (Exit.INCONCLUSIVE, Exit.NOT_HERE, Exit.BROKEN)
    element = ET.SubElement(
        case, "error" if unmeasured else "failure", type=kind, message=plain(said)
    )
    element.text = plain(failure.detail if failure else "")
