"""What the stages with a paged cache share: steps from plain values, and timed decode steps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from course.types import Request, SamplingParams, StepBatch
from course.types import Sequence as Served

INT32 = ("query_start_loc", "context_lens", "block_tables")


def batch_from(values: dict[str, Any], device: Any) -> StepBatch:
    """A StepBatch from lists: the judge's own, so that a fault of `step_batch` shows elsewhere."""
    return StepBatch(
        **{
            name: torch.tensor(
                value, dtype=torch.int32 if name in INT32 else torch.int64, device=device
            )
            for name, value in values.items()
        }
    )


def served(tokens: list[int], num_computed: int, block_table: list[int]) -> Served:
    """A sequence in the middle of its life."""
    request = Request("a sequence", (tokens[0],), SamplingParams())
    return Served(request, list(tokens), num_computed, list(block_table))


def random_past(config: Any, length: int, seed: int, device: Any, dtype: Any) -> Iterator[Any]:
    """(q, k, v) of `length` positions for each layer, [1, T, H, D]: a past that no model made.

    Both sides of a measurement get the same one, without the time that a prefill takes.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    for _ in range(config.num_layers):
        yield tuple(
            torch.randn(1, length, n, config.head_dim, generator=generator).to(device, dtype)
            for n in heads
        )


def as_views(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v [..., H, D] as the decoder hands them over: views of wider tensors."""
    rotated = torch.cat((q, k), dim=-2).split((q.shape[-2], k.shape[-2]), dim=-2)
    return (*rotated, torch.cat((q, k, v), dim=-2)[..., -v.shape[-2] :, :])


def chosen(logits: torch.Tensor) -> list[list[float]]:
    """For each row of [S, V]: its token, and by how much it leads, in units of the row's spread."""
    top = logits.float().topk(2, dim=-1)
    leads = (top.values[:, 0] - top.values[:, 1]) / logits.float().std(dim=-1)
    return [[int(t), float(g)] for t, g in zip(top.indices[:, 0], leads, strict=True)]


def decode(
    env: Any, solution: Any, model: str, tables: Sequence[list[int]], lengths: Sequence[int],
    *, num_blocks: int, block_size: int, steps: int, seed: int,
) -> Iterator[list[list[float]]]:  # fmt: skip
    """Decode steps of several sequences with a random past; what `chosen` says of each step."""
    decoder = env.model(model)
    attend = solution.PagedAttention(
        decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
    )
    rows = []
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        sequence = served([7] * (length + 1), 0, table)
        attend.plan(solution.step_batch([sequence], [length], block_size, device=env.device))
        past = random_past(decoder.config, length, seed + index, env.device, decoder.dtype)
        for layer, (q, k, v) in enumerate(past):
            attend(layer, q, k, v)
        sequence.num_computed = length
        rows.append(sequence)
    yield []  # ready: what follows is timed
    for _ in range(steps):
        batch = solution.step_batch(rows, [1] * len(rows), block_size, device=env.device)
        attend.plan(batch)
        logits = decoder.forward(
            batch.token_ids[None], batch.positions[None], attend, batch.logit_rows
        )
        found = chosen(logits)
        for row, (token, _) in zip(rows, found, strict=True):
            row.num_computed += 1
            row.tokens.append(int(token))
        yield found
