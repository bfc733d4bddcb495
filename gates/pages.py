"""Sequences in blocks, as the judge knows them: what attention must say, and where all lies."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun

TOLERANCE = 1e-5  # float32 attention against float64

Table = list[int]


class Pages:
    """Sequences in a pool: their tables, with ids in random order, and what was stored for each."""

    def __init__(
        self, gate: GateRun, heads: tuple[int, int, int], block_size: int, sizes: list[int],
        *, spare: int = 3,
    ) -> None:  # fmt: skip
        """
        Args:
            heads: query heads, KV heads, width.
            sizes: positions that each sequence's table has room for, at least.
            spare: blocks of the pool that belong to nobody.
        """
        self.heads, self.block_size = heads, block_size
        needed = [-(-size // block_size) for size in sizes]
        self.num_blocks = sum(needed) + spare
        ids = list(range(self.num_blocks))
        gate.rng.shuffle(ids)
        self.tables: list[Table] = [[ids.pop() for _ in range(count)] for count in needed]
        self.free = ids
        self.lengths = [0] * len(sizes)
        self.seed = gate.rng.randrange(1 << 30)
        # [layer][sequence]: keys and values so far, float32 [n, Hkv, D]
        self.past: list[list[list[torch.Tensor]]] = [
            [[torch.empty(0, *heads[1:]) for _ in range(2)] for _ in sizes] for _ in range(2)
        ]

    def step(
        self, counts: dict[int, int], *, padded: int = 0, values: dict[int, float] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """A step that feeds counts[s] new positions to each sequence s, in that order.

        padded: rows at the end that stand for nobody, and write to slot -1.
        values: what stands in the values of a sequence's first row, in KV head 0.

        Returns what the scenario takes, and the outputs [T, Hq, D] of each layer in float64.
        """
        rows = sum(counts.values())
        slots, positions = [], []
        for index, count in counts.items():
            for position in range(self.lengths[index], self.lengths[index] + count):
                block = self.tables[index][position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            self.lengths[index] += count
        members = [self.tables[index] for index in counts]
        width = max(map(len, members))
        starts = list(itertools.accumulate(counts.values(), initial=0))
        batch = {
            "token_ids": [7] * (rows + padded),
            "positions": positions + [0] * padded,
            "query_start_loc": starts + [rows + i + 1 for i in range(padded)],
            "context_lens": [self.lengths[index] for index in counts] + [1] * padded,
            "block_tables": [t + [-1] * (width - len(t)) for t in members]
            + [[members[0][0]] + [-1] * (width - 1)] * padded,
            "slot_mapping": slots + [-1] * padded,
            "logit_rows": [start - 1 for start in starts[1:]],
        }
        layers, outputs = [], []
        query_heads, kv_heads, width = self.heads
        for layer in range(2):
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            q, k, v = (
                torch.randn(rows + padded, n, width, generator=generator)
                for n in (query_heads, kv_heads, kv_heads)
            )
            for index, value in (values or {}).items():
                v[starts[list(counts).index(index)], 0] = value
            layers.append([q, k, v])
            outputs.append(self._outputs(layer, counts, q, k, v))
        return ["step", batch, layers], outputs

    def _outputs(
        self, layer: int, counts: dict[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Dense attention of each sequence to its own past and present, in float64."""
        found, start = [], 0
        for index, count in counts.items():
            rows = slice(start, start + count)
            start += count
            stored = self.past[layer][index]
            for side, new in enumerate((k, v)):
                stored[side] = torch.cat([stored[side], new[rows]])
            found.append(dense(q[rows].double(), stored[0].double(), stored[1].double()))
        return torch.cat(found)

    def begin_anew(self, index: int) -> None:
        """The sequence ends, and another text takes over its table."""
        self.lengths[index] = 0
        for layer in self.past:
            layer[index] = [tensor[:0] for tensor in layer[index]]

    def overwrite(self, index: int, other: int, block: int) -> list[int]:
        """A full block of a sequence takes the contents of the same block of another.

        Returns the pair (source, destination) to be copied.
        """
        places = slice(block * self.block_size, (block + 1) * self.block_size)
        for layer in self.past:
            for mine, others in zip(layer[index], layer[other], strict=True):
                mine[places] = others[places]
        return [self.tables[other][block], self.tables[index][block]]

    def fork(self, index: int, shared: int) -> int:
        """A new sequence that shares the first `shared` blocks of another; its number."""
        table = self.tables[index]
        own = [self.free.pop() for _ in table[shared:]]
        self.tables.append(table[:shared] + own)
        self.lengths.append(self.lengths[index])
        for layer in self.past:
            layer.append([tensor.clone() for tensor in layer[index]])
        return len(self.tables) - 1


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by the formula: q [n, Hq, D], the last n of the positions of k, v [m, ...].

    Returns [n, Hq, D].
    """
    count, length = len(q), len(k)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))  # [m, Hq, D]
    scores = torch.einsum("nhd,mhd->hnm", q, keys) / q.shape[-1] ** 0.5
    own = torch.arange(length - count, length)[:, None]
    scores = scores.masked_fill(torch.arange(length) > own, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), values)


def _has_rows(got: Any, wanted: torch.Tensor) -> bool:
    """Real numbers of the right shape; rows for nobody may follow those that are wanted."""
    return (
        isinstance(got, torch.Tensor)
        and not got.is_complex()
        and got.shape[1:] == wanted.shape[1:]
        and len(got) >= len(wanted)
    )


def compare(found: list[Any], outputs: list[Any], what: str, *, atol: float = TOLERANCE) -> float:
    """The outputs of steps, each a list with one for each layer; returns the largest error."""
    worst = 0.0
    for index, (layers, expected) in enumerate(zip(found, outputs, strict=True)):
        for layer, (got, wanted) in enumerate(zip(layers, expected, strict=True)):
            where = f"{what}: step {index}, layer {layer}"
            rows = len(wanted)
            if not _has_rows(got, wanted):
                expect.is_tensor(got, where, wanted.shape)  # says what is wrong with it
            if got[:rows].isnan().any():
                bad = got[:rows].isnan().flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise GateFailure(
                    Code.WRONG_VALUE, f"{where}: a slot was read that nobody has written",
                    "finite values", "NaN, which the judge puts into a new pool",
                    where=f"first in row {bad[0]}",
                    likely="What lies past a context, or was never written, is read. A mask does "
                    "not help: 0 x NaN is NaN.",
                )  # fmt: skip
            worst = max(
                worst,
                expect.close(
                    got[:rows].flatten(1), wanted.flatten(1), atol=atol, what=where,
                    code=Code.WRONG_VALUE,
                ),
            )  # fmt: skip
    return worst
