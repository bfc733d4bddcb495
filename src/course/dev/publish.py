"""What one machine has measured, as `results/<machine>.json`: the gates, on the references.

README and the notebooks show what lies there. What was not measured is not in the file, and no
figure of it is written by hand. `scripts/gpu_proof` runs this on a machine with a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from course.check.result import Exit, StageResult
from course.check.session import Session, Wish, has_cuda
from course.paths import course_home
from course.study.workspace import write_atomically
from course.syllabus import Stage, load_syllabus


def results_file(name: str, tier: str, folder: Path) -> Path:
    """Where the results of a machine belong, such as `nvidia-h200.json`; CPUs say their tier."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder / (f"{slug}.json" if tier == "cuda" else f"{slug}-{tier}.json")


def publishable(result: StageResult) -> dict[str, Any]:
    """A result without what belongs to the machine's owner: paths, and the secret of the run."""
    document = result.as_dict()
    checks = document.pop("checks")
    for name in ("solution", "seed", "remarks", "contract_only"):
        del document[name]
    contract = [check for check in checks if check["layer"] == "contract"]
    document["contract"] = {
        outcome: sum(check["outcome"] == outcome for check in contract)
        for outcome in ("passed", "failed")
    }
    if document["failure"]:
        kept = ("code", "message", "expected", "got", "where")
        document["failure"] = {name: document["failure"][name] for name in kept}
    return document | {"solution": "reference"}


def measure(
    session: Session, stages: list[Stage], tier: str, *, until: float
) -> Iterator[StageResult]:
    """Check the references one after another; none is begun after `until`, in `time.monotonic`."""
    for stage in stages:
        if time.monotonic() >= until:
            return
        yield session.check(stage, Wish("reference", tier))


def commit() -> dict[str, Any]:
    """Which source was measured, and whether it was changed; nothing where git does not tell."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=course_home(), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def main(
    stages: Annotated[list[str] | None, typer.Argument(help="All published ones if none.")] = None,
    tier: Annotated[str, typer.Option(help="cuda, or cpu for a rehearsal.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Begin no stage later than this.")] = 12.0,
    out: Annotated[Path | None, typer.Option(help="The folder to write to; results/.")] = None,
) -> None:
    """Run the gates on the references and write what they measure to `results/<machine>.json`.

    The file is written after each stage, so a run that is cut short has lost one stage at most.
    Status: 0 if every stage passed, 1 if not, 2 for wrong usage, 4 without a GPU for tier cuda.
    """
    until = time.monotonic() + minutes * 60
    session, syllabus = Session(), load_syllabus()
    if tier not in ("cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda, got {tier!r}", param_hint="--tier")
    if tier == "cuda" and not has_cuda():  # nothing to publish, not even that it failed
        print("no GPU here that torch can use; --tier cpu is a rehearsal")
        raise typer.Exit(Exit.NOT_HERE)
    chosen = [syllabus.find(name) for name in stages] if stages else list(syllabus.published)
    name = session.machine.name(tier)
    path = results_file(name, tier, out or course_home() / "results")
    path.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "machine": name,
        "hardware": session.machine.as_dict(),
        "date": datetime.now(UTC).date().isoformat(),
        **commit(),
        "results": [],
    }
    found = []
    for result in measure(session, chosen, tier, until=until):
        found.append(result)
        document["results"].append(publishable(result))
        write_atomically(path, json.dumps(document, indent=1) + "\n")
        said = result.failure or result.status.name.lower()
        print(f"{result.stage}  {result.seconds:4.0f} s  {said}", flush=True)
    for stage in chosen[len(found) :]:
        print(f"{stage.id}  not measured: the time was up")
    print(f"written to {path}")
    passed = [result.passed for result in found]
    raise typer.Exit(0 if len(passed) == len(chosen) and all(passed) else 1)


if __name__ == "__main__":
    typer.run(main)
