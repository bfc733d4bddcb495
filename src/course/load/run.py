"""One load on one server: stage 06's parts, the client and the prompts, put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from types import ModuleType
from typing import Any

from course.load.client import Client
from course.types import Timeline

MOST_REQUESTS = 1_000_000  # each one's timeline is kept
TICK = 0.01  # seconds between two looks of the watch on the client itself


@dataclass(frozen=True)
class Load:
    """What is asked for: `concurrency` in flight (closed loop), or else `rate` per second (open).

    Raises:
        ValueError: neither or both are given, more than MOST_REQUESTS, or so few requests that
            nothing is left between warm-up and cool-down.
    """

    requests: int
    warmup: int  # requests that are left out at the start, and as many at the end
    concurrency: int | None = None
    rate: float | None = None
    process: str = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has either a concurrency or a rate")
        for name, value in (("concurrency", self.concurrency or 0), ("requests", self.requests)):
            if value > MOST_REQUESTS:
                raise ValueError(f"--{name} must be at most {MOST_REQUESTS:,}, got {value:,}")
        if self.requests <= self.warmup + self.cooldown:
            least = self.warmup + self.cooldown + 1
            raise ValueError(
                f"--requests must be more than warm-up and cool-down take, "
                f"{self.warmup} + {self.cooldown}, got {self.requests}: ask for {least} or more"
                + (", or leave out less with --warmup 0" if self.warmup else "")
            )

    @classmethod
    def planned(
        cls,
        *,
        concurrency: int | None,
        rate: float | None,
        requests: int | None,
        warmup: int | None,
        process: str,
        seed: int,
    ) -> Load:
        """A load with sensible numbers for those that are not given."""
        if rate is None:
            concurrency = 8 if concurrency is None else concurrency
            requests = max(20, 8 * concurrency) if requests is None else requests
            warmup = concurrency if warmup is None else warmup
        else:
            requests = max(20, round(30 * rate)) if requests is None else requests
            warmup = max(1, requests // 10) if warmup is None else warmup
        return cls(requests, warmup, concurrency, rate, process, seed)

    @property
    def cooldown(self) -> int:
        """Requests that are left out at the end."""
        return max(1, self.warmup)

    @property
    def words(self) -> str:
        """How requests come, in words."""
        if self.rate is None:
            return f"closed loop, {self.concurrency} in flight"
        return f"open loop, {self.rate:g} per second ({self.process})"


@dataclass
class Measured:
    """A load as far as it has come."""

    load: Load
    harness: ModuleType  # the parts of stage 06
    timelines: list[Timeline] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)  # of the client's own event loop, seconds
    details: dict[str, str] = field(default_factory=dict)  # what a server said as it failed
    model: str = ""
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
    interrupted: bool = False

    @cached_property
    def settled(self) -> float:
        """When as many answers end as begin: an open loop fills an empty server before.

        That takes as long as an answer, of which the p90 stands for all but the rare ones. In a
        closed loop, where all users begin at once, it is the start.
        """
        start = min((timeline.intended for timeline in self.timelines), default=0.0)
        lengths = [self.harness.e2e(timeline) for timeline in self.timelines]
        known = [length for length in lengths if length is not None]
        if self.load.rate is None or not known:
            return start
        return start + float(self.harness.percentile(known, 90))

    @cached_property
    def left_out(self) -> int:
        """Requests that are left out at the start: the warm-up, and all before it is settled."""
        early = sum(timeline.intended < self.settled for timeline in self.timelines)
        return max(self.load.warmup, early)

    @cached_property
    def window(self) -> Any:
        """When the load was steady; None if it never was. To be asked when the load is over.

        Where nothing is left after the load has settled, it is the window after the warm-up, of
        which latencies can be told, and no rates.
        """
        steady, cooldown = self.harness.steady_window, self.load.cooldown
        later = steady(self.timelines, self.left_out, cooldown)
        if later is not None:
            return later
        return steady(self.timelines, self.load.warmup, cooldown)

    @cached_property
    def summary(self) -> Any:
        """What happened in that window; None if there is none."""
        if self.window is None:
            return None
        return self.harness.summarize(self.timelines, self.window)


async def drive(measured: Measured, client: Client, prompts: Sequence[str]) -> None:
    """Put the load on the server, with the prompts over and over.

    What is seen is in `measured` as it is seen.
    """
    load, harness = measured.load, measured.harness
    asked = islice(cycle(prompts), load.requests)
    measured.started = time.time()
    async with client:
        measured.model, measured.details = client.model, client.details
        clock = asyncio.get_running_loop().time
        start = clock()
        watch = asyncio.create_task(_watch(measured.lateness))
        try:
            if load.rate is None:
                await harness.closed_loop(client.send, asked, load.concurrency, measured.timelines)
            else:
                arrivals = harness.arrival_times(load.rate, load.requests, load.process, load.seed)
                await harness.open_loop(client.send, asked, arrivals, measured.timelines)
        finally:
            measured.seconds = clock() - start
            watch.cancel()


async def _watch(lateness: list[float]) -> None:
    """How much later than asked this process goes on: what it sees late, it stamps late."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + TICK
        await asyncio.sleep(TICK)
        lateness.append(max(0.0, clock() - due))
