"""The commands that a student uses besides `check`, with what can go wrong in each."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from check.test_result import check, number, result
from cli.terminal import Terminal
from course.check.codes import Code
from course.check.progress import Progress
from course.check.result import StageResult
from course.measure.machine import fingerprint
from course.measure.ratio import Verdict
from toy_course import ToyCourse


def passed(machine: str | None = None, **fields: Any) -> None:
    """Store a check as if it had been run."""
    found: StageResult = result(**fields)
    Progress().save(found, machine=machine or fingerprint().key, mine=True, gate_hash="g")


# -- where one stands -----------------------------------------------------------------------------


def test_next(course: Terminal, toy: ToyCourse) -> None:
    ended = course("next")
    assert ended.status == 0
    for words in ("stage-01 The toy", "Numbers are too small.", "course predict 1",
                  "course read 1", "stages/stage_01_toy/toy.py", "course check 1"):  # fmt: skip
        assert words in ended.words, words
    passed()
    assert "You have passed every published stage." in course("next").out


def test_a_stage_that_was_given_up_is_said_to_be_so(course: Terminal, toy: ToyCourse) -> None:
    course("solution", "1", "--give-up")
    assert "01 The toy open, solution seen" in course("status").words
    assert "stage-01 The toy" in course("next").words  # there is no other
    passed()
    assert "01 The toy passed" in course("status").words
    assert "solution seen" not in course("status").words


def test_status(course: Terminal, toy: ToyCourse) -> None:
    assert "01 The toy open" in course("status").words
    assert "02 The second toy not yet published" in course("status").words
    passed(checks=[check("failed")], numbers=[])
    assert "01 The toy tried contract holds" in course("status").words
    passed(numbers=[number(Verdict.INCONCLUSIVE)])
    assert "01 The toy tried 5 of 10" in course("status").words
    passed(machine="another")
    assert "01 The toy passed on another machine" in course("status").words
    passed()
    assert "01 The toy passed 5 of 10" in course("status").words


def test_status_without_anything(course: Terminal, toy: ToyCourse) -> None:
    assert course("status").status == 0
    assert not toy.progress.exists()  # looking makes nothing


def test_damaged_progress_is_one_line(course: Terminal, toy: ToyCourse) -> None:
    toy.progress.parent.mkdir(exist_ok=True)
    toy.progress.write_bytes(b"garbage" * 1000)
    for command in (["status"], ["next"], ["hint", "1"], ["predict", "1", "5"], ["solution", "1"]):
        assert "move it away" in last_line(course, *command), command


def last_line(course: Terminal, *arguments: str) -> str:
    ended = course(*arguments)
    assert ended.status == 2
    assert "Traceback" not in ended.err
    return ended.err.strip().splitlines()[-1]


# -- learning -------------------------------------------------------------------------------------


def test_read(course: Terminal, toy: ToyCourse) -> None:
    ended = course("read", "1")
    assert ended.status == 0
    assert "Stage 01: The toy" in ended.out
    assert "It is 42." in ended.out
    assert "01_toy.ipynb" in course.refused("read", "1", "--notebook")
    notebook = {"cells": [{"cell_type": "markdown", "source": ["The *reader's* path [1]."]}]}
    toy.write("notebooks/01_toy.ipynb", json.dumps(notebook))
    assert "The reader's path [1]." in course("read", "1", "--notebook").out
    assert "not yet published" in course.refused("read", "2")


def test_hints_walk_through_the_levels(course: Terminal, toy: ToyCourse) -> None:
    for words in ("Look at [the] number.", "Add it to itself.", "Write 2 * number."):
        ended = course("hint", "1")
        assert ended.status == 0
        assert words in ended.words
    assert "hint 3 of 3" in course("hint", "1").words  # there is no fourth
    assert "Look at [the] number." in course("hint", "1", "--level", "1").words
    assert Progress().events("stage-01", "hint") == ["1", "2", "3", "3", "1"]
    assert "less than or equal to 3" in course.refused("hint", "1", "--level", "4")
    (toy.home / "stages" / "stage_01_toy" / "hints.md").unlink()
    assert "hint" in last_line(course, "hint", "1")


def test_a_hint_that_was_asked_for_out_of_turn(course: Terminal, toy: ToyCourse) -> None:
    course("hint", "1", "--level", "2")
    assert "Look at" in course("hint", "1").words
    assert "Write" in course("hint", "1").words


def test_explain(course: Terminal) -> None:
    every = course("explain")
    assert every.status == 0
    for code in Code:
        ended = course("explain", code.value.lower().replace("_", "-"))
        assert ended.status == 0
        assert ended.out.startswith(code.value)
        assert " ".join(code.page.do.split()) in ended.words
        assert code.value in every.out
    assert "Did you mean TOO_SLOW" in course.refused("explain", "TO_SLOW")
    assert "`course explain` lists them" in course.refused("explain", "xyz")


def test_predict(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = course("predict", "1", "12.5")
    assert ended.status == 0
    assert "How much work [in steps] is done?" in ended.out
    assert "noted: 12.5" in ended.words
    for value in ("nan", "inf", "0"):
        assert "a prediction must be a number above 0" in last_line(course, "predict", "1", value)
    assert "-5" in last_line(course, "predict", "1", "--", "-5")
    assert course("predict", "1", "abc").status == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "type a number: course predict 1 NUMBER" in last_line(course, "predict", "1")
    assert [value for _, value in Progress().predictions("stage-01")] == [12.5]


def test_glossary(course: Terminal, toy: ToyCourse) -> None:
    ended = course("glossary")
    assert ended.words == "double (stage 01) Two of [them]. work (stage 01) What is done."
    assert course("glossary", "twice").words == "double (stage 01) Two of [them]."
    assert "Did you mean double?" in course.refused("glossary", "doubl")


# -- the student's file ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["solution", "diff"])
def test_the_solution_is_earned_or_given_up_for(
    course: Terminal, toy: ToyCourse, command: str
) -> None:
    said = course.refused(command, "1")
    assert "is not passed yet" in said
    assert f"course {command} 1 --give-up" in said
    assert Progress().events("stage-01", "give-up") == []
    ended = course(command, "1", "--give-up")
    assert ended.status == 0
    assert "return 2 * number" in ended.out
    assert Progress().events("stage-01", "give-up") == [command]
    assert "is not passed yet" in course.refused(command, "1")  # each time anew
    passed(contract_only=True)
    assert "is not passed yet" in course.refused(command, "1")
    passed()
    ended = course(command, "1")
    assert ended.status == 0
    assert "return 2 * number" in ended.out
    assert "solution: begin" not in ended.out
    course(command, "1", "--give-up")
    assert Progress().events("stage-01", "give-up") == [command]  # nothing to give up any more


def test_diff_from_the_stub_needs_no_pass(course: Terminal, toy: ToyCourse) -> None:
    assert course("diff", "1", "--stub").out == "no difference\n"
    toy.mine.write_text(toy.mine.read_text() + "# [red]mine[/red]\n")
    assert "+# [red]mine[/red]" in course("diff", "1", "--stub").out


def test_reset(course: Terminal, toy: ToyCourse) -> None:
    toy.mine.write_text("my work\n")
    ended = course("reset", "1", "--yes")
    assert ended.status == 0
    [backup] = toy.mine.parent.glob("*.bak")
    assert backup.read_text() == "my work\n"
    assert str(backup) in ended.out
    assert "NotImplementedError" in toy.mine.read_text()
    assert course("reset", "1").status == 0  # nobody to ask, nothing to lose
    assert len(list(toy.mine.parent.glob("*.bak"))) == 1


def test_reset_asks_first(
    course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    toy.mine.write_text("my work\n")
    for answer, status in (("n\n", 1), ("", 1), ("y\n", 0)):
        assert toy.mine.read_text() == "my work\n"
        monkeypatch.setattr(sys, "stdin", Keyboard(answer))
        ended = course("reset", "1")
        assert ended.status == status, ended
        assert "Traceback" not in ended.err
    assert "NotImplementedError" in toy.mine.read_text()


# -- the machine ----------------------------------------------------------------------------------


def test_doctor(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    from course.study import doctor
    from course.study.doctor import Finding

    found = [Finding("ok", "path", "/a/[red]/b"), Finding("limit", "x", "y", "do [this]")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    ended = course("doctor")
    assert ended.status == 0
    assert "ok path /a/[red]/b limit x y do [this]" in ended.words
    found.append(Finding("mend", "z", "broken"))
    assert course("doctor").status == 1


def test_machine(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    from course.measure import roofline

    asked: list[bool] = []
    measured = roofline.Roofline(
        device="cpu", threads=2, torch_version="2.13", array_bytes=1 << 28, cache_bytes=32 << 20,
        read_bandwidth=20e9, copy_bandwidth=15e9, flops={"float32": 100e9}, tried=("float32",),
        busy=False,
    )  # fmt: skip

    def probe(device: str, *, refresh: bool = False) -> roofline.Roofline:
        asked.append(refresh)
        return measured

    monkeypatch.setattr(roofline, "probe", probe)
    ended = course("machine")
    assert ended.status == 0
    for words in ("32 MiB", "20.0 GB/s", "15.0 GB/s", "GFLOP/s", "ridge at 5.0 FLOP per byte"):
        assert words in ended.words
    document = json.loads(course("machine", "--json", "--refresh").out)
    assert document["machine"]["key"] == fingerprint().key
    assert document["roofline"]["read_bandwidth"] == 20e9
    assert asked == [False, True]


def test_models(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    from course import model
    from course.model import ModelUnavailable

    ended = course("model", "list")
    assert ended.status == 0
    assert "nano" in ended.out
    assert "smollm2-135m" in ended.out
    fetched: list[str] = []

    def fetch(name: str, progress: object = None) -> None:
        if name == "no/such":
            raise ModelUnavailable("neither hub nor wheel")
        fetched.append(name)

    monkeypatch.setattr(model, "fetch", fetch)
    assert course("model", "fetch", "smollm2-135m").out == "smollm2-135m is here\n"
    assert "neither hub nor wheel" in course.refused("model", "fetch", "no/such")
    assert fetched == ["smollm2-135m"]


# -- usage ----------------------------------------------------------------------------------------


def test_without_a_command_there_is_help(course: Terminal) -> None:
    ended = course()
    assert ended.status == 2
    assert "Commands:" in ended.out + ended.err
    assert course("--help").status == 0


COMMANDS = (
    "check", "watch", "prove", "status", "next", "read", "hint", "explain", "predict", "glossary",
    "diff", "solution", "reset", "doctor", "machine", "model", "dev",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(course: Terminal, command: str) -> None:
    ended = course(command, "--help")
    assert ended.status == 0
    assert "Usage: course" in ended.out
    assert course(command, "--no-such-option").status == 2


@pytest.mark.parametrize("command", ["watch", "read", "hint", "predict", "diff", "solution",
                                     "reset"])  # fmt: skip
def test_commands_that_need_a_stage(course: Terminal, toy: ToyCourse, command: str) -> None:
    assert course(command).status == 2
    assert "there is no stage 'nonsense'" in course.refused(command, "nonsense")
    assert "not yet published" in course.refused(command, "2")


def test_unknown_commands(course: Terminal) -> None:
    assert "nonsense" in course.refused("nonsense")
    assert "nonsense" in course.refused("model", "nonsense")


def test_a_home_that_is_not_there(course: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    from course.syllabus import load_syllabus

    monkeypatch.setenv("COURSE_HOME", "/nowhere/at/all")
    load_syllabus.cache_clear()
    assert "COURSE_HOME" in course.refused("status")
    load_syllabus.cache_clear()


@contextmanager
def in_the_way(toy: ToyCourse) -> Iterator[None]:
    (toy.home / ".course").write_text("in the way")
    yield


def test_what_cannot_be_recorded_is_shown_all_the_same(course: Terminal, toy: ToyCourse) -> None:
    with in_the_way(toy):
        for command in (["hint", "1"], ["solution", "1", "--give-up"], ["diff", "1", "--give-up"]):
            ended = course(*command)
            assert ended.status == 0, ended
            assert ended.out
            assert "this was not recorded" in ended.err
        for command in (["status"], ["next"], ["read", "1"], ["glossary"]):
            assert course(*command).status == 0
        assert "course: " in last_line(course, "predict", "1", "5")


# -- changing the course --------------------------------------------------------------------------


def test_dev_stubs(course: Terminal, toy: ToyCourse) -> None:
    assert course("dev", "stubs", "--check").status == 0
    toy.reference.write_text(toy.reference.read_text().replace("The toy.", "A toy."))
    ended = course("dev", "stubs", "--check")
    assert ended.status == 1
    assert "stages/stage_01_toy/toy.py" in ended.out
    assert course("dev", "stubs").status == 0
    assert course("dev", "stubs", "--check").status == 0
    toy.reference.write_text("x = 1\n")
    assert "no region" in course.refused("dev", "stubs")


def test_dev_readme(course: Terminal, toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = course("dev", "readme", "--check")
    assert ended.status == 1
    assert "table 'stages' was stale" in ended.out
    assert "stale\n<!-- end -->" in (toy.home / "README.md").read_text()
    assert course("dev", "readme").status == 0
    text = (toy.home / "README.md").read_text()
    assert "| 01 | [The toy](stages/stage_01_toy/README.md) | Numbers are too small. |" in text
    assert "| 02 | The second toy | One toy is not enough. | to come |" in text
    assert course("dev", "readme", "--check").status == 0


def test_dev_test(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every part runs, even after one has failed."""
    from course.dev import suite
    from course.dev.suite import Part

    python = sys.executable
    parts = (
        Part("good", (python, "-c", "print('ran')")),
        Part("bad", (python, "-c", "print('first'); raise SystemExit('because')")),
        Part("slow", (python, "-c", "raise SystemExit(4)"), measures=True),
        Part("after", (python, "-c", "")),
    )
    monkeypatch.setattr(suite, "PARTS", parts)
    assert suite.run_suite(fast=False) == 1
    out = capfd.readouterr().out
    for words in ("passed  good", "FAILED  bad", "FAILED  slow", "passed  after",
                  "2 passed, 2 failed"):  # fmt: skip
        assert words in out
    assert out.index("== good") < out.index("ran") < out.index("== bad")
    end = out.partition("== bad FAILED, and ended with\n")[2]
    assert end.startswith("first\nbecause\n"), "why it failed is said again at the end"
    monkeypatch.setattr(suite, "PARTS", (parts[0], parts[2]))
    assert suite.run_suite(fast=True) == 0
    assert "1 passed, 0 failed" in capfd.readouterr().out


def test_the_parts_of_the_suite() -> None:
    """Commands that exist, and the quick ones take no measurements."""
    from course.dev.suite import PARTS

    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    quick = {part.name for part in PARTS if not part.measures}
    assert {"lint", "types", "stubs", "unit tests"} <= quick
    assert not {"proofs", "gates on references"} & quick
    assert all(part.command[0] == sys.executable for part in PARTS)
