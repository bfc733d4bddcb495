"""Memory that nobody has written yet, made to show when it is read."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from course.measure.counters import tensors_in


def poison(cache: Any, value: float = math.nan) -> None:
    """NaN, or another value, into every floating-point tensor that a cache holds so far."""
    for tensor in tensors_in(cache):
        if tensor.is_floating_point():
            tensor.fill_(value)


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """What is reserved meanwhile and not filled, as by `torch.empty`, holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills it, so that it can be seen
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
