"""Stage 13: CUDA graphs. A decode step is recorded once, and then replayed in a single call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from course.model import masked_attention
from course.parts import PagedAttention
from course.types import StepBatch, require_int, require_range


class GraphDecodeAttention(PagedAttention):
    """Stage 08's pool, with decode steps that a graph can hold.

    In a decode step, a call reads nothing but tensors: those of the planned batch, q, k and v. It
    never asks for a value, and no shape depends on one. So the operations of a captured call are
    right for whatever the batch holds later, as long as it lies at the same addresses. The price:
    every row gathers the whole width of its table, however short its context is.

    Any other step is stage 08's.
    """

    def plan(self, batch: StepBatch) -> None:
        """Take a batch for the calls that follow.

        In a decode step (as many tokens as sequences) nothing is read here: the batch may be filled
        later, and again and again. The batch stays as it is.
        """
        raise NotImplementedError("your code goes here")

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """As stage 08's: q [1, T, Hq, D]; k, v [1, T, Hkv, D] -> [1, T, Hq, D].

        Layers are called in order, from 0 on.
        """
        raise NotImplementedError("your code goes here")


class Captured(NamedTuple):
    """A graph, and the two ends of it that do not move."""

    graph: Any  # graphs.CUDAGraph
    step: StepBatch  # what it reads
    logits: torch.Tensor  # [bucket, V], what it writes


class GraphRunner:
    """Forward passes, of which decode steps are replayed: a graph for each bucket of batch sizes.

    All graphs are captured when the runner is made, the largest bucket first, into one pool. A
    decode step takes the smallest bucket that has room for it; rows that are left over stand for
    nobody. What no graph was captured for (more sequences than the largest bucket, a step with a
    prefill or a chunk in it, a table wider than `width`) runs eagerly.

    Making a runner writes into no block of the pool but the one that belongs to nobody.

    Args:
        model: a `Decoder`, or anything with its `forward` and `device`.
        attend: an attention whose call reads tensors only, such as `GraphDecodeAttention`. Its
            `plan` gets the batch of a graph once, before the capture.
        buckets: batch sizes to capture, in any order.
        width: columns of the block tables in all graphs: the most blocks that a sequence may have.
        graphs: `torch.cuda` on a GPU. On a CPU `course.graphs`, which has the same names:
            CUDAGraph, graph, graph_pool_handle, Stream, stream, current_stream, synchronize.

    Raises:
        ValueError: `buckets` is empty, or holds a number below 1; `width` is below 1.
        TypeError: a bucket, or `width`, is not an int.
    """

    def __init__(
        self,
        model: Any,
        attend: Any,
        buckets: Iterable[int],
        width: int,
        graphs: Any,
    ) -> None:
        buckets = list(buckets)
        if not buckets:
            raise ValueError("buckets must hold at least one batch size, got none")
        for name, value in (*(("buckets", size) for size in buckets), ("width", width)):
            require_int(name, value)
            require_range(name, value, low=1)
        self.model = model
        self.attend = attend
        self.width = width
        self.graphs = graphs
        raise NotImplementedError("your code goes here")

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """The logits of a step.

        Args:
            batch: S sequences, S >= 1, on the model's device. It stays as it is, and may be freed
                when the call returns: nothing is kept of a step.

        Returns:
            [L, V], for the L rows that `batch.logit_rows` names. They may lie in memory of a graph:
            the next call overwrites them, so copy what is to be kept.
        """
        raise NotImplementedError("your code goes here")
