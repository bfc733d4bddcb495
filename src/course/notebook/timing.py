"""Times of several steps, taken in turns so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from course.measure.clock import timed

__all__ = ["Times", "take_turns"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Times:
    """Readings of one step, in seconds."""

    readings: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle reading."""
        return statistics.median(self.readings)

    @property
    def spread(self) -> tuple[float, float]:
        """Between these two lies the middle half of the readings."""
        if len(self.readings) < 2:
            return self.readings[0], self.readings[0]
        low, _, high = statistics.quantiles(self.readings, n=4, method="inclusive")
        return low, high


def take_turns(
    steps: Mapping[Key, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 7,
    warmup: int = 1,
) -> dict[Key, Times]:
    """Time every step once per round, in swapped order from round to round.

    Raises:
        ValueError: `rounds` is below 1 or `warmup` is negative.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    for _ in range(warmup):
        for step in steps.values():
            timed(step, device)
    readings: dict[Key, list[float]] = {key: [] for key in steps}
    order = list(steps)
    for _ in range(rounds):
        for key in order:
            readings[key].append(timed(steps[key], device)[1])
        order.reverse()
    return {key: Times(tuple(found)) for key, found in readings.items()}
