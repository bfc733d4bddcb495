"""A guess before the measurement, and its score after it."""

from __future__ import annotations

from dataclasses import dataclass

from course.notebook.prose import short, table

__all__ = ["Prediction", "grade"]


@dataclass(frozen=True)
class Prediction:
    """What the reader expects, written down while it can still be wrong.

    Raises:
        ValueError: the guess is not above 0. Every number predicted here is.
    """

    question: str
    guess: float
    unit: str = ""

    def __post_init__(self) -> None:
        if not self.guess > 0:
            raise ValueError(f"guess must be above 0, got {self.guess!r}")

    def score(self, measured: float, *, derived: float | None = None) -> None:
        """Show guess, derivation and measurement side by side.

        derived: what the arithmetic of the notebook said before the measurement.
        """
        rows = [["your guess", self._text(self.guess), grade(self.guess, measured)]]
        if derived is not None:
            rows.append(["derived", self._text(derived), grade(derived, measured)])
        rows.append(["**measured**", f"**{self._text(measured)}**", ""])
        table([self.question, "", "against the measurement"], rows)

    def _text(self, value: float) -> str:
        exact = float(value).is_integer() and value < 1e9
        return f"{value:,.0f}{self.unit}" if exact else f"{short(value)}{self.unit}"


def grade(guess: float, measured: float) -> str:
    """The score in words; over and under by the same factor score alike."""
    factor = max(guess / measured, measured / guess)
    side = "too high" if guess > measured else "too low"
    if guess == measured:
        return "exact"
    if factor <= 1.1:
        return f"within a tenth ({abs(guess / measured - 1):.1%} {side})"
    if factor <= 1.5:
        return f"close: {abs(guess / measured - 1):.0%} {side}"
    if factor <= 3:
        return f"the right order: {short(factor)}x {side}"
    return f"off by a factor of {short(factor)}, {side}"
