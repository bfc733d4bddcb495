"""Runs one gate on one solution, and says what came of it."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateOptions, GateRun
from course.check.libraries import is_here, where
from course.check.plugin import GatePlugin, gate_arguments, title_of
from course.check.result import StageResult
from course.check.solutions import solution_hash
from course.syllabus import Stage


def new_seed() -> int:
    """A secret that nobody could prepare for; `--seed` repeats it."""
    return secrets.randbits(48)


def run_gate(
    stage: Stage,
    options: GateOptions,
    *,
    progress: Callable[[str], None] | None = None,
) -> StageResult:
    """Run the gate of `stage`. Raises for nothing that a solution does; Ctrl-C comes through.

    Args:
        progress: called with one line for each check that begins.
    """
    result = StageResult(
        stage=stage.id,
        title=stage.title,
        tier=options.tier,
        device="cuda" if options.tier == "cuda" else "cpu",
        model=options.model,
        solution=str(options.solution),
        solution_hash=solution_hash(options.solution),
        seed=options.seed,
        contract_only=options.contract_only,
    )
    start = time.perf_counter()
    gate = GateRun(stage, options)
    gate.say = progress
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # oracles are small, and threads that wait for each other take a core
    try:
        for path in (stage.gate, stage.scenarios):
            if not path.is_file():
                raise GateFailure(
                    Code.BROKEN_GATE, f"{path} is missing",
                    likely="It was moved or deleted; `git status` shows what is gone.",
                )  # fmt: skip
        _must_have(stage)
        gate.candidate.wait_loaded()
        status, said = _run_pytest(gate, progress)
        if gate.failure is None and (status not in (0, 1) or not gate.checks):
            gate.failure = GateFailure(
                Code.BROKEN_GATE, f"pytest ended with status {int(status)}", detail=said[-3000:]
            )
    except GateFailure as failure:
        gate.failure = failure
    finally:
        if gate.failure is not None:
            printed = gate.printed()
            result.printed = printed if printed not in gate.failure.detail else ""
        torch.set_num_threads(threads)
        gate.close()
    if gate.left_behind:
        result.remarks.append(
            f"processes that the solution left behind were ended: {gate.left_behind[0]}"
        )
    result.checks, result.numbers, result.failure = gate.checks, gate.numbers, gate.failure
    result.left_out = gate.left_out
    if not options.contract_only and result.failure is None:
        found = {number.name for number in gate.numbers}
        wanted = stage.numbers + (stage.gpu_numbers if options.tier == "cuda" else ())
        result.missing = [name for name in wanted if name not in found]
    result.seconds = time.perf_counter() - start
    return result


def _must_have(stage: Stage) -> None:
    """Raise NOT_MEASURABLE where a library does not exist that the stage is about."""
    for name in stage.modules:
        if not is_here(name):
            raise GateFailure(
                Code.NOT_MEASURABLE, f"{stage.id} cannot be measured here: there is no {name}",
                likely=where(name),
            )  # fmt: skip


def _run_pytest(gate: GateRun, progress: Callable[[str], None] | None) -> tuple[int, str]:
    plugin = GatePlugin(gate)
    plugins: list[object] = [plugin]
    if progress is not None:
        plugins.append(_Progress(progress))
    said = io.StringIO()
    with _no_autoload(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = pytest.main(gate_arguments(gate.stage.gate), plugins=plugins)
    if plugin.interrupted:
        raise KeyboardInterrupt  # pytest has swallowed it
    return int(status), said.getvalue()


class _Progress:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.say(title_of(item))


@contextlib.contextmanager
def _no_autoload() -> Iterator[None]:
    """Gates need no other pytest plugin; loading every installed one costs a second."""
    name = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
