"""One look for every figure: colours that colour-blind readers can tell apart, SVG, a caption."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from IPython.display import SVG, Markdown, display

from course.measure.split import Split

__all__ = ["COLOURS", "doublings", "figure", "show", "split_bars", "use_style"]

# Okabe and Ito's palette. What a colour means is the same in every notebook.
COLOURS = {
    "measured": "#0072B2",
    "predicted": "#D55E00",
    "reference": "#000000",
    "naive": "#D55E00",
    "cached": "#0072B2",
    "host": "#E69F00",
    "weights": "#56B4E9",
    "kv": "#009E73",
    "arithmetic": "#CC79A7",
    "unexplained": "#BBBBBB",
    "faint": "#DDDDDD",
}

PARTS = {  # of a step, in the order in which they are stacked
    "host": "host overhead",
    "weights": "reading weights",
    "kv": "reading the KV cache",
    "arithmetic": "arithmetic",
    "unexplained": "not explained",
}


def use_style() -> None:
    """Make every figure of this notebook look alike, and its SVG the same from run to run."""
    import matplotlib

    matplotlib.rcParams.update({
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.facecolor": "white",  # readable on a dark page, too
        "font.size": 10,
        "grid.color": "#E5E5E5",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "svg.fonttype": "none",  # text stays text: small files, and a reader can search them
        "svg.hashsalt": "course",
    })  # fmt: skip


def figure(width: float = 7.0, height: float = 3.6, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, in inches; options go to `plt.subplots`."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def doublings(ax: Any, values: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """A horizontal axis on which every doubling is as wide, with plain numbers at `values`."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), labels or [f"{value:,g}" for value in values])


def show(fig: Any, caption: str) -> None:
    """Show a finished figure as SVG, with a caption below it."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(fig)
    display(SVG(buffer.getvalue()))
    display(Markdown(f"*{caption}*"))


def split_bars(ax: Any, splits: Mapping[str, Split]) -> None:
    """Stacked horizontal bars in milliseconds, one per step.

    Memory and arithmetic overlap, so only the longer of the two is drawn: reading weights and
    cache, or computing. Host overhead comes first, unless it overlaps, too (a GPU). What the
    measured step took beyond that is grey; a step faster than its bills has no grey part.
    """
    bars: dict[str, dict[str, float]] = {}
    for label, bill in splits.items():
        reading = {"weights": bill.weights, "kv": bill.kv}
        device = reading if sum(reading.values()) > bill.arithmetic else {}
        device = device or {"arithmetic": bill.arithmetic}
        host = bill.predicted - sum(device.values())  # only what is not hidden
        bars[label] = {"host": host, **device, "unexplained": bill.unexplained}
    left = dict.fromkeys(bars, 0.0)
    for part, words in PARTS.items():
        widths = {label: max(0.0, 1e3 * bar.get(part, 0.0)) for label, bar in bars.items()}
        if any(widths.values()):
            ax.barh(
                list(bars), list(widths.values()), left=list(left.values()), height=0.6,
                color=COLOURS[part], label=words,
            )  # fmt: skip
            left = {label: left[label] + widths[label] for label in bars}
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("ms")
    ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
