"""How far a load has come, on a terminal, while it runs."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from course.load.run import Measured

PERIOD = 0.25  # seconds; drawing takes time that the client could use to stamp what comes


class Shown:
    """A bar that follows a load; nothing where no one looks. An async context manager."""

    def __init__(self, console: Console, measured: Measured) -> None:
        self.measured = measured
        self.progress = Progress(
            BarColumn(30), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
            refresh_per_second=1 / PERIOD, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self.bar = self.progress.add_task("", total=measured.load.requests, state="")

    async def __aenter__(self) -> Self:
        self.progress.start()
        self.task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.task.cancel()
        self.progress.stop()

    async def _follow(self) -> None:
        while True:
            timelines = self.measured.timelines
            ended = sum(timeline.ended is not None for timeline in timelines)
            failed = sum(timeline.error is not None for timeline in timelines)
            state = f"{len(timelines) - ended} in flight"
            state += f", {failed} failed" if failed else ""
            self.progress.update(self.bar, completed=ended, state=state)
            await asyncio.sleep(PERIOD)
