"""The three levels of hints in a stage's hints.md."""

from __future__ import annotations

import re

from course.syllabus import Stage

LEVELS = (1, 2, 3)
HEADING = re.compile(r"^##\s*Level\s*(\d)\b.*$", re.MULTILINE)


def hint(stage: Stage, level: int) -> str:
    """The Markdown of one level.

    Raises:
        ValueError: `level` is not 1, 2 or 3, or the stage has no hints.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be 1, 2 or 3, got {level}")
    if not stage.hints.exists():
        folder = stage.hints.parent
        raise ValueError(f"{stage.hints} is missing; `git checkout -- {folder}` brings it back")
    text = stage.hints.read_text(encoding="utf-8")
    parts = HEADING.split(text)  # before, "1", text, "2", text, ...
    found = dict(zip(parts[1::2], parts[2::2], strict=False))
    if str(level) not in found:
        raise ValueError(f"{stage.hints.name} of {stage.id} has no level {level}")
    return found[str(level)].strip()
