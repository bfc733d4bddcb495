"""Clocks: this process's own, and the device's where work is queued.

A GPU works through a queue: when a call returns, its work may not have begun. So time on a GPU is
taken between two events in that queue, and on a CPU by ``perf_counter``. A worker's report is then
held against the wall clock of whoever asked for the step (:func:`bounded`), because a report can
be wrong and the wall clock of another process cannot be touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["bounded", "now", "sync", "timed"]

T = TypeVar("T")


def now() -> float:
    """Seconds on this process's monotonic clock; only differences mean anything."""
    return time.perf_counter()


def sync(device: torch.device | str) -> None:
    """Wait until the device has done all that it was given. Nothing to do on a CPU."""
    if _is_cuda(device):
        import torch

        torch.cuda.synchronize(device)


def timed(step: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, float]:
    """Run ``step`` once and return (its result, its seconds).

    On CUDA: the time between an event before the step's first kernel and one after its last, on
    the current stream of ``device``, with an empty queue before. It includes gaps in which the GPU
    waits for the host. Elsewhere: ``perf_counter``.
    """
    if not _is_cuda(device):
        start = now()
        result = step()
        return result, now() - start
    import torch

    with torch.cuda.device(device):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        result = step()
        end.record()
        end.synchronize()
    return result, begin.elapsed_time(end) / 1e3  # elapsed_time is in milliseconds


def bounded(
    reported_s: float, wall_s: float, *, share: float = 0.2, slack_s: float = 0.002
) -> float:
    """The seconds to believe, when a worker reports ``reported_s`` for a step of ``wall_s``.

    The wall clock runs around the request and its answer, so it is the longer of the two, by the
    time of a message. A report that leaves at most ``share * wall_s + slack_s`` unexplained is
    taken; one that leaves more, or claims more than there was, is not, and the wall clock counts.

    Raises ValueError when ``wall_s`` is not finite and positive.
    """
    if not (math.isfinite(wall_s) and wall_s > 0):
        raise ValueError(f"wall_s must be finite, positive seconds, got {wall_s!r}")
    unexplained = wall_s - reported_s
    if reported_s > 0 and 0 <= unexplained <= share * wall_s + slack_s:
        return reported_s
    return wall_s


def _is_cuda(device: torch.device | str) -> bool:
    kind = device if isinstance(device, str) else device.type
    return kind.split(":")[0] == "cuda"
