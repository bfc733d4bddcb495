"""Stage 10: prefix caching. Blocks that hold how an earlier text began are used again."""

from __future__ import annotations

# solution: begin
from collections import OrderedDict

# solution: end
from collections.abc import Callable
from dataclasses import dataclass

from course.parts import BlockAllocator
from course.types import OutOfBlocks, Sequence, require_int, require_range

HashBlock = Callable[[int, tuple[int, ...]], int]


def hash_block(parent: int, tokens: tuple[int, ...]) -> int:
    """The hash of a full block: of its tokens, and of everything before them.

    Args:
        parent: the hash of the block before; for the first one, a number that is everybody's.
        tokens: those of the block.

    Returns:
        Any int. Equal arguments give equal hashes within a process; other arguments nearly always
        another one. Whoever relies on more than that compares tokens.
    """
    # solution: begin
    return hash((parent, tokens))
    # solution: end


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a published block holds: its own tokens, behind those of its parent.

    Two of them are the same only if they are one object, so that comparing `parent` compares
    everything before the block, however long it is.
    """

    parent: Prefix | None  # None: the block is the first one
    tokens: tuple[int, ...]
    space: tuple[str, str]  # model and salt: prefixes are shared within one space only
    hash: int


class PrefixCachingAllocator(BlockAllocator):
    """Stage 07's allocator, in which a new sequence finds the blocks of an earlier one.

    A block that is full, and whose keys and values have been computed, is *published*: from then on
    a sequence that begins with the same tokens, of the same model and salt, may hold it too. A
    published block that no table holds any more is free and still findable, until it is taken.

    `take` prefers free blocks that nobody can find. Then comes the published one that was given
    back longest ago, so that of a text its end goes first (`free` gives the last block back first).

    Args:
        num_blocks, block_size: as for BlockAllocator.
        hash_block: finds candidates; it is never trusted. Tokens and parent are compared.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, hash_block: HashBlock = hash_block
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.hash_block = hash_block
        # solution: begin
        self._unused = OrderedDict.fromkeys(range(num_blocks))  # in the order of being taken
        self._prefixes: list[Prefix | None] = [None] * num_blocks  # what each block holds
        self._by_hash: dict[int, int] = {}  # the block to be found under a hash
        # solution: end

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, findable ones included."""
        # solution: begin
        return len(self._unused)
        # solution: end

    def take(self) -> int:
        """Take a block off the free list, which is not empty; what it held is forgotten."""
        # solution: begin
        block, _ = self._unused.popitem(last=False)
        prefix, self._prefixes[block] = self._prefixes[block], None
        if prefix is not None and self._by_hash.get(prefix.hash) == block:
            del self._by_hash[prefix.hash]
        return block
        # solution: end

    def give_back(self, block: int) -> None:
        """Put a block that no table holds any more on the free list."""
        # solution: begin
        self._unused[block] = None
        if not self._is_findable(block):
            self._unused.move_to_end(block, last=False)
        # solution: end

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The published blocks that a sequence begins with, in order; nothing changes.

        At least one token is left to compute, whose logits give the next one: of n tokens at most
        (n - 1) // block_size blocks are found.
        """
        # solution: begin
        blocks: list[int] = []
        parent = None
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            wanted = self._prefix(sequence, index, parent)
            block = self._find(wanted)
            if block is None:
                break
            blocks.append(block)
            parent = self._prefixes[block]
        return blocks
        # solution: end

    def admit(self, sequence: Sequence, *, reserve: int = 0) -> None:
        """Give a sequence its table: blocks that are cached first, and new ones for the rest.

        There is room for all of its tokens then; those of cached blocks count as computed
        (`num_computed`, and `num_cached`).

        Args:
            sequence: it has no blocks.
            reserve: blocks that must still be free afterwards.

        Raises:
            OutOfBlocks: too few are free. A cached block that is free is one that is needed, like a
                new one: it leaves the free list too. Nothing has changed.
            ValueError: the sequence has blocks (`sequence`); `reserve` is negative.
        """
        if sequence.block_table:
            raise ValueError(f"sequence must have no blocks, got {len(sequence.block_table)}")
        require_int("reserve", reserve)
        require_range("reserve", reserve, low=0)
        # solution: begin
        cached = self.cached_blocks(sequence)
        unused = [block for block in cached if self.ref_count(block) == 0]
        new = self.blocks_for(len(sequence.tokens)) - len(cached)
        if new + len(unused) + reserve > self.num_free:
            raise OutOfBlocks(new + len(unused) + reserve, self.num_free)
        for block in unused:
            del self._unused[block]
        for block in cached:
            self._ref_counts[block] += 1
        sequence.block_table = cached
        sequence.num_computed = sequence.num_cached = len(cached) * self.block_size
        self.append(cached, sequence.num_computed, len(sequence.tokens) - sequence.num_computed)
        # solution: end

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of a sequence whose tokens have been computed.

        Called after the pass that wrote them: the first `num_computed` tokens are in the pool. If
        another block with the same prefix is findable already, that one stays. What it takes does
        not depend on the length of the sequence, but on how many of its blocks are new.
        """
        # solution: begin
        first = full = sequence.num_computed // self.block_size
        table = sequence.block_table
        while first > 0 and self._prefixes[table[first - 1]] is None:
            first -= 1
        for index in range(first, full):
            parent = self._prefixes[table[index - 1]] if index else None
            prefix = self._prefix(sequence, index, parent)
            twin = self._find(prefix)
            if twin is None:
                self._by_hash[prefix.hash] = table[index]
            else:
                prefix = self._prefixes[twin]  # the next block has one parent, whoever is asked
            self._prefixes[table[index]] = prefix
        # solution: end

    # solution: begin
    def _prefix(self, sequence: Sequence, index: int, parent: Prefix | None) -> Prefix:
        """What block `index` of a sequence holds when it is full."""
        begin = index * self.block_size
        tokens = tuple(sequence.tokens[begin : begin + self.block_size])
        space = (sequence.request.model, sequence.request.cache_salt)
        before = hash(space) if parent is None else parent.hash
        return Prefix(parent, tokens, space, self.hash_block(before, tokens))

    def _find(self, wanted: Prefix) -> int | None:
        """The block that can be found with this prefix, if there is one."""
        block = self._by_hash.get(wanted.hash)
        found = None if block is None else self._prefixes[block]
        same = (
            found is not None
            and found.parent is wanted.parent
            and found.tokens == wanted.tokens
            and found.space == wanted.space
        )
        return block if same else None

    def _is_findable(self, block: int) -> bool:
        """Whether a sequence could be given this block for what it holds."""
        prefix = self._prefixes[block]
        return prefix is not None and self._by_hash.get(prefix.hash) == block

    # solution: end
