"""Clocks, without a bare time: only orders and sums are asserted."""

import math
import subprocess
import sys

import pytest
import torch

from course.measure import bounded, now, sync, timed


def test_timed_returns_the_result_and_no_more_seconds_than_passed():
    start = now()
    result, seconds = timed(lambda: sum(range(10_000)))
    assert result == 49_995_000
    assert 0 < seconds <= now() - start


def test_errors_come_through():
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 // 0)


def test_sync_is_nothing_on_a_cpu():
    sync("cpu")
    sync(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_events_see_queued_work():
    x = torch.randn(4096, 4096, device="cuda")
    timed(lambda: x @ x, "cuda")
    start = now()
    _, one = timed(lambda: x @ x, "cuda")
    _, ten = timed(lambda: [x @ x for _ in range(10)], "cuda")
    assert 0 < one + ten <= now() - start
    assert ten > 3 * one


@pytest.mark.parametrize(
    ("reported", "wall", "believed"),
    [
        (0.100, 0.100, 0.100),
        (0.085, 0.100, 0.085),  # the rest is the message
        (0.001, 0.0025, 0.001),  # so it is in a short step
        (0.050, 0.100, 0.100),  # half of the step is missing
        (0.200, 0.100, 0.100),  # more than there was
        (0.0, 0.001, 0.001),
        (-1.0, 0.100, 0.100),
        (math.nan, 0.100, 0.100),
        (math.inf, 0.100, 0.100),
    ],
)
def test_a_report_is_believed_as_far_as_the_wall_clock_bears_it_out(reported, wall, believed):
    assert bounded(reported, wall) == believed


@pytest.mark.parametrize("wall", [0.0, -1.0, math.nan, math.inf])
def test_the_wall_clock_must_be_sound(wall):
    with pytest.raises(ValueError, match="wall_s"):
        bounded(0.1, wall)


def test_importing_the_kit_imports_no_torch():
    code = "import course.measure, sys; assert 'torch' not in sys.modules; course.measure.probe"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    import course.measure

    for name in course.measure.__all__:
        assert getattr(course.measure, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = course.measure.nothing_like_it
