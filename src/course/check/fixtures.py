"""The fixtures of gates. Functions of a module: pytest wants none of a wide scope in an object."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from course.check.gate import GateOptions, GateRun
from course.check.plugin import GatePlugin, is_gate, layer_of
from course.check.result import Number
from course.check.session import Session, Wish
from course.check.solutions import solution_path
from course.syllabus import load_syllabus


def plugin_of(config: pytest.Config) -> GatePlugin:
    """The plugin that `course check`, or else `pytest_configure`, has registered."""
    return next(p for p in config.pluginmanager.get_plugins() if isinstance(p, GatePlugin))


@pytest.fixture(scope="module")
def gate(request: pytest.FixtureRequest) -> Iterator[GateRun]:
    """The run of this module's gate."""
    run = plugin_of(request.config).run
    if run is not None:  # `course check` owns it, and closes it
        yield run
        return
    stage = load_syllabus().find(request.module.STAGE)
    option = request.config.getoption
    seed = option("--gate-seed")
    options = GateOptions(
        solution=solution_path(stage, option("--solution")),
        tier=option("--tier"),
        model=Session().model_for(stage, Wish(model=option("--gate-model")), option("--tier")),
        seed=random.SystemRandom().getrandbits(48) if seed is None else seed,
    )
    run = GateRun(stage, options)
    yield run
    run.close()


@pytest.fixture(autouse=True)
def _benchmark_bridge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the timed number of this test a pytest-benchmark record too."""
    if not is_gate(request.node):  # `pytest tests gates` runs others beside them
        yield
        return
    run: GateRun = request.getfixturevalue("gate")
    run.layer = layer_of(request.node)
    if run.layer != "number" or not request.config.pluginmanager.hasplugin("benchmark"):
        yield
        return
    benchmark = request.getfixturevalue("benchmark")
    clock = plugin_of(request.config).clock

    def record(number: Number) -> None:
        benchmark.extra_info[number.name] = number.as_dict()
        if not number.pairs or benchmark.stats is not None:  # one series of times per record
            return
        seconds = iter([candidate for _, candidate in number.pairs])
        benchmark.pedantic(
            lambda: clock.advance(next(seconds)), rounds=len(number.pairs), iterations=1
        )

    run.record = record
    yield
    run.record = None
    if benchmark.stats is None and benchmark.extra_info:  # a counter: nothing was timed
        benchmark.pedantic(lambda: clock.advance(1e-9), rounds=1, iterations=1)
