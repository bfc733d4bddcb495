"""The loop: schedule, compute, take note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course.types import Output, Request, Step


class Engine:
    """Serves requests, step by step.

    Args:
        scheduler: decides, as stage 11's Scheduler or one that extends it.
        runner: computes what was decided, as Runner: a token for each sequence of a step.
    """

    def __init__(self, scheduler: Any, runner: Callable[[Step], list[int]]) -> None:
        self.scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.has_work)

    def add(self, request: Request) -> Output | None:
        """Queue a request; an Output if it has ended already: it asks for nothing, or is refused.

        Raises:
            ValueError, TypeError: as the scheduler's.
        """
        output: Output | None = self.scheduler.add(request)
        return output

    def abort(self, request_id: str) -> Output | None:
        """End a request; None if it is not being served."""
        output: Output | None = self.scheduler.abort(request_id)
        return output

    def step(self) -> list[Output]:
        """One pass, and what it adds to each request; without work, an empty list.

        Raises:
            RuntimeError: there is work, and the scheduler found none: it would be asked for ever.
        """
        step = self.scheduler.schedule()
        if not step.sequences:
            if self.scheduler.has_work:
                raise RuntimeError("the scheduler has work, and its step is empty")
            return []
        outputs: list[Output] = self.scheduler.update(step, self.runner(step))
        return outputs
