"""Stubs, made from the references: one source, so that the two cannot drift apart.

What lies between `# solution: begin` and `# solution: end` is what the student writes. A region
inside a function becomes one `raise NotImplementedError`; a region at the top level, or between the
methods of a class, goes without a trace.
"""

from __future__ import annotations

import ast
import re

BEGIN, END = "# solution: begin", "# solution: end"
NEARLY = re.compile(r"#\W*solution\W*(begin|end)\b", re.IGNORECASE)


class BadRegions(ValueError):
    """The markers of a reference do not pair up."""


def make_stub(reference: str) -> str:
    """The stub of a reference's source.

    Raises:
        BadRegions: a marker that is misspelt, without its partner or not alone in its line; no
            region at all; or what is left when the regions are gone is no Python.
    """
    functions = _functions(reference, "the reference")
    lines: list[str] = []
    inside = False
    regions = 0
    for number, line in enumerate(reference.splitlines(), start=1):
        marker = line.strip()
        if NEARLY.search(line) and marker not in (BEGIN, END):
            raise BadRegions(f"line {number}: a marker is {BEGIN!r} or {END!r}, alone in its line")
        if marker == BEGIN:
            if inside:
                raise BadRegions(f"line {number}: a region begins inside another")
            inside = True
            regions += 1
            if any(number in function for function in functions):
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(f'{indent}raise NotImplementedError("your code goes here")')
        elif marker == END:
            if not inside:
                raise BadRegions(f"line {number}: a region ends that did not begin")
            inside = False
        elif not inside:
            lines.append(line)
    if inside or not regions:
        raise BadRegions("a region does not end" if inside else "there is no region to write")
    stub = _tidy(lines)
    _functions(stub, "the stub")
    return stub


def without_markers(reference: str) -> str:
    """The solution as a reader wants it: the markers taken out."""
    return _tidy([line for line in reference.splitlines() if line.strip() not in (BEGIN, END)])


def _tidy(lines: list[str]) -> str:
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).rstrip() + "\n"


def _functions(source: str, name: str) -> list[range]:
    """The lines of each function, its first one left out."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadRegions(f"{name} is no Python: {error}") from None
    return [
        range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
