"""Stage 10 in another way: one block for each hash, whole texts compared, SHA-256."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from course.parts import BlockAllocator
from course.types import OutOfBlocks, Sequence, require_int, require_range


def hash_block(parent: int, tokens: tuple[int, ...]) -> int:
    """256 bits."""
    return int.from_bytes(hashlib.sha256(repr((parent, tokens)).encode()).digest(), "big")


class PrefixCachingAllocator(BlockAllocator):
    """Where hashes collide, the text that came first is found, and the other one is not cached."""

    def __init__(self, num_blocks: int, block_size: int, *, hash_block: Any = hash_block) -> None:
        super().__init__(num_blocks, block_size)
        self.hash_block = hash_block
        self.by_hash: dict[int, int] = {}
        self.texts: dict[int, tuple[Any, ...]] = {}  # of published blocks
        self.hashes: dict[int, int] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return super().num_free + len(self.unused)

    def take(self) -> int:
        if super().num_free:
            return super().take()
        block, _ = self.unused.popitem(last=False)
        del self.by_hash[self.hashes.pop(block)], self.texts[block]
        return block

    def give_back(self, block: int) -> None:
        if block in self.texts and self.by_hash.get(self.hashes[block]) == block:
            self.unused[block] = None
        else:
            self.texts.pop(block, None)
            self.hashes.pop(block, None)
            super().give_back(block)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        before = self.root(sequence)
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            before = self.hash_block(before, self.tokens(sequence, index))
            block = self.by_hash.get(before)
            if block is None or self.texts[block] != self.text(sequence, index):
                break
            blocks.append(block)
        return blocks

    def admit(self, sequence: Sequence, *, reserve: int = 0) -> None:
        if sequence.block_table:
            raise ValueError("sequence has blocks")
        require_int("reserve", reserve)
        require_range("reserve", reserve, low=0)
        table = self.cached_blocks(sequence)
        unused = [block for block in table if self.ref_count(block) == 0]
        needed = self.blocks_for(len(sequence.tokens)) - len(table) + len(unused) + reserve
        if needed > self.num_free:
            raise OutOfBlocks(needed, self.num_free)
        for block in unused:
            del self.unused[block]
        for block in table:
            self._ref_counts[block] += 1
        found = len(table) * self.block_size
        self.append(table, found, len(sequence.tokens) - found)
        sequence.block_table = table
        sequence.num_computed = sequence.num_cached = found

    def publish(self, sequence: Sequence) -> None:
        table, end = sequence.block_table, sequence.num_computed // self.block_size
        room = min(len(sequence.tokens), len(table) * self.block_size)
        if sequence.num_computed > room:
            raise ValueError("sequence is too short")
        new = [index for index in range(end) if table[index] not in self.texts]
        for index in new:
            before = self.hashes[table[index - 1]] if index else self.root(sequence)
            own = self.hash_block(before, self.tokens(sequence, index))
            self.hashes[table[index]] = own
            self.texts[table[index]] = self.text(sequence, index)
            self.by_hash.setdefault(own, table[index])

    def root(self, sequence: Sequence) -> int:
        return hash((sequence.request.model, sequence.request.cache_salt))

    def tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.tokens[index * self.block_size : (index + 1) * self.block_size])

    def text(self, sequence: Sequence, index: int) -> tuple[Any, ...]:
        request = sequence.request
        tokens = tuple(sequence.tokens[: (index + 1) * self.block_size])
        return request.model, request.cache_salt, tokens
