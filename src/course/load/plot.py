"""A picture of a load: its requests, how many were decoding, and the latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course.load.report import reasons
from course.load.run import Measured

BLUE, ORANGE, GREY, RED = "#0072B2", "#D55E00", "#BBBBBB", "#CC3311"
MOST = 400  # requests that are drawn one by one


def plot(measured: Measured, path: Path, title: str) -> None:
    """Write the picture to `path`, in the format that its suffix says.

    Raises:
        ValueError: matplotlib knows no such format.
    """
    from matplotlib.figure import Figure  # no window, no pyplot: nothing global is touched

    figure = Figure(figsize=(9, 9), layout="constrained")
    rows, busy, spread = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    figure.suptitle(title, fontsize=11)
    start = min((t.intended for t in measured.timelines), default=0.0)
    _requests(rows, measured, start)
    _busy(busy, measured, start)
    _spread(spread, measured)
    window = measured.window
    if window is not None:
        for axes in (rows, busy):
            axes.axvspan(window.start - start, window.end - start, color="#EEEEEE", zorder=0)
    busy.sharex(rows)
    figure.savefig(path)


def _requests(axes: Any, measured: Measured, start: float) -> None:
    """A line for each request: waiting, then decoding, from top to bottom in the order sent."""
    for row, timeline in enumerate(measured.timelines[:MOST]):
        text = [chunk.time - start for chunk in timeline.chunks if chunk.tokens != 0]
        intended = timeline.intended - start
        end = intended if timeline.ended is None else timeline.ended - start
        first = text[0] if text else end
        axes.hlines(row, intended, first, color=ORANGE, linewidth=1)
        axes.hlines(row, first, text[-1] if text else first, color=BLUE, linewidth=1)
        if timeline.error is not None:
            axes.plot(end, row, "x", color=RED, markersize=4)
    axes.invert_yaxis()
    axes.set(ylabel="request", xlabel="s")
    axes.set_title("orange: waiting for the first token; blue: decoding; x: failed; grey: measured",
                   fontsize=9, loc="left")  # fmt: skip


def _busy(axes: Any, measured: Measured, start: float) -> None:
    """How many requests were in flight, and how many between their first and last token."""
    flights, decodes = [], []
    for timeline in measured.timelines:
        text = [chunk.time for chunk in timeline.chunks if chunk.tokens != 0]
        last = timeline.ended if timeline.ended is not None else (text or [timeline.sent])[-1]
        flights.append((timeline.sent - start, last - start))
        if text:
            decodes.append((text[0] - start, text[-1] - start))
    for spans, colour, label in ((flights, GREY, "in flight"), (decodes, BLUE, "decoding")):
        steps = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
        level, times, counts = 0, [0.0], [0]
        for time, step in steps:
            level += step
            times.append(time)
            counts.append(level)
        axes.step(times, counts, where="post", color=colour, label=label, linewidth=1.2)
    summary = measured.summary
    if summary is not None and "occupancy" not in reasons(measured):
        axes.axhline(
            summary.occupancy.product, color=ORANGE, linestyle=":", label="throughput x ITL"
        )
    axes.set(ylabel="requests", xlabel="s", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8, ncols=3)


def _spread(axes: Any, measured: Measured) -> None:
    """Which share of the latencies is below a time."""
    harness, window = measured.harness, measured.window
    due = [t for t in measured.timelines if window is not None and window.holds(t.intended)]
    figures = {
        "TTFT": [harness.ttft(t) for t in due],
        "ITL": [gap for t in due for gap in harness.itl(t) or () if gap > 0],
        "E2E": [harness.e2e(t) for t in due],
    }
    for (name, values), colour in zip(figures.items(), (ORANGE, BLUE, GREY), strict=True):
        known = sorted(1e3 * value for value in values if value is not None)
        if known:
            shares = [(i + 1) / len(known) for i in range(len(known))]
            axes.step(known, shares, where="post", color=colour, label=name)
    axes.set(xscale="log", xlabel="ms", ylabel="share below", ylim=(0, 1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
