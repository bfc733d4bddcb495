"""`course prove`: the proof that a gate is a gate.

1. the reference passes;
2. the untouched stub fails with NOT_IMPLEMENTED;
3. the baseline fails the number and nothing but the number (where a stage has no baseline of its
   own, a named wrong solution stands in: one whose first line says it is the control);
4. every file in gates/wrong/ fails with the code in its first line.

Claims that no clock decides are tried side by side, one on each core, in workers that are forked.
The others come after, one by one, in workers that are started as `course check` starts them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from course.check import host
from course.check.codes import Code, Kind
from course.check.edits import SUFFIX, BadEdit, edited, edited_solution
from course.check.fork_server import ForkServer
from course.check.gate import GateOptions
from course.check.result import Exit, StageResult
from course.check.runner import new_seed, run_gate
from course.check.worker import die_with_parent
from course.syllabus import Stage

FIRST_LINE = re.compile(r"# (?P<code>[A-Z_]+)(?: \((?P<role>control|timed)\))?: (?P<why>.+)")

TIMES = {Code.TOO_SLOW, Code.TOO_GOOD, Code.MISMEASURED, Code.BACKGROUND_WORK}
MORE_RUNS = 4  # while a machine is too noisy for a verdict; slices add up from run to run


@dataclass(frozen=True)
class Claim:
    """One solution, and how it must fare: a code, or None for a pass."""

    kind: str  # "reference", "stub", "control", "wrong"
    path: Path
    code: Code | None
    why: str
    timed: bool = False  # a fault that shows only while the numbers are taken

    @property
    def contract_only(self) -> bool:
        """Whether it must fail before any number is taken."""
        kinds = (Kind.CONTRACT, Kind.LOADING)
        return self.code is not None and self.code.page.kind in kinds and not self.timed

    @property
    def by_the_clock(self) -> bool:
        """Whether a time decides, so that nothing may run beside it."""
        return self.code is None or self.code in TIMES or self.timed


@dataclass(frozen=True)
class Proof:
    """A claim and what came of it."""

    claim: Claim
    result: StageResult

    @property
    def holds(self) -> bool:
        """Whether it came out as claimed."""
        return self.problem == ""

    @property
    def problem(self) -> str:
        """Why the claim does not hold; empty if it does."""
        failure = self.result.failure
        got = failure.code.value if failure else self.result.status.name
        if self.claim.code is None:
            if self.result.passed:
                return ""
            return f"should pass, but: {failure or got}"
        if failure is None or failure.code is not self.claim.code:
            return f"should fail with {self.claim.code.value}, but: {failure or got}"
        if self.claim.kind == "control":
            broken = [c.name for c in self.result.checks if c.layer == "contract"
                      and c.outcome != "passed"]  # fmt: skip
            if broken:
                return f"the control must keep the contract, but it fails {broken[0]}"
        return ""


class BadWrongSolution(ValueError):
    """A file in gates/wrong/ that does not say how it must fail, or does not fit the reference."""


def claims(stage: Stage) -> list[Claim]:
    """All that must be shown for one stage."""
    found = [
        Claim("reference", stage.reference, None, "the reference passes"),
        Claim("stub", stage.home / f"{stage.slug}.py", Code.NOT_IMPLEMENTED, "the stub fails"),
    ]
    controls = 0
    baseline = [stage.baseline] if stage.baseline.exists() else []
    for path in [*baseline, *stage.wrong]:
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        match = FIRST_LINE.fullmatch(first)
        if match is None and path == stage.baseline:
            continue  # a peer, not the stage before: it has a contract and numbers of its own
        if match is None or match["code"] not in Code.__members__:
            raise BadWrongSolution(
                f"{path.name}: the first line must be `# CODE: why`, `# CODE (control): why` or "
                f"`# CODE (timed): why` with a code of the closed list, got {first!r}"
            )
        if path.suffix == SUFFIX:
            _must_fit(stage, path)
        if match["role"] == "control" and Code[match["code"]].page.kind is not Kind.NUMBER:
            raise BadWrongSolution(
                f"{path.name}: a control keeps the contract and fails the number, and "
                f"{match['code']} is not about a number"
            )
        kind = "control" if match["role"] == "control" else "wrong"
        controls += kind == "control"
        timed = match["role"] == "timed"
        found.append(Claim(kind, path, Code[match["code"]], match["why"], timed))
    if controls == 0:
        raise BadWrongSolution(
            f"{stage.id} has no control: one wrong solution must keep the contract and fail the "
            "number alone"
        )
    return found


def _must_fit(stage: Stage, diff: Path) -> None:
    try:
        edited(stage.reference, diff)
    except BadEdit as error:
        raise BadWrongSolution(str(error)) from None


@contextlib.contextmanager
def judges(count: int, tier: str) -> Iterator[Executor]:
    """Processes that judge side by side. They are kept from stage to stage, and end with this one.

    Args:
        count: at least 1.
        tier: "cpu" or "cuda"; on a CPU their workers are forked.
    """
    spawn = multiprocessing.get_context("spawn")  # torch has threads: a fork would lose them
    pool = ProcessPoolExecutor(count, spawn, initializer=_judge, initargs=(os.getpid(), tier))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _judge(parent: int, tier: str) -> None:
    """What a process does before it judges."""
    die_with_parent(parent)
    if tier == "cpu":  # a driver does not survive a fork
        host.launch = ForkServer().fork


def prove(
    stage: Stage,
    options: Callable[[Stage, Path], GateOptions],
    stub_source: str,
    scratch: Path,
    progress: Callable[[str], None] | None = None,
    side_by_side: Executor | None = None,
) -> Iterator[Proof]:
    """Try every claim of one stage.

    Args:
        options: gives the options for checking a path, as `course check` would.
        stub_source: the stub as `course dev stubs` generates it. The student's own folder may have
            been worked in, so the stub is written to `scratch` and checked there; so are the
            solutions that edits of the reference describe.
        side_by_side: `judges` for what no clock decides; those claims come first, in the order in
            which they are done. Without it, all are tried here and in order.

    Raises:
        BadWrongSolution: a first line, or an edit, that says nothing; before anything is run.
    """
    say = progress or (lambda _: None)
    trials = []
    for claim in claims(stage):
        path = claim.path
        if claim.kind == "stub":
            path = scratch / f"{stage.slug}.py"
            path.write_text(stub_source, encoding="utf-8")
        elif path.suffix == SUFFIX:
            path = edited_solution(stage.reference, path, scratch)
        # A wrong solution runs only the layer that it must fail: contract faults show there.
        chosen = replace(
            options(stage, path), seed=new_seed(), prior={}, contract_only=claim.contract_only
        )
        trials.append((claim, chosen))
    if side_by_side is not None:
        beside = {
            side_by_side.submit(_try, stage, chosen): claim
            for claim, chosen in trials
            if not claim.by_the_clock
        }
        for count, done in enumerate(as_completed(beside), 1):
            say(f"what no clock decides: {count} of {len(beside)} tried")
            yield Proof(beside[done], done.result())
        trials = [trial for trial in trials if trial[0].by_the_clock]
    for claim, chosen in trials:
        say(f"{claim.kind}: {claim.path.stem}")
        yield Proof(claim, _try(stage, chosen))


def _try(stage: Stage, options: GateOptions) -> StageResult:
    """Run the gate. Noise is not a verdict: again, with what was measured so far."""
    result = run_gate(stage, options)
    for _ in range(MORE_RUNS):
        if result.status is not Exit.INCONCLUSIVE:
            break
        prior = {n.name: n.pairs for n in result.numbers if n.pairs}
        result = run_gate(stage, replace(options, prior=prior))
    return result
