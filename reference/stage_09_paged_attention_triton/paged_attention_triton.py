"""Stage 09: paged attention in Triton. A kernel walks the block table; nothing is gathered."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course.model import ModelConfig
from course.parts import PagedAttention
from course.types import StepBatch

MAX_QUERIES = 16  # of a sequence: more than that is prefill, which is bound by arithmetic
TILE = 64  # positions that a program reads at a time


@triton.jit
def attend_kernel(
    out,  # [T, Hq, D]
    partial,  # [S, QUERIES, Hq, SPLITS, D] float32, and with it
    stats,  # [S, QUERIES, Hq, SPLITS, 2] float32: the maximum and the sum of each split
    q,  # [T, Hq, D], with rows `q_stride` elements apart
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    block_tables,  # [S, W]
    context_lens,  # [S]
    query_start_loc,  # [S + 1]
    width,  # W
    q_stride,
    scale,
    QUERIES: tl.constexpr,  # the most that a sequence has here
    GROUPS: tl.constexpr,  # query heads that share a KV head
    ROWS: tl.constexpr,  # QUERIES x GROUPS, padded to a power of two
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One sequence, one KV head, one split of the context: program (s, h, split)."""
    # solution: begin
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - start
    if queries > QUERIES:
        return  # a long chunk: it goes another way
    length = tl.load(context_lens + sequence)

    # All queries that read this KV head are the rows of one tile: its keys are loaded once.
    row = tl.arange(0, ROWS)
    query, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    column = tl.arange(0, HEAD_DIM)
    heads = kv_heads * GROUPS
    head_row = (start + query) * heads + head  # [ROWS], rows of [T * Hq, D]
    is_row = query < queries
    q_row = (start + query) * q_stride + head * HEAD_DIM  # not head_row: q may be a view
    q_tile = tl.load(q + q_row[:, None] + column, mask=is_row[:, None], other=0.0)  # [ROWS, D]
    own = length - queries + query  # the position of each row's query

    per_split = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, length)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for tile in range(first, last, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < last
        block = tl.load(
            block_tables + sequence * width + position // BLOCK_SIZE, mask=inside, other=0
        )
        # In 64 bits: a pool of some GB has more elements than 32 bits can count.
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = (slot * kv_heads + kv_head)[:, None] * HEAD_DIM + column  # [TILE, D]
        # Both loads are masked: what lies past the context may be NaN, and 0 x NaN is NaN.
        k_tile = tl.load(keys + offset, mask=inside[:, None], other=0.0)
        v_tile = tl.load(values + offset, mask=inside[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale  # [ROWS, TILE]
        seen = inside & (position <= own[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no maximum to subtract: -inf - -inf is NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(maximum - base)
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(
            weights.to(v_tile.dtype), v_tile, input_precision="ieee"
        )
        maximum = new_maximum

    if SPLITS == 1:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + head_row[:, None] * HEAD_DIM + column, result.to(out.dtype.element_ty),
            mask=is_row[:, None],
        )  # fmt: skip
    else:
        part = ((sequence * QUERIES + query) * heads + head) * SPLITS + split
        tl.store(partial + part[:, None] * HEAD_DIM + column, result, mask=is_row[:, None])
        tl.store(stats + part * 2, maximum, mask=is_row)
        tl.store(stats + part * 2 + 1, total, mask=is_row)
    # solution: end


@triton.jit
def merge_kernel(
    out,  # [T, Hq, D]
    partial,  # [S, QUERIES, Hq, SPLITS, D]
    stats,  # [S, QUERIES, Hq, SPLITS, 2]
    query_start_loc,  # [S + 1]
    heads,  # Hq
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two
):
    """Put the splits of one query head of one sequence together: program (s, query, head)."""
    # solution: begin
    sequence, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - start
    if queries > QUERIES:
        return
    if query >= queries:
        return
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, HEAD_DIM)
    part = ((sequence * QUERIES + query) * heads + head) * SPLITS + split
    maximum = tl.load(stats + part * 2)  # [SPLITS]
    total = tl.load(stats + part * 2 + 1)
    result = tl.load(partial + part[:, None] * HEAD_DIM + column)  # [SPLITS, D]
    # Each split weighed its keys against its own maximum. An empty one has -inf, and weighs 0.
    highest = tl.max(maximum, axis=0)
    weight = tl.exp(maximum - tl.where(highest == float("-inf"), 0.0, highest))
    norm = tl.sum(weight * total, axis=0)
    merged = tl.sum(weight[:, None] * result, axis=0) / tl.where(norm == 0.0, 1.0, norm)
    head_row = (start + query) * heads + head
    tl.store(out + head_row * HEAD_DIM + column, merged.to(out.dtype.element_ty))
    # solution: end


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_queries: int,
    num_splits: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of S sequences, each with at most `max_queries` queries, over paged keys.

    Args:
        q: [T, Hq, D], the queries of a step; D a power of two, at least 16. It may be a view, with
            other tensors between its rows: what the decoder hands over is part of a wider product.
        keys, values: [num_blocks, block_size, Hkv, D], contiguous: the pool of one layer.
        block_tables: int32 [S, W]; context_lens: int32 [S]; query_start_loc: int32 [S + 1].
        max_queries: 1 to MAX_QUERIES. Rows of a sequence with more of them are left as they are.
        num_splits: a power of two: into how many programs a context is cut. The result does not
            depend on it, rounding aside.
        out: [T, Hq, D] to write to; a new tensor by default.

    Returns:
        [T, Hq, D].

    Raises:
        ValueError: `max_queries` or `num_splits` is out of range, or the shapes of `q` and `keys`
            do not fit together.
    """
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[2]
    if not 1 <= max_queries <= MAX_QUERIES:
        raise ValueError(f"max_queries must lie in 1 .. {MAX_QUERIES}, got {max_queries}")
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits must be a power of two, got {num_splits}")
    if keys.shape != values.shape or keys.shape[3] != dim or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} and keys {tuple(keys.shape)} do not fit together")
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"the width of q must be a power of two, at least 16, got {dim}")
    out = torch.empty_like(q) if out is None else out
    # solution: begin
    if q.stride()[1:] != (dim, 1):
        q = q.contiguous()  # rows may lie apart, but each of them must be whole
    groups, sequences = heads // kv_heads, len(context_lens)
    partial = stats = out  # nobody looks at them when there is one split
    if num_splits > 1:
        shape = (sequences, max_queries, heads, num_splits)
        partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    rows = max(16, triton.next_power_of_2(max_queries * groups))
    attend_kernel[sequences, kv_heads, num_splits](
        out, partial, stats, q, keys, values, block_tables, context_lens, query_start_loc,
        block_tables.shape[1], q.stride(0), dim**-0.5, QUERIES=max_queries, GROUPS=groups,
        ROWS=rows, HEAD_DIM=dim, BLOCK_SIZE=keys.shape[1], TILE=TILE, SPLITS=num_splits,
        num_warps=4 if rows * dim <= 4096 else 8,  # more rows in 4 warps do not fit in registers
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[sequences, max_queries, heads](
            out, partial, stats, query_start_loc, heads, QUERIES=max_queries, HEAD_DIM=dim,
            SPLITS=num_splits,
        )  # fmt: skip
    return out
    # solution: end


class TritonPagedAttention(PagedAttention):
    """Stage 08's pool, read by the kernel. Chunks of more than MAX_QUERIES queries are gathered.

    Args:
        num_splits: programs for each context; by default as many as it takes to fill the device.
        The others are those of `PagedAttention`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_splits: int | None = None,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype=dtype, device=device)
        self.kv_heads = config.num_kv_heads
        self.num_splits = num_splits

    def plan(self, batch: StepBatch) -> None:
        """As stage 08's, for long chunks; the kernel takes the tensors of the batch as they are."""
        # solution: begin
        counts = batch.query_start_loc.diff().tolist()
        short = [count for count in counts if count <= MAX_QUERIES]
        self.batch = batch
        self.max_queries = max(short, default=0)
        self.slots = batch.slot_mapping
        self.groups = [
            self._group(batch, [s for s, c in enumerate(counts) if c == count], count)
            for count in sorted(set(counts))
            if count > MAX_QUERIES
        ]
        width = batch.block_tables.shape[1] * self.block_size
        self.splits = self.num_splits or splits_for(
            len(counts) * self.kv_heads, width, self.keys.device
        )
        # solution: end

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """As stage 08's: q [1, T, Hq, D]; k, v [1, T, Hkv, D] -> [1, T, Hq, D]."""
        # solution: begin
        out = super().__call__(layer, q, k, v)  # writes, and attends for the long chunks
        if self.max_queries:
            batch = self.batch
            paged_attention(
                q[0], self.keys[layer], self.values[layer], batch.block_tables,
                batch.context_lens, batch.query_start_loc, max_queries=self.max_queries,
                num_splits=self.splits, out=out[0],
            )  # fmt: skip
        return out
        # solution: end


def splits_for(programs: int, longest: int, device: torch.device) -> int:
    """A power of two of splits, so that all processors of a GPU have work, and none has too little.

    Args:
        programs: sequences x KV heads: what there is without splitting.
        longest: positions of the longest context.
    """
    # solution: begin
    processors = 4  # where there is no GPU, the interpreter's programs follow each other anyway
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = min(2 * processors // programs, longest // (4 * TILE), 64)
    return 1 << max(0, wanted.bit_length() - 1) if wanted > 1 else 1
    # solution: end
