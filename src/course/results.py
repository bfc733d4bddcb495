"""Published results: what other machines have measured, from the files in `results/`.

`course.dev.publish` writes them, one file for each machine and tier, from checks of the references.
What is not in them was not measured, and is not made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.paths import course_home
from course.syllabus import Stage

__all__ = ["PublishedNumber", "published_machines", "published_numbers"]


@dataclass(frozen=True)
class PublishedNumber:
    """One number of one stage, as a published check of the reference found it."""

    machine: str
    tier: str
    model: str
    name: str
    text: str
    needs: str  # its bar, as it is printed; empty if it is held against nothing


def published_machines(tier: str, folder: Path | None = None) -> list[str]:
    """The names of the machines that were measured at a tier."""
    found = [number.machine for number in _numbers(folder) if number.tier == tier]
    return list(dict.fromkeys(found))


def published_numbers(
    stage: Stage, tier: str = "cuda", folder: Path | None = None
) -> list[PublishedNumber]:
    """The numbers of a stage at a tier, from every file in `folder` (default results/)."""
    return [number for number in _numbers(folder, stage) if number.tier == tier]


def _numbers(folder: Path | None, stage: Stage | None = None) -> Iterator[PublishedNumber]:
    for path in sorted((folder or course_home() / "results").glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        for result in document["results"]:
            if stage is not None and result["stage"] != stage.id:
                continue
            for number in result["numbers"]:
                yield PublishedNumber(
                    document["machine"], result["tier"], result["model"],
                    number["name"], number["text"], number["needs"],
                )  # fmt: skip
