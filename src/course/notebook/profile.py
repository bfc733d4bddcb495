"""Where the time of a step goes, by the kind of operation that torch ran."""

from __future__ import annotations

import os
from collections.abc import Callable

# The profiler's library writes its own log past Python's streams, into the notebook. It reads this
# when torch is first imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.profiler import ProfilerActivity, profile

from course.measure.clock import timed

__all__ = ["time_by_kind"]

# The first fragment that an operation's name holds decides its kind.
KINDS = {
    "attention": ("scaled_dot_product", "attention", "flash"),
    "matrix products": ("linear", "addmm", "aten::mm", "aten::bmm", "aten::mv", "matmul"),
}
OTHER = "everything else in torch"  # norms, rotary positions, activations, lookups, views
BETWEEN = "Python between the operations"


def time_by_kind(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of one call of `step` by kind of operation; they add up to the wall time.

    Recording an operation costs a few microseconds, so the sum is larger than a plain step. On a
    GPU the time counts that it computed, and what is left is time that it waited.
    """
    step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as record:
        _, wall = timed(step, device)
    seconds = dict.fromkeys([*KINDS, OTHER, BETWEEN], 0.0)
    for event in record.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if device.type == "cpu" or event.device_type.name == "CPU":
            seconds[_kind(event.key)] += spent / 1e6
    seconds[BETWEEN] = max(0.0, wall - sum(seconds.values()))
    return seconds


def _kind(operation: str) -> str:
    for kind, fragments in KINDS.items():
        if any(fragment in operation for fragment in fragments):
            return kind
    return OTHER
