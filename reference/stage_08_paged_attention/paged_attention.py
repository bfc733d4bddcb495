"""Stage 08: paged attention. Keys and values lie in blocks anywhere; a table says where."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import torch

from course.model import ModelConfig, masked_attention
from course.types import Sequence, StepBatch


def slot_mapping(
    block_table: SequenceABC[int], start: int, count: int, block_size: int
) -> list[int]:
    """Where the positions start .. start + count - 1 of a sequence lie in the pool.

    A *slot* is the place of one position. Block b holds the slots from b * block_size on.

    Args:
        block_table: the blocks of the sequence, in the order of its positions.
        start: the first position; count: how many.

    Returns:
        `count` slots.

    Raises:
        ValueError: `start` or `count` is negative, or the table has no block for a position; the
            message names `block_table`.
    """
    if start < 0 or count < 0:
        raise ValueError(f"start and count must not be negative, got {start} and {count}")
    if start + count > len(block_table) * block_size:
        raise ValueError(
            f"block_table holds {len(block_table)} blocks of {block_size}, "
            f"too few for {start + count} positions"
        )
    # solution: begin
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, start + count)
    ]
    # solution: end


def step_batch(
    sequences: SequenceABC[Sequence],
    counts: SequenceABC[int],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
) -> StepBatch:
    """Lay the next tokens of several sequences end to end: one ragged forward pass.

    Sequence s feeds its `counts[s]` tokens from `num_computed` on: its newest one (decode), or
    several (prefill, or a chunk of it). Its block table has room for them.

    Args:
        sequences: S of them, S >= 1.
        counts: S numbers, each at least 1 and at most the tokens that the sequence has not fed.
        device: of all the tensors.

    Returns:
        A StepBatch of T = sum(counts) tokens. Logits are wanted for the last token of each
        sequence. Tables are padded with -1. The sequences stay as they are.

    Raises:
        ValueError: `sequences` is empty, `counts` has another length, or a count is out of range.
    """
    if len(sequences) == 0 or len(counts) != len(sequences):
        raise ValueError(
            f"counts must hold one number for each of at least one sequence, "
            f"got {len(counts)} for {len(sequences)}"
        )
    for sequence, count in zip(sequences, counts, strict=True):
        left = len(sequence.tokens) - sequence.num_computed
        if not 1 <= count <= left:
            raise ValueError(f"counts must lie in 1 .. {left} for this sequence, got {count}")
    # solution: begin
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, count in zip(sequences, counts, strict=True):
        begin, end = sequence.num_computed, sequence.num_computed + count
        token_ids += sequence.tokens[begin:end]
        positions += range(begin, end)
        slots += slot_mapping(sequence.block_table, begin, count, block_size)
        starts.append(len(token_ids))
    width = max(len(sequence.block_table) for sequence in sequences)
    tables = [s.block_table + [-1] * (width - len(s.block_table)) for s in sequences]
    lengths = [s.num_computed + count for s, count in zip(sequences, counts, strict=True)]

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        query_start_loc=tensor(starts, torch.int32),
        context_lens=tensor(lengths, torch.int32),
        block_tables=tensor(tables, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        logit_rows=tensor([start - 1 for start in starts[1:]], torch.int64),
    )
    # solution: end


class PagedAttention:
    """A pool of KV blocks, and attention over the sequences whose tables point into it.

    `plan` prepares a step; the forward pass then calls this object as its `attend`, once per layer,
    on tensors of fixed shape. `keys` and `values` are [L, num_blocks + 1, block_size, Hkv, D]: the
    last block belongs to nobody, and takes what is written to slot -1.

    Every step reads the past out of the blocks, once; no copy of it is kept for the next one. All
    that have equally many queries are attended in one call, so that a decode step takes as many
    operations for eight sequences as for two.

    A row that stands for nobody is a sequence of one token at position 0, with a context of 1, a
    table that begins with somebody's block and goes on with -1, and slot -1. Its result is dropped.

    Args:
        config: gives `num_layers` (L), `num_kv_heads` (Hkv) and `head_dim` (D).
        num_blocks, block_size: at least 1.
        dtype, device: of the keys and values.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        shape = (
            config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim
        )  # fmt: skip
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def plan(self, batch: StepBatch) -> None:
        """Work out, once for all layers, what each sequence of a step reads and where it writes.

        The batch stays as it is.
        """
        # solution: begin
        self.slots = batch.slot_mapping
        counts = batch.query_start_loc.diff().tolist()
        self.groups = [
            self._group(batch, [s for s, c in enumerate(counts) if c == count], count)
            for count in sorted(set(counts))
        ]
        # solution: end

    # solution: begin
    def _group(
        self, batch: StepBatch, members: list[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The G sequences of a step that have `count` queries each: one call of dense attention.

        Returns the rows of their queries [G, count], the slots of their contexts [G, M] with M the
        longest, and what each query sees, bool [G, count, M].
        """
        device = batch.slot_mapping.device
        chosen = torch.tensor(members, device=device)
        rows = batch.query_start_loc[chosen, None] + torch.arange(count, device=device)
        lengths = batch.context_lens[chosen, None]  # [G, 1]
        position = torch.arange(int(lengths.max()), device=device)  # [M]
        blocks = batch.block_tables[chosen][:, position // self.block_size].long()
        slots = blocks * self.block_size + position % self.block_size
        # Past a context nothing may be read, not even to be masked: 0 x NaN is NaN. Its first
        # position stands in, which has been written.
        slots = torch.where(position < lengths, slots, slots[:, :1])
        own = lengths - count + torch.arange(count, device=device)  # [G, count]
        return rows, slots, position <= own[:, :, None]

    # solution: end
    def copy_blocks(self, pairs: SequenceABC[tuple[int, int]]) -> None:
        """Copy blocks, in all layers, for (source, destination) in `pairs`; before the next write.

        The pairs are those of one or several `BlockAllocator.append`. The caller sees to it that no
        destination is a source of the same call, or comes twice, so their order does not matter. A
        source may have several destinations. No other block is touched or copied.
        """
        # solution: begin
        if pairs:
            sources, destinations = (list(side) for side in zip(*pairs, strict=True))
            self.keys[:, destinations] = self.keys[:, sources]
            self.values[:, destinations] = self.values[:, sources]
        # solution: end

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write the keys and values of the planned step, then attend, each sequence to its own.

        Args:
            q: [1, T, Hq, D].
            k, v: [1, T, Hkv, D].

        Returns:
            [1, T, Hq, D].
        """
        # solution: begin
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)  # [slots]
        keys[self.slots], values[self.slots] = k[0], v[0]
        out = torch.empty_like(q)
        for rows, slots, visible in self.groups:
            # Indexing by a tensor copies: every step moves every context once more than it must.
            out[0, rows] = masked_attention(q[0, rows], keys[slots], values[slots], visible)
        return out
        # solution: end
