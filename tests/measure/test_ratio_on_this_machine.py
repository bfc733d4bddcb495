"""The kit tested on real processes: planted ratios, on a quiet machine and on a loaded one.

Two workers are stepped alternately over pipes, as a gate steps them. A step reads an array larger
than the last-level cache, some ten times or twice as often, so the truth is known: 2.0, or 1.0.
Bars are near the truth here, so a case takes several pairs of workers: see "How long a look must
last" in `ratio.py`. Only verdicts are asserted, never times.
"""

import math
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from course.measure import (
    Bar,
    PairedRatio,
    PairedResult,
    Verdict,
    last_level_cache_bytes,
    measure_pair,
)
from course.measure.ratio import MAX_SLICES

pytestmark = pytest.mark.slow

# Reads its array as many times as the line says, then answers.
WORKER = """
import sys
import numpy
array = numpy.ones(int(sys.argv[1]) // 4, dtype=numpy.float32)
for line in sys.stdin:
    for _ in range(int(line)):
        array.sum()
    print("done", flush=True)
"""

ONE_CORE_BUSY = "while True: pass"

COMES_AND_GOES = """
import random
import time
while True:
    stop = time.perf_counter() + random.uniform(0.02, 0.3)
    while time.perf_counter() < stop:
        pass
    time.sleep(random.uniform(0.02, 0.4))
"""

LOADS = {
    "quiet": [],
    "one core busy": [ONE_CORE_BUSY],
    "load comes and goes": [COMES_AND_GOES, COMES_AND_GOES],
}
STEP_S = 0.03  # what a step of the faster side takes on a quiet machine, roughly
SLICES = 5  # of a pair of workers
ROUNDS = 3  # of all cases, under each load
ENOUGH_S = 18  # no further round after this, so that a loaded machine is not kept for minutes


class Worker:
    """A process that does a step when it is asked to; the clock is on this side of the pipe."""

    def __init__(self):
        nbytes = min(max(64 << 20, 2 * last_level_cache_bytes()), 1 << 30)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def step(self, reads: int) -> float:
        start = time.perf_counter()
        self.process.stdin.write(f"{reads}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        seconds = time.perf_counter() - start
        assert answer == "done\n", "the worker died"
        return seconds

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@contextmanager
def running(programs):
    """Keep other processes busy meanwhile."""
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(baseline_reads: int, bar: Bar) -> PairedResult:
    """Measure pairs of workers, of which the baseline reads so many times as often."""
    ratio, verdict = PairedRatio(), None
    while verdict is None:
        with ExitStack() as stack:
            baseline, candidate = (stack.enter_context(Worker()) for _ in range(2))
            often = math.ceil(STEP_S / min(worker.step(1) for worker in (baseline, candidate) * 5))
            result = measure_pair(
                partial(baseline.step, baseline_reads * often), partial(candidate.step, often), bar,
                prior=ratio, max_slices=SLICES, final_at=MAX_SLICES, warmup=1,
            )  # fmt: skip
        ratio, verdict = result.ratio, result.verdict
    return result


@pytest.mark.parametrize("load", LOADS)
def test_planted_ratios_get_no_wrong_verdict(load):
    verdicts: dict[str, Counter] = {"gain": Counter(), "none": Counter(), "no loss": Counter()}
    seen = []
    rounds = 0
    start = time.monotonic()
    with running(LOADS[load]):
        while rounds < ROUNDS and time.monotonic() - start < ENOUGH_S:
            rounds += 1
            for case, reads, bar in (
                ("gain", 2, Bar(1.5)),
                ("none", 1, Bar(1.2)),
                ("no loss", 1, Bar(0.75, "no_worse_than")),
            ):
                result = measured(reads, bar)
                verdicts[case][result.verdict] += 1
                low, high = result.interval
                seen.append(f"{case}: {result.median:.3f} [{low:.3f}, {high:.3f}] {result.slices}")
    print(*seen, sep="\n")  # shown by pytest when an assertion fails
    assert verdicts["gain"][Verdict.FAIL] == 0
    assert verdicts["none"][Verdict.PASS] == 0
    assert verdicts["no loss"][Verdict.FAIL] == 0
    # And it does decide: were everything inconclusive, the above would hold and mean nothing.
    decided = verdicts["gain"][Verdict.PASS] + verdicts["none"][Verdict.FAIL]
    assert decided >= rounds
