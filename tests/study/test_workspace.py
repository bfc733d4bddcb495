"""The student's own file: what changed, and the way back, with nothing lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course.study import workspace
from course.study.workspace import (
    diff_lines,
    mine,
    reset,
    solution_source,
    stub_source,
    write_atomically,
)
from course.syllabus import Stage, load_syllabus
from toy_course import ToyCourse


@pytest.fixture
def stage(toy: ToyCourse) -> Stage:
    return load_syllabus().find(1)


def backups(stage: Stage) -> list[Path]:
    return sorted(stage.home.glob("*.bak"))


def test_reset_keeps_what_was_there(toy: ToyCourse, stage: Stage) -> None:
    work = b"my work, \xff not even text\r\n"
    stage.file.write_bytes(work)
    backup = reset(stage)
    assert backup is not None
    assert backup.read_bytes() == work
    assert backups(stage) == [backup]
    assert stage.file.read_text() == stub_source(stage)
    assert not list(stage.home.glob(".*"))


def test_resets_in_one_second_keep_everything(stage: Stage) -> None:
    for index in range(3):
        stage.file.write_text(f"version {index}\n")
        reset(stage)
    kept = {path.read_text() for path in backups(stage)}
    assert kept == {"version 0\n", "version 1\n", "version 2\n"}


def test_nothing_to_keep(stage: Stage) -> None:
    assert reset(stage) is None  # the stub itself
    stage.file.unlink()
    assert reset(stage) is None
    assert stage.file.read_text() == stub_source(stage)
    assert backups(stage) == []


def test_a_failure_in_the_middle_leaves_the_old_file(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.file.write_text("work\n")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(workspace.os, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        reset(stage)
    assert stage.file.read_text() == "work\n"
    assert not list(stage.home.glob("*.part"))
    assert not list(stage.home.glob(".*.part"))


WRITER = """
import sys
from pathlib import Path
from course.study.workspace import write_atomically
texts = ["a" * 3_000_000, "b" * 3_000_000]
print("ready", flush=True)
while True:
    for text in texts:
        write_atomically(Path(sys.argv[1]), text)
"""


def test_a_kill_leaves_one_text_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    write_atomically(path, "a" * 3_000_000)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    for _ in range(20):
        text = path.read_text()
        assert text in ("a" * 3_000_000, "b" * 3_000_000)
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    text = path.read_text()
    assert len(text) == 3_000_000
    assert len(set(text)) == 1


def test_writing_makes_folders(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "c.py", "é\n")
    assert (tmp_path / "a" / "b" / "c.py").read_bytes() == "é\n".encode()
    assert os.listdir(tmp_path / "a" / "b") == ["c.py"]


def test_differences(toy: ToyCourse, stage: Stage) -> None:
    assert diff_lines(stage, against="stub") == []
    toy.mine.write_text(toy.mine.read_text().replace("    raise Not", "    x = 1\n    raise Not"))
    lines = diff_lines(stage, against="stub")
    assert lines[:2] == ["--- stub", "+++ mine"]
    assert "+    x = 1" in lines
    lines = diff_lines(stage, against="reference")
    assert lines[:2] == ["--- mine", "+++ reference"]
    assert "-    x = 1" in lines
    assert "+    return 2 * number" in lines
    toy.mine.write_text(solution_source(stage))
    assert diff_lines(stage, against="reference") == []


def test_differences_of_what_is_not_there_or_no_text(stage: Stage) -> None:
    stage.file.write_bytes(b"\xff\n")
    assert "\ufffd" in mine(stage)
    assert diff_lines(stage, against="stub")
    stage.file.unlink()
    assert mine(stage) == ""
    assert diff_lines(stage, against="reference")
