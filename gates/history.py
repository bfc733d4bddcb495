"""What a judge has asked of a solution so far, told with every failure."""

from __future__ import annotations

from course.check.codes import Code
from course.check.failure import GateFailure

SHOWN = 6  # of the last operations


class History:
    """A judge that asks one operation after the other. `what` names the object that is asked."""

    what: str
    history: list[str]

    def _failure(
        self, code: Code, message: str, expected: str, got: str, where: str = "", *,
        likely: str = "",
    ) -> GateFailure:  # fmt: skip
        return GateFailure(
            code, f"{self.what}: {message}", expected, got, where, likely=likely,
            notes=self._notes(),
        )  # fmt: skip

    def _notes(self) -> list[str]:
        """The last operations, as a student could type them."""
        cut = "... " if len(self.history) > SHOWN else ""
        return [f"after: {cut}" + "; ".join(self.history[-SHOWN:])]
