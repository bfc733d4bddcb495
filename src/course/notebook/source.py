"""The reference's own code, cut out of its file by name: what a notebook shows is what runs."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

from course.paths import course_home

__all__ = ["Excerpt", "excerpt"]

MARKERS = ("# solution: begin", "# solution: end")  # they serve the stub, not the reader


@dataclass(frozen=True)
class Excerpt:
    """A function, method or class, as its file has it."""

    text: str
    path: str  # relative to the course's folder
    name: str

    @property
    def markdown(self) -> str:
        """A highlighted block with its place above it."""
        return f"`{self.name}` in `{self.path}`:\n\n```python\n{self.text}\n```"


def excerpt(path: Path, name: str, *, docstrings: bool = False) -> Excerpt:
    """Cut `name` out of a Python file.

    name: a top-level function or class, or a method such as "KVCache.append".
    docstrings: keep them. Without, the notebook's own prose says what they say.

    Raises:
        ValueError: the file has nothing of that name; the message lists what it has.
    """
    source = path.read_text("utf-8")
    node = _find(ast.parse(source), name, path)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines: dict[int, str] = dict(enumerate(source.splitlines(), start=1))
    hidden = set() if docstrings else _docstring_lines(node)
    assert node.end_lineno is not None
    kept = [
        lines[number]
        for number in range(first, node.end_lineno + 1)
        if number not in hidden and lines[number].strip() not in MARKERS
    ]
    text = textwrap.dedent("\n".join(kept)).strip("\n")
    home = course_home()
    shown = path.relative_to(home) if path.is_relative_to(home) else Path(path.name)
    return Excerpt(text, shown.as_posix(), name)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _find(tree: ast.Module, name: str, path: Path) -> Definition:
    known = []
    for node in tree.body:
        if isinstance(node, Definition):
            known.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            known += [(f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, Definition)]
    for label, node in known:
        if label == name:
            return node
    names = ", ".join(label for label, _ in known)
    raise ValueError(f"name {name!r} is not defined in {path.name}; these are: {names}")


def _docstring_lines(node: Definition) -> set[int]:
    """The lines of the docstrings of a definition and of what is defined in it."""
    lines: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner) is not None:
            doc = inner.body[0]
            assert doc.end_lineno is not None
            if len(inner.body) > 1:  # a body of nothing but a docstring must keep it
                lines.update(range(doc.lineno, doc.end_lineno + 1))
    return lines
