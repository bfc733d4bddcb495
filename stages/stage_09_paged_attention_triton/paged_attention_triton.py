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
    raise NotImplementedError("your code goes here")


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
    raise NotImplementedError("your code goes here")


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
    raise NotImplementedError("your code goes here")


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
        raise NotImplementedError("your code goes here")

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """As stage 08's: q [1, T, Hq, D]; k, v [1, T, Hkv, D] -> [1, T, Hq, D]."""
        raise NotImplementedError("your code goes here")


def splits_for(programs: int, longest: int, device: torch.device) -> int:
    """A power of two of splits, so that all processors of a GPU have work, and none has too little.

    Args:
        programs: sequences x KV heads: what there is without splitting.
        longest: positions of the longest context.
    """
    raise NotImplementedError("your code goes here")
