"""Which file `--solution mine|reference|PATH` means."""

from __future__ import annotations

import hashlib
from pathlib import Path

from course.check.edits import SUFFIX, BadEdit, edited_solution
from course.paths import course_home
from course.syllabus import Stage


class NoSuchSolution(ValueError):
    """`--solution` names nothing that could be checked."""


def solution_path(stage: Stage, solution: str) -> Path:
    """The file to check. A `.diff` of gates/wrong/ is applied to the reference, in `.course/`.

    Raises:
        NoSuchSolution: a path that is neither a file nor a folder holding the stage's file, or a
            `.diff` that does not fit.
    """
    if solution == "mine":
        return stage.file
    if solution == "reference":
        return stage.reference
    try:
        path = Path(solution).expanduser().resolve()
    except RuntimeError as error:  # links in a circle, or the home of nobody
        raise NoSuchSolution(f"--solution: {error}") from None
    inside = [path / stage.folder / f"{stage.slug}.py", path / f"{stage.slug}.py"]
    inside += [path / "stages" / stage.folder / f"{stage.slug}.py"]
    for candidate in inside if path.is_dir() else [path]:
        if candidate.is_file() and candidate.suffix == SUFFIX:
            return _edited(stage, candidate)
        if candidate.is_file():
            return candidate
    raise NoSuchSolution(
        f"--solution must be mine, reference, or a path to {stage.slug}.py or a folder that holds "
        f"it; there is none at {solution}"
    )


def _edited(stage: Stage, diff: Path) -> Path:
    try:
        return edited_solution(stage.reference, diff, course_home() / ".course" / "edited")
    except BadEdit as error:
        raise NoSuchSolution(f"--solution: {error}") from None


def solution_hash(path: Path) -> str:
    """A short hash of the file's bytes; of nothing when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "missing"
