"""The baseline of stage 09: stage 08, which gathers before it attends."""

from course.parts import PagedAttention, step_batch

__all__ = ["PagedAttention", "step_batch"]
