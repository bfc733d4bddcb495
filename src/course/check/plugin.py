"""The pytest plugin under every gate, for `course check` and for plain `pytest gates` alike.

    pytest gates/test_stage_01_naive_loop.py --solution reference

A gate module names its stage (`STAGE = 1`) and marks its tests `contract` or `number`. Contract
tests run first. The plugin keeps what they find. `course.check.fixtures` hands them the fixture
`gate`, and turns every timed number into a pytest-benchmark record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.libraries import is_here, where
from course.check.replies import SolutionError
from course.check.result import CheckOutcome
from course.paths import course_home


class ReplayClock:
    """A clock for pytest-benchmark that replays seconds which the judge has measured already."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """The time of the replay, in seconds."""
        return self.time

    def advance(self, seconds: float) -> None:
        """Let the clock go on."""
        self.time += seconds


class GatePlugin:
    """Collects outcomes. `run` is given by `course check`; plain pytest makes one per module."""

    def __init__(self, run: GateRun | None = None) -> None:
        self.run = run
        self.clock = ReplayClock()
        self.interrupted = False

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that it was Ctrl-C: pytest's own ways of stopping are subclasses of it."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Contracts first; numbers only if they are wanted."""
        gates = [item for item in items if is_gate(item)]
        for item in gates:
            number = item.get_closest_marker("number") is not None
            if not number and item.get_closest_marker("contract") is None:
                raise pytest.UsageError(f"{item.nodeid} is marked neither contract nor number")
            if number and config.pluginmanager.hasplugin("benchmark"):
                item.add_marker(pytest.mark.benchmark(timer=self.clock.now))
        gates.sort(key=lambda item: (str(item.path), layer_of(item) == "number"))
        items[:] = [item for item in items if not is_gate(item)] + gates
        if self.run is not None and self.run.options.contract_only:
            items[:] = [item for item in items if layer_of(item) == "contract"]
        if self.run is not None:
            items[:] = [item for item in items if not self._left_out(item, self.run)]

    @staticmethod
    def _left_out(item: pytest.Item, run: GateRun) -> bool:
        """Note a test whose library is not here: what is not checked is said, and is no pass."""
        library = lacks(item)
        if library and title_of(item) not in run.left_out.setdefault(library, []):
            run.left_out[library].append(title_of(item))
        return bool(library)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Plain pytest leaves nothing out: it fails."""
        if library := lacks(item):
            message = f"this cannot be checked here: there is no {library}"
            raise GateFailure(Code.NOT_MEASURABLE, message, likely=where(library))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Iterator[None]:
        """Keep what came of a test; the first failure ends the gate."""
        outcome = yield
        report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
        if call.excinfo is not None and isinstance(call.excinfo.value, GateFailure):
            report.longrepr = explain_briefly(call.excinfo.value)
        if self.run is None or (report.when != "call" and report.passed):
            return
        self.run.checks.append(
            CheckOutcome(
                item.name, layer_of(item), report.outcome, round(report.duration, 3), title_of(item)
            )
        )
        if report.passed:
            self.run.warm_baseline()  # the solution does something: there will be numbers to take
        if report.passed or self.run.failure is not None:
            return
        self.run.failure = as_failure(call, report)
        item.session.shouldfail = "the first decisive failure ends a gate"


def is_gate(item: pytest.Item) -> bool:
    """Whether a test belongs to a gate: its module names the stage."""
    return hasattr(getattr(item, "module", None), "STAGE")


def layer_of(item: pytest.Item) -> str:
    """ "contract" or "number"."""
    return "number" if item.get_closest_marker("number") else "contract"


def lacks(item: pytest.Item) -> str:
    """The library that a test needs (`@pytest.mark.needs("triton")`) and this machine has not."""
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    return next((name for name in needed if not is_here(name)), "")


def title_of(item: pytest.Item) -> str:
    """The first line of a test's docstring, or its name in words."""
    doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return doc.strip().split("\n")[0] or item.name.removeprefix("test_").replace("_", " ")


def as_failure(call: pytest.CallInfo[Any], report: pytest.TestReport) -> GateFailure:
    """What a test that did not pass means. Anything unforeseen is the course's fault."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, GateFailure):
        return error
    if isinstance(error, SolutionError):
        return GateFailure(Code.CRASHED, str(error), where=error.where, detail=error.traceback)
    if report.skipped:
        return GateFailure(Code.BROKEN_GATE, f"a check was skipped: {report.nodeid}")
    return GateFailure(
        Code.BROKEN_GATE,
        f"the judge raised {type(error).__name__}: {error}",
        detail=str(report.longrepr)[-3000:],
    )


def explain_briefly(failure: GateFailure) -> str:
    """What plain pytest prints for a GateFailure, instead of the judge's own source."""
    lines = [f"{failure.code.value}: {failure.message}"]
    for name in ("expected", "got", "where"):
        if text := getattr(failure, name):
            lines.append(f"  {name:9} {text}")
    if failure.detail:
        lines += ["", failure.detail]
    return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of plain pytest."""
    group = parser.getgroup("course", "gates of the course")
    group.addoption("--solution", default="mine", help="mine, reference, or a path to a file")
    group.addoption("--tier", default="cpu", choices=["cpu", "cuda"])
    group.addoption("--gate-model", default=None, help="the model of the numbers")
    group.addoption("--gate-seed", type=int, default=None, help="repeats a run's secret inputs")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and the plugin itself unless `course check` has."""
    gates = str(course_home() / "gates")
    if gates not in sys.path:  # gates share modules; pytest's importlib mode does not see to that
        sys.path.insert(0, gates)
    config.addinivalue_line("markers", "contract: what comes out must be right")
    config.addinivalue_line("markers", "number: what was predicted, measured")
    config.addinivalue_line("markers", "needs(library): cannot be checked where it is not")
    if not any(isinstance(p, GatePlugin) for p in config.pluginmanager.get_plugins()):
        config.pluginmanager.register(GatePlugin(), "course-gate")
    from course.check import fixtures

    config.pluginmanager.register(fixtures, "course-gate-fixtures")


def gate_arguments(gate: Path) -> list[str]:
    """The arguments with which `course check` runs pytest on one gate."""
    # The plugins that look for errors in the background collect garbage several times in each run.
    unused = ("cacheprovider", "terminal", "unraisableexception", "threadexception")
    return [
        str(gate), *(word for name in unused for word in ("-p", f"no:{name}")),
        "--strict-markers", "--rootdir", str(gate.parent), "-c", "/dev/null",
    ]  # fmt: skip
