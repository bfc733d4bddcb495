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
    # solution: begin
    if process == "constant":
        return [index / rate for index in range(count)]
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))
    # solution: end


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
    # solution: begin
    clock = asyncio.get_running_loop().time
    pending = iter(requests)

    async def user() -> None:
        for request in pending:
            await _follow(send, request, clock(), timelines)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    # solution: end


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
    # solution: begin
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as flights:
        for arrival, request in zip(arrivals, requests, strict=False):
            intended = start + arrival
            await asyncio.sleep(intended - loop.time())
            flights.create_task(_follow(send, request, intended, timelines))
    # solution: end


# solution: begin
async def _follow(send: Send, request: Any, intended: float, timelines: list[Timeline]) -> None:
    """Send one request, and note what comes when."""
    clock = asyncio.get_running_loop().time
    timeline = Timeline(intended, sent=clock())
    timelines.append(timeline)
    try:
        async for chunk in send(request):
            timeline.chunks.append(Stamp(clock(), chunk.tokens))
            if chunk.output_tokens is not None:
                timeline.output_tokens = chunk.output_tokens
    except Exception as error:  # one request's failure is no other's; cancellation is none
        known = isinstance(error, RequestFailed)
        timeline.error = str(error) if known else type(error).__name__
    timeline.ended = clock()


# solution: end

# -- one request ---------------------------------------------------------------------------------


def token_times(timeline: Timeline) -> list[float] | None:
    """When each token came, or None where that cannot be said.

    A chunk of n tokens brings n at once. Where as many chunks have text as the server counted
    tokens, each whose number is unknown has one. Then every number must be known, and their sum
    must be the server's count, if there is one. No text and no count is None; no text and a count
    of 0 is []. Whether the request finished does not matter.
    """
    # solution: begin
    text = _text(timeline)
    total = timeline.output_tokens
    counts = [chunk.tokens for chunk in text]
    if len(counts) == total:
        counts = [1 if count is None else count for count in counts]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or (total is not None and sum(known) != total):
        return None
    if not text and total is None:
        return None  # nothing was shown, and nobody says that there was nothing
    return [chunk.time for chunk, count in zip(text, known, strict=True) for _ in range(count)]
    # solution: end


# solution: begin
def _text(timeline: Timeline) -> list[Stamp]:
    """The chunks that show something: not the role at the start, nor the reason at the end."""
    return [chunk for chunk in timeline.chunks if chunk.tokens != 0]


# solution: end


def ttft(timeline: Timeline) -> float | None:
    """Time to first token: from the intended time to the first chunk that has text, in seconds.

    None if the request did not finish, or no chunk has text: an answer that comes in one piece and
    not as a stream, or an empty one.
    """
    # solution: begin
    text = _text(timeline)
    return text[0].time - timeline.intended if timeline.finished and text else None
    # solution: end


def itl(timeline: Timeline) -> list[float] | None:
    """Inter-token latencies: the gap before each token but the first, in seconds.

    After a gap g, a chunk of n tokens adds g and n - 1 zeros (the first chunk, only the zeros).
    None if the request did not finish, its token times are unknown, or all of several tokens came
    in a single chunk: then no gap was seen at all. Of a single token, or none, it is [].
    """
    # solution: begin
    times = token_times(timeline)
    if not timeline.finished or times is None or len(_text(timeline)) < min(2, len(times)):
        return None
    return [after - before for before, after in pairwise(times)]
    # solution: end


def tpot(timeline: Timeline) -> float | None:
    """Time per output token after the first: (last - first) / (n - 1), in seconds.

    n is the server's count, or else the sum of the chunks' numbers if all are known. None if the
    request did not finish, n is unknown or below 2, or fewer than two chunks have text.
    """
    # solution: begin
    text = _text(timeline)
    count = timeline.output_tokens
    if count is None:
        count = len(token_times(timeline) or ())
    if not timeline.finished or count < 2 or len(text) < 2:
        return None
    return (text[-1].time - text[0].time) / (count - 1)
    # solution: end


def e2e(timeline: Timeline) -> float | None:
    """End-to-end latency: from the intended time to the end of the answer, in seconds.

    None if the request did not finish.
    """
    # solution: begin
    if timeline.ended is None or timeline.error is not None:
        return None
    return timeline.ended - timeline.intended
    # solution: end


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
    # solution: begin
    ordered = sorted(values)
    rank = q / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
    # solution: end


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
    # solution: begin
    ordered = sorted(timelines, key=lambda timeline: timeline.intended)
    if warmup + cooldown >= len(ordered):
        return None
    start = ordered[warmup].intended
    open_ends = [timeline.intended for timeline in ordered if timeline.ended is None]
    end = min([ordered[-cooldown].intended, *open_ends])
    return Window(start, end) if start < end else None
    # solution: end


def throughput(timelines: Sequence[Timeline], window: Window) -> float | None:
    """Output tokens per second inside a window, of requests that finished.

    Each token counts if it came in the window. Where token times are unknown, the server's count is
    spread evenly over the chunks that have text; without any, all tokens came at the end. None if
    no request that was under way in the window (due before its end, not over before its start)
    finished, or one of those that did has neither token times nor a server's count.
    """
    # solution: begin
    under_way = _under_way(timelines, window)
    tokens = [_tokens_within(timeline, window) for timeline in under_way]
    known = [count for count in tokens if count is not None]
    if not known or len(known) < len(tokens):
        return None
    return sum(known) / window.seconds
    # solution: end


# solution: begin
def _under_way(timelines: Sequence[Timeline], window: Window) -> list[Timeline]:
    """Requests that finished, and were being served at some time in the window."""
    return [
        timeline
        for timeline in timelines
        if timeline.finished and timeline.intended < window.end and _end(timeline) >= window.start
    ]


def _end(timeline: Timeline) -> float:
    assert timeline.ended is not None
    return timeline.ended


def _tokens_within(timeline: Timeline, window: Window) -> float | None:
    times = token_times(timeline)
    if times is not None:
        return sum(map(window.holds, times))
    if timeline.output_tokens is None:
        return None
    times = [chunk.time for chunk in _text(timeline)] or [_end(timeline)]
    return timeline.output_tokens * sum(map(window.holds, times)) / len(times)


def _gaps_within(timelines: Sequence[Timeline], window: Window) -> list[float | None]:
    """Every gap that closed in the window; a None for each request whose gaps are unknown."""
    gaps: list[float | None] = []
    for timeline in _under_way(timelines, window):
        mine, times = itl(timeline), token_times(timeline)
        if mine is None or times is None:
            gaps.append(None)
        else:
            gaps += [gap for gap, time in zip(mine, times[1:], strict=True) if window.holds(time)]
    return gaps


# solution: end


def occupancy(timelines: Sequence[Timeline], window: Window) -> Occupancy | None:
    """How many finished requests were between their first and last token, found in two ways.

    By Little's law: tokens per second times the mean gap before a token. First tokens close no gap,
    so they do not count. And by counting: the average over the window's time of the number of
    requests whose first token has come and whose last has not.

    None if there is no throughput, no gap closed in the window, or the inter-token latencies of a
    finished request that was under way in it are unknown.
    """
    # solution: begin
    rate = throughput(timelines, window)
    gaps = _gaps_within(timelines, window)
    known = [gap for gap in gaps if gap is not None]
    if rate is None or not known or len(known) < len(gaps):
        return None
    spans = [
        (text[0].time, text[-1].time)
        for timeline in _under_way(timelines, window)
        if (text := _text(timeline))
    ]
    first_tokens = sum(window.holds(first) for first, _ in spans)
    busy = sum(max(0.0, min(last, window.end) - max(first, window.start)) for first, last in spans)
    return Occupancy(
        product=(rate - first_tokens / window.seconds) * statistics.fmean(known),
        counted=busy / window.seconds,
    )
    # solution: end


def summarize(timelines: Sequence[Timeline], window: Window) -> Summary:
    """Everything about a load inside a window.

    A request belongs to the window in which it was due; a gap to that in which its token came.
    Percentiles are those of all values together, never of percentiles. Only requests that finished
    have latencies (`lag` is none: it is of all that were due), and a `Stat` is None if there is no
    value at all. Missing in `itl` are finished requests that were under way in the window, as
    `throughput` says; in the others, finished requests that were due in it.
    """
    # solution: begin
    due = [timeline for timeline in timelines if window.holds(timeline.intended)]
    finished = [timeline for timeline in due if timeline.finished]
    return Summary(
        window=window,
        requests=len(due),
        errors=dict(Counter(t.error for t in due if t.error is not None)),
        request_rate=len(finished) / window.seconds,
        throughput=throughput(timelines, window),
        ttft=_stat([ttft(timeline) for timeline in finished]),
        itl=_stat(_gaps_within(timelines, window)),
        tpot=_stat([tpot(timeline) for timeline in finished]),
        e2e=_stat([e2e(timeline) for timeline in finished]),
        lag=_stat([timeline.sent - timeline.intended for timeline in due]),
        occupancy=occupancy(timelines, window),
    )
    # solution: end


# solution: begin
def _stat(values: Sequence[float | None]) -> Stat | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (percentile(known, q) for q in (50, 90, 99))
    return Stat(statistics.fmean(known), p50, p90, p99, len(known), len(values) - len(known))


# solution: end
