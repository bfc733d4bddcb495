"""Texts that the course ships: prompts of three workloads, and a passage to be read."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

WORKLOADS = ("chat", "code", "revision")


@cache
def prompts(workload: str) -> tuple[str, ...]:
    """The prompts of `chat`, `code` (completion) or `revision` (a piece of code to be edited).

    Raises:
        ValueError: another workload is asked for.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}")
    document = tomllib.loads(files(__package__).joinpath("prompts.toml").read_text("utf-8"))
    return tuple(entry.strip() for entry in document[workload])


@cache
def passage() -> str:
    """Two pieces of English prose, written for this course: what perplexity is taken on."""
    return files(__package__).joinpath("passage.txt").read_text("utf-8")
