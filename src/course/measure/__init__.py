"""The measurement kit: ratios with honest intervals, exact counters, and the machine's roofline.

``import course.measure`` is cheap. The names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from course.measure.clock import bounded, now, sync, timed
from course.measure.machine import Machine, fingerprint, last_level_cache_bytes
from course.measure.ratio import (
    ALPHA,
    MAX_SLICES,
    Bar,
    Look,
    PairedRatio,
    PairedResult,
    Verdict,
    look,
    measure_pair,
    verdict,
)
from course.measure.split import (
    Split,
    StepWork,
    decode_work,
    host_overhead,
    narrow,
    pass_work,
    split_step,
)

if TYPE_CHECKING:
    from course.measure.counters import CopiedBytes, CountingModel, WorkCounts, tensor_bytes
    from course.measure.roofline import (
        Probe,
        Roofline,
        copy_bandwidth,
        matmul_flops,
        probe,
        read_bandwidth,
    )

_NEED_TORCH = {
    **dict.fromkeys(["CopiedBytes", "CountingModel", "WorkCounts", "tensor_bytes"], "counters"),
    **dict.fromkeys(
        ["Probe", "Roofline", "copy_bandwidth", "matmul_flops", "probe", "read_bandwidth"],
        "roofline",
    ),
}

__all__ = [
    "ALPHA",
    "MAX_SLICES",
    "Bar",
    "CopiedBytes",
    "CountingModel",
    "Look",
    "Machine",
    "PairedRatio",
    "PairedResult",
    "Probe",
    "Roofline",
    "Split",
    "StepWork",
    "Verdict",
    "WorkCounts",
    "bounded",
    "copy_bandwidth",
    "decode_work",
    "fingerprint",
    "host_overhead",
    "last_level_cache_bytes",
    "look",
    "matmul_flops",
    "measure_pair",
    "narrow",
    "now",
    "pass_work",
    "probe",
    "read_bandwidth",
    "split_step",
    "sync",
    "tensor_bytes",
    "timed",
    "verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
