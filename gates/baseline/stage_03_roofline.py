"""The baseline of stage 03: the course's own probe, behind the student's functions."""

from __future__ import annotations

import torch

from course.measure.roofline import matmul_flops, read_bandwidth


def measure_bandwidth(device: torch.device, cache_bytes: int) -> float:
    return read_bandwidth(device, max(4 * cache_bytes, 256 << 20))


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    return matmul_flops(device, dtype)
