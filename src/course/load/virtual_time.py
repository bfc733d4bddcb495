"""An event loop whose clock jumps: what takes a minute of waiting takes no time, and is exact.

Whenever every task waits, the clock is set to the moment at which the first of them goes on. Code
that waits with `asyncio.sleep` and reads `asyncio.get_running_loop().time()` cannot tell the
difference. Times are sums of the delays that were asked for, with nothing added: delays that are
multiples of a power of two (1/1024 s) add up without rounding.

Threads, sockets and other clocks are outside of this time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits, and nothing is due that could wake one of them."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Impatient(self))

    def time(self) -> float:
        """Seconds since the start, in virtual time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass without giving way to other tasks, as code does that computes."""
        self._now += seconds


class _Impatient(selectors.SelectSelector):
    """Waits for nothing: a time-out has passed as soon as it is asked for."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("every task waits for another, and nothing is due that could wake one")
        self._loop.advance(max(0.0, timeout))
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, from time 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
