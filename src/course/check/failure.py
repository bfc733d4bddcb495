"""How a judge says no."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from course.check.codes import Code


@dataclass
class GateFailure(Exception):
    """A check that did not hold, said so that a student can act on it.

    Attributes:
        code: one of the closed list.
        message: one sentence: what is wrong.
        expected, got: the two sides, where there are two.
        where: the first token, row, block or line where they part.
        detail: more lines (a traceback, captured output), shown below the rest.
        likely: the likely cause, where more is known than the code's page says.
        hint: the level of `course hint` that speaks of this, if one does.
    """

    code: Code
    message: str
    expected: str = ""
    got: str = ""
    where: str = ""
    detail: str = ""
    hint: int | None = None
    likely: str = ""  # where more is known than the code's page says
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.code.value}: {self.message}"]
        parts += [f"{k}: {v}" for k, v in (("expected", self.expected), ("got", self.got)) if v]
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "code": self.code.value}
