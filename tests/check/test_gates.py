"""What gates do besides judging: here, going on from the slices of an inconclusive run."""

from __future__ import annotations

import importlib.util
import math
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from course.check.failure import GateFailure
from course.measure.ratio import Verdict
from course.syllabus import load_syllabus


def gate_module(number: int, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A gate's file as a module."""
    stage = load_syllabus().find(number)
    monkeypatch.syspath_prepend(str(stage.gate.parent))
    spec = importlib.util.spec_from_file_location(f"gate_{number}", stage.gate)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Worker:
    """Readings around a true value, with as much noise as is wanted."""

    def __init__(self, value: float, noise: float, anew: float | None = None) -> None:
        self.rng, self.value, self.noise = random.Random(3), value, noise
        self.anew = value if anew is None else anew

    def kill(self) -> None:
        """The next process may lie elsewhere."""
        self.value = self.anew

    def start(self, scenario: str, **_: Any) -> SimpleNamespace:
        """A run whose steps read."""

        def step() -> SimpleNamespace:
            value = self.value * (1 + self.rng.uniform(-self.noise, self.noise))
            return SimpleNamespace(value=value, seconds=1.0)

        return SimpleNamespace(step=step, stop=lambda: None)


def bandwidth(
    module: ModuleType, true: float, noise: float, prior: list[tuple[float, float]],
    anew: float | None = None,
) -> SimpleNamespace:  # fmt: skip
    """What stage 03 records of a bandwidth that is `true` times the probe's.

    anew: what it is in another process; the same by default.
    """
    recorded: list[SimpleNamespace] = []

    def interval(name: str, ratio: Any, ends: Any, verdict: Any, unit: str, **_: Any) -> None:
        recorded.append(SimpleNamespace(verdict=verdict, pairs=ratio.pairs, slices=len(ratio)))

    gate = SimpleNamespace(
        candidate=Worker(true * 1e10, noise, anew and anew * 1e10),
        baseline=Worker(1e10, noise), interval=interval,
        bar=lambda name: {"at_least": 0.85, "at_most": 1.15}, tell=lambda text: None,
        options=SimpleNamespace(prior={"bandwidth": prior}),
    )  # fmt: skip
    readings = module.Readings(gate, "measure_bandwidth", [])
    try:
        readings.compare("bandwidth", "GB/s", 1e9, least_work=1.0)
    except GateFailure as failure:
        recorded[-1].code = failure.code.value
    return recorded[-1]


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stage 03's gate."""
    return gate_module(3, monkeypatch)


def test_a_band_passes_fails_on_either_side_or_says_that_it_cannot_tell(
    roofline: ModuleType,
) -> None:
    good = bandwidth(roofline, 1.0, 0.02, [])
    assert (good.verdict, good.slices) == (Verdict.PASS, 25)
    slow, fast = (bandwidth(roofline, true, 0.02, []) for true in (0.7, 1.4))
    assert (slow.verdict, slow.code) == (Verdict.FAIL, "TOO_SLOW")
    assert (fast.verdict, fast.code) == (Verdict.FAIL, "TOO_GOOD")
    unclear = bandwidth(roofline, 1.15, 0.1, [])
    assert (unclear.verdict, unclear.slices) == (Verdict.INCONCLUSIVE, 100)


def test_two_processes_that_differ_are_no_fault_of_the_solution(roofline: ModuleType) -> None:
    """What lies near the band is measured anew in other processes; what stays there has failed."""
    unlucky = bandwidth(roofline, 1.25, 0.02, [], anew=1.0)
    assert (unlucky.verdict, unlucky.slices) == (Verdict.PASS, 25)
    wrong = bandwidth(roofline, 1.25, 0.02, [], anew=1.2)
    assert (wrong.verdict, wrong.code) == (Verdict.FAIL, "TOO_GOOD")
    far = bandwidth(roofline, 2.0, 0.02, [], anew=1.0)  # nobody's luck: no second chance
    assert (far.verdict, far.code) == (Verdict.FAIL, "TOO_GOOD")


def test_an_inconclusive_band_is_gone_on_with(roofline: ModuleType) -> None:
    """The second run reads anew, and adds to what the first one read."""
    first = bandwidth(roofline, 1.15, 0.1, [])
    second = bandwidth(roofline, 1.0, 0.02, first.pairs)
    assert second.slices == 200
    assert second.pairs[:100] == first.pairs
    third = bandwidth(roofline, 1.0, 0.02, [(1.0, 1.0)] * 25)  # decided the first time
    assert third.verdict is Verdict.PASS
    assert third.slices > 25


def test_traces_differ_in_their_order_and_not_in_their_luck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = load_syllabus().stages[0].gate.parent
    monkeypatch.syspath_prepend(str(gates))
    from traces import log_uniform

    first, second = (log_uniform(random.Random(seed), 400, 8, 128, 32) for seed in (1, 2))
    assert first != second
    news = [[new for _, new in trace] for trace in (first, second)]
    assert sorted(news[0]) == sorted(news[1])
    assert (min(news[0]), max(news[0])) == (8, 128)
    octaves = [sum(low <= new < 2 * low for new in news[0]) for low in (8, 16, 32, 64)]
    assert max(octaves) - min(octaves) <= 8  # each holds a quarter, roundings aside
    assert sum(news[0]) / 400 == pytest.approx(120 / math.log(16), rel=0.005)
    assert {prompt for prompt, _ in first} == set(range(16, 33))
