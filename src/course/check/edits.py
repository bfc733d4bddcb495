"""Wrong solutions as edits of the reference: the mistake stands out, and nothing is written twice.

A file `gates/wrong/stage_NN_slug/name.diff` begins with comment lines, the first of which gives the
code. Then come hunks, each below a line of `@@`, in the notation of a unified diff:

    # WRONG_TOKEN: positions count columns, the padding included
    @@
    -    positions = (columns - starts[:, None]).clamp(min=0)
    +    positions = columns.expand(len(rows), -1)

There are no line numbers: the lines of a hunk that are not added must stand in the reference, below
each other, exactly once. So an edit of the reference either keeps all its wrong solutions, or says
which one has lost its place.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from course.check.stubs import without_markers

SUFFIX = ".diff"


class BadEdit(ValueError):
    """A `.diff` that does not fit the reference, or is no diff."""


def edited(reference: Path, diff: Path) -> str:
    """The source of the solution that a `.diff` describes.

    Raises:
        BadEdit: naming the file and the hunk.
    """
    source = without_markers(reference.read_text(encoding="utf-8"))
    try:
        return apply_edits(source, diff.read_text(encoding="utf-8"))
    except BadEdit as error:
        raise BadEdit(f"{diff.name}: {error}") from None


def edited_solution(reference: Path, diff: Path, folder: Path) -> Path:
    """Write that solution into `folder`, and return its path. Raises as `edited`."""
    source = edited(reference, diff)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{diff.stem}.py"
    path.write_text(source, encoding="utf-8")
    return path


def apply_edits(source: str, diff: str) -> str:
    """The source with every hunk of the diff applied.

    Raises:
        BadEdit: naming the hunk.
    """
    lines = source.splitlines()
    edits: list[tuple[int, int, list[str]]] = []  # first line, line after the last, what replaces
    for number, hunk in enumerate(_hunks(diff), start=1):
        old = [line[1:] for line in hunk if line[0] != "+"]
        new = [line[1:] for line in hunk if line[0] != "-"]
        places = [i for i in range(len(lines)) if lines[i : i + len(old)] == old]
        if not old:
            raise BadEdit(f"hunk {number} says nowhere where it belongs: it has only added lines")
        if len(places) != 1:
            raise BadEdit(
                f"hunk {number} must stand in the reference exactly once, and is {len(places)} "
                "times"
            )
        if old == new:
            raise BadEdit(f"hunk {number} changes nothing")
        edits.append((places[0], places[0] + len(old), new))
    edits.sort(key=lambda edit: edit[0], reverse=True)
    for (start, _, _), (_, end, _) in pairwise(edits):
        if end > start:
            raise BadEdit(f"two hunks overlap at {lines[start].strip()!r}")
    for start, end, new in edits:  # from the end, so that the places before it stay where they are
        lines[start:end] = new
    return "\n".join(lines) + "\n"


def _hunks(diff: str) -> list[list[str]]:
    hunks: list[list[str]] = []
    for number, line in enumerate(diff.splitlines(), start=1):
        if line.startswith("@@"):
            hunks.append([])
        elif hunks:
            hunks[-1].append(line or " ")  # editors strip the space of an empty line
            if hunks[-1][-1][0] not in " +-":
                raise BadEdit(f"line {number} must begin with a space, + or -, got {line!r}")
        elif not line.startswith("#"):
            raise BadEdit(f"line {number} stands before the first @@ and is no comment")
    if not hunks:
        raise BadEdit("there is no hunk: a line of @@, and then lines of -, + and context")
    for hunk in hunks:
        while hunk and not hunk[-1].strip():
            hunk.pop()  # an empty line between two hunks is there for the reader
    return hunks
