"""The baseline of stage 03: the course's own probe, behind the student's functions."""

from __future__ import annotations

from functools import cache

import torch

from course.measure.roofline import Probe, matmul_probe, read_probe

_READING_S = 0.05  # the judge asks again and again, in turn with the student's


@cache
def _product(device: torch.device, dtype: torch.dtype) -> Probe:
    return matmul_probe(device, dtype, 8192 if device.type == "cuda" else 1024)


def measure_bandwidth(device: torch.device, cache_bytes: int) -> float:
    """Bytes per second, by the course."""
    # A fresh array each time, as the student's: how memory is laid out is worth several percent.
    return read_probe(device, max(4 * cache_bytes, 256 << 20)).rate(_READING_S).median


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second, by the course."""
    return _product(device, dtype).rate(_READING_S).median
