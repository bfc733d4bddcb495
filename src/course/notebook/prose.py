"""Sentences and tables that are made from measured values, and never typed in."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from IPython.display import Markdown, display

__all__ = ["bytes_text", "per_second", "say", "seconds_text", "short", "table"]


def say(text: str) -> None:
    """Show Markdown; common indentation and line breaks in the source do not matter."""
    display(Markdown(textwrap.dedent(text).strip()))


def table(headers: Sequence[object], rows: Iterable[Sequence[object]], note: str = "") -> None:
    """Show a table: the first column left, the others right; a note below it in italics."""
    cells = [[_cell(value) for value in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"rows must have {len(headers)} cells like headers, got {row}")
    lines = [
        "| " + " | ".join(map(_cell, headers)) + " |",
        "|:---|" + "---:|" * (len(headers) - 1),
        *("| " + " | ".join(row) + " |" for row in cells),
    ]
    if note:
        lines += ["", f"*{note}*"]
    display(Markdown("\n".join(lines)))


def _cell(value: object) -> str:
    text = short(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "⏎")


def short(value: float, digits: int = 3) -> str:
    """A number to three digits, without an exponent: 1234.6 -> "1,235", 0.01234 -> "0.0123"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{round(value, decimals):,.{decimals}f}"


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it: 0.0123 -> "12.3 ms"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{short(seconds / scale)} {unit}"
    return f"{short(seconds / 1e-9)} ns"


def bytes_text(count: float) -> str:
    """A number of bytes in powers of 1000: 46080 -> "46.1 kB"."""
    return _scaled(count, "B")


def per_second(rate: float, unit: str) -> str:
    """A rate: 2.57e10, "B" -> "25.7 GB/s"."""
    return _scaled(rate, unit) + "/s"


def _scaled(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{short(value / scale)} {prefix}{unit}"
    return f"{short(value)} {unit}"
