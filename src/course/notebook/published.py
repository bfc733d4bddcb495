"""Published results of GPUs, to stand beside what is measured here."""

from __future__ import annotations

from course.notebook.prose import say, table
from course.results import published_numbers
from course.syllabus import Stage

__all__ = ["show_published"]


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
