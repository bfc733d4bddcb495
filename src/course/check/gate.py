"""A gate being run: the workers, the secret, and the numbers found so far.

A gate file (`gates/test_stage_NN_slug.py`) is a pytest module. Its tests take the fixture `gate`,
an object of the class below, and drive scenarios in the two workers through it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.host import Limits, WorkerConfig, WorkerHost, forbidden_paths
from course.check.processes import (
    adopt_orphans,
    cpu_seconds,
    descendants,
    end_orphans,
    own_children,
)
from course.check.result import CheckOutcome, Number
from course.measure.ratio import Bar, PairedRatio, Verdict, measure_pair
from course.syllabus import Stage, load_syllabus

# A solution whose processes use more than this share of a core while the baseline is being timed is
# working behind the baseline's back. Threads that wind down after a step stay far below it.
BACKGROUND_SHARE = 0.3

ENOUGH_SECONDS = 2.0  # of the baseline's time, before that share means anything
LEAST_SECONDS = 0.1  # of the solution's: the system counts in steps of a hundredth
CONTRACT_SECONDS = 15.0  # for one reply on nano, which takes milliseconds
# With nano a process holds a few hundred, nearly all of them torch's. First touching a gigabyte can
# take six seconds on a virtual machine: growth must meet this limit before the one of time.
CONTRACT_MEMORY_MB = 1500
PRINTED_LINES = 10  # of a solution's output, shown with a failure
BASELINE_SECONDS = 180.0  # importing transformers from a cold disk is slow


@dataclass(frozen=True)
class GateOptions:
    """What a run of a gate is asked to do."""

    solution: Path
    tier: str = "cpu"
    model: str = "smollm2-135m"  # what text is generated with
    seed: int = 0
    threads: int = 1
    contract_only: bool = False
    prior: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)


class GateRun:
    """One stage's gate, run on one solution."""

    def __init__(self, stage: Stage, options: GateOptions) -> None:
        self.stage = stage
        self.options = options
        self.tier = options.tier
        self.device = "cuda" if options.tier == "cuda" else "cpu"
        self.model = options.model
        self.rng = random.Random(f"{options.seed}:{stage.id}")
        self.numbers: list[Number] = []
        self.checks: list[CheckOutcome] = []
        self.left_out: dict[str, list[str]] = {}  # library that is not here -> what needs it
        self.failure: GateFailure | None = None
        self.record: Callable[[Number], None] | None = None  # set by the pytest-benchmark bridge
        self.say: Callable[[str], None] | None = None  # tells whoever waits what is going on
        self.layer = "contract"  # or "number": contracts run on nano, and have less time
        self.left_behind: list[str] = []  # what the solution had started and had to be ended
        self._workers: dict[str, WorkerHost] = {}
        self.bystanders = own_children()
        adopt_orphans()

    # -- workers -----------------------------------------------------------------------------

    @property
    def candidate(self) -> WorkerHost:
        """The worker that runs the solution; a new one if the last has ended."""
        return self._worker("candidate", self.options.solution, trusted=False)

    def candidate_in(self, device: str, **environment: str) -> WorkerHost:
        """A worker of the solution in an environment of its own: kept, like the first one.

        device: "cpu" or "cuda"; environment: variables that must be set before anything is
        imported, such as TRITON_INTERPRET.
        """
        role = " ".join(
            ["candidate", device, *(f"{k}={v}" for k, v in sorted(environment.items()))]
        )
        return self._worker(
            role, self.options.solution, trusted=False, device=device, environment=environment
        )

    @property
    def baseline(self) -> WorkerHost:
        """The worker that runs `gates/baseline/`, behind the same functions."""
        return self._worker("baseline", self.stage.baseline, trusted=True)

    def warm_baseline(self) -> None:
        """Begin starting the baseline, so that it has loaded by the time the numbers need it."""
        if not self.options.contract_only and self.stage.baseline.exists():
            self._worker("baseline", self.stage.baseline, trusted=True)

    def _worker(
        self,
        role: str,
        path: Path,
        *,
        trusted: bool,
        device: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> WorkerHost:
        worker = self._workers.get(role)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            folders = [s.folder for s in load_syllabus().stages]
            config = WorkerConfig(
                solution=path,
                scenarios=self.stage.scenarios,
                stage=self.stage.number,
                builds=() if trusted else self.stage.builds,
                forbidden=forbidden_paths(self.stage.number, folders),
                trusted=trusted,
                device=device or self.device,
                threads=self.options.threads,
                limits=self._limits(trusted),
                environment=environment or {},
            )
            worker = self._workers[role] = WorkerHost(config)
        worker.limits = self._limits(trusted)
        return worker

    def _limits(self, trusted: bool) -> Limits:
        """What a worker may use now: contracts run on nano, and need little."""
        seconds = BASELINE_SECONDS if trusted else self.stage.seconds
        memory_mb = self.stage.memory_mb
        if not trusted and self.layer == "contract":
            seconds = min(CONTRACT_SECONDS, seconds)
            memory_mb = min(CONTRACT_MEMORY_MB, memory_mb)
        if self.device == "cuda":
            memory_mb += 8192  # a process that uses a GPU maps gigabytes of its driver besides
        return Limits(seconds, memory_mb << 20)

    def printed(self) -> str:
        """The last lines that the solution has printed, wherever it ran."""
        workers = [w for role, w in self._workers.items() if role.startswith("candidate")]
        lines = [line for worker in workers for line in worker.output().splitlines()]
        return "\n".join(lines[-PRINTED_LINES:])

    def close(self) -> None:
        """End both workers, and whatever the solution has started and left behind."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.left_behind += end_orphans(self.bystanders)

    # -- numbers -----------------------------------------------------------------------------

    def bar(self, name: str) -> Any:
        """One bar or setting of this stage at this tier."""
        return self.stage.bar(self.tier, name)

    def exact(
        self,
        name: str,
        value: float,
        *,
        equals: float | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
        text: str,
        unit: str = "",
        code: Code = Code.WRONG_COUNT,
        message: str = "",
        likely: str = "",
        note: str = "",
        counted: bool = True,
    ) -> None:
        """Record a figure and hold it against its formula; `counted` says that it has no noise.

        `message` and `likely` are for the failure, where more is known than the code's page says.

        Raises:
            GateFailure: with `code`, when the figure is not what it must be.
        """
        bounds = (("=", equals), (">=", at_least), ("<=", at_most))
        mark = unit if unit == "%" else ""
        needs = " and ".join(f"{sign} {_figure(b)}{mark}" for sign, b in bounds if b is not None)
        good = (
            (equals is None or value == equals)
            and (at_least is None or value >= at_least)
            and (at_most is None or value <= at_most)
        )
        verdict = Verdict.PASS if good else Verdict.FAIL
        notes = [note] if note else []
        self._add(Number(name, value, text, unit, needs, verdict, exact=counted, notes=notes))
        if not good:
            raise GateFailure(
                code, message or f"{name} is not what the chapter derives", needs, _figure(value),
                likely=likely,
            )  # fmt: skip

    def report(self, name: str, value: float, text: str, *, unit: str = "", note: str = "") -> None:
        """Record a figure that is held against nothing."""
        self._add(Number(name, value, text, unit, notes=[note] if note else []))

    def ratio(
        self,
        name: str,
        step_baseline: Callable[[], float],
        step_candidate: Callable[[], float],
        *,
        text: Callable[[PairedRatio], str],
        warmup: int = 1,
        max_slices: int = 100,
        notes: Callable[[PairedRatio], list[str]] | None = None,
        slower: Callable[[PairedRatio], str] | None = None,
        itself: bool = False,
        max_spread: float | None = None,
    ) -> PairedRatio:
        """Time both sides step by step and hold the ratio against its bar in `course.toml`.

        The steps return seconds by the judge's clock. The bar is `{at_least = x}` or
        `{no_worse_than = x}`. `itself` says that both sides are the solution, at two sizes: the
        candidate's worker does the baseline's steps too, and is not watched meanwhile.
        `max_spread` is how wide an interval may be and still decide: see `Bar`. `notes` gives the
        lines below the number, unless it has failed.

        Raises:
            GateFailure: TOO_SLOW when the interval lies below the bar; BACKGROUND_WORK when the
                solution's processes were busy during the baseline's steps.
        """
        bar = replace(bar_of(self.bar(name)), max_spread=max_spread)
        watch = None if itself else BackgroundWatch(self)
        prior = PairedRatio(self.options.prior.get(name, []))
        result = measure_pair(
            watch.around(step_baseline) if watch else step_baseline,
            self._counted(name, step_candidate), bar,
            prior=prior, max_slices=max_slices, warmup=warmup,
        )  # fmt: skip
        if watch:
            watch.judge()
        verdict = result.verdict or Verdict.INCONCLUSIVE
        number = Number(
            name, result.median, text(result.ratio), "x", str(bar), verdict,
            interval=result.interval, slices=result.slices, pairs=result.ratio.pairs,
        )  # fmt: skip
        if notes is not None and verdict is not Verdict.FAIL:
            number.notes += notes(result.ratio)
        self._add(number)
        if verdict is Verdict.FAIL:
            low, high = result.interval
            raise GateFailure(
                Code.TOO_SLOW,
                slower(result.ratio) if slower else f"{name} lies below its bar",
                expected=str(bar),
                got=f"{result.median:.2f}x, interval [{low:.2f}, {high:.2f}], "
                f"{result.slices} slices",
            )
        return result.ratio

    def observe(
        self,
        name: str,
        step_baseline: Callable[[], float],
        step_candidate: Callable[[], float],
        *,
        text: Callable[[PairedRatio], str],
        slices: int,
        warmup: int = 1,
    ) -> PairedRatio:
        """Time both sides as `ratio` does, for a figure that is held against nothing."""
        ratio = PairedRatio()
        for index in range(-warmup, slices):
            self.tell(f"{name.replace('_', ' ')}: step {index + warmup + 1} of {slices + warmup}")
            if index % 2:
                baseline_s, candidate_s = step_baseline(), step_candidate()
            else:
                candidate_s, baseline_s = step_candidate(), step_baseline()
            if index >= 0:
                ratio.add(baseline_s, candidate_s)
        number = Number(name, ratio.median, text(ratio), "x", slices=slices, pairs=ratio.pairs)
        self._add(number)
        return ratio

    def interval(
        self,
        name: str,
        ratio: PairedRatio,
        interval: tuple[float, float],
        verdict: Verdict,
        unit: str,
        *,
        text: str,
        needs: str,
        extra: dict[str, float] | None = None,
    ) -> None:
        """Record a figure whose verdict the gate itself has drawn from an interval."""
        self._add(
            Number(
                name,
                ratio.median,
                text,
                unit,
                needs,
                verdict,
                interval=interval,
                slices=len(ratio),
                pairs=ratio.pairs,
                extra=extra or {},
            )
        )

    def tell(self, text: str) -> None:
        """Say what is going on, to whoever waits."""
        if self.say is not None:
            self.say(text)

    def _counted(self, name: str, step: Callable[[], float]) -> Callable[[], float]:
        """The same step, which says how many there have been."""
        steps = 0

        def counted() -> float:
            nonlocal steps
            steps += 1
            self.tell(f"{name.replace('_', ' ')}: step {steps} of each side")
            return step()

        return counted

    def _add(self, number: Number) -> None:
        self.numbers.append(number)
        if self.record is not None:
            self.record(number)


class BackgroundWatch:
    """Notices processor time that the candidate uses during the baseline's steps."""

    def __init__(self, gate: GateRun) -> None:
        self.gate = gate
        self.used = 0.0
        self.elapsed = 0.0

    def around(self, step: Callable[[], float]) -> Callable[[], float]:
        """The same step, with the other processes watched meanwhile."""

        def watched() -> float:
            before, start = self._others(), time.perf_counter()
            seconds = step()
            self.elapsed += time.perf_counter() - start
            self.used += max(0.0, self._others() - before)
            if self.elapsed > ENOUGH_SECONDS:
                self.judge()
            return seconds

        return watched

    def _others(self) -> float:
        """Processor time of everything below the judge that is not the baseline.

        Daemons that left the candidate's process are among it.
        """
        spared = {*self.gate.baseline.tree()}
        others = descendants(self.gate.bystanders)
        return sum(cpu_seconds(pid) for pid in others if pid not in spared)

    def judge(self) -> None:
        """Raise BACKGROUND_WORK if they were busy."""
        share = self.used / self.elapsed if self.elapsed else 0.0
        if self.used > LEAST_SECONDS and share > BACKGROUND_SHARE:
            raise GateFailure(
                Code.BACKGROUND_WORK,
                "the solution kept a processor busy while the baseline was being timed",
                expected=f"at most {BACKGROUND_SHARE:.0%} of one core",
                got=f"{share:.0%} over {self.elapsed:.1f} s",
            )


def bar_of(entry: Mapping[str, float]) -> Bar:
    """A bar as `course.toml` writes it."""
    if "at_most" in entry:
        return Bar(entry["at_least"], "within", upper=entry["at_most"])
    if "at_least" in entry:
        return Bar(entry["at_least"], "at_least")
    return Bar(entry["no_worse_than"], "no_worse_than")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
