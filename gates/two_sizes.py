"""One scenario at two sizes, in turn: what does not depend on the size takes as long at both."""

from __future__ import annotations

from typing import Any

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import Run

SHORT_BATCH, LONG_BATCH = 16, 2048  # operations
BATCH_SECONDS = 0.03


class TwoSizes:
    """Batches of one scenario's operations, at a small size and at a large one.

    A batch is as long as takes some milliseconds at the large size, so that an honest solution is
    timed well above the noise of a message, and one that is a hundred times slower ends today.

    Args:
        shortest: operations in the shortest batch.
    """

    def __init__(
        self, gate: GateRun, scenario: str, sizes: list[int], what: str, *, block_size: int,
        shortest: int = SHORT_BATCH, **args: Any,
    ) -> None:  # fmt: skip
        self.what = what

        def start(size: int, batch: int) -> Run:
            run = gate.candidate.start(
                scenario, size=size, block_size=block_size, batch=batch, **args
            )
            expect.result_of(run.step, f"{what} of {size:,}")
            return run

        trial = start(max(sizes), shortest)
        seconds = min(expect.result_of(trial.step, what).seconds for _ in range(3))
        trial.stop()
        longer = max(1, min(LONG_BATCH // shortest, round(BATCH_SECONDS / seconds)))
        self.batch = shortest * longer
        self.runs = {size: start(size, self.batch) for size in sizes}

    def step(self, size: int, expected: int) -> float:
        """One batch, whose last reply is known; seconds."""
        reply = expect.result_of(self.runs[size].step, f"{self.what} of {size:,}")
        if reply.value != expected:
            raise GateFailure(
                Code.WRONG_VALUE, f"{self.what} of {size:,}, while it is timed", str(expected),
                str(reply.value), likely="A block was lost, or two were found, on the way.",
            )  # fmt: skip
        return reply.seconds
