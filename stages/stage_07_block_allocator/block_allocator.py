"""Stage 07: the block allocator. Which blocks of a pool are free, and who holds the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from course.types import OutOfBlocks, require_int, require_range


class BlockAllocator:
    """Hands out the blocks of a pool: ids from 0 to num_blocks - 1, block_size tokens in each.

    A sequence has a *block table*, a list of ids that belongs to the caller: its token p lies in
    block table[p // block_size], at offset p % block_size. A block may stand in several tables; its
    reference count says in how many. With a count of 0 it is free, so that at any time
    free + used = num_blocks. The memory itself is somebody else's: nothing is read or written here.

    The free list is a queue: the block that has been free longest is taken first, in a new pool the
    one with the lowest id. The blocks that one call takes may stand in its table in any order.
    Every block is taken by `take` and given back by `give_back`, so that a subclass that keeps
    another list has these two to replace, and `num_free`. Memory does not grow with operations, and
    what is done for one block, or to read `num_free`, takes as long in a large pool or a long table
    as in a small one; only `check` looks at everything.

    Args:
        num_blocks, block_size: at least 1; also attributes.

    Raises:
        ValueError, TypeError: either is below 1, or no int.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
            require_int(name, size)
            require_range(name, size, low=1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks  # of each block: how many tables hold it
        raise NotImplementedError("your code goes here")

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        raise NotImplementedError("your code goes here")

    def take(self) -> int:
        """Take the block that has been free longest off the free list, which is not empty."""
        raise NotImplementedError("your code goes here")

    def give_back(self, block: int) -> None:
        """Put a block that no table holds any more on the free list, behind all others."""
        raise NotImplementedError("your code goes here")

    def ref_count(self, block: int) -> int:
        """How many tables hold a block; 0 if it is free.

        Raises:
            ValueError, TypeError: there is no such block (`block`).
        """
        require_int("block", block)
        require_range("block", block, low=0, high=self.num_blocks - 1)
        return self._ref_counts[block]

    def blocks_for(self, num_tokens: int) -> int:
        """The fewest blocks that hold this many tokens.

        Raises:
            ValueError, TypeError: `num_tokens` is negative, or no int.
        """
        _require_count("num_tokens", num_tokens)
        raise NotImplementedError("your code goes here")

    def allocate(self, num_tokens: int) -> list[int]:
        """A block table for the first tokens of a sequence, with no block more than they need.

        Raises:
            OutOfBlocks: fewer are free.
            ValueError, TypeError: `num_tokens` is negative, or no int.
        """
        _require_count("num_tokens", num_tokens)
        raise NotImplementedError("your code goes here")

    def append(self, table: list[int], num_tokens: int, new_tokens: int) -> list[tuple[int, int]]:
        """Make room for the next tokens of a sequence: they can be written when this has returned.

        Whatever they will be written into is then in the table, and in no other: blocks that are
        missing are added at the end, and a shared block that would be written is replaced by a new
        one. Nothing else changes. The table may have room to spare, which is used first.

        It takes the same time however long the table is.

        Args:
            table: changed in place.
            num_tokens: tokens that it holds so far.
            new_tokens: how many more are to be written; for 0 nothing changes.

        Returns:
            Blocks to be copied, (source, destination): replaced ones in which some of the first
            `num_tokens` tokens lie. They are to be copied before anything is written, in any order;
            those of several appends append by append.

        Raises:
            OutOfBlocks: fewer blocks are free than it takes, copies included.
            ValueError: a number is negative; of the block that holds the last of the `num_tokens`
                tokens and those to be written, one is free, is none at all, or stands there twice
                (`table`, and the block's id); or the table is too short (`num_tokens`).
            TypeError: a number is no int, a table no list.
        """
        _require_list(table)
        _require_count("num_tokens", num_tokens)
        _require_count("new_tokens", new_tokens)
        raise NotImplementedError("your code goes here")

    def fork(self, table: list[int]) -> list[int]:
        """A second table of the same blocks, for a sequence that begins like this one.

        Raises:
            ValueError: a block of the table is free, is none, or stands there twice (`table`, and
                the block's id). TypeError: the table is no list.
        """
        _require_list(table)
        raise NotImplementedError("your code goes here")

    def free(self, table: list[int]) -> None:
        """Give the blocks of a sequence back, the last one first, and empty its table.

        Those that stand in other tables stay in use. The order keeps the beginning of a text for
        longest: somebody may begin alike.

        Raises:
            ValueError: as `fork`; nothing is given back then.
        """
        _require_list(table)
        raise NotImplementedError("your code goes here")

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that the pool is in order, given every table that is in use.

        Args:
            tables: may be walked once only.

        Raises:
            RuntimeError: a block's count is not the number of tables that hold it, or
                free + used is not `num_blocks`. The message gives the block, or the numbers. A
                table that holds a block twice, which no operation makes, may count once or twice.
        """
        raise NotImplementedError("your code goes here")


def _require_count(name: str, value: int) -> None:
    """Raise an error that names `name` unless it is an int, and not negative."""
    require_int(name, value)
    require_range(name, value, low=0)


def _require_list(table: object) -> None:
    """Raise a TypeError unless it is a list: only a list can be changed in place."""
    if not isinstance(table, list):
        raise TypeError(f"table must be a list of block ids, got {type(table).__name__}")
