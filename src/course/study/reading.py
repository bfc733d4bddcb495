"""A chapter or a notebook as Markdown, for a terminal."""

from __future__ import annotations

import json
import re
from typing import Any

from course.syllabus import Stage

DETAILS = re.compile(r"</?(details|summary)[^>]*>")


def chapter_text(stage: Stage) -> str:
    """The chapter. Folded answers are unfolded: a terminal cannot fold."""
    text = _file(stage.chapter, stage).read_text(encoding="utf-8")
    return DETAILS.sub("", text)


def notebook_text(stage: Stage) -> str:
    """The notebook's prose, code and textual outputs; figures are named, not shown."""
    path = _file(stage.notebook, stage)
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a notebook") from None
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(part for part in parts if part)


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "```\n" + "".join(output["text"]).rstrip() + "\n```"
    data = output.get("data", {})
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    if any(kind.startswith("image/") for kind in data):
        return "*(a figure: open the notebook with `course read STAGE --jupyter`)*"
    if "text/plain" in data:
        return "```\n" + "".join(data["text/plain"]).rstrip() + "\n```"
    return ""


def _file(path, stage: Stage):  # type: ignore[no-untyped-def]
    if not path.exists():
        raise ValueError(f"{path} is missing; `git checkout -- {path.parent}` brings it back")
    return path
