"""Everything that must hold before a change lands: what `course dev test` and CI run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
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
PYTEST = (PYTHON, "-m", "pytest")
SIDE_BY_SIDE = ("--numprocesses", "logical", "--maxprocesses", "8", "--dist", "loadfile")
PARTS = (
    Part("lint", (PYTHON, "-m", "ruff", "check", ".")),
    Part("format", (PYTHON, "-m", "ruff", "format", "--check", ".")),
    Part("types", (PYTHON, "-m", "mypy")),
    Part("stubs", (*COURSE, "dev", "stubs", "--check")),
    # Side by side, on as many cores as there are, since none of them measures.
    Part("unit tests", (*PYTEST, "tests", "-q", "-m", "not slow", *SIDE_BY_SIDE)),
    Part("slow tests", (*PYTEST, "tests", "-q", "-m", "slow"), measures=True),
    # Their numbers are part of the proofs.
    Part(
        "contracts under plain pytest",
        (*PYTEST, "gates", "-q", "--solution", "reference", "-m", "contract"),
        measures=True,
    ),
    Part("proofs", (*COURSE, "prove"), measures=True),
    Part("notebooks", (*COURSE, "dev", "notebooks", "--check"), measures=True),
    Part("readme", (*COURSE, "dev", "readme", "--check"), measures=True),
)  # fmt: skip


LAST_LINES = 20  # of a failed part, said again at the end: where a log is cut, its end is kept


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command and pass its output on; its status, and the last lines of what it printed."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command, cwd=course_home(), env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip("\n"))
    return process.returncode, list(last)


def run_suite(*, fast: bool) -> int:
    """Run every part, all of them even after a failure; 0 if all passed."""
    # Tests expect the course to call itself `course`, however this suite was started.
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_NAME"}
    environment["PYTHONUNBUFFERED"] = "1"  # each line as it comes, although it goes through a pipe
    outcomes: list[tuple[Part, int, float]] = []
    failures: list[tuple[Part, list[str]]] = []
    for part in PARTS:
        if fast and part.measures:
            continue
        print(f"== {part.name}", flush=True)
        start = time.monotonic()
        status, last = _run(part.command, environment)
        outcomes.append((part, status, time.monotonic() - start))
        if status != 0:
            failures.append((part, last))
    for part, last in failures:
        print(f"\n== {part.name} FAILED, and ended with")
        print("\n".join(last))
    print()
    for part, status, seconds in outcomes:
        print(f"{'passed' if status == 0 else 'FAILED'}  {part.name:<28} {seconds:5.0f} s")
    print(f"{len(outcomes) - len(failures)} passed, {len(failures)} failed")
    return int(bool(failures))
