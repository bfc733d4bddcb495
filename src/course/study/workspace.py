"""The student's own file of a stage: its stub, what changed, and the way back."""

from __future__ import annotations

import difflib
import os
from datetime import datetime
from pathlib import Path

from course.check.stubs import make_stub, without_markers
from course.syllabus import Stage


def stub_source(stage: Stage) -> str:
    """The stub, made from the reference."""
    return make_stub(stage.reference.read_text(encoding="utf-8"))


def solution_source(stage: Stage) -> str:
    """The reference as a reader wants it."""
    return without_markers(stage.reference.read_text(encoding="utf-8"))


def mine(stage: Stage) -> str:
    """The student's file; empty if it is not there."""
    try:
        return stage.file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def diff_lines(stage: Stage, *, against: str) -> list[str]:
    """A unified diff from the student's file to the "reference" or the "stub"."""
    other = stub_source(stage) if against == "stub" else solution_source(stage)
    sides = (mine(stage), other) if against == "reference" else (other, mine(stage))
    names = ("mine", "reference") if against == "reference" else ("stub", "mine")
    lines = difflib.unified_diff(
        sides[0].splitlines(), sides[1].splitlines(), *names, lineterm="", n=3
    )
    return list(lines)


def reset(stage: Stage) -> Path | None:
    """Put the stub in place of the student's file, and keep what was there beside it.

    Returns:
        The backup, or None when there was nothing to keep.
    """
    stub = stub_source(stage)
    backup = None
    if stage.file.exists():
        if stage.file.read_bytes() == stub.encode():
            return None
        backup = _free_name(stage.file)
        backup.write_bytes(stage.file.read_bytes())  # a copy: a kill now leaves both
    write_atomically(stage.file, stub)
    return backup


def _free_name(file: Path) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1000):
        name = file.with_name(f"{file.name}.{stamp}{f'_{number}' if number else ''}.bak")
        if not name.exists():
            return name
    raise FileExistsError(f"no free name for a backup of {file}")


def write_atomically(path: Path, text: str) -> None:
    """All of the text or nothing: a kill in the middle leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
