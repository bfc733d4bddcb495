"""`course prove`: the proof that a gate is a gate.

1. the reference passes;
2. the untouched stub fails with NOT_IMPLEMENTED;
3. the baseline fails the number and nothing but the number (where a stage has no baseline of its
   own, a named wrong solution stands in: one whose first line says it is the control);
4. every file in gates/wrong/ fails with the code in its first line.

A claim that a clock decides has its workers started as `course check` starts them, and no other
such claim runs beside it. Claims that no clock decides are tried side by side, one on each core, in
workers that are forked. On a CPU they also run beside the clock, on the other cores: a gate has to
hold on a machine that is busy, and so the proof is one of that as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
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

    stage: Stage
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
        Claim(stage, "reference", stage.reference, None, "the reference passes"),
        Claim(
            stage, "stub", stage.home / f"{stage.slug}.py", Code.NOT_IMPLEMENTED, "the stub fails"
        ),
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
        found.append(Claim(stage, kind, path, Code[match["code"]], match["why"], timed))
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


@dataclass(frozen=True)
class Trial:
    """A claim that is about to be tried."""

    claim: Claim
    options: GateOptions


def trials(
    stage: Stage, options: Callable[[Stage, Path], GateOptions], stub_source: str, scratch: Path
) -> list[Trial]:
    """Everything that one stage has to show.

    Args:
        options: gives the options for checking a path, as `course check` would.
        stub_source: the stub as `course dev stubs` generates it. The student's own folder may have
            been worked in, so the stub is written to `scratch` and checked there; so are the
            solutions that edits of the reference describe.
        scratch: a folder of this stage alone, kept until all is tried.

    Raises:
        BadWrongSolution: a first line, or an edit, that says nothing.
    """
    found = []
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
        found.append(Trial(claim, chosen))
    return found


@dataclass(frozen=True)
class Judges:
    """Processes that judge: one that a clock is read in, and others for what needs none."""

    clock: Executor
    others: Executor
    lanes: int  # trials at a time
    beside_the_clock: bool  # whether others may work while the clock runs


@contextlib.contextmanager
def judges(cores: int, tier: str) -> Iterator[Judges]:
    """Judges for a machine. They end with this one, and at once if it is interrupted.

    Args:
        cores: at least 1.
        tier: "cpu" or "cuda". On a CPU the workers of the others are forked; a driver does not
            survive a fork. And of one GPU, only one may be timed.
    """
    spawn = multiprocessing.get_context("spawn")  # torch has threads: a fork would lose them
    parent, cpu = os.getpid(), tier == "cpu"
    with contextlib.ExitStack() as stack:

        def pool(count: int, forked: bool) -> Executor:
            made = ProcessPoolExecutor(count, spawn, initializer=_judge, initargs=(parent, forked))
            stack.callback(made.shutdown, cancel_futures=True)
            return made

        try:
            yield Judges(pool(1, forked=False), pool(cores, forked=cpu), cores, cpu)
        except BaseException:
            for judge in multiprocessing.active_children():
                judge.kill()  # what it is at may take it a minute
            raise


def _judge(parent: int, forked: bool) -> None:
    """What a process does before it judges."""
    die_with_parent(parent)
    if forked:
        host.launch = ForkServer().fork


def _submit(judge: Executor, trial: Trial) -> Future[Proof]:
    """Processes start here, and Ctrl-C is not theirs: a terminal would send it to all of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return judge.submit(_try, trial)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prove(
    todo: Iterable[Trial],
    judges: Judges | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Proof]:
    """Try claims, of one stage or several.

    Args:
        judges: to try them side by side; proofs come in the order in which they are done. Without
            any, all are tried here and in order.
        progress: is told what is going on.
    """
    say = progress or (lambda _: None)
    if judges is None:
        for trial in todo:
            say(_named(trial))
            yield _try(trial)
        return
    timed: deque[Trial] = deque()
    exact: deque[Trial] = deque()
    for trial in todo:
        (timed if trial.claim.by_the_clock else exact).append(trial)
    running: dict[Future[Proof], Trial] = {}
    total, done = len(timed) + len(exact), 0
    while timed or exact or running:
        may_time = judges.beside_the_clock or not (exact or running)
        if timed and may_time and not any(t.claim.by_the_clock for t in running.values()):
            trial = timed.popleft()
            running[_submit(judges.clock, trial)] = trial
        while exact and len(running) < judges.lanes:
            trial = exact.popleft()
            running[_submit(judges.others, trial)] = trial
        clocked = [_named(trial) for trial in running.values() if trial.claim.by_the_clock]
        say(", at the clock ".join([f"{done} of {total} claims tried", *clocked]))
        for ended in wait(running, return_when=FIRST_COMPLETED).done:
            del running[ended]
            done += 1
            yield ended.result()


def _named(trial: Trial) -> str:
    return f"{trial.claim.stage.number:02d} {trial.claim.kind} {trial.claim.path.stem}"


def _try(trial: Trial) -> Proof:
    """Run the gate. Noise is not a verdict: again, with what was measured so far."""
    stage, options = trial.claim.stage, trial.options
    result = run_gate(stage, options)
    for _ in range(MORE_RUNS):
        if result.status is not Exit.INCONCLUSIVE:
            break
        prior = {n.name: n.pairs for n in result.numbers if n.pairs}
        result = run_gate(stage, replace(options, prior=prior))
    return Proof(trial.claim, result)
