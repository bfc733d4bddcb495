"""Stage 06: the load harness. What a server does, seen from outside, with a clock in hand."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from course.types import RequestFailed, Send, Stamp, Timeline, require_int, require_range


class Window(NamedTuple):
    """A stretch of time, its start included and its end not."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start

    def holds(self, time: float) -> bool:
        """Whether a moment lies in it."""
        return self.start <= time < self.end


class Occupancy(NamedTuple):
    """How many requests are between their first and their last token, found in two ways."""

    product: float  # tokens per second, without first ones, times the mean inter-token latency
    counted: float  # the average over time of the number of such requests


@dataclass(frozen=True)
class Stat:
    """A figure of many values; `missing` counts the requests that have no such value."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int
    missing: int


@dataclass(frozen=True)
class Summary:
    """What a load was like inside a window. Times in seconds. None: it could not be measured."""

    window: Window
    requests: int  # that were due in the window
    errors: dict[str, int]  # how many of them failed, by the kind of failure
    request_rate: float  # of those due in the window, the ones that finished, per second
    throughput: float | None  # output tokens per second
    ttft: Stat | None
    itl: Stat | None
    tpot: Stat | None
    e2e: Stat | None
    lag: Stat | None  # how much later than intended the client sent, of all that were due
    occupancy: Occupancy | None


# -- the load ------------------------------------------------------------------------------------


def arrival_times(rate: float, count: int, process: str = "poisson", seed: int = 0) -> list[float]:
    """When requests are due, in seconds from the start of an open loop, in order.

    Args:
        rate: requests per second, in the long run.
        count: how many.
        process: "constant": one every 1 / rate, the first at 0. "poisson": independent gaps with
            an exponential distribution, the first one before the first request.
        seed: the same seed gives the same times. Other users of `random` notice nothing.

    Raises:
        ValueError: `rate` is not above 0 and finite, `count` is negative, or `process` is another
            word.
        TypeError: `rate` is no number, or `count` no int.
    """
    require_range("rate", rate)
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be above 0 and finite, got {rate}")
    require_int("count", count)
    require_range("count", count, low=0)
    if process not in ("constant", "poisson"):
        raise ValueError(f"process must be constant or poisson, got {process!r}")
    raise NotImplementedError("your code goes here")


async def closed_loop(
    send: Send, requests: Iterable[Any], concurrency: int, timelines: list[Timeline]
) -> None:
    """Keep `concurrency` requests in flight until all have been sent; return when all have ended.

    When one ends, well or not, the next is sent at once. A request is taken from `requests` only
    when it is sent. Whatever `send` raises, when it is called or later, is that request's own
    `error`: the message of a RequestFailed, the name of the type of any other exception. How long
    an answer may take is for `send` to say.

    A load that is cancelled sends nothing more, cancels what it has sent, and raises the
    CancelledError.

    Args:
        send: `async for chunk in send(request)` sends a request and gives its answer's chunks.
        timelines: each request's timeline is appended as it is sent, and filled as chunks come, a
            `Stamp` for each; `output_tokens` is the last count that a chunk has brought. The caller
            can look at any time, and has what was seen if the load is cut short. A timeline that is
            cancelled never ends: `ended` and `error` stay None.

    Raises:
        ValueError: `concurrency` is below 1.
        TypeError: `concurrency` is no int.
    """
    require_int("concurrency", concurrency)
    require_range("concurrency", concurrency, low=1)
    raise NotImplementedError("your code goes here")


async def open_loop(
    send: Send, requests: Iterable[Any], arrivals: Sequence[float], timelines: list[Timeline]
) -> None:
    """Send the i-th request `arrivals[i]` seconds from now, whatever became of those before it.

    Returns when all have ended. A request that is late is sent at once, and its timeline still says
    when it was intended. What has no partner among `requests` or `arrivals` is not sent,
    and not waited for: either may be the longer, and `requests` may have no end.

    Args:
        send, timelines: as for `closed_loop`, failures and cancellation included.
        arrivals: from 0 upwards, in order.

    Raises:
        ValueError: `arrivals` are negative, not finite or not in order.
    """
    if any(not 0 <= a <= b < math.inf for a, b in pairwise((0.0, *arrivals))):
        raise ValueError("arrivals must be finite, at least 0, and in order")
    raise NotImplementedError("your code goes here")


# -- one request ---------------------------------------------------------------------------------


def token_times(timeline: Timeline) -> list[float] | None:
    """When each token came, or None where that cannot be said.

    A chunk of n tokens brings n at once. Where as many chunks have text as the server counted
    tokens, each whose number is unknown has one. Then every number must be known, and their sum
    must be the server's count, if there is one. No text and no count is None; no text and a count
    of 0 is []. Whether the request finished does not matter.
    """
    raise NotImplementedError("your code goes here")


def ttft(timeline: Timeline) -> float | None:
    """Time to first token: from the intended time to the first chunk that has text, in seconds.

    None if the request did not finish, or no chunk has text: an answer that comes in one piece and
    not as a stream, or an empty one.
    """
    raise NotImplementedError("your code goes here")


def itl(timeline: Timeline) -> list[float] | None:
    """Inter-token latencies: the gap before each token but the first, in seconds.

    After a gap g, a chunk of n tokens adds g and n - 1 zeros (the first chunk, only the zeros).
    None if the request did not finish, its token times are unknown, or all of several tokens came
    in a single chunk: then no gap was seen at all. Of a single token, or none, it is [].
    """
    raise NotImplementedError("your code goes here")


def tpot(timeline: Timeline) -> float | None:
    """Time per output token after the first: (last - first) / (n - 1), in seconds.

    n is the server's count, or else the sum of the chunks' numbers if all are known. None if the
    request did not finish, n is unknown or below 2, or fewer than two chunks have text.
    """
    raise NotImplementedError("your code goes here")


def e2e(timeline: Timeline) -> float | None:
    """End-to-end latency: from the intended time to the end of the answer, in seconds.

    None if the request did not finish.
    """
    raise NotImplementedError("your code goes here")


# -- many requests -------------------------------------------------------------------------------


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, with linear interpolation between the two nearest ranks.

    In the sorted values x[0] ... x[n-1] it lies at rank q / 100 * (n - 1): NumPy's default.

    Raises:
        ValueError: `values` is empty, or `q` is not within 0 to 100.
    """
    if len(values) == 0:
        raise ValueError("values must hold at least one number, got none")
    require_range("q", q, low=0, high=100)
    raise NotImplementedError("your code goes here")


def steady_window(timelines: Sequence[Timeline], warmup: int, cooldown: int = 1) -> Window | None:
    """When the load was steady.

    In the order of their intended times, the first `warmup` requests are left out, and the last
    `cooldown` too. The window opens at the intended time of the first request that is kept. It
    closes at that of the first of the last `cooldown`, or earlier: at that of the first request of
    all, those of the warm-up included, whose end is not known. None if nothing is left.

    Raises:
        ValueError: `warmup` is negative, or `cooldown` below 1: after the last request there is
            nothing to keep the load up.
    """
    for name, value, low in (("warmup", warmup, 0), ("cooldown", cooldown, 1)):
        require_int(name, value)
        require_range(name, value, low=low)
    raise NotImplementedError("your code goes here")


def throughput(timelines: Sequence[Timeline], window: Window) -> float | None:
    """Output tokens per second inside a window, of requests that finished.

    Each token counts if it came in the window. Where token times are unknown, the server's count is
    spread evenly over the chunks that have text; without any, all tokens came at the end. None if
    no request that was under way in the window (due before its end, not over before its start)
    finished, or one of those that did has neither token times nor a server's count.
    """
    raise NotImplementedError("your code goes here")


def occupancy(timelines: Sequence[Timeline], window: Window) -> Occupancy | None:
    """How many finished requests were between their first and last token, found in two ways.

    By Little's law: tokens per second times the mean gap before a token. First tokens close no gap,
    so they do not count. And by counting: the average over the window's time of the number of
    requests whose first token has come and whose last has not.

    None if there is no throughput, no gap closed in the window, or the inter-token latencies of a
    finished request that was under way in it are unknown.
    """
    raise NotImplementedError("your code goes here")


def summarize(timelines: Sequence[Timeline], window: Window) -> Summary:
    """Everything about a load inside a window.

    A request belongs to the window in which it was due; a gap to that in which its token came.
    Percentiles are those of all values together, never of percentiles. Only requests that finished
    have latencies (`lag` is none: it is of all that were due), and a `Stat` is None if there is no
    value at all. Missing in `itl` are finished requests that were under way in the window, as
    `throughput` says; in the others, finished requests that were due in it.
    """
    raise NotImplementedError("your code goes here")
