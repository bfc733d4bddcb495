"""The committed stubs: made from the references, and compared with them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from course.paths import course_home
from course.study.workspace import mine, reset, stub_source, write_atomically
from course.syllabus import load_syllabus

QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def refresh(*, write: bool) -> list[str]:
    """Bring every published stage's stub up to date; returns a line for each that was not.

    What was there is kept beside the new stub, as `course reset` does, unless git has it.
    """
    lines = []
    for stage in load_syllabus().published:
        stub, current = stub_source(stage), mine(stage)
        if current == stub:
            continue
        name = stage.file.relative_to(course_home())
        if not write:
            lines.append(f"{name} is not the stub that its reference makes")
        elif not current or committed(stage.file):
            write_atomically(stage.file, stub)
            lines.append(f"{name} made")
        else:
            lines.append(f"{name} made; what was there is in {reset(stage)}")
    return lines


def committed(file: Path) -> bool:
    """Whether git has the file as it is, so that nothing is lost if it is overwritten."""
    git = ("git", "-C", str(file.parent))
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", file.name], **QUIET)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", file.name], **QUIET)
    except OSError:  # there is no git
        return False
    return tracked.returncode == 0 and changed.returncode == 0
