"""Stage 13: CUDA graphs. A decode step is recorded once, and then replayed in a single call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from course.model import masked_attention
from course.parts import PagedAttention
from course.types import StepBatch, require_int, require_range

# solution: begin
# A row that stands for nobody: token 0 at position 0, with a context of 1 that begins in block 0,
# and written to slot -1, which no table holds. Everything else about a step is a constant of its
# bucket: in decode, query_start_loc is 0, 1, 2, ...
NOBODY = {"token_ids": 0, "positions": 0, "context_lens": 1, "block_tables": 0, "slot_mapping": -1}
# solution: end


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
        # solution: begin
        self.step = batch if len(batch.token_ids) == len(batch.context_lens) else None
        if self.step is None:
            super().plan(batch)
        # solution: end

    # solution: begin
    def _read_tables(self, batch: StepBatch) -> None:
        """What every layer needs: the slots of all columns [S, M], and which of them count."""
        size, device = self.block_size, batch.block_tables.device
        blocks = batch.block_tables.long()[:, :, None]  # [S, W, 1]
        slots = (blocks * size + torch.arange(size, device=device)).flatten(1)  # [S, M]
        visible = torch.arange(slots.shape[1], device=device) < batch.context_lens[:, None]
        # As in stage 08: past a context stands its first slot, which has been written.
        self.contexts = torch.where(visible, slots, slots[:, :1])
        self.visible = visible[:, None]  # [S, 1, M]

    # solution: end
    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """As stage 08's: q [1, T, Hq, D]; k, v [1, T, Hkv, D] -> [1, T, Hq, D].

        Layers are called in order, from 0 on.
        """
        # solution: begin
        if self.step is None:
            return super().__call__(layer, q, k, v)
        if layer == 0:  # not in `plan`, which no replay calls
            self._read_tables(self.step)
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)  # [slots]
        slots = self.step.slot_mapping
        keys[slots], values[slots] = k[0], v[0]
        out = masked_attention(
            q.transpose(0, 1), keys[self.contexts], values[self.contexts], self.visible
        )
        return out.transpose(0, 1)  # [S, 1, Hq, D] -> [1, S, Hq, D]
        # solution: end


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
        # solution: begin
        self.pool = graphs.graph_pool_handle()
        # The largest first: the smaller ones then find room in what it has used and given back.
        self.captured = {size: self._capture(size) for size in sorted(set(buckets), reverse=True)}
        # solution: end

    # solution: begin
    def _capture(self, size: int) -> Captured:
        """A graph for `size` rows, which stand for nobody yet."""
        graphs, step = self.graphs, self._empty_step(size)
        self.attend.plan(step)
        # What is set up at a first use, such as a library's workspace, cannot be captured.
        side = graphs.Stream()
        side.wait_stream(graphs.current_stream())
        with graphs.stream(side):
            self._forward(step)
        graphs.current_stream().wait_stream(side)
        graph = graphs.CUDAGraph()
        with graphs.graph(graph, pool=self.pool):
            logits = self._forward(step)
        return Captured(graph, step, logits)

    def _empty_step(self, size: int) -> StepBatch:
        """A decode step of `size` rows that stand for nobody."""
        device = self.model.device

        def rows(name: str, dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.full((size, *more), NOBODY[name], dtype=dtype, device=device)

        return StepBatch(
            token_ids=rows("token_ids", torch.int64),
            positions=rows("positions", torch.int64),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=rows("context_lens", torch.int32),
            block_tables=rows("block_tables", torch.int32, self.width),
            slot_mapping=rows("slot_mapping", torch.int64),
            logit_rows=torch.arange(size, device=device),
        )

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        return self.model.forward(
            batch.token_ids[None], batch.positions[None], self.attend, batch.logit_rows
        )

    def _bucket(self, batch: StepBatch) -> int | None:
        """The smallest bucket that can take a step; None if it must run eagerly."""
        rows, width = batch.block_tables.shape  # shapes lie on the host: nothing is waited for
        decodes = len(batch.token_ids) == rows and len(batch.logit_rows) <= rows
        if not decodes or width > self.width:
            return None
        return min((size for size in self.captured if size >= rows), default=None)

    # solution: end
    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """The logits of a step.

        Args:
            batch: S sequences, S >= 1, on the model's device. It stays as it is, and may be freed
                when the call returns: nothing is kept of a step.

        Returns:
            [L, V], for the L rows that `batch.logit_rows` names. They may lie in memory of a graph:
            the next call overwrites them, so copy what is to be kept.
        """
        # solution: begin
        size = self._bucket(batch)
        if size is None:
            self.attend.plan(batch)
            return self._forward(batch)
        graph, step, logits = self.captured[size]
        rows, width = batch.block_tables.shape
        step.block_tables[:rows, :width].copy_(batch.block_tables)
        for name in ("token_ids", "positions", "context_lens", "slot_mapping"):
            getattr(step, name)[:rows].copy_(getattr(batch, name))
        for name, nobody in NOBODY.items():
            getattr(step, name)[rows:].fill_(nobody)
        wanted = len(batch.logit_rows)
        step.logit_rows[:wanted].copy_(batch.logit_rows)
        graph.replay()
        return logits[:wanted]
        # solution: end
