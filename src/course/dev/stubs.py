"""The committed stubs: made from the references, and compared with them."""

from __future__ import annotations

from course.paths import course_home
from course.study.workspace import mine, reset, stub_source, write_atomically
from course.syllabus import load_syllabus

UNTOUCHED = "raise NotImplementedError("


def refresh(*, write: bool) -> list[str]:
    """Bring every published stage's stub up to date; returns a line for each that was not.

    A file that somebody has worked in is kept beside the new stub, as `course reset` does.
    """
    lines = []
    for stage in load_syllabus().published:
        stub, current = stub_source(stage), mine(stage)
        if current == stub:
            continue
        name = stage.file.relative_to(course_home())
        if not write:
            lines.append(f"{name} is not the stub that its reference makes")
        elif not current or current.count(UNTOUCHED) == stub.count(UNTOUCHED):
            write_atomically(stage.file, stub)
            lines.append(f"{name} made")
        else:
            lines.append(f"{name} made; what was there is in {reset(stage)}")
    return lines
