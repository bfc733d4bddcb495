"""A worker that is no process: scenarios run here, on a solution that is a module."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from course.check.channel import HEADER, decode, encode
from course.check.replies import SolutionError
from course.check.worker import describe_error
from course.syllabus import Stage
from loading import module_at


class LocalWorker:
    """Enough of a `WorkerHost` for scenarios that are plain functions."""

    def __init__(self, stage: Stage, solution: ModuleType) -> None:
        self.scenarios = module_at(stage.scenarios)
        self.solution = solution
        self.env = SimpleNamespace(solution=solution, device="cpu")

    def call(self, scenario: str, **args: Any) -> Any:
        """What a scenario returns, as it would come over the channel."""
        try:
            value = getattr(self.scenarios, scenario)(self.env, **args)
        except Exception as error:
            raise SolutionError(describe_error(error, str(self.solution.__file__))) from error
        frame = encode(value)
        size, _ = HEADER.unpack(frame[: HEADER.size])
        body = frame[HEADER.size :]
        return decode(body[:size], body[size:])


def local_gate(stage: Stage, solution: ModuleType, seed: int = 0) -> Any:
    """Enough of a `GateRun` for the contract of a gate whose scenarios are plain functions."""
    for folder in (str(stage.gate.parent), str(stage.scenarios.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return SimpleNamespace(candidate=LocalWorker(stage, solution), rng=random.Random(seed))
