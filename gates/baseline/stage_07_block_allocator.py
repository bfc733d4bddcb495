"""The baseline of stage 07: stage 05, which reserves the longest context for every sequence.

Behind this stage's API a slot is one block that is as long as that context, and a sequence takes
one. What is measured against it is how many sequences fit.
"""

from __future__ import annotations

from collections import deque

from course.types import OutOfBlocks


class BlockAllocator:
    """`num_blocks` slots of `block_size` positions each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.capacity = block_size
        self.free_slots = deque(range(num_blocks))

    def allocate(self, num_tokens: int) -> list[int]:
        """A slot."""
        if not self.free_slots:
            raise OutOfBlocks(1, 0)
        self.append([], 0, num_tokens)
        return [self.free_slots.popleft()]

    def append(self, table: list[int], num_tokens: int, new_tokens: int) -> list[tuple[int, int]]:
        """Room is there, up to the capacity."""
        if num_tokens + new_tokens > self.capacity:
            raise ValueError(f"capacity is {self.capacity}, the sequence needs more")
        return []
