"""The baseline of stage 12: stage 11, which computes every prompt in one step.

It takes a budget and does not look at it, so it cannot keep the contract; what is measured against
it is how long those who decode wait for a prompt.
"""

from __future__ import annotations

from course.parts import Scheduler


class ChunkedScheduler(Scheduler):
    """The scheduler of stage 11 behind this stage's arguments."""

    def __init__(self, allocator, config, *, max_running, max_tokens, watermark=0):
        super().__init__(allocator, config, max_running=max_running, watermark=watermark)
