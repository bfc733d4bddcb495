"""The parts of stage 06, held against NumPy and against laws that always hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from itertools import pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.load.virtual_time import run
from course.parts import load_part
from course.syllabus import load_syllabus
from course.types import Chunk, Stamp, Timeline

harness = load_part(load_syllabus().find(6))

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    before = list(values)
    got, wanted = harness.percentile(values, q), float(numpy.percentile(values, q))
    assert math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-9)
    assert min(values) <= got <= max(values) or math.isclose(got, wanted, abs_tol=1e-9)
    assert values == before


chunk = st.tuples(st.floats(0, 1), st.one_of(st.none(), st.integers(0, 5)))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Anything that a server could do."""
    now = draw(st.floats(0, 10))
    made = Timeline(intended=now, sent=now + draw(st.floats(0, 1)))
    now = made.sent
    for gap, tokens in draw(st.lists(chunk, max_size=8)):
        now += gap
        made.chunks.append(Stamp(now, tokens))
    made.output_tokens = draw(st.one_of(st.none(), st.integers(0, 20)))
    made.ended = draw(st.one_of(st.none(), st.just(now + 0.5)))
    made.error = draw(st.one_of(st.none(), st.just("HTTP 500")))
    return made


@given(timelines())
def test_figures_of_one_request_agree_with_each_other(timeline: Timeline) -> None:
    times, gaps = harness.token_times(timeline), harness.itl(timeline)
    ttft, tpot, e2e = harness.ttft(timeline), harness.tpot(timeline), harness.e2e(timeline)
    if not timeline.finished:
        assert (ttft, gaps, tpot, e2e) == (None, None, None, None)
        return
    assert e2e is not None
    if ttft is not None:
        assert 0 <= ttft <= e2e
    if times is not None:
        assert timeline.output_tokens in (None, len(times))
        assert all(a <= b for a, b in pairwise(times))
    if gaps:
        assert ttft is not None
        assert math.isclose(timeline.intended + ttft + sum(gaps), times[-1], abs_tol=1e-9)
        assert math.isclose(tpot, sum(gaps) / len(gaps), abs_tol=1e-9)


@given(st.lists(timelines(), max_size=12), st.floats(0, 12), st.floats(0.1, 10))
def test_a_window_never_holds_more_than_everything(
    many: list[Timeline], start: float, seconds: float
) -> None:
    window = harness.Window(start, start + seconds)
    summary = harness.summarize(many, window)
    finished = [t for t in many if t.finished]
    assert summary.requests <= len(many)
    if summary.occupancy is not None:
        assert 0 <= summary.occupancy.counted <= len(finished)
    for stat in (summary.ttft, summary.itl, summary.tpot, summary.e2e):
        if stat is not None:
            assert stat.count > 0
            assert stat.p50 <= stat.p90 <= stat.p99


def test_two_halves_of_a_window_make_the_whole() -> None:
    many = [
        Timeline(i / 4, i / 4, [Stamp(i / 4 + 0.3 * k, 1) for k in range(1, 9)], 8, i / 4 + 3)
        for i in range(40)
    ]
    whole, left, right = (
        harness.throughput(many, harness.Window(*edges)) for edges in ((3, 9), (3, 6), (6, 9))
    )
    assert math.isclose(whole, (left + right) / 2)


def test_what_coordinated_omission_hides() -> None:
    """One server that stalls for a second, and the same harness with and without a schedule."""

    async def load(open_loop: bool) -> list[Timeline]:
        busy = asyncio.Semaphore(1)

        async def send(index: int) -> AsyncIterator[Chunk]:
            async with busy:
                await asyncio.sleep(1.0 if index == 50 else 1 / 128)
                yield Chunk(1, 1)

        log: list[Timeline] = []
        if open_loop:
            arrivals = harness.arrival_times(64.0, 200, "constant")
            await harness.open_loop(send, range(200), arrivals, log)
        else:
            await harness.closed_loop(send, range(200), 1, log)
        return log

    waited = [harness.ttft(t) for t in run(load(True))]
    hidden = [harness.ttft(t) for t in run(load(False))]
    assert max(waited) == max(hidden) == 1.0
    assert harness.percentile(hidden, 99) == 1 / 128
    assert harness.percentile(waited, 90) > 0.5


@pytest.mark.parametrize("process", ["constant", "poisson"])
def test_arrivals_keep_their_rate(process: str) -> None:
    times = harness.arrival_times(50.0, 5000, process, 3)
    assert len(times) == 5000
    assert 90 < times[-1] < 110
