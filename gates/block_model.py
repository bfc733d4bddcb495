"""What a block allocator must do, in the plainest way: no free list, and nothing is counted.

A block is an object. How many tables hold it is found by looking through all of them; whatever no
table holds is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Full(Exception):
    """More blocks are needed than are free."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} needed, {free} free")
        self.needed, self.free = needed, free


class Block:
    """A block in use. Which id it has is the business of the allocator under test."""


@dataclass
class Change:
    """What an operation did: blocks that it took, and those to be copied, (source, destination)."""

    taken: list[Block] = field(default_factory=list)
    copied: list[tuple[Block, Block]] = field(default_factory=list)


class BlockModel:
    """A pool, and the tables of all sequences by name. An operation that raises changes nothing."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[str, list[Block]] = {}

    def holders(self, block: Block) -> int:
        """Tables that hold a block."""
        return sum(other is block for table in self.tables.values() for other in table)

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return self.num_blocks - len({block for table in self.tables.values() for block in table})

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        full, rest = divmod(num_tokens, self.block_size)
        return full + (rest > 0)

    def allocate(self, name: str, num_tokens: int) -> Change:
        """A table of its own for a new sequence. Raises Full."""
        needed, free = self.blocks_for(num_tokens), self.num_free
        if needed > free:
            raise Full(needed, free)
        self.tables[name] = [Block() for _ in range(needed)]
        return Change(list(self.tables[name]))

    def append(self, name: str, num_tokens: int, new_tokens: int) -> Change:
        """Room for more tokens, in blocks that are this sequence's alone. Raises Full."""
        table = self.tables[name]
        places = {p // self.block_size for p in range(num_tokens, num_tokens + new_tokens)}
        shared = [i for i in sorted(places) if i < len(table) and self.holders(table[i]) > 1]
        missing = [i for i in sorted(places) if i >= len(table)]
        needed, free = len(shared) + len(missing), self.num_free
        if needed > free:
            raise Full(needed, free)
        change = Change([Block() for _ in range(needed)])
        for index, block in zip(shared, change.taken, strict=False):
            if index * self.block_size < num_tokens:
                change.copied.append((table[index], block))
            table[index] = block
        table += change.taken[len(shared) :]
        return change

    def fork(self, name: str, other: str) -> Change:
        """A second table of the same blocks."""
        self.tables[other] = list(self.tables[name])
        return Change()

    def free(self, name: str) -> Change:
        """The table of a sequence that has ended is empty."""
        self.tables[name] = []
        return Change()
