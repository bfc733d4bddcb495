"""What the notebooks need beside the course itself: code shown, guesses scored, figures, prose.

Only notebooks import this package, and nothing of the course imports it but the tools in
`course.dev`.
"""

from course.measure import pass_work
from course.notebook.figures import COLOURS, doublings, figure, show, split_bars
from course.notebook.fit import Line
from course.notebook.lesson import Lesson, reference
from course.notebook.prediction import Prediction
from course.notebook.profile import time_by_kind
from course.notebook.prose import (
    bytes_text,
    per_second,
    say,
    seconds_text,
    short,
    table,
)
from course.notebook.timing import Times, take_turns

__all__ = [
    "COLOURS",
    "Lesson",
    "Line",
    "Prediction",
    "Times",
    "bytes_text",
    "doublings",
    "figure",
    "pass_work",
    "per_second",
    "reference",
    "say",
    "seconds_text",
    "short",
    "show",
    "split_bars",
    "table",
    "take_turns",
    "time_by_kind",
]
