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
    """The hash of a full block: of its tokens, in order, and of everything before them.

    Args:
        parent: the hash of the block before; for the first one, of the model and salt.
        tokens: those of the block.

    Returns:
        An int of at most 256 bits. Equal arguments give equal hashes within a process; others
        nearly always another one. Whoever relies on more than that compares tokens.
    """
    # solution: begin
    return hash((parent, tokens))
    # solution: end


@dataclass(frozen=True, eq=False)
class Prefix:
    """The text up to the end of a full block: a key for dictionaries.

    A dictionary looks where `hash` says, and then asks `==`: so two texts of one hash do no harm.
    """

    parent: Prefix | None  # the text up to the end of the block before; None: there is none
    tokens: tuple[int, ...]  # of the block
    space: tuple[str, str]  # model and salt of the request
    hash: int

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        """Whether both are the same text of one model and salt, from its first token on.

        The hashes are not asked: others may be equal too. Texts that go on from one object are not
        compared further back than that, so that it is one step as a rule. A text may have
        thousands of blocks.
        """
        # solution: begin
        one: object = self
        while one is not other:
            if not (isinstance(one, Prefix) and isinstance(other, Prefix)):
                return False
            if one.tokens != other.tokens or one.space != other.space:
                return False
            one, other = one.parent, other.parent
        return True
        # solution: end


class PrefixCachingAllocator(BlockAllocator):
    """Stage 07's allocator, in which a sequence begins with blocks that earlier ones have filled.

    A block is *published* once it is full and its keys and values have been computed. The first one
    that is published with a text (its tokens, all those before them, and the request's model and
    salt) is *cached* from then on, until it is taken: sequences that begin with this text may hold
    it too. A later one with the same text, its twin, is never cached.

    A cached block that no table holds is free as well. `take` prefers free blocks that are not
    cached, in stage 07's order. Then comes the cached one that was given back longest ago. `free`
    gives the last block of a table back first, so that of a text the end goes before the beginning.

    Memory grows with the pool, not with the texts that it has seen. What is done for a block takes
    as long in a large pool as in a small one.

    Args:
        num_blocks, block_size: as for BlockAllocator.
        hash_block: finds candidates. It is asked at most once for each block that is looked up, and
            once for each that is published; or before, if the hash is kept until then. It is never
            trusted, the default no more than another.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, hash_block: HashBlock = hash_block
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.hash_block = hash_block
        # solution: begin
        self._published: list[Prefix | None] = [None] * num_blocks  # the text of each block
        self._cached: dict[Prefix, int] = {}
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # given back longest ago first
        # solution: end

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, cached ones included."""
        # solution: begin
        return super().num_free + len(self._free_cached)
        # solution: end

    def take(self) -> int:
        """Take a block off the free list, which is not empty. What it held is forgotten."""
        # solution: begin
        if super().num_free:
            return super().take()
        block, _ = self._free_cached.popitem(last=False)
        del self._cached[self._published[block]]
        self._published[block] = None
        return block
        # solution: end

    def give_back(self, block: int) -> None:
        """Put a block that no table holds any more on the free list."""
        # solution: begin
        prefix = self._published[block]
        if prefix is not None and self._cached.get(prefix) == block:
            self._free_cached[block] = None
        else:
            self._published[block] = None
            super().give_back(block)
        # solution: end

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a sequence begins with, in order. Nothing changes in either.

        The first block that is not cached ends them. At least one token is left to compute, whose
        logits give the next one: of n tokens at most (n - 1) // block_size blocks are found, and
        without tokens none.
        """
        # solution: begin
        blocks: list[int] = []
        parent = None
        for index in range((len(sequence.tokens) - 1) // self.block_size):
            block = self._cached.get(self._prefix(sequence, index, parent))
            if block is None:
                break
            blocks.append(block)
            parent = self._published[block]
        return blocks
        # solution: end

    def admit(self, sequence: Sequence, *, reserve: int = 0) -> None:
        """Give a sequence its table: the blocks that are cached, and new ones for the rest.

        There is room for all of its tokens then. Those of cached blocks count as computed:
        `num_computed` and `num_cached` are their number.

        Args:
            sequence: it has no blocks, and nothing of it is computed. Without tokens it gets none.
            reserve: blocks that must still be free afterwards.

        Raises:
            OutOfBlocks: too few are free; what is needed includes `reserve`. A cached block that is
                free is needed like a new one: it leaves the free list too. Nothing has changed,
                in the sequence neither.
            ValueError, TypeError: the sequence has blocks (`sequence`); `reserve` is negative, or
                no int.
        """
        if sequence.block_table:
            raise ValueError(f"sequence must have no blocks, got {len(sequence.block_table)}")
        require_int("reserve", reserve)
        require_range("reserve", reserve, low=0)
        # solution: begin
        cached = self.cached_blocks(sequence)
        unused = [block for block in cached if self._ref_counts[block] == 0]
        new = self.blocks_for(len(sequence.tokens)) - len(cached)
        needed = new + len(unused) + reserve
        if needed > self.num_free:
            raise OutOfBlocks(needed, self.num_free)
        for block in unused:  # before new ones are taken, which might be these
            del self._free_cached[block]
        for block in cached:
            self._ref_counts[block] += 1
        found = len(cached) * self.block_size
        self.append(cached, found, len(sequence.tokens) - found)
        sequence.block_table = cached
        sequence.num_computed = sequence.num_cached = found
        # solution: end

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of a sequence whose tokens have been computed.

        It is called after the pass that wrote them: the first `num_computed` tokens are in the
        pool. Where a block with the same text is cached already, that one stays; tables stay as
        they are in any case. Each block is published once: what is published already costs
        nothing, however long the text.

        While a sequence has blocks its tokens only grow, and `num_computed` too: what is published
        is never written again. Who takes tokens back frees its blocks, and admits it anew.

        Raises:
            ValueError: more tokens are computed than the sequence has, or its blocks hold
                (`sequence`).
        """
        room = min(len(sequence.tokens), len(sequence.block_table) * self.block_size)
        if sequence.num_computed > room:
            raise ValueError(
                f"sequence must hold its {sequence.num_computed} computed tokens, and has tokens "
                f"and blocks for {room}"
            )
        # solution: begin
        table = sequence.block_table
        begin = end = sequence.num_computed // self.block_size
        while begin > 0 and self._published[table[begin - 1]] is None:
            begin -= 1
        for index in range(begin, end):
            parent = self._published[table[index - 1]] if index else None
            prefix = self._prefix(sequence, index, parent)
            first = self._cached.setdefault(prefix, table[index])
            # Of a twin, the text is noted as the object that is known: what follows compares fast.
            self._published[table[index]] = self._published[first] or prefix
        # solution: end

    # solution: begin
    def _prefix(self, sequence: Sequence, index: int, parent: Prefix | None) -> Prefix:
        """The text of a sequence up to the end of block `index`, which it fills."""
        start = index * self.block_size
        tokens = tuple(sequence.tokens[start : start + self.block_size])
        space = (sequence.request.model, sequence.request.cache_salt)
        before = hash(space) if parent is None else parent.hash
        return Prefix(parent, tokens, space, self.hash_block(before, tokens))

    # solution: end
