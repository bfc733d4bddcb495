"""Published results of other machines, to stand beside what is measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.notebook.prose import say, table
from course.paths import course_home
from course.syllabus import Stage

__all__ = ["PublishedNumber", "published_numbers", "show_published"]


@dataclass(frozen=True)
class PublishedNumber:
    """One number of one stage, as a published check of the reference found it."""

    machine: str
    model: str
    name: str
    text: str


def published_numbers(
    stage: Stage, tier: str = "cuda", folder: Path | None = None
) -> list[PublishedNumber]:
    """The numbers of the reference at a tier, from every file in `folder` (default results/).

    A file is one machine's: somewhere in it lie the results of checks, each with `stage`, `tier`,
    `solution` and `numbers`. What is not there was not measured, and is not made up.
    """
    found = []
    for path in sorted((folder or course_home() / "results").glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        for result in _results(document):
            if result["stage"] != stage.id or result["tier"] != tier:
                continue
            if result.get("solution", "reference") != "reference":
                continue
            machine = str(result.get("device") or path.stem)
            for number in result["numbers"]:
                found.append(
                    PublishedNumber(
                        machine, str(result.get("model", "")), number["name"], number["text"]
                    )
                )
    return found


def show_published(stage: Stage) -> None:
    """Show what was published for a GPU, or that nothing was."""
    numbers = published_numbers(stage)
    if not numbers:
        say("**On a GPU:** not measured. No published result of this stage comes from one.")
        return
    table(
        ["published, on a GPU", "model", "machine"],
        [[f"{n.name}: {n.text}", n.model, n.machine] for n in numbers],
    )


def _results(value: Any) -> Iterator[dict[str, Any]]:
    """Every check's result in a document, wherever it lies."""
    if isinstance(value, dict):
        if {"stage", "tier", "numbers"} <= set(value):
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _results(inner)
