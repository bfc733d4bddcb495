"""The oracle of stage 06: what comes when in a load, by simulation, and what a window of it holds.

Timelines are plain: the fields of `course.types.Timeline`, with chunks as [time, tokens]. A script
says how a request is answered: see `gates/scenarios/stage_06_load_harness.py`.
"""

from __future__ import annotations

import heapq
import statistics
from itertools import pairwise
from typing import Any

import numpy

Json = dict[str, Any]


# -- loads -----------------------------------------------------------------------------------------


def expected(script: Json, intended: float, sent: float, begun: float) -> Json:
    """The timeline of an answer that the server begins to work on at `begun`."""
    now, chunks, count = begun + script.get("busy", 0.0), [], None
    for delay, tokens, output_tokens in script["chunks"]:
        now += delay
        chunks.append([now, tokens])
        count = count if output_tokens is None else output_tokens
    error = "KeyError" if script.get("bug") else script.get("error")
    return {
        "intended": intended, "sent": sent, "chunks": chunks, "output_tokens": count,
        "ended": now + script.get("rest", 0.0), "error": error,
    }  # fmt: skip


def closed(script: list[Json], concurrency: int) -> list[Json]:
    """A closed loop against a server that answers all at once: users who each send the next."""
    free = [0.0] * concurrency
    wanted = []
    for one in script:
        now = heapq.heappop(free)
        wanted.append(expected(one, now, now, now))
        heapq.heappush(free, wanted[-1]["ended"])
    return wanted


def on_time(script: list[Json], arrivals: list[float]) -> list[Json]:
    """An open loop against a server that answers all at once."""
    return [expected(one, t, t, t) for one, t in zip(script, arrivals, strict=True)]


def queued(script: list[Json], arrivals: list[float]) -> list[Json]:
    """An open loop against a server that answers one at a time, in order (Lindley's recursion)."""
    free, wanted = 0.0, []
    for one, arrival in zip(script, arrivals, strict=True):
        begun = max(arrival, free)
        wanted.append(expected(one, arrival, arrival, begun))
        free = wanted[-1]["ended"]
    return wanted


def seen_until(one: Json, cut: float) -> Json:
    """A timeline as far as it has come at a moment."""
    if one["ended"] <= cut:
        return one
    chunks = [chunk for chunk in one["chunks"] if chunk[0] <= cut]
    told = one["output_tokens"] if len(chunks) == len(one["chunks"]) else None
    return {**one, "chunks": chunks, "ended": None, "error": None, "output_tokens": told}


# -- windows ---------------------------------------------------------------------------------------
# By loops over tokens, and over the moments between which nothing changes.


def whole(one: Json) -> bool:
    """Whether the whole answer came."""
    return one["ended"] is not None and one["error"] is None


def shown(one: Json) -> list[list[Any]]:
    """The chunks that have text."""
    return [chunk for chunk in one["chunks"] if chunk[1] != 0]


def moments(one: Json) -> list[float] | None:
    """When each token of a timeline came. Here chunks either have sizes, or one token each."""
    sizes = [1 if n is None and len(shown(one)) == one["output_tokens"] else n
             for _, n in shown(one)]  # fmt: skip
    if None in sizes or not sizes:
        return [] if one["output_tokens"] == 0 else None
    return [time for (time, _), n in zip(shown(one), sizes, strict=True) for _ in range(n)]


def alive(many: list[Json], start: float, end: float) -> list[Json]:
    """Finished requests that were under way in the window."""
    return [one for one in many if whole(one) and one["intended"] < end and one["ended"] >= start]


def tokens_per_second(many: list[Json], start: float, end: float) -> float | None:
    """Output tokens in the window over its length."""
    total, any_at_all = 0.0, False
    for one in alive(many, start, end):
        any_at_all = True
        times, weight = moments(one), 1.0
        if times is None and one["output_tokens"] is None:
            return None
        if times is None:
            times = [time for time, _ in shown(one)] or [one["ended"]]
            weight = one["output_tokens"] / len(times)
        total += weight * sum(start <= time < end for time in times)
    return total / (end - start) if any_at_all else None


def gaps(many: list[Json], start: float, end: float) -> tuple[list[float], int]:
    """Every gap that closes in the window, and how many requests have none that is known."""
    found, missing = [], 0
    for one in alive(many, start, end):
        times = moments(one)
        if times is None or (len(times) > 1 and len(shown(one)) == 1):
            missing += 1
            continue
        found += [b - a for a, b in pairwise(times) if start <= b < end]
    return found, missing


def between_first_and_last(many: list[Json], start: float, end: float) -> float:
    """The time-average of the number of requests between their first and last token."""
    spans = [(shown(o)[0][0], shown(o)[-1][0]) for o in alive(many, start, end) if shown(o)]
    edges = sorted({start, end, *(t for span in spans for t in span if start < t < end)})
    area = 0.0
    for left, right in pairwise(edges):
        middle = (left + right) / 2
        area += (right - left) * sum(first < middle < last for first, last in spans)
    return area / (end - start)


def little(many: list[Json], start: float, end: float) -> list[float] | None:
    """[tokens per second without first ones x mean gap, counted], or None."""
    rate, (found, missing) = tokens_per_second(many, start, end), gaps(many, start, end)
    if rate is None or missing or not found:
        return None
    firsts = sum(start <= shown(o)[0][0] < end for o in alive(many, start, end) if shown(o))
    product = (rate - firsts / (end - start)) * statistics.fmean(found)
    return [product, between_first_and_last(many, start, end)]


def stat(values: list[float | None]) -> Json | None:
    """Mean and percentiles of all that is known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (float(p) for p in numpy.percentile(known, (50, 90, 99)))
    return {
        "mean": statistics.fmean(known), "p50": p50, "p90": p90, "p99": p99,
        "count": len(known), "missing": len(values) - len(known),
    }  # fmt: skip


def summary(many: list[Json], start: float, end: float) -> Json:
    """Everything that a Summary holds."""
    due = [one for one in many if start <= one["intended"] < end]
    done = [one for one in due if whole(one)]
    found, missing = gaps(many, start, end)
    errors: dict[str, int] = {}
    for one in due:
        if one["error"] is not None:
            errors[one["error"]] = errors.get(one["error"], 0) + 1

    def tpot(one: Json) -> float | None:
        count = one["output_tokens"]
        if count is None:
            count = len(moments(one) or ())
        text = shown(one)
        return (text[-1][0] - text[0][0]) / (count - 1) if count > 1 and len(text) > 1 else None

    return {
        "requests": len(due),
        "errors": errors,
        "request_rate": len(done) / (end - start),
        "throughput": tokens_per_second(many, start, end),
        "ttft": stat([shown(o)[0][0] - o["intended"] if shown(o) else None for o in done]),
        "itl": stat([*found, *[None] * missing]),
        "tpot": stat([tpot(one) for one in done]),
        "e2e": stat([one["ended"] - one["intended"] for one in done]),
        "lag": stat([one["sent"] - one["intended"] for one in due]),
        "occupancy": little(many, start, end),
    }
