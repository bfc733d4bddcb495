"""The generated parts of README.md: tables from course.toml and results/, and transcripts of real
commands.

A generated part stands between two comments:

    <!-- run: ./course check stage-01 --solution reference -->
    ...
    <!-- end -->

    <!-- table: stages -->
    ...
    <!-- end -->

Numbers in a transcript differ from run to run, so a transcript is stale when its *words* differ.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from course.paths import course_home
from course.results import PublishedNumber, published_machines, published_numbers
from course.study.workspace import write_atomically
from course.syllabus import load_syllabus

PART = re.compile(
    r"(?P<head><!-- (?P<kind>run|table): (?P<what>.+?) -->\n)(?P<body>.*?)(?P<tail><!-- end -->)",
    re.DOTALL,
)
WIDTH = 100


def refresh(*, write: bool) -> list[str]:
    """Make every generated part anew; returns a line for each that was stale."""
    path = course_home() / "README.md"
    text = path.read_text(encoding="utf-8")
    stale: list[str] = []

    def replace(match: re.Match[str]) -> str:
        kind, what = match["kind"], match["what"]
        body = _transcript(what) if kind == "run" else TABLES[what]()
        fresh = _words(body) == _words(match["body"]) if kind == "run" else body == match["body"]
        if not fresh:
            stale.append(f"README.md: {kind} {what!r} was stale")
        return match["head"] + body + match["tail"]

    made = PART.sub(replace, text)
    if write and made != text:
        write_atomically(path, made)
    return stale


def _transcript(command: str) -> str:
    """What a command prints, as a reader would see it. Only `./course ...` is run."""
    program, *arguments = shlex.split(command)
    if program != "./course":
        raise ValueError(f"a transcript must be of ./course, got {program!r}")
    done = subprocess.run(
        [sys.executable, "-m", "course.cli", *arguments],
        capture_output=True, text=True, cwd=course_home(),
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb",
             "COURSE_NAME": program},
    )  # fmt: skip
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    shown = "\n".join(lines).strip("\n").replace(str(course_home()), ".")
    return f"```console\n$ {command}\n{shown}\n```\n"


def _words(transcript: str) -> list[str]:
    """The words of a transcript without its figures, and without how it was wrapped."""
    text = re.sub(r"\b(pass|inconclusive)\b", "verdict", transcript)
    return re.findall(r"[A-Za-z][A-Za-z_./-]+", text)


def _stages_table() -> str:
    """The map of the stages."""
    rows = ["| | stage | because | |", "|---|---|---|---|"]
    for stage in load_syllabus().stages:
        title = stage.title
        if stage.published:
            title = f"[{title}](stages/{stage.folder}/README.md)"
        state = f"[notebook](notebooks/{stage.notebook.name})" if stage.published else "to come"
        rows.append(f"| {stage.number:02d} | {title} | {stage.because} | {state} |")
    return "\n".join(rows) + "\n"


def _results_table() -> str:
    """The number that each stage predicts, as the published results have it."""
    columns = [(machine, "cpu") for machine in published_machines("cpu")]
    columns += [(machine, "cuda") for machine in published_machines("cuda")]
    heads = [machine for machine, _ in columns]
    if "cuda" not in {tier for _, tier in columns}:
        heads.append("on a GPU")
    rows = [f"| | stage | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for stage in load_syllabus().published:
        cells = []
        for machine, tier in columns:
            numbers = {n.name: n for n in published_numbers(stage, tier) if n.machine == machine}
            cells.append(_cell(numbers.get(stage.predicts)))
        cells += ["not measured"] * (len(heads) - len(cells))
        rows.append(f"| {stage.number:02d} | {stage.title} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(number: PublishedNumber | None) -> str:
    if number is None:
        return "not measured"
    return number.text + (f" (needs {number.needs})" if number.needs else "")


TABLES = {"stages": _stages_table, "results": _results_table}
