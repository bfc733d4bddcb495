"""What a prefix-caching allocator must do, in the plainest way: texts are compared as a whole.

There is no hash and no reference count. Who holds a block is found by looking through all tables,
and the text of a block is a tuple of all its tokens from the first one on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from block_model import Full

Space = tuple[str, str]  # model and salt
Text = tuple[Space, tuple[int, ...]]


@dataclass
class Line:
    """A sequence: its tokens, how many are computed, and its blocks."""

    space: Space
    tokens: list[int]
    computed: int = 0
    found: int = 0  # computed by somebody else, when it was admitted
    table: list[int] = field(default_factory=list)

    def text(self, end: int) -> Text:
        """Its first `end` tokens."""
        return self.space, tuple(self.tokens[:end])


class PrefixModel:
    """A pool, and all sequences by name. An operation that raises Full changes nothing.

    The blocks that an operation takes are known; in which order they stand in a table is not. So
    `admit` and `append` return them, and `tables` are put right by whoever has seen the order.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lines: dict[str, Line] = {}
        self.plain = list(range(num_blocks))  # free and not cached, longest free first
        self.lru: list[int] = []  # free and cached, given back longest ago first
        self.cached: dict[Text, int] = {}
        self.published: dict[int, Text] = {}  # twins included

    def holders(self, block: int) -> int:
        """Tables that hold a block."""
        return sum(line.table.count(block) for line in self.lines.values())

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return self.num_blocks - len({b for line in self.lines.values() for b in line.table})

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        full, rest = divmod(num_tokens, self.block_size)
        return full + (rest > 0)

    def hits(self, line: Line) -> list[int]:
        """Cached blocks that a sequence would be given."""
        found: list[int] = []
        for end in range(self.block_size, len(line.tokens), self.block_size):
            block = self.cached.get(line.text(end))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, name: str, line: Line, hits: list[int], reserve: int) -> list[int]:
        """A table that begins with `hits`; returns the blocks that are taken. Raises Full."""
        unused = [block for block in hits if not self.holders(block)]
        new = self.blocks_for(len(line.tokens)) - len(hits)
        if new + len(unused) + reserve > self.num_free:
            raise Full(new + len(unused) + reserve, self.num_free)
        for block in unused:
            (self.lru if block in self.lru else self.plain).remove(block)
        self.lines[name] = line
        line.computed = line.found = len(hits) * self.block_size
        taken = [self._take() for _ in range(new)]
        line.table = hits + taken
        return taken

    def append(self, name: str, new_tokens: int) -> tuple[list[int], list[int], list[int]]:
        """Room for more tokens: (blocks taken, entries that are replaced, those copied of them).

        Raises Full.
        """
        line = self.lines[name]
        stored = len(line.tokens)
        places = sorted({p // self.block_size for p in range(stored, stored + new_tokens)})
        shared = [i for i in places if i < len(line.table) and self.holders(line.table[i]) > 1]
        missing = [i for i in places if i >= len(line.table)]
        needed = len(shared) + len(missing)
        if needed > self.num_free:
            raise Full(needed, self.num_free)
        taken = [self._take() for _ in range(needed)]
        for index, block in zip(shared, taken, strict=False):
            line.table[index] = block
        line.table += taken[len(shared) :]
        return taken, shared, [i for i in shared if i * self.block_size < stored]

    def publish(self, name: str) -> int:
        """Full blocks whose tokens are computed; returns how many are new."""
        line, new = self.lines[name], 0
        for index in range(line.computed // self.block_size):
            block = line.table[index]
            if block not in self.published:
                new += 1
                text = self.published[block] = line.text((index + 1) * self.block_size)
                self.cached.setdefault(text, block)
        return new

    def fork(self, name: str, other: str) -> None:
        """A second sequence with the same blocks."""
        line = self.lines[name]
        self.lines[other] = Line(
            line.space, list(line.tokens), line.computed, line.found, list(line.table)
        )

    def free(self, name: str) -> None:
        """Its table is empty; of what is free now, the last block of it comes first."""
        table, self.lines[name].table = self.lines[name].table, []
        for block in reversed(table):
            if self.holders(block):
                continue
            text = self.published.get(block)
            if text is not None and self.cached.get(text) == block:
                self.lru.append(block)
            else:
                self.published.pop(block, None)
                self.plain.append(block)

    def _take(self) -> int:
        if self.plain:
            return self.plain.pop(0)
        block = self.lru.pop(0)
        del self.cached[self.published.pop(block)]
        return block
