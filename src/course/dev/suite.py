"""Everything that must hold before a change lands: what `course dev test` and CI run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from course.paths import course_home


@dataclass(frozen=True)
class Part:
    """One part of the suite, as a command."""

    name: str
    command: Sequence[str]
    measures: bool = False  # takes time, and wants the machine for itself


PYTHON = sys.executable
COURSE = (PYTHON, "-m", "course.cli")
PARTS = (
    Part("lint", (PYTHON, "-m", "ruff", "check", ".")),
    Part("format", (PYTHON, "-m", "ruff", "format", "--check", ".")),
    Part("types", (PYTHON, "-m", "mypy")),
    Part("stubs", (*COURSE, "dev", "stubs", "--check")),
    Part("unit tests", (PYTHON, "-m", "pytest", "tests", "-q", "-m", "not slow")),
    Part("slow tests", (PYTHON, "-m", "pytest", "tests", "-q", "-m", "slow"), measures=True),
    Part(
        "gates on references", (PYTHON, "-m", "pytest", "gates", "-q", "--solution", "reference"),
        measures=True,
    ),
    Part("proofs", (*COURSE, "prove"), measures=True),
    Part("notebooks", (*COURSE, "dev", "notebooks", "--check"), measures=True),
    Part("readme", (*COURSE, "dev", "readme", "--check"), measures=True),
)  # fmt: skip


def run_suite(*, fast: bool) -> int:
    """Run every part, all of them even after a failure; 0 if all passed."""
    # Tests expect the course to call itself `course`, however this suite was started.
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_NAME"}
    outcomes: list[tuple[Part, int, float]] = []
    for part in PARTS:
        if fast and part.measures:
            continue
        print(f"== {part.name}", flush=True)
        start = time.monotonic()
        status = subprocess.call(part.command, cwd=course_home(), env=environment)
        outcomes.append((part, status, time.monotonic() - start))
    print()
    for part, status, seconds in outcomes:
        print(f"{'passed' if status == 0 else 'FAILED'}  {part.name:<22} {seconds:5.0f} s")
    failed = sum(status != 0 for _, status, _ in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return int(failed > 0)
