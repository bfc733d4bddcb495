"""The baseline of stage 10: stages 07 and 08 without a cache, behind this stage's functions."""

from __future__ import annotations

from typing import Any

from course.parts import BlockAllocator
from course.types import Sequence


class PrefixCachingAllocator(BlockAllocator):
    """Finds nothing, and publishes nothing: every prompt is computed from its first token on."""

    def __init__(self, num_blocks: int, block_size: int, **_: Any) -> None:
        super().__init__(num_blocks, block_size)

    def admit(self, sequence: Sequence, *, reserve: int = 0) -> None:
        """Blocks for all of its tokens."""
        sequence.block_table = self.allocate(len(sequence.tokens))
        sequence.num_computed = sequence.num_cached = 0

    def publish(self, sequence: Sequence) -> None:
        """Nobody will look for it."""
