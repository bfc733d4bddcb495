"""What a load found: a table for the terminal, and plain values for JSON.

What could not be measured is said to be so, with the reason; it is never a 0 and never left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from course.load.run import Measured
from course.plain import one_line
from course.types import Timeline

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
OF = {"itl": "gaps"}  # what a count counts; requests, if not said
INDENT = 2
RATES = ("request_rate", "throughput", "occupancy")
FEW = 5  # requests: a rate of fewer says more of when these happened to end than of the server
LATE = 0.1  # of the median gap: a client that is later than that spoils what it measures
TIMER = 0.001  # seconds: asyncio's timers are late by up to that much on an idle machine, too


# -- what is missing -----------------------------------------------------------------------------


def reasons(measured: Measured) -> dict[str, str]:
    """Why a figure of the summary is absent, by its name; nothing for those that are there.

    The summary may hold rates of a window that is too short for them. Those are absent, too.
    """
    summary = measured.summary
    if summary is None:
        return {}
    finished = [t for t in measured.timelines if t.finished]
    if not finished:
        return dict.fromkeys((*LATENCIES, "throughput", "occupancy"), "no request finished")
    found = {}
    for name in LATENCIES:
        if getattr(summary, name) is None:
            found[name] = _reason(measured, name)
    if summary.throughput is None:
        found["throughput"] = (
            "the server does not say how many tokens an answer has"
            if _under_way(measured)
            else "no request that was under way in the window finished"
        )
    if summary.occupancy is None:
        every = "it takes every request's inter-token latencies"
        known = summary.throughput is not None and not _lacking(measured, "itl")
        found["occupancy"] = found.get("itl", every) if known else every
    unsteady = _unsteady(measured)
    return (dict.fromkeys(RATES, unsteady) if unsteady else {}) | found


def _unsteady(measured: Measured) -> str:
    """Why a window is none to take rates from; empty if it is one.

    It must last as long as an answer: else all that is counted is where one group of requests
    begins or ends. It must hold some requests. And an open loop must have filled the server.
    """
    window, e2e = measured.window, measured.summary.e2e
    start = min(timeline.intended for timeline in measured.timelines)
    if e2e is None:
        return ""
    if window.seconds < e2e.p50:
        return (
            f"the steady window is shorter than an answer, {_long(window.seconds)} and "
            f"{_long(e2e.p50)} (p50): take more --requests"
        )
    if e2e.count < FEW:
        return (
            f"{e2e.count} of the requests that were due in the steady window finished, and it "
            f"takes {FEW}: take more --requests"
        )
    if window.start < measured.settled:
        return (
            f"the window opens {_long(window.start - start)} after the first request, and an "
            f"answer takes {_long(measured.settled - start)} (p90): the server was still filling. "
            "Take more --requests"
        )
    return ""


def _under_way(measured: Measured) -> list[Timeline]:
    """Finished requests that were under way in the window."""
    window = measured.window
    return [
        t
        for t in measured.timelines
        if t.finished and t.intended < window.end and (t.ended or 0.0) >= window.start
    ]


def _lacking(measured: Measured, name: str) -> list[Timeline]:
    """Finished requests that should have a latency in the window, and have none."""
    holds, latency = measured.window.holds, getattr(measured.harness, name)
    due = [t for t in measured.timelines if t.finished and holds(t.intended)]
    return [t for t in (_under_way(measured) if name == "itl" else due) if latency(t) is None]


def _reason(measured: Measured, name: str) -> str:
    """Why one latency is absent, by the first request that lacks it."""
    lacking = _lacking(measured, name)
    if not lacking and name == "itl":
        return "no gap between two tokens ended in the window"
    if not lacking:
        return "no request that was due in the window finished"
    timeline = lacking[0]
    text = [chunk for chunk in timeline.chunks if chunk.tokens != 0]
    total = timeline.output_tokens
    if not text:
        return "answers did not come as a stream" if total != 0 else "answers are empty"
    known = [chunk.tokens for chunk in text if chunk.tokens is not None]
    if name == "itl" and len(known) < len(text):
        counted = "an unknown number of" if total is None else f"{total}"
        return f"{len(text)} chunks for {counted} tokens, and nobody says how many each has"
    if name == "itl" and total is not None and sum(known) != total:
        return f"{sum(known)} tokens by the chunks' counts, {total} by the server's"
    if len(text) < 2:
        return "an answer comes in a single chunk"
    return "the server does not say how many tokens an answer has"


def remarks(measured: Measured, distinct_prompts: int) -> list[str]:
    """What whoever reads the figures should know."""
    found = []
    load, summary = measured.load, measured.summary
    if measured.interrupted:
        found.append(f"cut short after {len(measured.timelines)} of {load.requests} requests")
    if summary is None:
        found.append(
            f"there was no steady state to measure: the first {load.warmup} and the last "
            f"{load.cooldown} of {len(measured.timelines)} requests are left out"
        )
        return found
    if summary.window.start >= measured.settled and measured.left_out > load.warmup:
        start = min(timeline.intended for timeline in measured.timelines)
        found.append(
            f"the first {measured.left_out} requests are left out, not {load.warmup}: until "
            f"{_long(measured.settled - start)} (the p90 of an answer) have passed, an open loop "
            "fills an empty server"
        )
    late = measured.harness.percentile(measured.lateness, 99) if measured.lateness else 0.0
    gap = summary.itl.p50 if summary.itl and summary.itl.p50 > 0 else None
    gap = gap or (summary.tpot.p50 if summary.tpot else None)
    if gap is not None and late - TIMER > LATE * gap:
        found.append(
            f"this client was late itself, by {_ms(late)} ms (p99) beside a gap of {_ms(gap)} ms: "
            "what it stamps may be off by as much. Take fewer requests at once, or an idle machine"
        )
    if summary.lag is not None and summary.lag.p99 > 0.01:
        found.append(
            f"requests were sent up to {_ms(summary.lag.p99)} ms (p99) after they were due; "
            "latencies count from when they were due"
        )
    if distinct_prompts < load.requests:
        found.append(
            f"{distinct_prompts} different prompts for {load.requests} requests: a server with a "
            "prefix cache has seen most of them before"
        )
    return found


# -- the table -----------------------------------------------------------------------------------


def print_report(console: Console, measured: Measured, target: str, distinct: int) -> None:
    """Everything that was found, and everything that was not."""
    load, summary, why = measured.load, measured.summary, reasons(measured)
    console.print(Text(one_line(f"{target} · {measured.model}"), style="bold"))
    console.print(Text(f"  {load.words} · {len(measured.timelines)} requests", style="dim"))
    if summary is not None:
        _print_latencies(console, summary, why)
        _print_rates(console, summary, why)
    _print_errors(console, measured)
    for remark in remarks(measured, distinct):
        console.print(Padding(Text(remark, style="yellow"), (0, 0, 0, INDENT), expand=False))


def _print_latencies(console: Console, summary: Any, why: dict[str, str]) -> None:
    heads = "".join(f"{head:>10}" for head in ("mean", "p50", "p90", "p99"))
    _line(console, "ms", heads, "dim")
    for name, shown in LATENCIES.items():
        stat = getattr(summary, name)
        if stat is None:
            _line(console, shown, f"not measured: {why[name]}", "yellow")
            continue
        cells = "".join(f"{_ms(v):>10}" for v in (stat.mean, stat.p50, stat.p90, stat.p99))
        of = f"  {stat.count:,} {OF.get(name, 'requests')}"
        of += f", unknown for {stat.missing}" if stat.missing else ""
        _line(console, shown, Text(cells) + Text(of, style="dim"))


def _print_rates(console: Console, summary: Any, why: dict[str, str]) -> None:
    if "request_rate" in why:
        _line(console, "requests", f"not measured: {why['request_rate']}", "yellow")
    else:
        window = f"over {_long(summary.window.seconds)} without warm-up and cool-down"
        _line(console, "requests", f"{summary.request_rate:.3g} finished per second, {window}")
    if "throughput" in why:
        _line(console, "throughput", f"not measured: {why['throughput']}", "yellow")
    else:
        _line(console, "throughput", f"{summary.throughput:,.1f} output tokens per second")
    if "occupancy" in why:
        _line(console, "occupancy", f"not measured: {why['occupancy']}", "yellow")
    else:
        product, counted = summary.occupancy.product, summary.occupancy.counted
        apart = f" ({product / counted - 1:+.1%})" if counted else ""
        text = f"{product:.2f} by throughput x ITL, {counted:.2f} by counting{apart}"
        _line(console, "occupancy", text)


def _print_errors(console: Console, measured: Measured) -> None:
    kinds = Counter(t.error for t in measured.timelines if t.error is not None)
    if not kinds:
        _line(console, "errors", "none")
    for kind, count in kinds.most_common():
        said = measured.details.get(kind, "")
        text = f"{count} x {kind}" + (f": {said}" if said else "")
        _line(console, "errors", one_line(text), "red")


def _line(console: Console, name: str, text: str | Text, style: str = "") -> None:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(min_width=10)
    table.add_column(overflow="fold")
    table.add_row(name, text if isinstance(text, Text) else Text(text, style=style))
    console.print(Padding(table, (0, 0, 0, INDENT), expand=False))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _long(seconds: float) -> str:
    """A stretch of time, with as many digits as tell it from nothing."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{_ms(seconds)} ms"


# -- JSON ----------------------------------------------------------------------------------------


def as_dict(measured: Measured, target: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Plain values: figures, why some are absent, and every timeline, for whoever counts again."""
    why = reasons(measured)
    summary = None if measured.summary is None else _plain(measured.summary)
    if summary is not None:
        summary |= {name: None for name in RATES if name in why}
    percentile = measured.harness.percentile
    late = measured.lateness
    return {
        "target": target,
        "model": measured.model,
        "settings": {**settings, **asdict(measured.load), "cooldown": measured.load.cooldown},
        "started": measured.started,
        "seconds": measured.seconds,
        "interrupted": measured.interrupted,
        "summary": summary,
        "not_measured": why,
        "errors": dict(Counter(t.error for t in measured.timelines if t.error is not None)),
        "error_details": measured.details,
        "client_late_s": {f"p{q}": percentile(late, q) for q in (50, 99)} if late else None,
        "timelines": [asdict(timeline) for timeline in measured.timelines],
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
