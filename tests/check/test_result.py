"""What a result is worth: a pass is only what was measured, in full, and held."""

from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from course.check.codes import PAGES, Code, Kind
from course.check.failure import GateFailure
from course.check.junit import write_junit
from course.check.report import print_result
from course.check.result import CheckOutcome, Exit, Number, StageResult
from course.measure.ratio import Verdict
from course.plain import one_line, plain


def check(outcome: str = "passed", layer: str = "contract") -> CheckOutcome:
    return CheckOutcome("test_it", layer, outcome, 0.1, "it is right")


def number(verdict: Verdict | None = Verdict.PASS, **fields: Any) -> Number:
    return Number("work", 5.0, "5 of 10", " steps", "<= 10", verdict, **fields)


def result(**fields: Any) -> StageResult:
    known: dict[str, Any] = {
        "stage": "stage-01", "title": "The toy", "tier": "cpu", "device": "cpu", "model": "nano",
        "solution": "/home/me/toy.py", "solution_hash": "abc", "seed": 7,
        "checks": [check(), check(layer="number")], "numbers": [number()],
    }  # fmt: skip
    return StageResult(**(known | fields))


FAILURE = GateFailure(Code.WRONG_TOKEN, "another token", "5", "6", "token 3", "a traceback")

LEFT_OUT = {"triton": ["the kernel is right", "it spills nothing"]}

STATUS: dict[str, tuple[StageResult, Exit]] = {
    "all held": (result(), Exit.PASS),
    "nothing was checked": (result(checks=[]), Exit.FAIL),
    "a check was skipped": (result(checks=[check(), check("skipped")]), Exit.FAIL),
    "a check failed without a failure": (result(checks=[check("failed")]), Exit.FAIL),
    "a number is missing": (result(missing=["time"]), Exit.FAIL),
    "a number failed": (result(numbers=[number(), number(Verdict.FAIL)]), Exit.FAIL),
    "a number is open": (result(numbers=[number(), number(Verdict.INCONCLUSIVE)]),
                         Exit.INCONCLUSIVE),
    "one failed and one is open": (
        result(numbers=[number(Verdict.INCONCLUSIVE), number(Verdict.FAIL)]), Exit.FAIL),
    "a failure": (result(failure=FAILURE), Exit.FAIL),
    "a failure though all passed": (result(failure=FAILURE, checks=[check()]), Exit.FAIL),
    "missing and open": (
        result(missing=["time"], numbers=[number(Verdict.INCONCLUSIVE)]), Exit.FAIL),
    "the tier is not here": (
        result(failure=GateFailure(Code.NOT_MEASURABLE, "no GPU"), checks=[]), Exit.NOT_HERE),
    "the judge failed": (result(failure=GateFailure(Code.BROKEN_GATE, "oh")), Exit.BROKEN),
    "only reported": (result(numbers=[number(None)]), Exit.PASS),
    "a library is not here": (result(left_out=LEFT_OUT), Exit.NOT_HERE),
    "a library and its number": (result(left_out=LEFT_OUT, missing=["time"]), Exit.NOT_HERE),
    "a library, and nothing held": (result(left_out=LEFT_OUT, checks=[]), Exit.FAIL),
    "a library, and a failure": (result(left_out=LEFT_OUT, failure=FAILURE), Exit.FAIL),
    "a library, and a number failed": (
        result(left_out=LEFT_OUT, numbers=[number(Verdict.FAIL)]), Exit.FAIL),
    "a library, and a number is open": (
        result(left_out=LEFT_OUT, numbers=[number(Verdict.INCONCLUSIVE)]), Exit.NOT_HERE),
}  # fmt: skip


@pytest.mark.parametrize(("found", "status"), STATUS.values(), ids=STATUS.keys())
def test_status(found: StageResult, status: Exit) -> None:
    assert found.status is status
    assert found.passed is (status is Exit.PASS)
    found.contract_only = True
    assert not found.passed
    found.contract_only = False


@given(
    outcomes=st.lists(st.sampled_from(["passed", "failed", "skipped", "error"]), max_size=4),
    verdicts=st.lists(st.sampled_from([None, *Verdict]), max_size=4),
    missing=st.booleans(), failed=st.booleans(), contract_only=st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_whatever_was_not_measured_is_never_a_pass(
    outcomes: list[str], verdicts: list[Verdict | None], missing: bool, failed: bool,
    contract_only: bool,
) -> None:  # fmt: skip
    found = result(
        checks=[check(outcome) for outcome in outcomes], numbers=[number(v) for v in verdicts],
        missing=["x"] * missing, failure=FAILURE if failed else None, contract_only=contract_only,
    )  # fmt: skip
    clean = bool(outcomes) and set(outcomes) == {"passed"} and not missing and not failed
    good = clean and not {Verdict.FAIL, Verdict.INCONCLUSIVE} & set(verdicts)
    assert (found.status is Exit.PASS) == good
    assert found.passed == (good and not contract_only)
    assert (found.status is Exit.INCONCLUSIVE) <= clean


def test_as_json() -> None:
    odd = number(interval=(0.0, math.inf), extra={"x": math.nan}, pairs=[(1.0, 2.0)])
    odd.value = math.inf
    found = result(numbers=[odd], failure=FAILURE)
    text = json.dumps(found.as_dict(), allow_nan=False)
    document = json.loads(text)
    assert document["status"] == "fail"
    assert document["passed"] is False
    assert document["failure"]["code"] == "WRONG_TOKEN"
    [kept] = document["numbers"]
    assert kept["value"] is None
    assert kept["interval"] == [0.0, None]
    assert kept["extra"] == {"x": None}
    assert "pairs" not in kept
    assert kept["verdict"] == "pass"


def test_the_list_of_codes_is_closed_and_explained() -> None:
    assert set(PAGES) == set(Code)
    for code in Code:
        page = code.page
        assert page.means.endswith("."), code
        assert page.do.endswith("."), code
        assert page.causes, code
        assert page.likely in ("", page.causes[0]), code
        assert all(cause.endswith(".") or cause.endswith("`") for cause in page.causes), code
        assert isinstance(page.kind, Kind)
        assert code.name == code.value


def test_a_failure_as_text() -> None:
    assert str(FAILURE) == "WRONG_TOKEN: another token; expected: 5; got: 6"
    assert str(GateFailure(Code.EXITED, "gone")) == "EXITED: gone"


# -- fit to be shown ------------------------------------------------------------------------------

NASTY = "a \x1b[31mred\x1b[0m [bold]word[/] \x00\x07\x08 \ud800 \ufffe \u202e :smile: é 日本"
SHOWN = "a red [bold]word[/]  \ufffd \ufffd  :smile: é 日本"


def test_plain() -> None:
    assert plain(NASTY) == SHOWN
    assert plain("\x1b]0;a title\x07x\x1b]8;;http://y\x1b\\z\x1bc!") == "xz!"
    assert plain("one\r\ntwo\rthree\tfour\n") == "one\ntwo\nthree\tfour\n"
    assert plain("\x9b31m") == "31m"
    assert plain("\x1b") == ""
    assert one_line(" a\n\n b\tc ") == "a b c"


@given(st.text(st.characters(codec=None, exclude_categories=())))
@settings(deadline=None)
def test_plain_text_is_valid_everywhere(text: str) -> None:
    shown = plain(text)
    shown.encode("utf-8")
    ET.fromstring(f"<a>{shown.replace('&', '').replace('<', '')}</a>")
    assert "\x1b" not in shown


def printed(found: StageResult, width: int = 80, **options: Any) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, highlight=False, markup=False, emoji=False, **options
    )
    print_result(console, found, published="not measured on this machine", stage="1")
    return stream.getvalue()


def full() -> StageResult:
    failure = GateFailure(
        Code.WRONG_TOKEN, f"a prompt with {NASTY}", "1 2 [3]", "1 2 [red]3[/red]", "token 2 of 3",
        f"Traceback:\n  File 'x'\n{NASTY}\n" + "y" * 200, hint=2, notes=["a note [dim]"],
        likely="a cause [b]",
    )  # fmt: skip
    numbers = [
        number(exact=True),
        number(Verdict.FAIL, interval=(1.38, 1.52), slices=50, notes=["predicted " + "much " * 30]),
        number(None), number(Verdict.INCONCLUSIVE, interval=(0.0, math.inf)),
        Number("a_very_long_name_of_a_number", 1.0, "long " * 30, needs=">= 123,456,789"),
    ]  # fmt: skip
    return result(
        numbers=numbers, failure=failure, remarks=["note [red] /a/[path]"], missing=["time"],
        checks=[check(), check("failed")], printed=f"shape [2]\n{NASTY}",
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_report_fits_its_width(width: int) -> None:
    text = printed(full(), width)
    assert max(map(len, text.splitlines())) <= width
    for line in text.splitlines()[1:]:
        assert line == "" or line.startswith("  "), line


def test_a_report_tells_everything() -> None:
    text = printed(full(), 120)
    flat = " ".join(text.split())
    for words in (
        "1 passed, 1 failed: it is right", "5 of 10", "needs <= 10", "pass exact", "fail",
        "[1.38, 1.52] over 50 slices",
        "reported", "inconclusive", "GPU number not measured on this machine",
        "not measured time. A check that is absent is not a pass.", "WRONG_TOKEN", "[bold]word[/]",
        "expected 1 2 [3]", "got 1 2 [red]3[/red]", "where token 2 of 3", "a note [dim]",
        "note note [red] /a/[path]", "Traceback:", "likely a cause [b]",
        "course explain WRONG_TOKEN", "course hint 1 --level 2", "not yet (0 s)", ":smile:",
        "printed shape [2]",
    ):  # fmt: skip
        assert words in flat, words
    assert "\x1b" not in text
    assert "\x07" not in text


def test_colours_are_for_terminals_only() -> None:
    coloured = printed(full(), force_terminal=True, color_system="standard")
    assert "\x1b[" in coloured
    assert "\x1b[" not in printed(full())


CLOSING = {
    "passed: the gate is open": result(),
    "contract holds; the number was not measured": result(contract_only=True),
    "not yet": result(failure=FAILURE),
    "inconclusive: too noisy": result(numbers=[number(Verdict.INCONCLUSIVE)]),
    "not measurable on this machine": result(failure=GateFailure(Code.NOT_MEASURABLE, "no GPU")),
    "what could be checked holds; the rest": result(left_out=LEFT_OUT),
}


@pytest.mark.parametrize("words", CLOSING)
def test_the_last_line_says_how_it_ended(words: str) -> None:
    assert words in printed(CLOSING[words])


def test_what_was_left_out_is_named() -> None:
    text = " ".join(printed(result(left_out=LEFT_OUT, missing=["time"]), 120).split())
    assert "no triton not checked: the kernel is right; it spills nothing. triton exists" in text
    assert "not measured time" in text
    assert result(left_out=LEFT_OUT).as_dict()["left_out"] == LEFT_OUT


def test_what_a_machine_lacks_is_no_matter_for_a_hint() -> None:
    text = printed(result(failure=GateFailure(Code.NOT_MEASURABLE, "no triton")))
    assert "course doctor" in text
    assert "course hint" not in text


def test_a_stub_is_sent_to_the_chapter() -> None:
    text = printed(result(failure=GateFailure(Code.NOT_IMPLEMENTED, "your code goes here")))
    assert "course read 1" in text


def test_a_contract_that_did_not_run_is_not_a_contract_without_faults() -> None:
    found = result(checks=[], numbers=[], failure=GateFailure(Code.SYNTAX_ERROR, "no such word"))
    assert "contract not run" in " ".join(printed(found).split())


# -- JUnit ----------------------------------------------------------------------------------------


def test_junit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "results.xml"
    stopped = result(stage="stage-02", failure=FAILURE, checks=[])
    noisy = result(stage="stage-03", numbers=[number(Verdict.INCONCLUSIVE)])
    missing = result(stage="stage-04", missing=["time"])
    left = result(stage="stage-05", left_out=LEFT_OUT)
    write_junit(path, [full(), result(), stopped, noisy, missing, left])
    root = ET.parse(path).getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert len(suites) == 5  # the first two have one name
    first, second = list(root)[:2]
    assert [first.get(n) for n in ("tests", "failures", "errors")] == ["2", "1", "0"]
    assert [second.get(n) for n in ("tests", "failures", "errors")] == ["2", "0", "0"]
    failure = first.find("testcase/failure")
    assert failure is not None
    assert failure.get("type") == "WRONG_TOKEN"
    assert "red [bold]word[/]" in str(failure.get("message"))
    assert "Traceback:" in str(failure.text)
    assert "\x1b" not in str(failure.text)
    kinds = {"02": "failure", "03": "error", "04": "failure", "05": "error"}
    for name, kind in ((f"stage-{number}", kind) for number, kind in kinds.items()):
        case = suites[name].findall("testcase")[-1]
        assert case.get("name") == "verdict"
        assert case.find(kind) is not None, name
    assert "time" in str(suites["stage-04"].find("testcase/failure").get("message"))  # type: ignore[union-attr]
    assert "no triton" in str(suites["stage-05"].find("testcase/error").get("message"))  # type: ignore[union-attr]
    kept = {p.get("name"): p.get("value") for p in second.iter("property")}
    assert kept["seed"] == "7"
    assert kept["number:work"] == "5 of 10 (pass)"
    assert not list(root.iter("skipped"))


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=30))
@settings(max_examples=50, deadline=None)
def test_junit_is_valid_whatever_was_said(text: str) -> None:
    import tempfile

    failure = GateFailure(Code.CRASHED, text, text, text, text, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        odd = Number(text, 1.0, text, text, text, Verdict.FAIL)
        checks = [CheckOutcome(text, "contract", "failed", 0.1, text)]
        write_junit(path, [result(failure=failure, numbers=[odd], checks=checks, model=text)])
        ET.parse(path)
