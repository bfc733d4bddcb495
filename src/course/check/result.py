"""What a check found: plain data, printed, stored and written as JSON alike."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from course.check.failure import GateFailure
from course.measure.ratio import Verdict


class Exit(IntEnum):
    """The exit status of every command that checks."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    INCONCLUSIVE = 3
    NOT_HERE = 4  # the required tier, or a library, is not on this machine
    BROKEN = 5  # the judge failed: it says nothing about the solution


_NOT_THE_STUDENTS = {"NOT_MEASURABLE": Exit.NOT_HERE, "BROKEN_GATE": Exit.BROKEN}


@dataclass
class Number:
    """One measured figure.

    `verdict` is None for a figure that is reported and held against nothing.
    """

    name: str
    value: float
    text: str  # "272 against 417: 1.53x fewer"
    unit: str = ""
    needs: str = ""  # the bar, as it is printed
    verdict: Verdict | None = None
    exact: bool = False
    interval: tuple[float, float] | None = None
    slices: int = 0
    notes: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)  # figures that other checks build on
    pairs: list[tuple[float, float]] = field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        document = asdict(self)
        document["verdict"] = None if self.verdict is None else self.verdict.value
        document["value"] = _finite(self.value)
        if self.interval is not None:
            document["interval"] = [_finite(end) for end in self.interval]
        document["extra"] = {name: _finite(value) for name, value in self.extra.items()}
        del document["pairs"]
        return document


def _finite(value: float) -> float | None:
    """JSON has no word for infinity or NaN."""
    return value if math.isfinite(value) else None


@dataclass
class CheckOutcome:
    """One test of a gate."""

    name: str
    layer: str  # "contract" or "number"
    outcome: str  # "passed", "failed"
    seconds: float
    title: str = ""  # what it checks, in words


@dataclass
class StageResult:
    """Everything that one run of one gate found."""

    stage: str
    title: str
    tier: str
    device: str
    model: str
    solution: str
    solution_hash: str
    seed: int
    contract_only: bool = False
    checks: list[CheckOutcome] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    failure: GateFailure | None = None
    missing: list[str] = field(default_factory=list)  # numbers that should be there and are not
    # What was not checked, by the library that it needs and that is not here: titles, in words.
    left_out: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    printed: str = ""  # the last lines that a solution that failed has printed
    seconds: float = 0.0

    @property
    def status(self) -> Exit:
        """Fail before inconclusive before pass; what was not measured is never a pass."""
        if self.failure is not None:
            return _NOT_THE_STUDENTS.get(self.failure.code.value, Exit.FAIL)
        if not self.checks or any(c.outcome != "passed" for c in self.checks):
            return Exit.FAIL
        if self.missing and not self.left_out:
            return Exit.FAIL
        verdicts = [n.verdict for n in self.numbers if n.verdict is not None]
        if Verdict.FAIL in verdicts:
            return Exit.FAIL
        if self.left_out:
            return Exit.NOT_HERE
        if Verdict.INCONCLUSIVE in verdicts:
            return Exit.INCONCLUSIVE
        return Exit.PASS

    @property
    def passed(self) -> bool:
        """The gate is open: contract and numbers both, on this machine."""
        return self.status is Exit.PASS and not self.contract_only

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "stage": self.stage,
            "title": self.title,
            "status": self.status.name.lower(),
            "passed": self.passed,
            "tier": self.tier,
            "device": self.device,
            "model": self.model,
            "solution": self.solution,
            "solution_hash": self.solution_hash,
            "seed": self.seed,
            "contract_only": self.contract_only,
            "checks": [asdict(c) for c in self.checks],
            "numbers": [n.as_dict() for n in self.numbers],
            "failure": self.failure.as_dict() if self.failure else None,
            "missing": self.missing,
            "left_out": self.left_out,
            "remarks": self.remarks,
            "printed": self.printed,
            "seconds": round(self.seconds, 2),
        }
