"""A straight line through measured points, which one bad reading cannot bend."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

__all__ = ["Line"]


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        """The line's y at x."""
        return self.fixed + self.slope * x

    @classmethod
    def through(cls, points: Mapping[int, float] | Mapping[float, float]) -> Line:
        """Fit the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968).

        Raises:
            ValueError: fewer than two points.
        """
        if len(points) < 2:
            raise ValueError(f"points must be at least 2, got {len(points)}")
        pairs = combinations(points.items(), 2)
        slope = statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)
        fixed = statistics.median(y - slope * x for x, y in points.items())
        return cls(fixed, slope)
