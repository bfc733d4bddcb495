"""Notebooks from their sources: made, executed, and checked for being current.

`notebooks/source/NN_slug.py` (jupytext's percent format) is the only source. `build` turns it into
`notebooks/NN_slug.ipynb`, executed, with its outputs. The hash of the source is kept in the
notebook, so that a notebook that was made from an older source is found without running it.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat

from course.measure.machine import fingerprint
from course.paths import course_home
from course.syllabus import Stage, load_syllabus

__all__ = ["Problem", "build", "notebook_stages", "source_file", "stale", "verify"]

MAX_BYTES = 300_000  # of a notebook with its outputs: a page still shows it
CELL_SECONDS = 300
NOTEBOOK_SECONDS = 120.0  # on two cores that do nothing else

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one notebook, in words."""

    notebook: str
    what: str

    def __str__(self) -> str:
        return f"{self.notebook}: {self.what}"


def source_file(stage: Stage) -> Path:
    """Where the notebook of a stage is written."""
    return stage.notebook.parent / "source" / f"{stage.notebook.stem}.py"


def notebook_stages(numbers: Iterable[int] | None = None) -> list[Stage]:
    """The stages of these numbers, or every stage that has a notebook source.

    Raises:
        ValueError: a number is no stage's, or the stage has no source.
    """
    stages = {stage.number: stage for stage in load_syllabus().stages}
    if numbers is None:
        return [stage for stage in stages.values() if source_file(stage).is_file()]
    chosen = []
    for number in numbers:
        if number not in stages or not source_file(stages[number]).is_file():
            raise ValueError(f"stage number {number!r} has no notebook source")
        chosen.append(stages[number])
    return chosen


def build(
    numbers: Iterable[int] | None = None, *, execute: bool = True, tell: Tell | None = None
) -> list[Path]:
    """Make notebooks from their sources, and execute them.

    numbers: stages; None for all that have a source. tell: called with a line per notebook.
    A notebook is replaced only when all its cells ran. With execute=False it has no outputs.

    Raises:
        ValueError: as `notebook_stages`; or a notebook came out larger than MAX_BYTES.
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    say = tell or (lambda _: None)
    made = []
    for stage in notebook_stages(numbers):
        notebook = from_source(stage)
        if execute:
            say(f"{stage.notebook.name}: running")
            seconds = _execute(notebook)
            say(f"{stage.notebook.name}: ran in {seconds:.0f} s")
        text = nbformat.writes(notebook) + "\n"
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"{stage.notebook.name} is {len(text.encode()):,} bytes: too large")
        draft = stage.notebook.with_suffix(".ipynb.draft")
        draft.write_text(text, "utf-8")
        draft.replace(stage.notebook)
        made.append(stage.notebook)
    return made


def verify(
    numbers: Iterable[int] | None = None, *, tell: Tell | None = None, side_by_side: int = 1
) -> list[Problem]:
    """Run notebooks anew in a temporary folder, and compare them with the committed ones.

    A problem is: a stale notebook (see `stale`); a cell that fails; a run that takes much longer
    than a reader was promised. Outputs may differ: they are measurements, and nobody reads these,
    so as many notebooks as `side_by_side` says may run at a time.
    """
    say = tell or (lambda _: None)
    stages, cores = notebook_stages(numbers), fingerprint().cores

    def run(stage: Stage) -> Problem | None:
        name = stage.notebook.name
        say(f"{name}: running")
        try:
            seconds = _execute(from_source(stage), threads=max(1, cores // side_by_side))
        except Exception as error:  # whatever a cell raises is a problem of that notebook
            return Problem(name, f"fails when it runs: {_last_lines(error)}")
        say(f"{name}: ran in {seconds:.0f} s")
        if seconds > 2 * NOTEBOOK_SECONDS:
            what = f"took {seconds:.0f} s; {NOTEBOOK_SECONDS:.0f} are promised"
            return Problem(name, what)
        return None

    with ThreadPoolExecutor(side_by_side) as pool:
        found = list(pool.map(run, stages))
    return [*stale(stage.number for stage in stages), *(p for p in found if p is not None)]


def stale(numbers: Iterable[int] | None = None) -> list[Problem]:
    """Notebooks that are missing, not executed, or not those that their source makes now.

    Compared are the hash of the source, every cell, prose and code, and the code of the references
    that the outputs show. Nothing is run.
    """
    problems = []
    for stage in notebook_stages(numbers):
        name = stage.notebook.name
        if not stage.notebook.is_file():
            problems.append(Problem(name, "is missing: run `course dev notebooks`"))
            continue
        committed = nbformat.read(stage.notebook, as_version=4)
        expected = from_source(stage)
        if committed.metadata.get("course") != expected.metadata["course"]:
            problems.append(Problem(name, "its source changed since it was made"))
        pairs = zip_longest(committed.cells, expected.cells)
        for index, (old, new) in enumerate(pairs):
            if (
                old is None
                or new is None
                or (old.cell_type, old.source) != (new.cell_type, new.source)
            ):
                problems.append(Problem(name, f"cell {index} is not what its source says"))
                break
        if any(c.cell_type == "code" and c.execution_count is None for c in committed.cells):
            problems.append(Problem(name, "not all of its cells were executed"))
        problems += [Problem(name, what) for what in _stale_excerpts(committed)]
    return problems


def _stale_excerpts(notebook: Any) -> Iterator[str]:
    """Code of a reference that the notebook shows, and that its file no longer has."""
    from course.notebook.source import excerpt  # brings torch with it: seconds

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = output.get("data", {}).get("text/markdown", "")
            if not (place := re.match(r"`([\w.]+)` in `(reference/[\w./]+)`:\n", shown)):
                continue
            name, path = place.groups()
            try:
                current = excerpt(course_home() / path, name).markdown
            except (OSError, ValueError) as error:
                yield f"shows {name}, which is gone: {error}"
            else:
                if current != shown:
                    yield f"shows {name} as it was in {path} before it changed"


def from_source(stage: Stage) -> Any:
    """The notebook that a source makes, without outputs.

    Cells are numbered instead of given random ids, so that the same source makes the same file.
    """
    import jupytext

    text = source_file(stage).read_text("utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:02d}"
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "course": {"source_sha256": hashlib.sha256(text.encode()).hexdigest()},
    })  # fmt: skip
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _execute(notebook: Any, *, threads: int | None = None) -> float:
    """Run all cells in place, in an empty folder, as a reader's Jupyter would; returns seconds.

    threads: that torch may compute with, where notebooks run side by side; all by default.
    """
    from nbclient import NotebookClient
    from traitlets.config import Config

    metadata = notebook.metadata.copy()
    with tempfile.TemporaryDirectory(prefix="course-notebook-") as folder:
        home = Path(folder, "home")
        home.mkdir()
        # Socket files, where there is such a thing: no port of the machine is opened.
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"} if os.name == "posix" else {}
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(home)}},
            config=Config({"KernelManager": sockets}),
        )
        start = time.monotonic()
        client.execute(env=_environment(threads), cleanup_kc=True)
        seconds = time.monotonic() - start
    notebook.metadata = metadata  # the kernel adds the exact Python, which is not the source's
    return seconds


def _environment(threads: int | None) -> dict[str, str]:
    """This process's environment, with the course found from the empty folder."""
    own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **own, "COURSE_HOME": str(course_home())}


def _last_lines(error: Exception, count: int = 3) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or type(error).__name__
