"""The baseline of stage 08: the contiguous slots of stage 05."""

from course.parts import SlotCache

__all__ = ["SlotCache"]
