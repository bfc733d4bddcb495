"""Stage 08, the half that runs beside the solution."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from paged import as_views, batch_from, chosen, decode, random_past, served
from poison import poison

from course.measure.counters import CopiedBytes, tensor_bytes
from course.types import StepBatch

__all__ = [
    "attention",
    "batch",
    "contiguous",
    "gathered_bytes",
    "made",
    "mapping",
    "paged",
    "pool_bytes",
    "steps",
]


def mapping(env: Any, table: list[int], start: int, count: int, block_size: int) -> Any:
    """What `slot_mapping` returns."""
    return env.solution.slot_mapping(table, start, count, block_size)


def batch(
    env: Any, sequences: list[Any], counts: list[int], block_size: int
) -> dict[str, torch.Tensor]:
    """What `step_batch` makes of sequences [tokens, num_computed, block_table]."""
    rows = [served(*values) for values in sequences]
    made = env.solution.step_batch(rows, counts, block_size, device=env.device)
    return {name: getattr(made, name) for name in StepBatch.__dataclass_fields__}


def made(env: Any, model: str, num_blocks: Any, block_size: Any) -> None:
    """Make a pool, and nothing else."""
    env.solution.PagedAttention(env.model(model).config, num_blocks, block_size)


def attention(
    env: Any, model: str, heads: list[int], num_blocks: int, block_size: int, todo: list[Any]
) -> Iterator[Any]:
    """Attention alone, on a pool full of NaN.

    heads: query heads, KV heads, width. todo: ["step", batch, [q, k, v] per layer], answered with
    the outputs of each layer; ["copy", pairs]; or ["pool"], answered with all keys and values.
    """
    config = replace(
        env.model(model).config, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=heads[2],
    )  # fmt: skip
    attend = env.solution.PagedAttention(config, num_blocks, block_size, device=env.device)
    poison(attend)
    for kind, *rest in todo:
        if kind == "copy":
            attend.copy_blocks([tuple(pair) for pair in rest[0]])
        elif kind == "pool":
            yield [attend.keys[:, :num_blocks].clone(), attend.values[:, :num_blocks].clone()]
        else:
            attend.plan(batch_from(rest[0], env.device))
            yield [
                attend(layer, *as_views(*(tensor.to(env.device)[None] for tensor in tensors)))[0]
                for layer, tensors in enumerate(rest[1])
            ]


def steps(
    env: Any, model: str, num_blocks: int, block_size: int, tables: list[Any], todo: list[Any]
) -> Iterator[torch.Tensor]:
    """Forward passes through the solution's own batches; logits [L, V] of each.

    todo: [[sequence, tokens to feed], ...] for each pass.
    """
    decoder = env.model(model)
    attend = env.solution.PagedAttention(
        decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
    )
    poison(attend)
    rows = [served([0], 0, table) for table in tables]
    for row in rows:
        row.tokens.clear()
    for step in todo:
        for index, tokens in step:
            rows[index].tokens += tokens
        members = [rows[index] for index, _ in step]
        counts = [len(tokens) for _, tokens in step]
        made = env.solution.step_batch(members, counts, block_size, device=env.device)
        attend.plan(made)
        yield decoder.forward(made.token_ids[None], made.positions[None], attend, made.logit_rows)
        for row, count in zip(members, counts, strict=True):
            row.num_computed += count


def paged(env: Any, **arguments: Any) -> Iterator[Any]:
    """Timed decode steps through the solution's pool."""
    yield from decode(env, env.solution, **arguments)


def contiguous(
    env: Any, model: str, lengths: list[int], capacity: int, steps: int, seed: int
) -> Iterator[Any]:
    """The same through stage 05's slots: the baseline."""
    decoder = env.model(model)
    cache = env.solution.SlotCache(
        decoder.config, len(lengths), capacity, dtype=decoder.dtype, device=env.device
    )
    for slot, length in enumerate(lengths):
        cache.plan([slot], length)
        past = random_past(decoder.config, length, seed + slot, env.device, decoder.dtype)
        for layer, (q, k, v) in enumerate(past):
            cache(layer, q, k, v)
    yield []
    slots = list(range(len(lengths)))
    tokens = [7] * len(slots)
    for _ in range(steps):
        positions = cache.plan(slots, 1)
        token_ids = torch.tensor(tokens, device=env.device)[:, None]
        found = chosen(decoder.forward(token_ids, positions, cache, slots))
        tokens = [int(token) for token, _ in found]
        yield found


def pool_bytes(env: Any, model: str, num_blocks: int, block_size: int) -> int:
    """Bytes of everything that a new PagedAttention holds."""
    decoder = env.model(model)
    return tensor_bytes(
        env.solution.PagedAttention(
            decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
        )
    )


def gathered_bytes(env: Any, model: str, length: int, block_size: int) -> int:
    """Bytes that the attention of one decode step copies, in all layers, at one context length."""
    config = env.model(model).config
    blocks = -(-(length + 1) // block_size)
    attend = env.solution.PagedAttention(config, blocks, block_size, device=env.device)
    sequence = served([7] * (length + 1), 0, list(range(blocks)))
    for start, count in ((0, length), (length, 1)):
        sequence.num_computed = start
        attend.plan(env.solution.step_batch([sequence], [count], block_size, device=env.device))
        with CopiedBytes() as copied:
            for layer, (q, k, v) in enumerate(
                random_past(config, count, start, env.device, torch.float32)
            ):
                attend(layer, q, k, v)
    return copied.bytes
