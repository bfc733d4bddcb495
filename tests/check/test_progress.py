"""The store: what is written stays, what is damaged is said, and nothing else is lost."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from check.test_result import check, number, result
from course.check.progress import Progress, ProgressUnavailable, ProgressUnreadable
from course.check.result import Number, StageResult
from course.check.session import prediction_line
from course.measure.ratio import Verdict
from course.syllabus import Stage

KEY = {"machine": "m", "stage": "stage-01", "tier": "cpu", "solution_hash": "abc"}


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return Progress(tmp_path / "new" / "progress.sqlite")


def save(progress: Progress, found: StageResult, **fields: Any) -> None:
    known: dict[str, Any] = {"machine": "m", "mine": True, "gate_hash": "g"}
    progress.save(found, **(known | fields))


def timed(verdict: Verdict, pairs: list[tuple[float, float]], name: str = "time") -> Number:
    return Number(name, 1.0, "x", verdict=verdict, pairs=pairs, slices=len(pairs))


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "new" / "progress.sqlite")
    assert progress.checks() == []
    assert progress.predictions("stage-01") == []
    assert progress.events("stage-01", "hint") == []
    assert not progress.has_passed("stage-01")
    assert not (tmp_path / "new").exists()


def test_checks_are_kept(progress: Progress) -> None:
    before = time.time()
    save(progress, result(contract_only=True))
    save(progress, result(stage="stage-02"), machine="other", mine=False)
    save(progress, result())
    first, second, third = progress.checks()
    assert (first.stage, first.status, first.passed, first.mine) == (
        "stage-01", "PASS", False, True,
    )  # fmt: skip
    assert (second.stage, second.machine, second.mine, second.passed) == (
        "stage-02", "other", False, True,
    )  # fmt: skip
    assert third.passed
    assert third.document == json.loads(json.dumps(result().as_dict()))
    assert before <= first.at <= third.at <= time.time()
    assert [row.stage for row in progress.checks("stage-02")] == ["stage-02"]


def test_what_has_passed(progress: Progress) -> None:
    save(progress, result(contract_only=True))
    save(progress, result(numbers=[number(Verdict.INCONCLUSIVE)]))
    save(progress, result(), mine=False)  # the reference passed
    assert not progress.has_passed("stage-01")
    save(progress, result())
    assert progress.has_passed("stage-01")
    assert progress.has_passed("stage-01", "m")
    assert not progress.has_passed("stage-01", "another machine")
    assert not progress.has_passed("stage-02")
    save(progress, result(checks=[check("failed")]))
    assert progress.has_passed("stage-01")  # once passed is passed


def test_slices_are_kept_while_a_number_is_open(progress: Progress) -> None:
    def slices(**other: str) -> dict[str, Any]:
        return progress.slices(**({**KEY, "gate_hash": "g"} | other))

    assert slices() == {}
    noisy = [(1.0, 0.5), (0.25, 0.125)]
    save(progress, result(numbers=[timed(Verdict.INCONCLUSIVE, noisy), number()]))
    assert slices() == {"time": noisy}
    for other in ("machine", "stage", "tier", "solution_hash", "gate_hash"):
        assert slices(**{other: "another"}) == {}, other
    more = [*noisy, (3.0, 1.0)]
    save(progress, result(numbers=[timed(Verdict.INCONCLUSIVE, more)]))
    assert slices() == {"time": more}
    save(progress, result(numbers=[timed(Verdict.INCONCLUSIVE, noisy)]), keep_slices=False)
    assert slices() == {"time": more}
    save(progress, result(numbers=[timed(Verdict.INCONCLUSIVE, noisy, "other")]))
    assert slices() == {"time": more, "other": noisy}
    save(progress, result(numbers=[timed(Verdict.PASS, more)]))
    assert slices() == {"other": noisy}
    save(progress, result(numbers=[timed(Verdict.FAIL, noisy, "other")]))
    assert slices() == {}


def test_predictions_and_events(progress: Progress) -> None:
    progress.predict("stage-01", 10.0)
    progress.predict("stage-02", 1.5)
    progress.predict("stage-01", 20.0)
    assert [value for _, value in progress.predictions("stage-01")] == [10.0, 20.0]
    progress.note("stage-01", "hint", "1")
    progress.note("stage-01", "give-up", "solution")
    progress.note("stage-01", "hint", "2")
    assert progress.events("stage-01", "hint") == ["1", "2"]
    assert progress.events("stage-01", "give-up") == ["solution"]
    assert progress.events("stage-02", "hint") == []


SCORES = [
    (5.0, 5.0, "exactly right"), (5.1, 5.0, "well predicted"), (4.0, 5.0, "well predicted"),
    (6.3, 5.0, "off by a factor of 1.3"),
    (500.0, 5.0, "off by a factor of 100.0"), (1e-9, 5.0, "off by a factor of"),
]  # fmt: skip


@pytest.mark.parametrize(("guess", "measured", "words"), SCORES)
def test_predictions_are_scored(
    progress: Progress, guess: float, measured: float, words: str
) -> None:
    stage = Stage(1, "toy", "The toy", "", predicts="work")
    found = result(numbers=[Number("work", measured, "5", " steps")])
    assert prediction_line(stage, found, progress) == ""
    progress.predict("stage-01", 77.0)
    progress.predict("stage-01", guess)
    line = prediction_line(stage, found, progress)
    assert line.startswith("you predicted ")
    assert words in line
    assert "measured 5 steps" in line
    assert prediction_line(stage, result(numbers=[]), progress) == ""


# -- damage ---------------------------------------------------------------------------------------


def every_use(progress: Progress) -> dict[str, Any]:
    return {
        "save": lambda: save(progress, result()),
        "slices": lambda: progress.slices(**KEY, gate_hash="g"),
        "checks": progress.checks,
        "passed": lambda: progress.has_passed("stage-01"),
        "predict": lambda: progress.predict("stage-01", 1.0),
        "predictions": lambda: progress.predictions("stage-01"),
        "note": lambda: progress.note("stage-01", "hint", "1"),
        "events": lambda: progress.events("stage-01", "hint"),
    }


USES = list(every_use(Progress(Path("nowhere"))))
DAMAGE = {
    "text": b"this is no database, but it is long enough to be read as one" * 20,
    "a header and no more": b"SQLite format 3\0" + b"\xff" * 84,
    "JSON": b"{}",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_named(progress: Progress, content: bytes, use: str) -> None:
    progress.path.parent.mkdir()
    progress.path.write_bytes(content)
    with pytest.raises(ProgressUnreadable, match="move it away") as caught:
        every_use(progress)[use]()
    assert str(progress.path) in str(caught.value)
    assert progress.path.read_bytes() == content


def test_a_file_that_is_damaged_in_the_middle(progress: Progress) -> None:
    for _ in range(50):
        save(progress, result())
    content = bytearray(progress.path.read_bytes())
    content[5000:20000] = os.urandom(15000)
    progress.path.write_bytes(content)
    with pytest.raises((ProgressUnreadable, ValueError)):
        progress.checks()


@pytest.mark.parametrize("use", USES)
def test_an_empty_file_is_a_new_store(progress: Progress, use: str) -> None:
    """What a kill can leave that came between making the file and filling it."""
    progress.path.parent.mkdir()
    progress.path.write_bytes(b"")
    every_use(progress)[use]()


@pytest.mark.parametrize("use", USES)
def test_a_folder_in_the_way(progress: Progress, use: str) -> None:
    progress.path.mkdir(parents=True)
    with pytest.raises(ProgressUnavailable):
        every_use(progress)[use]()


@pytest.mark.parametrize("use", ["save", "predict", "note", "slices"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, use: str) -> None:
    (tmp_path / ".course").write_text("in the way")
    with pytest.raises(OSError):
        every_use(Progress(tmp_path / ".course" / "progress.sqlite"))[use]()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write there; not even root, who becomes somebody else for the time."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(stat.S_IMODE(modes[path]) & ~0o222 | 0o444 | (0o111 if path.is_dir() else 0))
    for parent in folder.parents:
        with contextlib.suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | 0o011)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.parametrize("use", USES)
def test_a_read_only_folder(progress: Progress, use: str) -> None:
    """What is there can be read; what cannot be written is said, and changes nothing."""
    save(progress, result())
    progress.note("stage-01", "hint", "1")
    content = progress.path.read_bytes()
    with read_only(progress.path.parent):
        if use in ("save", "predict", "note"):
            with pytest.raises(ProgressUnavailable, match="readonly"):
                every_use(progress)[use]()
        else:
            every_use(progress)[use]()
    assert progress.path.read_bytes() == content
    assert progress.has_passed("stage-01")


def test_a_folder_in_which_nothing_can_be_made(tmp_path: Path) -> None:
    folder = tmp_path / ".course"
    folder.mkdir()
    progress = Progress(folder / "progress.sqlite")
    with read_only(folder):
        assert progress.checks() == []
        for use in ("save", "slices", "predict", "note"):
            with pytest.raises(ProgressUnavailable):
                every_use(progress)[use]()
    save(progress, result())


# -- several at once ------------------------------------------------------------------------------


def write_many(path: str, name: str, count: int) -> None:
    progress = Progress(Path(path))
    for index in range(count):
        progress.note("stage-01", name, str(index))
        save(progress, result())


def test_several_processes_write_at_once(progress: Progress) -> None:
    """From the very first, when each of them finds no file and makes one."""
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_many, args=(str(progress.path), f"writer-{i}", 10))
        for i in range(6)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(progress.checks()) == 60
    for index in range(6):
        assert progress.events("stage-01", f"writer-{index}") == [str(i) for i in range(10)]


def test_a_file_that_stays_locked(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    save(progress, result())
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, timeout=0.1))
    holder = connect(progress.path)
    holder.execute("begin exclusive")
    with pytest.raises(ProgressUnavailable, match="locked"):
        save(progress, result())
    holder.rollback()
    holder.close()
    save(progress, result())
    assert len(progress.checks()) == 2


WRITER = """
import sys
from pathlib import Path
from course.check.progress import Progress
from course.check.result import StageResult
progress = Progress(Path(sys.argv[1]))
found = StageResult("stage-01", "x" * 50_000, "cpu", "cpu", "nano", "toy.py", "abc", 7)
print("ready", flush=True)
while True:
    progress.save(found, machine="m", mine=True, gate_hash="g")
"""


def test_a_kill_in_the_middle_of_writing(progress: Progress) -> None:
    """Whenever it comes, what was written before is there, and writing goes on."""
    kept = 0
    for delay in (0.0, 0.01, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(progress.path)],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        save(progress, result(title="after"))
        rows = progress.checks()
        assert len(rows) >= kept + 1
        assert rows[-1].document["title"] == "after"
        kept = len(rows)
    assert sqlite3.connect(progress.path).execute("pragma integrity_check").fetchone() == ("ok",)
