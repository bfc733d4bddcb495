"""What chapter 12 works out on paper: worked out again, from the shapes and the formula."""

from __future__ import annotations

import math
import re

import pytest

from course.measure import decode_work
from course.model.seeded import BENCH_8B
from course.syllabus import load_syllabus
from test_chapters import fences, flat, section

STAGE = load_syllabus().find(12)
READ, FLOPS = 3.35e12, 989e12  # of an H100: bytes and operations in a second
WEIGHT_BYTES = decode_work(BENCH_8B, [1], weight_itemsize=2, kv_itemsize=2).weight_bytes
KV_TOKEN = 131_072  # bytes of Llama-3-8B
PROMPT, DECODES, BUDGET, STEPS = 264, 4, 48, 7  # of the gate


def paper() -> str:
    return flat(section(STAGE, "On paper"))


def on_an_h100(positions: float) -> float:
    """Seconds of a step, without the host."""
    return max(WEIGHT_BYTES / READ, WEIGHT_BYTES * positions / FLOPS)  # 2 FLOP per 2-byte weight


def example(positions: int) -> int:
    """Milliseconds of a step in the example of stage 02."""
    return 10 + max(40, 3 * positions)


def test_the_long_step() -> None:
    usual, prompt = on_an_h100(1), on_an_h100(8192)
    pairs = 8192 * 8193 / 2
    attention = 4 * BENCH_8B.num_layers * BENCH_8B.num_heads * BENCH_8B.head_dim * pairs / FLOPS
    text = paper()
    assert f"{WEIGHT_BYTES / 1e9:.1f} GB" in text
    assert f"{1e3 * usual:.1f} ms" in text
    assert f"{1e3 * prompt:.0f} ms, and {1e3 * attention:.0f} ms of attention" in text
    assert f"{1e3 * (prompt + attention):.0f} ms, {(prompt + attention) / usual:.0f} times" in text
    assert f"{FLOPS / READ:.0f} positions" in text


def test_the_example() -> None:
    assert STAGE.bar("cpu", "arrival") == [DECODES, PROMPT, BUDGET, STEPS]
    whole, cut, plain = example(DECODES + PROMPT), example(BUDGET), example(DECODES)
    text = paper()
    assert f"t(4) = {plain}, t(48) = {cut} and t(268) = {whole} ms" in text
    assert f"by {whole / cut:.1f}." in text
    assert f"268 / 48 = {(DECODES + PROMPT) / BUDGET:.1f}" in text
    chunks = math.ceil(PROMPT / (BUDGET - DECODES))
    assert chunks == STEPS - 1 == 6
    assert f"{chunks * cut:,} ms, {chunks * cut / whole:.1f} times as late" in text
    pieces, one = chunks * cut + plain, whole + (STEPS - 1) * plain
    assert f"= {one:,} ms" in text
    assert f"= {pieces:,} ms" in text


def test_the_steps_that_are_drawn() -> None:
    """The prompt's tokens of steps 0, 1 and 5."""
    block = next(b for b in fences(section(STAGE, "On paper"), "") if "step 5" in b)
    shown = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) \.\. +(\d+)", block)]
    chunk = BUDGET - DECODES
    assert shown == [(chunk * k, chunk * k + chunk - 1) for k in (0, 1, 5)]


def test_the_table_of_budgets() -> None:
    rows = re.findall(
        r"^\| ([\d,]+) \| (\d+) \| ([\d,]+) ms \| ([\d.]+) ms \|$", section(STAGE, "On paper"),
        flags=re.M,
    )  # fmt: skip
    assert len(rows) == 5
    for budget, steps, milliseconds, keys in rows:
        tokens = int(budget.replace(",", ""))
        chunk = tokens - 32
        count = math.ceil(8192 / chunk)
        read = sum(min(chunk * (k + 1), 8192) for k in range(count)) * KV_TOKEN / READ
        assert int(steps) == count
        assert milliseconds == f"{1e3 * count * on_an_h100(tokens):,.0f}"
        assert keys == f"{1e3 * read:.1f}"


def test_the_incident() -> None:
    """Friday's budget and Monday's: what a second holds, and how long the newest waits."""
    incident = flat(section(STAGE, "Incident"))
    decodes, prompt, rate, lasts = 48, 2000, 8, 6
    assert decodes == rate * lasts  # Little's law

    def holds(budget: int) -> float:
        return (budget - decodes) / on_an_h100(budget)

    for budget in (64, 512, 295):
        assert any(f"{round(n):,}" in incident for n in (holds(budget), round(holds(budget), -3)))
    least = next(b for b in range(decodes, 600) if holds(b) >= rate * prompt)
    assert f"b = {least}" in incident
    alone = math.ceil(prompt / (64 - decodes)) * on_an_h100(64)
    assert f"0.05 {alone:.2f} " in incident
    running = lasts * 64 / (prompt * on_an_h100(64) + lasts)
    served = running / lasts
    assert f"{running:.0f} that decode and {served:.1f} requests a second" in incident
    waiting = 600 * (rate - served)
    assert f"{waiting:,.0f} wait" in incident
    assert waiting / served == pytest.approx(520, abs=5)
    assert 600 - served / rate * 600 == pytest.approx(280, abs=2)
    assert incident.count("280") == 2
