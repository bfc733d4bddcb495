"""The baseline of stage 13: stage 08, which asks for every operation of every step."""

from course.parts import PagedAttention, step_batch

__all__ = ["PagedAttention", "step_batch"]
