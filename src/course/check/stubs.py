"""Stubs, made from the references: one source, so that the two cannot drift apart.

What lies between `# solution: begin` and `# solution: end` is what the student writes. A region
inside a function becomes one `raise NotImplementedError`; a region at the top level goes without a
trace.
"""

from __future__ import annotations

import re

BEGIN, END = "# solution: begin", "# solution: end"


class BadRegions(ValueError):
    """The markers of a reference do not pair up."""


def make_stub(reference: str) -> str:
    """The stub of a reference's source.

    Raises:
        BadRegions: a marker without its partner, or no region at all.
    """
    lines: list[str] = []
    inside = False
    regions = 0
    for number, line in enumerate(reference.splitlines(), start=1):
        marker = line.strip()
        if marker == BEGIN:
            if inside:
                raise BadRegions(f"line {number}: a region begins inside another")
            inside = True
            regions += 1
            indent = line[: len(line) - len(line.lstrip())]
            if indent:
                lines.append(f'{indent}raise NotImplementedError("your code goes here")')
        elif marker == END:
            if not inside:
                raise BadRegions(f"line {number}: a region ends that did not begin")
            inside = False
        elif not inside:
            lines.append(line)
    if inside or not regions:
        raise BadRegions("a region does not end" if inside else "there is no region to write")
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).rstrip() + "\n"


def without_markers(reference: str) -> str:
    """The solution as a reader wants it: the markers taken out."""
    kept = [line for line in reference.splitlines() if line.strip() not in (BEGIN, END)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).rstrip() + "\n"
