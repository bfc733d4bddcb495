"""The paired ratio: how two step times are compared, and when that is a verdict.

Two sides are stepped alternately: one step of the baseline and one of the candidate make a
*slice*, and the order is swapped in every slice. A slow moment of the machine then hits both sides
alike. What is kept of a slice is one number, ``baseline seconds / candidate seconds``: above 1 the
candidate is faster. The estimate is the *median* of these ratios, because load that comes and goes
spoils single slices, and a median does not care how badly.

**The interval.** If each slice lies above the true median with chance 1/2, like a coin, then the
number of slices below it is binomial, whatever the shape of the noise. So the interval between the
k-th smallest and the k-th largest of n ratios misses the true median with a chance of exactly

    2 * P(Binomial(n, 1/2) <= k - 1)

and k is the largest rank for which that is at most alpha. No normal curve is assumed. (Sources:
W. R. Thompson, "On confidence ranges for the median", Ann. Math. Statist. 7, 1936; H. A. David and
H. N. Nagaraja, "Order Statistics", 3rd ed., section 7.1.)

**Slices that hang together.** The coin is only fair if slices are independent. When one side sits
on a busy core for several slices, its ratios lie on one side of the median in runs, and 25 slices
say less than 25. Let r be the mean product of neighbouring signs (+1 above the median, -1 below);
then n slices are worth about n * (1 - r) / (1 + r) independent ones (the variance of a mean under
first-order dependence; e.g. G. E. P. Box and G. M. Jenkins, "Time Series Analysis", 1970, ch. 2),
and a verdict takes its ranks from that smaller number. Negative r is ignored: the interval only
ever widens. Estimates from more lags were tried and cost more verdicts than they saved. For the
widest interval there is no need to approximate: a chain that keeps its side of the median from one
slice to the next with chance p = (1 + r) / 2 keeps it for all n with chance p ** (n - 1), and that
is how often the interval from the smallest ratio to the largest misses. In simulations (chains of
two states, and normal noise with r up to 0.9) it errs hardly more often than the approximation, by
little more than one in a hundred, and decides at 25 slices where that needs 50.

**The looks.** Whoever looks again and again at growing data, and stops when the answer pleases,
errs more often than alpha. So the error is shared out in advance: the k-th look may err with

    alpha / (k * (k + 1)),      k = 1, 2, 3, ...

and since the sum of 1 / (k (k + 1)) over all k is 1, *any* number of looks together errs with at
most alpha (Bonferroni's inequality; the idea of spending alpha over looks is K. K. G. Lan and D. L.
DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70, 1983). Looks happen
at 12, 25, 50 and 100 slices, and at every further hundred when slices accumulate over runs. Calling
:func:`verdict` between two looks is harmless: it sees the slices of the last look only.

The first look is for what is plain. Its interval goes from the smallest of 12 ratios to the
largest, so it decides only where every slice lies on the same side of the bar, and where the slices
do not hang together: with r above 0.23, no interval is sure enough. Where two sides
should agree (``within``), it comes at 25: what a core suffers for a second is no disagreement.

**How long a look must last.** Two cores of one machine differ for up to a second at a time, where a
neighbour on the same hardware is busy, and each side sits on one of them. Of 180 pairs of equal
processes with a core each to spare (an idle virtual machine with 2 cores, 25 slices a pair), the
medians lay between 0.74 and 1.36, and 36 were off by more than 10%, with steps of 3 ms as with
steps of 28 ms. Held to one core they agreed within 5%; but then a candidate that works behind the
baseline's back would slow it down. With a fresh pair for every 5 slices, 60 medians lay between
0.85 and 1.07, and one was off by more than 10%. So a look should last for seconds, or take several
pairs of processes.

What this cannot see: two processes that differ for as long as a look lasts, or for as long as they
live (where their memory pages lie is worth up to 6%). Bars near 1 need fresh pairs of processes;
see :func:`measure_pair`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

ALPHA = 0.01
"""Chance that a measurement errs, all its looks together."""

MAX_SLICES = 100
"""Slices that one run takes at most."""

_FIRST_LOOKS = (12, 25, 50, 100)
_LOOK_EVERY = 100  # after the first looks: one per further full run


class Verdict(StrEnum):
    """What a measurement says about a bar."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


BarKind = Literal["at_least", "no_worse_than", "within"]

_MAX_SPREAD: dict[BarKind, float] = {
    # A clear gain stays clear in a wide interval ...
    "at_least": 3.0,
    # ... but "nothing was lost" means little when the interval would hide a loss of a third,
    # unless it lies on one side of the bar.
    "no_worse_than": 1.5,
    # ... and a band decides by its own width: an interval that lies inside is narrow enough.
    "within": 3.0,
}


@dataclass(frozen=True)
class Bar:
    """What a ratio is held against.

    ``at_least``
        a gain is claimed: passes when the whole interval lies at or above ``value``, fails when it
        lies below.
    ``no_worse_than``
        only a loss is ruled out: fails when the whole interval lies below ``value``; passes early
        when it lies at or above, and otherwise at the last look.
    ``within``
        two sides should agree: passes when the whole interval lies between ``value`` and ``upper``,
        fails when it lies outside.

    ``max_spread`` is the largest ``hi / lo`` of an interval that still counts: a wider one is noise
    and never decides anything (default 3.0; for ``no_worse_than`` 1.5 where the interval holds the
    bar).

    Raises ValueError for a value or spread that is not finite and positive, an unknown kind, or an
    ``upper`` that is not above ``value`` (``within``) or not wanted (the other kinds).
    """

    value: float
    kind: BarKind = "at_least"
    max_spread: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _MAX_SPREAD:
            raise ValueError(f"kind must be one of {sorted(_MAX_SPREAD)}, got {self.kind!r}")
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"value must be finite and positive, got {self.value!r}")
        spread = self.max_spread
        if spread is not None and not (math.isfinite(spread) and spread > 1):
            raise ValueError(f"max_spread must be finite and above 1, got {spread!r}")
        if (self.kind == "within") != (self.upper is not None):
            raise ValueError(f"upper belongs to the kind 'within', and {self.kind!r} was given")
        if self.upper is not None and not (math.isfinite(self.upper) and self.upper > self.value):
            raise ValueError(f"upper must be finite and above {self.value}, got {self.upper!r}")

    @property
    def first_look(self) -> int:
        """Slices at which a verdict is first looked for."""
        return 25 if self.kind == "within" else _FIRST_LOOKS[0]

    def spread_limit(self, low: float, high: float) -> float:
        """The ``hi / lo`` above which an interval decides nothing."""
        if self.max_spread is not None:
            return self.max_spread
        beside = high < self.value or low >= self.value
        return _MAX_SPREAD["at_least" if beside else self.kind]

    def __str__(self) -> str:
        if self.upper is not None:
            return f"{self.value:.3g} to {self.upper:.3g}x"
        sign = ">=" if self.kind == "at_least" else "no worse than"
        return f"{sign} {self.value:.3g}x"


class PairedRatio:
    """Slices of two sides and the median of their ratios, baseline seconds / candidate seconds.

    Holds the seconds, not only the ratios, so that a run can be stored and continued:
    ``PairedRatio(old.pairs)``.
    """

    def __init__(self, pairs: Iterable[tuple[float, float]] = ()) -> None:
        """``pairs`` are (baseline seconds, candidate seconds), oldest first; see :meth:`add`."""
        self._pairs: list[tuple[float, float]] = []
        for baseline_s, candidate_s in pairs:
            self.add(baseline_s, candidate_s)

    def add(self, baseline_s: float, candidate_s: float) -> None:
        """Append one slice, in seconds. Raises ValueError unless both are finite and positive."""
        for name, seconds in (("baseline_s", baseline_s), ("candidate_s", candidate_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be finite, positive seconds, got {seconds!r}")
        self._pairs.append((float(baseline_s), float(candidate_s)))

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        middle = f", median={self.median:.4g}" if self._pairs else ""
        return f"PairedRatio(slices={len(self)}{middle})"

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """A copy of all slices, (baseline seconds, candidate seconds), oldest first."""
        return list(self._pairs)

    @property
    def ratios(self) -> list[float]:
        """Per-slice ratios, oldest first."""
        return [baseline / candidate for baseline, candidate in self._pairs]

    def first(self, count: int) -> PairedRatio:
        """The oldest ``count`` slices (all of them when there are fewer)."""
        return PairedRatio(self._pairs[:count])

    @property
    def median(self) -> float:
        """Median ratio. Raises ValueError without slices.

        Of an even number the two middle ones are averaged geometrically, so that exchanging the
        sides gives exactly the inverse.
        """
        self._need_slices()
        ordered = sorted(self.ratios)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return math.sqrt(ordered[middle - 1] * ordered[middle])

    @property
    def baseline_s(self) -> float:
        """Median seconds of a baseline step. To be shown, never to be compared with a bar."""
        self._need_slices()
        return float(statistics.median(baseline for baseline, _ in self._pairs))

    @property
    def candidate_s(self) -> float:
        """Median seconds of a candidate step. To be shown, never to be compared with a bar."""
        self._need_slices()
        return float(statistics.median(candidate for _, candidate in self._pairs))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Exact order-statistic interval (lo, hi) that misses the true median with chance <= alpha.

        (0, inf) when there are too few slices for any pair of ranks to be that sure.
        Raises ValueError unless 0 < alpha < 1.
        """
        return self._between_ranks(interval_rank(len(self), alpha))

    def independent_slices(self) -> int:
        """How many independent slices these are worth: at most ``len(self)``; see the module."""
        likeness = self._likeness()
        return max(min(1, len(self)), int(len(self) * (1 - likeness) / (1 + likeness)))

    def _likeness(self) -> float:
        """Mean product of neighbouring signs, +1 above the median and -1 below; 0 if negative."""
        if len(self) < 2:
            return 0.0
        middle = self.median
        signs = [(ratio > middle) - (ratio < middle) for ratio in self.ratios]
        return max(0.0, sum(a * b for a, b in pairwise(signs)) / (len(self) - 1))

    def cautious_interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return :meth:`interval` as it would be with :meth:`independent_slices` slices.

        The rank is moved outward so that it cuts off the same share of the sorted ratios as it
        would among the smaller number; where that number has none, the smallest and the largest
        are sure enough if all slices lie on one side of the median that seldom. Verdicts use this
        interval; it is never the narrower of the two.
        """
        worth = self.independent_slices()
        rank = interval_rank(worth, alpha)
        scaled = rank * (len(self) + 1) // (worth + 1)
        if scaled == 0:
            stays = (1 + self._likeness()) / 2
            scaled = int(len(self) > 0 and stays ** (len(self) - 1) <= alpha)
        return self._between_ranks(min(scaled, interval_rank(len(self), alpha)))

    def _between_ranks(self, rank: int) -> tuple[float, float]:
        if rank == 0:
            return 0.0, math.inf
        ordered = sorted(self.ratios)
        return ordered[rank - 1], ordered[-rank]

    def _need_slices(self) -> None:
        if not self._pairs:
            raise ValueError("PairedRatio has no slices yet: add() one first")


@lru_cache(maxsize=1024)
def miss_chance(slices: int, rank: int) -> float:
    """Chance that [rank-th smallest, rank-th largest] of ``slices`` values misses their median.

    2 * P(Binomial(slices, 1/2) <= rank - 1), summed in integers, hence exact.
    """
    if slices < 0 or rank < 0:
        raise ValueError(f"slices and rank must not be negative, got {slices} and {rank}")
    tail = sum(math.comb(slices, below) for below in range(rank))
    return float(min(1.0, 2 * tail / 2**slices))


@lru_cache(maxsize=1024)
def interval_rank(slices: int, alpha: float) -> int:
    """Largest rank whose interval misses the median with chance <= alpha; 0 when there is none."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha!r}")
    rank, tail, ways = 0, 0, 1  # tail = sum of C(slices, i) for i < rank; ways = C(slices, rank)
    while 2 * (rank + 1) <= slices and 2 * (tail + ways) / 2**slices <= alpha:
        tail += ways
        ways = ways * (slices - rank) // (rank + 1)
        rank += 1
    return rank


def look_sizes(max_slices: int, first: int = _FIRST_LOOKS[0]) -> list[int]:
    """Numbers of slices at which a verdict is looked for, from ``first`` up to ``max_slices``."""
    early = [size for size in _FIRST_LOOKS if first <= size <= max_slices]
    return early + list(range(_FIRST_LOOKS[-1] + _LOOK_EVERY, max_slices + 1, _LOOK_EVERY))


def look_alpha(look: int, alpha: float = ALPHA) -> float:
    """The share of ``alpha`` that the ``look``-th look (counted from 1) may spend."""
    if look < 1:
        raise ValueError(f"look is counted from 1, got {look}")
    return alpha / (look * (look + 1))


@dataclass(frozen=True)
class Look:
    """One look at the data: what the interval was and what it says.

    ``verdict`` is None when more slices may still decide. ``number`` is 0, and the interval
    (0, inf), before the first look.
    """

    number: int
    slices: int
    interval: tuple[float, float]
    verdict: Verdict | None
    reason: str


def look(ratio: PairedRatio, bar: Bar, *, alpha: float = ALPHA, final_at: int = MAX_SLICES) -> Look:
    """Look at ``ratio`` at the last scheduled size that it has reached.

    ``final_at`` is the number of slices at which this run ends: once it is reached, what is still
    open becomes a verdict.
    """
    sizes = look_sizes(len(ratio), bar.first_look)
    final = len(ratio) >= final_at
    if not sizes:
        verdict = Verdict.INCONCLUSIVE if final else None
        reason = f"{len(ratio)} slices are too few: the first look needs {bar.first_look}"
        return Look(0, len(ratio), (0.0, math.inf), verdict, reason)

    number, slices = len(sizes), sizes[-1]
    low, high = ratio.first(slices).cautious_interval(look_alpha(number, alpha))
    verdict, reason = _decide(low, high, bar, final)
    return Look(number, slices, (low, high), verdict, reason)


def _decide(low: float, high: float, bar: Bar, final: bool) -> tuple[Verdict | None, str]:
    span = f"the interval [{low:.3g}, {high:.3g}]"
    undecided = Verdict.INCONCLUSIVE if final else None
    if low <= 0 or not math.isfinite(high) or high / low > bar.spread_limit(low, high):
        return undecided, f"{span} is too wide to mean anything: the machine is too noisy"
    if high < bar.value:
        return Verdict.FAIL, f"{span} lies below {bar.value:.3g}x"
    if bar.upper is not None:
        if low > bar.upper:
            return Verdict.FAIL, f"{span} lies above {bar.upper:.3g}x"
        if bar.value <= low and high <= bar.upper:
            return Verdict.PASS, f"{span} lies within {bar}"
        return undecided, f"{span} holds an end of {bar}: more slices are needed"
    if low >= bar.value:
        return Verdict.PASS, f"{span} lies at or above {bar.value:.3g}x"
    if bar.kind == "no_worse_than" and final:
        return Verdict.PASS, f"{span} does not lie below {bar.value:.3g}x"
    return undecided, f"{span} holds {bar.value:.3g}x: more slices are needed"


def verdict(
    ratio: PairedRatio, bar: Bar, *, alpha: float = ALPHA, final_at: int = MAX_SLICES
) -> Verdict | None:
    """PASS, FAIL or INCONCLUSIVE; None when there are looks left before ``final_at`` slices."""
    return look(ratio, bar, alpha=alpha, final_at=final_at).verdict


@dataclass(frozen=True)
class PairedResult:
    """A measured ratio and what it says about its bar.

    ``verdict`` is None only when :func:`measure_pair` was told that the run goes on after it.
    ``interval`` is that of the last look. Nothing in here depends on live objects but ``ratio``,
    which can be handed to the next run as ``prior``.
    """

    ratio: PairedRatio
    bar: Bar
    verdict: Verdict | None
    interval: tuple[float, float]
    look: int
    reason: str

    @property
    def median(self) -> float:
        """Median ratio over all slices; above 1 the candidate is faster."""
        return self.ratio.median

    @property
    def slices(self) -> int:
        """Slices behind the result, those of the prior included."""
        return len(self.ratio)

    @property
    def baseline_s(self) -> float:
        """Median seconds of a baseline step."""
        return self.ratio.baseline_s

    @property
    def candidate_s(self) -> float:
        """Median seconds of a candidate step."""
        return self.ratio.candidate_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an interval end that is infinite becomes None."""
        low, high = self.interval
        return {
            "median": self.median if self.slices else None,
            "interval": [low, high if math.isfinite(high) else None],
            "slices": self.slices,
            "look": self.look,
            "bar": self.bar.value,
            "kind": self.bar.kind,
            "verdict": None if self.verdict is None else self.verdict.value,
            "reason": self.reason,
            "baseline_s": self.baseline_s if self.slices else None,
            "candidate_s": self.candidate_s if self.slices else None,
        }


def measure_pair(
    step_baseline: Callable[[], float],
    step_candidate: Callable[[], float],
    bar: Bar,
    *,
    prior: PairedRatio | None = None,
    max_slices: int = MAX_SLICES,
    final_at: int | None = None,
    warmup: int = 2,
    alpha: float = ALPHA,
) -> PairedResult:
    """Step both sides alternately until a look decides or ``max_slices`` new slices are taken.

    Each callable does one step of its side and returns the seconds it took, by a clock that the
    side itself cannot touch. ``warmup`` steps of each side come first and are not counted.
    ``prior`` holds the slices of earlier runs of the same two sides; it is not changed.

    A ratio near 1 should not rest on one pair of processes. Then call this once for each fresh
    pair, and say with ``final_at`` where the whole run ends (default: after this call)::

        ratio = PairedRatio()
        for _ in range(4):
            result = measure_pair(*fresh_pair(), bar, prior=ratio, max_slices=25, final_at=100)
            ratio = result.ratio
            if result.verdict is not None:
                break

    Raises ValueError when ``max_slices`` is under 1 or ``warmup`` is negative, or when a side
    reports seconds that are not finite and positive; errors of a side come through unchanged.
    """
    if max_slices < 1:
        raise ValueError(f"max_slices must be at least 1, got {max_slices}")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    ratio = PairedRatio(prior.pairs if prior is not None else ())
    stop_at = len(ratio) + max_slices
    end = stop_at if final_at is None else final_at
    for _ in range(warmup):
        step_baseline()
        step_candidate()

    looks = set(look_sizes(stop_at, bar.first_look)) | {stop_at}
    while True:
        if len(ratio) % 2 == 0:
            baseline_s = step_baseline()
            candidate_s = step_candidate()
        else:
            candidate_s = step_candidate()
            baseline_s = step_baseline()
        ratio.add(baseline_s, candidate_s)
        if len(ratio) in looks:
            seen = look(ratio, bar, alpha=alpha, final_at=end)
            if seen.verdict is not None or len(ratio) >= stop_at:
                return PairedResult(
                    ratio, bar, seen.verdict, seen.interval, seen.number, seen.reason
                )
