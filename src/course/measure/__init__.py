"""The measurement kit: ratios with honest intervals, exact counters, and the machine's roofline.

``import course.measure`` is cheap: the names that need torch load it when first used.
"""

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

__all__ = [
    "ALPHA",
    "MAX_SLICES",
    "Bar",
    "Look",
    "PairedRatio",
    "PairedResult",
    "Verdict",
    "look",
    "measure_pair",
    "verdict",
]
