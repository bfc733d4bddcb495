"""What a solution leaves in memory when its work is done."""

from __future__ import annotations

from typing import Any

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun


def keeps_nothing(gate: GateRun, what: str, times: int, likely: str, **arguments: Any) -> None:
    """The tensors that are alive after some work do not grow when it is done again and again.

    Args:
        what: one piece of work, in words: "a batch".
        arguments: of the stage's scenario `left_behind`.

    Raises:
        GateFailure: TOO_MUCH_MEMORY.
    """
    first, last = expect.result_of(
        lambda: gate.candidate.call("left_behind", model="nano", times=times, **arguments),
        f"{what}, {times} times",
    )
    if last > first:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, f"what is alive after {what} grows from time to time",
            f"{first:,} bytes, as after the first", f"{last:,} after the last of {times}",
            likely=likely,
        )  # fmt: skip
