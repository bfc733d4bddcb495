"""`course check` and `course prove`: verdicts, exit statuses, JSON, JUnit, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import Terminal
from course.check import session as session_module
from course.check.progress import Progress
from toy_course import ToyCourse

pytestmark = pytest.mark.usefixtures("forked")

NANO = ("--model", "nano")


def as_json(text: str) -> Any:
    return json.loads(text, parse_constant=pytest.fail)


def test_a_pass(course: Terminal, toy: ToyCourse) -> None:
    toy.solve()
    ended = course("check", "1", *NANO)
    assert ended.status == 0, ended
    assert ended.err == ""
    for words in (
        "stage 01 The toy", "nano · cpu", "contract 3 passed", "5 of 10", "needs <= 10",
        "pass exact", "2.00x", "needs >= 1.5x", "half of it", "reported",
        "GPU number not measured on this machine", "passed: the gate is open",
    ):  # fmt: skip
        assert words in ended.words, words
    assert "\x1b" not in ended.out
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert Progress().has_passed("stage-01")


def test_a_fail(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(double="3 * number")
    ended = course("check", "1", *NANO)
    assert ended.status == 1
    for words in ("1 failed", "WRONG_VALUE", "expected", "course explain WRONG_VALUE",
                  "course hint 1", "not yet"):  # fmt: skip
        assert words in ended.words, words
    assert not Progress().has_passed("stage-01")


def test_inconclusive(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(seconds="[0.3, 3.0]")
    ended = course("check", "1", *NANO)
    assert ended.status == 3
    assert "inconclusive: too noisy for a verdict" in ended.words
    assert not Progress().has_passed("stage-01")


def test_a_tier_that_is_not_here(
    course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "has_cuda", lambda: False)
    toy.solve()
    ended = course("check", "1", "--tier", "cuda")
    assert ended.status == 4
    assert "NOT_MEASURABLE" in ended.out
    assert "not measurable on this machine" in ended.out
    both = course("check", "1", "--tier", "cuda", "--json")
    assert both.status == 4
    assert as_json(both.out)["results"][0]["status"] == "not_here"


def test_the_worst_status_of_several_counts(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(double="3 * number")
    ended = course("check", "1", "stage-01", "toy", *NANO, "--contract-only", "--json")
    assert ended.status == 1
    assert [r["status"] for r in as_json(ended.out)["results"]] == ["fail"] * 3


def test_contract_only(course: Terminal, toy: ToyCourse) -> None:
    toy.solve()
    ended = course("check", "1", "--contract-only")
    assert ended.status == 0
    assert "contract holds; the number was not measured" in ended.words
    assert not Progress().has_passed("stage-01")


def test_without_a_stage_the_next_one_is_checked(course: Terminal, toy: ToyCourse) -> None:
    toy.solve()
    ended = course("check", *NANO)
    assert ended.status == 0
    assert "stage 01" in ended.out
    assert "every published stage is passed" in course.refused("check")
    assert course("check", "--all", *NANO).status == 0


def test_solutions_by_path(course: Terminal, toy: ToyCourse) -> None:
    assert course("check", "1", "--solution", "reference", *NANO).status == 0
    assert not Progress().has_passed("stage-01")  # that was not one's own
    wrong = toy.home / "gates" / "wrong" / "stage_01_toy" / "slow.py"
    ended = course("check", "1", "--solution", str(wrong), *NANO)
    assert ended.status == 1
    assert "TOO_SLOW" in ended.out
    other = toy.write("other/toy.py", toy.reference.read_text())
    assert course("check", "1", "--solution", str(other.parent), *NANO).status == 0


def test_json_is_all_of_stdout(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(double="print('noise') or 2 * number")
    ended = course("check", "1", *NANO, "--json")
    assert ended.status == 0
    document = as_json(ended.out)
    assert document["machine"]["key"]
    [found] = document["results"]
    assert found["stage"] == "stage-01"
    assert found["status"] == "pass"
    assert found["passed"] is True
    assert [number["name"] for number in found["numbers"]] == ["work", "time", "share"]
    assert found["numbers"][1]["verdict"] == "pass"
    assert ended.err == ""
    toy.mine.write_text("def double(:")
    ended = course("check", "1", *NANO, "--json")
    assert ended.status == 1
    assert as_json(ended.out)["results"][0]["failure"]["code"] == "SYNTAX_ERROR"


def test_junit(course: Terminal, toy: ToyCourse, tmp_path: Path) -> None:
    toy.solve(double="3 * number")
    path = tmp_path / "out" / "junit.xml"
    assert course("check", "1", *NANO, "--junit", str(path)).status == 1
    [suite] = ET.parse(path).getroot()
    assert suite.get("failures") == "1"
    in_the_way = course("check", "1", "--contract-only", "--junit", str(toy.home))
    assert in_the_way.status == 2
    assert "not yet" in in_the_way.out  # shown all the same
    assert in_the_way.err.startswith("course: ")


def test_a_seed_repeats_the_secret(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(double="2 * number + (number > 9)")
    first = course("check", "1", "--contract-only", "--json")
    seed = as_json(first.out)["results"][0]["seed"]
    again = course("check", "1", "--contract-only", "--json", "--seed", str(seed))
    other = course("check", "1", "--contract-only", "--json", "--seed", str(seed + 1))
    failures = [as_json(e.out)["results"][0]["failure"] for e in (first, again, other)]
    assert failures[0] == failures[1]
    assert failures[0] != failures[2]


def test_predictions_are_scored(course: Terminal, toy: ToyCourse) -> None:
    assert course("predict", "1", "50").status == 0
    toy.solve()
    ended = course("check", "1", *NANO)
    assert "you predicted 50 steps, measured 5 steps: off by a factor of 10.0" in ended.words


def test_a_home_that_cannot_be_written_still_shows_results(
    course: Terminal, toy: ToyCourse
) -> None:
    toy.solve()
    (toy.home / ".course").write_text("in the way")
    ended = course("check", "1", *NANO)
    assert ended.status == 0
    assert "passed: the gate is open" in ended.words
    assert "could not be stored" in ended.words
    assert course("check", "1", "--contract-only", "--json").status == 0


def test_damaged_progress_hides_no_result(course: Terminal, toy: ToyCourse) -> None:
    toy.solve()
    toy.progress.parent.mkdir(exist_ok=True)
    toy.progress.write_bytes(b"garbage" * 1000)
    ended = course("check", "1", *NANO)
    assert ended.status == 0
    assert "passed: the gate is open" in ended.words
    assert "could not be stored" in ended.words
    assert "move it away" in ended.words


def test_what_a_solution_says_is_no_markup(course: Terminal, toy: ToyCourse) -> None:
    toy.solve(work="1 / 0")
    text = toy.mine.read_text().replace("1 / 0", "fail()")
    toy.mine.write_text(
        text + "def fail(): raise ValueError('[red]a[/red] [/nothing] \\x1b[31m \\ud800 :smile:')\n"
    )
    ended = course("check", "1", *NANO)
    assert ended.status == 1
    assert "[red]a[/red] [/nothing]" in ended.words
    assert ":smile:" in ended.out
    assert "\x1b" not in ended.out


REFUSED = {
    "an unknown stage": (("check", "foo"), "there is no stage 'foo'"),
    "a number too high": (("check", "3"), "there is no stage '3'"),
    "one not yet published": (("check", "2"), "not yet published"),
    "an unknown tier": (("check", "1", "--tier", "tpu"), "--tier must be cpu, cuda or best"),
    "an unknown model": (("check", "1", "--model", "foo"), "--model: "),
    "no such file": (("check", "1", "--solution", "nowhere.py"), "--solution must be"),
    "a stage and --all": (("check", "1", "--all"), "not both"),
    "a negative seed": (("check", "1", "--seed", "-1"), "greater than or equal to 0"),
    "a seed that is none": (("check", "1", "--seed", "x"), "--seed"),
    "an unknown option": (("check", "1", "--fast"), "--fast"),
    "nothing to prove": (("prove", "2", *NANO), "not yet published"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes(course: Terminal, toy: ToyCourse, arguments: tuple[str, ...], said: str) -> None:
    assert said in course.refused(*arguments)


def test_an_interruption(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "run_gate", interrupt)
    assert "interrupted" in course.refused("check", "1", *NANO, status=130)
    assert Progress().checks() == []


def test_what_nobody_foresaw_is_a_traceback(
    course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug of the course")

    monkeypatch.setattr(session_module, "run_gate", fail)
    with pytest.raises(KeyError, match="a bug of the course"):
        course("check", "1", *NANO)


# -- prove ----------------------------------------------------------------------------------------


def test_a_proof_that_holds(course: Terminal, toy: ToyCourse) -> None:
    toy.mine.write_text("a student's own work")
    ended = course("prove", "1", *NANO)
    assert ended.status == 0, ended.out
    assert "6 of 6 claims hold" in ended.out
    assert "stage-01 The toy 6 of 6 (nano, cpu)" in ended.words
    assert "BROKEN" not in ended.out
    for words in (
        "reference toy passes",
        "stub toy NOT_IMPLEMENTED",
        "control too_much WRONG_COUNT",
    ):
        assert words in ended.words
    assert toy.mine.read_text() == "a student's own work"
    assert Progress().checks() == []  # proofs are no checks of the student's


def test_a_proof_that_fails(course: Terminal, toy: ToyCourse) -> None:
    wrong = toy.home / "gates" / "wrong" / "stage_01_toy"
    (wrong / "right.py").write_text("# WRONG_VALUE: it is right\n" + toy.reference.read_text())
    ended = course("prove", *NANO)
    assert ended.status == 1
    assert "BROKEN 01 wrong right WRONG_VALUE" in ended.words
    assert "should fail with WRONG_VALUE, but: PASS" in ended.words
    end = ended.words.partition("6 of 7 claims hold ")[2]
    assert end.startswith("stage-01 right: should fail with WRONG_VALUE, but: PASS")
    (wrong / "unclear.py").write_text("x = 1\n")
    assert "unclear.py: the first line must be" in course("prove", "1", *NANO).err
