"""The kit tested on itself: simulated machines, planted ratios, and the verdicts that follow.

Nothing here reads a clock. Thousands of simulated runs go through the very code that gates use.
"""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from course.measure import (
    ALPHA,
    Bar,
    PairedRatio,
    PairedResult,
    Verdict,
    look,
    measure_pair,
    verdict,
)
from course.measure.ratio import interval_rank, look_alpha, look_sizes, miss_chance

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE


# --- the exact interval ---------------------------------------------------------------------------


def binomial_tail(n: int, k: int) -> Fraction:
    """P(Binomial(n, 1/2) <= k), by the recursion of Pascal's triangle, in fractions."""
    row = [Fraction(1)]
    for _ in range(n):
        row = [(a + b) / 2 for a, b in zip([Fraction(0), *row], [*row, Fraction(0)], strict=True)]
    return sum(row[: k + 1], Fraction(0))


@pytest.mark.parametrize("slices", [1, 2, 7, 25, 50, 100])
@pytest.mark.parametrize("alpha", [0.2, 0.01, 0.005])
def test_the_rank_is_the_largest_that_the_binomial_allows(slices, alpha):
    rank = interval_rank(slices, alpha)
    if rank:
        assert 2 * binomial_tail(slices, rank - 1) <= alpha
        assert miss_chance(slices, rank) == pytest.approx(
            float(2 * binomial_tail(slices, rank - 1))
        )
    if 2 * (rank + 1) <= slices:
        assert 2 * binomial_tail(slices, rank) > alpha


def test_textbook_ranks():
    # Conover, "Practical Nonparametric Statistics", table for the sign test, n = 25, two-sided 5%:
    # the 8th smallest and the 8th largest.
    assert interval_rank(25, 0.05) == 8
    assert interval_rank(5, 0.05) == 0
    assert interval_rank(6, 0.05) == 1


@pytest.mark.parametrize("slices", [25, 50, 100])
@pytest.mark.parametrize("noise", ["lognormal", "cauchy", "skewed"])
def test_coverage_is_the_binomials_whatever_the_noise(slices, noise):
    """An interval that is exact misses as often as the binomial says: no more, and no less."""
    runs, alpha = 20_000, 0.05
    rng = np.random.default_rng(slices)
    if noise == "lognormal":
        ratios = 2 * rng.lognormal(0, 0.3, (runs, slices))
    elif noise == "cauchy":
        ratios = 2 + 0.1 * rng.standard_cauchy((runs, slices))
    else:
        ratios = 2 + rng.exponential(1.0, (runs, slices)) - math.log(2)
    ordered = np.sort(ratios, axis=1)
    rank = interval_rank(slices, alpha)
    missed = np.mean((ordered[:, rank - 1] > 2) | (ordered[:, -rank] < 2))
    expected = miss_chance(slices, rank)
    assert expected <= alpha
    assert abs(missed - expected) < 4 * math.sqrt(expected / runs)


def test_interval_comes_from_the_sorted_ratios():
    ratio = PairedRatio((float(value), 1.0) for value in range(25, 0, -1))
    assert ratio.interval(0.05) == (8.0, 18.0)
    assert ratio.median == 13.0
    assert PairedRatio([(1, 1)] * 3).interval(0.05) == (0.0, math.inf)


# --- the error is shared out over the looks -------------------------------------------------------


def test_looks_spend_no_more_than_alpha_however_many_there_are():
    spent = math.fsum(look_alpha(number) for number in range(1, 10_001))
    assert spent < ALPHA
    assert spent == pytest.approx(ALPHA, rel=1e-3)
    assert look_alpha(1) == ALPHA / 2
    assert look_sizes(11) == []
    assert look_sizes(100) == [12, 25, 50, 100]
    assert look_sizes(100, Bar(0.9, "within", upper=1.1).first_look) == [25, 50, 100]
    assert look_sizes(450) == [12, 25, 50, 100, 200, 300, 400]


def test_the_first_look_decides_only_where_all_slices_agree():
    assert interval_rank(12, look_alpha(1)) == 1  # from the smallest to the largest
    assert interval_rank(9, look_alpha(1)) == 1
    assert interval_rank(8, look_alpha(1)) == 0  # slices that hang together: nothing is said
    for outlier, said in ((1.6, PASS), (1.4, None)):
        ratio = PairedRatio([(1.9, 1.0), (2.1, 1.0)] * 5 + [(1.9, 1.0), (outlier, 1.0)])
        assert look(ratio, Bar(1.5)).verdict is said


def decided_wrongly(looks: list[tuple[int, float]], ratios: np.ndarray, truth: float) -> float:
    """Share of rows in which the interval of some look excludes the truth."""
    wrong = np.zeros(len(ratios), bool)
    for slices, alpha in looks:
        ordered = np.sort(ratios[:, :slices], axis=1)
        rank = interval_rank(slices, alpha)
        wrong |= (ordered[:, rank - 1] > truth) | (ordered[:, -rank] < truth)
    return float(wrong.mean())


def test_all_looks_together_stay_within_alpha():
    """At the hardest place, a truth that lies on the bar, and with a run continued five times."""
    runs, alpha = 5_000, 0.05
    ratios = np.random.default_rng(3).lognormal(0, 0.1, (runs, 600))
    sizes = look_sizes(600)
    shared = [(size, look_alpha(number, alpha)) for number, size in enumerate(sizes, 1)]
    assert decided_wrongly(shared, ratios, 1.0) <= alpha
    # The same looks without sharing err far more often: the test above can fail.
    assert decided_wrongly([(size, alpha) for size in sizes], ratios, 1.0) > 2 * alpha


def test_between_two_looks_nothing_new_is_seen():
    rng = np.random.default_rng(5)
    ratio = PairedRatio()
    seen = set()
    for count in range(1, 101):
        ratio.add(float(rng.lognormal(0, 0.2)), 1.0)
        at = look(ratio, Bar(1.0), final_at=1000)
        seen.add((at.number, at.interval))
        assert at.number == sum(size <= count for size in (12, 25, 50, 100))
    assert len(seen) == 5  # nothing, and one interval for each look


# --- planted ratios on simulated machines ---------------------------------------------------------


class Machine:
    """Hands out the durations of steps, one after the other along one time line.

    A step of side s at time t takes work[s] * noise[t, s]: what slows the whole machine at t slows
    whichever side runs then.
    """

    def __init__(self, noise: np.ndarray, baseline: float, candidate: float):
        self.noise = noise
        self.work = (baseline, candidate)
        self.time = 0

    def step(self, side: int) -> float:
        seconds = self.work[side] * self.noise[self.time, side]
        self.time += 1
        return float(seconds)

    def measure(self, bar: Bar, **options) -> PairedResult:
        return measure_pair(lambda: self.step(0), lambda: self.step(1), bar, **options)


def switching(rng, runs, steps, sides, start, stop) -> np.ndarray:
    """States [runs, steps, sides] that go on with chance ``start`` a step and off with ``stop``."""
    state = rng.random((runs, sides)) < start / (start + stop)
    states = np.empty((runs, steps, sides), bool)
    for step in range(steps):
        draw = rng.random((runs, sides))
        state = np.where(state, draw >= stop, draw < start)
        states[:, step] = state
    return states


def quiet(rng, runs, steps):
    """A few percent of jitter."""
    return rng.lognormal(0, 0.04, (runs, steps, 2))


def one_core_busy(rng, runs, steps):
    """Slow stretches of the machine, and shorter ones in which one process sits on the busy core.

    Traces of real workers show next to none of the latter: neighbouring signs of their ratios had a
    mean product of -0.2 to 0.3, about 0 on average. Here it is 0.15.
    """
    noise = rng.lognormal(0, 0.08, (runs, steps, 2))
    noise *= np.where(switching(rng, runs, steps, 1, 0.05, 0.05), 1.7, 1.0)
    return noise * np.where(switching(rng, runs, steps, 2, 0.06, 0.25), 1.35, 1.0)


def one_side_lags(rng, runs, steps):
    """Harsher than anything measured: one process is the slower one for five slices at a time."""
    noise = one_core_busy(rng, runs, steps)
    return noise * np.where(switching(rng, runs, steps, 2, 0.03, 0.10), 1.35, 1.0)


def comes_and_goes(rng, runs, steps):
    """Load that comes in bursts and hits single steps of either side with 1.5x to 3x."""
    noise = rng.lognormal(0, 0.06, (runs, steps, 2))
    hit = switching(rng, runs, steps, 1, 0.02, 0.05) & (rng.random((runs, steps, 1)) < 0.6)
    return noise * np.where(hit, rng.uniform(1.5, 3, (runs, steps, 1)), 1.0)


def hopeless(rng, runs, steps):
    """Steps of the same work that differ by factors of ten."""
    return rng.lognormal(0, 2.0, (runs, steps, 2))


RUNS = 2_000


def verdicts(noise, baseline: float, candidate: float, bar: Bar) -> Counter:
    rng = np.random.default_rng(20)
    lines = noise(rng, RUNS, 210)  # 100 slices of two steps, and the warm-up
    return Counter(Machine(line, baseline, candidate).measure(bar).verdict for line in lines)


@pytest.mark.parametrize(
    ("noise", "decided"), [(quiet, 0.999), (one_core_busy, 0.90), (comes_and_goes, 0.98)]
)
class TestPlantedRatios:
    """No wrong verdict in thousands of runs; and not by calling everything inconclusive."""

    def test_a_true_gain_is_never_failed(self, noise, decided):
        got = verdicts(noise, 2.0, 1.0, Bar(1.5))
        assert got[FAIL] == 0
        assert got[PASS] >= decided * RUNS

    def test_equal_sides_never_pass_for_a_gain(self, noise, decided):
        got = verdicts(noise, 1.0, 1.0, Bar(1.2))
        assert got[PASS] == 0
        assert got[FAIL] >= (decided - 0.1) * RUNS

    def test_equal_sides_are_no_worse(self, noise, decided):
        got = verdicts(noise, 1.0, 1.0, Bar(0.8, "no_worse_than"))
        assert got[FAIL] == 0
        assert got[PASS] >= decided * RUNS

    def test_a_loss_of_half_is_worse(self, noise, decided):
        got = verdicts(noise, 1.0, 2.0, Bar(0.8, "no_worse_than"))
        assert got[PASS] == 0
        assert got[FAIL] >= decided * RUNS


def test_even_when_one_side_lags_for_long_the_error_stays_within_alpha():
    assert verdicts(one_side_lags, 2.0, 1.0, Bar(1.5))[FAIL] <= ALPHA * RUNS
    assert verdicts(one_side_lags, 1.0, 1.0, Bar(1.2))[PASS] <= ALPHA * RUNS


@pytest.mark.parametrize("noise", [quiet, comes_and_goes])
def test_a_ratio_on_the_bar_is_decided_no_oftener_than_alpha(noise):
    got = verdicts(noise, 1.5, 1.0, Bar(1.5))
    assert got[PASS] + got[FAIL] <= (ALPHA + 3 * math.sqrt(ALPHA / RUNS)) * RUNS


@pytest.mark.parametrize(
    ("baseline", "bar"),
    [(2.0, Bar(1.5)), (1.0, Bar(1.2)), (1.0, Bar(0.9, "no_worse_than"))],
)
def test_too_much_noise_is_inconclusive_and_not_wrong(baseline, bar):
    got = verdicts(hopeless, baseline, 1.0, bar)
    assert got[INCONCLUSIVE] >= 0.99 * RUNS
    wrong = FAIL if baseline / 1.0 >= bar.value else PASS
    assert got[wrong] == 0


def test_one_slow_process_for_a_while_counts_for_few_slices():
    """Slices that hang together are worth less; without that, equal sides would be told apart."""
    rng = np.random.default_rng(1)
    lines = one_side_lags(rng, RUNS, 210)
    naive = cautious = 0
    for line in lines:
        machine = Machine(line, 1.0, 1.0)
        ratio = PairedRatio((machine.step(0), machine.step(1)) for _ in range(100))
        low, high = ratio.interval(ALPHA)
        naive += not low <= 1 <= high
        low_c, high_c = ratio.cautious_interval(ALPHA)
        cautious += not low_c <= 1 <= high_c
        assert low_c <= low <= high <= high_c
    assert naive > 2 * ALPHA * RUNS
    assert cautious < naive / 2


@pytest.mark.parametrize("stays", [0.5, 0.7, 0.8])
def test_the_widest_interval_misses_as_often_as_a_chain_stays_on_one_side(stays):
    rng = np.random.default_rng(4)
    count, runs = 12, 20_000
    kept = np.cumprod(np.where(rng.random((runs, count)) < stays, 1, -1), axis=1)
    sides = kept * rng.choice([-1, 1], (runs, 1))  # of the true median
    missed = np.mean(np.abs(sides.sum(axis=1)) == count)
    expected = stays ** (count - 1)
    assert abs(missed - expected) < 4 * math.sqrt(expected / runs)


def test_slices_that_hang_together_have_an_interval_once_there_are_enough():
    sides = "hhhhlllhhhhlllhhhhlllhhhh"
    ratio = PairedRatio((5.0 + 0.1 * (s == "h") + i / 1e4, 1.0) for i, s in enumerate(sides))
    assert interval_rank(ratio.independent_slices(), ALPHA / 6) == 0
    assert ratio.cautious_interval(ALPHA / 6) == (min(ratio.ratios), max(ratio.ratios))
    assert ratio.first(12).cautious_interval(ALPHA / 2) == (0.0, math.inf)


def test_independent_slices():
    apart = PairedRatio((1.0 + 0.1 * (i % 2), 1.0) for i in range(100))  # swings every slice
    assert apart.independent_slices() == 100
    together = PairedRatio((1.0 + 0.1 * (i // 10 % 2), 1.0) for i in range(100))  # stays for ten
    assert together.independent_slices() <= 15
    assert PairedRatio().independent_slices() == 0
    assert PairedRatio([(1, 1)]).independent_slices() == 1
    same = PairedRatio([(2, 1)] * 25)
    assert same.cautious_interval() == (2, 2)


# --- how a run goes -------------------------------------------------------------------------------


def steps(seconds: float, log: list[str], name: str):
    def step() -> float:
        log.append(name)
        return seconds

    return step


def test_order_is_swapped_in_every_slice_and_warm_up_is_not_counted():
    log: list[str] = []
    result = measure_pair(steps(2, log, "b"), steps(1, log, "c"), Bar(1.5), warmup=1, max_slices=25)
    assert "".join(log).startswith("bc" + "bccb" * 3)
    assert len(log) == 2 * 13
    assert result.slices == 12
    assert result.verdict is PASS
    assert (result.baseline_s, result.candidate_s, result.median) == (2, 1, 2)


def test_a_clear_case_stops_at_the_first_look_and_an_open_one_goes_on():
    log: list[str] = []
    assert measure_pair(steps(1, log, "b"), steps(1, log, "c"), Bar(1.2)).slices == 12
    rng = np.random.default_rng(0)
    open_case = measure_pair(
        lambda: 1.2 * float(rng.lognormal(0, 0.1)), lambda: float(rng.lognormal(0, 0.1)), Bar(1.2)
    )
    assert open_case.slices == 100
    assert open_case.look == 4
    assert open_case.verdict is INCONCLUSIVE
    assert "more slices" in open_case.reason


def test_slices_accumulate_over_runs():
    rng = np.random.default_rng(2)

    def side(seconds):
        return lambda: seconds * float(rng.lognormal(0, 0.15))

    result = measure_pair(side(1.25), side(1.0), Bar(1.2))
    runs = 1
    while result.verdict is INCONCLUSIVE and runs < 20:
        before = result.ratio.pairs
        stored = PairedRatio(before)
        result = measure_pair(side(1.25), side(1.0), Bar(1.2), prior=stored)
        assert stored.pairs == before  # the prior is not changed
        assert result.ratio.pairs[: len(before)] == before
        runs += 1
    assert result.verdict is PASS
    assert runs > 1


def test_fresh_pairs_of_processes_share_one_run():
    ratio = PairedRatio()
    seen = []
    for _ in range(4):
        result = measure_pair(
            lambda: 1.0, lambda: 1.0, Bar(1.0001, "no_worse_than", max_spread=1.1),
            prior=ratio, max_slices=5, final_at=20,
        )  # fmt: skip
        ratio = result.ratio
        seen.append(result.verdict)
    assert seen == [None, None, FAIL, FAIL]


def test_few_slices_decide_nothing():
    for bar in (Bar(1.5), Bar(0.5, "no_worse_than")):
        result = measure_pair(lambda: 2.0, lambda: 1.0, bar, max_slices=11)
        assert result.verdict is INCONCLUSIVE
        assert "too few" in result.reason
        assert result.interval == (0.0, math.inf)
        assert result.as_dict()["interval"] == [0.0, None]
    assert verdict(PairedRatio([(2, 1)] * 11), Bar(1.5)) is None
    assert verdict(PairedRatio(), Bar(1.5)) is None


@pytest.mark.parametrize(
    ("ratios", "bar", "expected"),
    [
        ([2.0] * 100, Bar(1.5), PASS),
        ([1.5] * 100, Bar(1.5), PASS),
        ([1.4] * 100, Bar(1.5), FAIL),
        ([0.8] * 100, Bar(0.9, "no_worse_than"), FAIL),
        ([0.9] * 25, Bar(0.9, "no_worse_than"), PASS),
        ([0.8, 0.98] * 50, Bar(0.9, "no_worse_than"), PASS),  # not below at the last look
        ([0.8, 0.98] * 25, Bar(0.9, "no_worse_than"), None),  # there are looks left
        ([0.5, 1.9] * 50, Bar(0.9, "no_worse_than"), INCONCLUSIVE),  # too wide to say
        ([0.3, 0.6] * 50, Bar(0.9, "no_worse_than"), FAIL),  # as wide, and all of it below
        ([1.0, 2.0] * 50, Bar(0.9, "no_worse_than"), PASS),
        ([0.1, 0.6] * 50, Bar(0.9, "no_worse_than"), INCONCLUSIVE),
        ([2.0, 9.0] * 50, Bar(1.5), INCONCLUSIVE),  # above the bar, and too wide all the same
        ([2.0, 9.0] * 50, Bar(1.5, max_spread=5), PASS),
        ([1.4, 1.6] * 12 + [1.6], Bar(1.5), None),
        ([0.95, 1.05] * 50, Bar(0.85, "within", upper=1.15), PASS),
        ([0.85, 1.15] * 50, Bar(0.85, "within", upper=1.15), PASS),  # the ends belong to it
        ([0.8] * 24, Bar(0.85, "within", upper=1.15), None),
        ([0.8] * 25, Bar(0.85, "within", upper=1.15), FAIL),
        ([1.2] * 25, Bar(0.85, "within", upper=1.15), FAIL),
        ([1.0, 1.3] * 25, Bar(0.85, "within", upper=1.15), None),
        ([1.0, 1.3] * 50, Bar(0.85, "within", upper=1.15), INCONCLUSIVE),
        ([0.7, 1.0] * 50, Bar(0.85, "within", upper=1.15), INCONCLUSIVE),
    ],
)
def test_verdicts(ratios, bar, expected):
    assert verdict(PairedRatio((value, 1.0) for value in ratios), bar) is expected


def test_exchanging_the_sides_gives_the_inverse():
    rng = np.random.default_rng(8)
    pairs = [(float(a), float(b)) for a, b in rng.lognormal(0, 0.3, (50, 2))]
    one, other = PairedRatio(pairs), PairedRatio((b, a) for a, b in pairs)
    assert one.median == pytest.approx(1 / other.median)
    low, high = one.interval()
    assert other.interval() == pytest.approx((1 / high, 1 / low))


def test_a_result_becomes_plain_values():
    result = measure_pair(lambda: 2.0, lambda: 1.0, Bar(1.5), max_slices=25)
    assert result.as_dict() == {
        "median": 2.0,
        "interval": [2.0, 2.0],
        "slices": 12,
        "look": 1,
        "bar": 1.5,
        "kind": "at_least",
        "verdict": "pass",
        "reason": result.reason,
        "baseline_s": 2.0,
        "candidate_s": 1.0,
    }
    assert str(result.bar) == ">= 1.5x"
    assert str(Bar(0.9, "no_worse_than")) == "no worse than 0.9x"
    assert str(Bar(0.85, "within", upper=1.15)) == "0.85 to 1.15x"
    assert repr(result.ratio) == "PairedRatio(slices=12, median=2)"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_seconds_are_refused(seconds):
    with pytest.raises(ValueError, match="candidate_s"):
        PairedRatio().add(1.0, seconds)
    with pytest.raises(ValueError, match="baseline_s"):
        measure_pair(lambda: seconds, lambda: 1.0, Bar(1.5))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Bar(0.0), "value"),
        (lambda: Bar(math.nan), "value"),
        (lambda: Bar(1.0, "at_most"), "kind"),
        (lambda: Bar(1.0, max_spread=1.0), "max_spread"),
        (lambda: Bar(1.0, "within"), "upper"),
        (lambda: Bar(1.0, upper=2.0), "upper"),
        (lambda: Bar(1.0, "within", upper=1.0), "upper"),
        (lambda: Bar(1.0, "within", upper=math.inf), "upper"),
        (lambda: PairedRatio([(1, 1)]).interval(0.0), "alpha"),
        (lambda: PairedRatio([(1, 1)]).interval(1.0), "alpha"),
        (lambda: PairedRatio().median, "no slices"),
        (lambda: look_alpha(0), "look"),
        (lambda: miss_chance(-1, 0), "slices"),
        (lambda: measure_pair(lambda: 1.0, lambda: 1.0, Bar(1.0), max_slices=0), "max_slices"),
        (lambda: measure_pair(lambda: 1.0, lambda: 1.0, Bar(1.0), warmup=-1), "warmup"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def test_an_error_of_a_side_comes_through():
    def broken() -> float:
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        measure_pair(lambda: 1.0, broken, Bar(1.0))
