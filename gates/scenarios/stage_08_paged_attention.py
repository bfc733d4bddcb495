"""Stage 08, the half that runs beside the solution."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from paged import as_views, batch_from, chosen, decode, random_past, served
from poison import poison
from torch.utils._python_dispatch import TorchDispatchMode

from course.measure.counters import CopiedBytes, NewTensors, tensor_bytes
from course.types import StepBatch

__all__ = [
    "attention",
    "batch",
    "contiguous",
    "copied_by_pairs",
    "devices",
    "dtypes",
    "gathered_bytes",
    "held_bytes",
    "made",
    "mapping",
    "operations",
    "paged",
    "planned",
    "planned_in_layers",
    "pool_bytes",
    "steps",
]


def mapping(env: Any, table: list[int], start: int, count: int, block_size: int) -> Any:
    """What `slot_mapping` returns."""
    return env.solution.slot_mapping(table, start, count, block_size)


def batch(env: Any, sequences: list[Any], counts: list[int], block_size: int) -> dict[str, Any]:
    """What `step_batch` makes of sequences [tokens, num_computed, block_table]; they afterwards."""
    rows = [served(*values) for values in sequences]
    given = list(counts)
    made = env.solution.step_batch(rows, given, block_size, device=env.device)
    return {
        "batch": {name: getattr(made, name, None) for name in StepBatch.__dataclass_fields__},
        "sequences": [[row.tokens, row.num_computed, row.block_table] for row in rows],
        "counts": given,
    }


def devices(env: Any, device: str) -> dict[str, str] | None:
    """Where the tensors lie that `step_batch` makes for a device; None if it cannot be seen there.

    On "meta" tensors have a shape and no contents. Who computes with contents on the device raises,
    and has not ignored it.
    """
    row = served([7] * 6, 0, [3, 1])
    try:
        made = env.solution.step_batch([row, row], [5, 1], 4, device=device)
    except (NotImplementedError, RuntimeError):
        if device == "meta":
            return None
        raise
    return {name: str(getattr(made, name).device) for name in StepBatch.__dataclass_fields__}


def planned(
    env: Any, heads: list[int], num_blocks: int, block_size: int, todo: list[Any]
) -> Iterator[dict[str, list[Any]]]:
    """The fields of each batch, [before, after] it was planned and attended. As `attention`."""
    config = of_heads(env.model("nano").config, heads)
    attend = env.solution.PagedAttention(config, num_blocks, block_size, device=env.device)
    for _, values, layers in todo:
        batch = batch_from(values, env.device)
        attend.plan(batch)
        for layer, tensors in enumerate(layers):
            attend(layer, *as_views(*(tensor.to(env.device)[None] for tensor in tensors)))
        yield {name: [value, getattr(batch, name).tolist()] for name, value in values.items()}


def of_heads(config: Any, heads: list[int]) -> Any:
    """A configuration of two layers with these query heads, KV heads and width."""
    return replace(
        config, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2]
    )


def made(env: Any, model: str, num_blocks: Any, block_size: Any) -> None:
    """Make a pool, and nothing else."""
    env.solution.PagedAttention(env.model(model).config, num_blocks, block_size)


def dtypes(env: Any, model: str, dtype: str) -> list[str]:
    """The dtypes of keys, of values, and of what a step returns, in a pool of a dtype."""
    kind = getattr(torch, dtype)
    config = env.model(model).config
    attend = env.solution.PagedAttention(config, 2, 4, dtype=kind, device=env.device)
    row = served([7] * 3, 0, [1])
    attend.plan(env.solution.step_batch([row], [3], 4, device=env.device))
    out = attend(0, *next(random_past(config, 3, 0, env.device, kind)))
    return [str(tensor.dtype) for tensor in (attend.keys, attend.values, out)]


def attention(
    env: Any, model: str, heads: list[int], num_blocks: int, block_size: int, todo: list[Any],
    dtype: str = "float32", unwritten: float = math.nan,
) -> Iterator[Any]:  # fmt: skip
    """Attention alone, on a pool full of NaN, or of another value.

    heads: query heads, KV heads, width. todo: ["step", batch, [q, k, v] per layer], answered with
    the outputs of each layer; ["copy", pairs]; or ["pool"], answered with all keys and values.
    """
    config = of_heads(env.model(model).config, heads)
    kept_as = getattr(torch, dtype)
    attend = env.solution.PagedAttention(
        config, num_blocks, block_size, dtype=kept_as, device=env.device
    )
    poison(attend, unwritten)
    for kind, *rest in todo:
        if kind == "copy":
            attend.copy_blocks([tuple(pair) for pair in rest[0]])
        elif kind == "pool":
            yield [attend.keys[:, :num_blocks].clone(), attend.values[:, :num_blocks].clone()]
        else:
            attend.plan(batch_from(rest[0], env.device))
            yield [
                attend(
                    layer, *as_views(*(tensor.to(env.device, kept_as)[None] for tensor in tensors))
                )[0]
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


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Gathering(CopiedBytes):
    """Counts lookups of an embedding too: who takes the pool for one has copied what it gives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and add what it copied."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket is torch.ops.aten.embedding:
            self._by_op["embedding"] += result.nbytes
        return result


class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for while it is entered; views are none."""

    count = 0
    # Those that give integers, a tensor made of a list among them: slots and rows are integers,
    # and attention has none.
    integers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it."""
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        made_of_a_list = func.overloadpacket is torch.ops.aten.lift_fresh
        self.integers += (made_of_a_list or not func.is_view) and any(
            isinstance(part, torch.Tensor) and part.dtype in INTEGERS
            for part in (result if isinstance(result, (list, tuple)) else [result])
        )
        return result


def planned_to_attend(
    env: Any, model: str, lengths: list[int], block_size: int, *, queries: int = 1, spare: int = 0,
    reserved: int = 0,
) -> Any:  # fmt: skip
    """An attention whose sequences have a random past, planned for a step; and the step's layers.

    lengths: of the pasts; 0 for a prefill. queries: of each sequence in the step. spare: blocks of
    the pool for each that is used. reserved: of them, those that stand in the table behind the ones
    that are used, for each of these.
    """
    config = env.model(model).config
    needed = [-(-(length + queries) // block_size) for length in lengths]
    blocks = sum(needed) * (1 + spare)
    attend = env.solution.PagedAttention(config, blocks, block_size, device=env.device)
    used = iter(range(0, blocks, 1 + spare))
    rows = []
    for length, count in zip(lengths, needed, strict=True):
        table = [next(used) for _ in range(count)]
        table += [block + 1 + place for block in table for place in range(reserved)]
        rows.append(served([7] * (length + queries), 0, table))
    for counts in ([n for n in lengths if n], [queries] * len(lengths)):
        if not counts:
            continue  # no pasts
        attend.plan(env.solution.step_batch(rows, counts, block_size, device=env.device))
        layers = list(random_past(config, sum(counts), len(counts), env.device, torch.float32))
        if rows[0].num_computed < lengths[0]:
            for layer, tensors in enumerate(layers):
                attend(layer, *tensors)
            for row, count in zip(rows, counts, strict=True):
                row.num_computed += count
    return attend, layers


def operations(env: Any, model: str, lengths: list[int], block_size: int, queries: int) -> int:
    """Operations that the attention of one step takes, in all layers."""
    attend, layers = planned_to_attend(env, model, lengths, block_size, queries=queries)
    with Operations() as asked:
        for layer, tensors in enumerate(layers):
            attend(layer, *tensors)
    return asked.count


def planned_in_layers(env: Any, model: str, lengths: list[int], block_size: int) -> list[int]:
    """Operations that give integers, in each layer but the first, after a decode step's plan."""
    attend, layers = planned_to_attend(env, model, lengths, block_size)
    found = []
    for layer, tensors in enumerate(layers):
        with Operations() as asked:
            attend(layer, *tensors)
        found.append(asked.integers)
    return found[1:]  # what the first one works out and keeps has been worked out once


def held_bytes(env: Any, model: str, lengths: list[int], block_size: int) -> list[int]:
    """Bytes that a prefill and a decode step leave, wherever they are kept; of the pool alone."""
    env.model(model)
    made = NewTensors()
    attend, layers = planned_to_attend(env, model, lengths, block_size)
    for layer, tensors in enumerate(layers):
        attend(layer, *tensors)
    return [made.bytes(exclude=[layers]), tensor_bytes([attend.keys, attend.values])]


def copied_by_pairs(env: Any, model: str, num_blocks: int, block_size: int, pairs: Any) -> int:
    """Bytes that `copy_blocks` writes."""
    config = env.model(model).config
    attend = env.solution.PagedAttention(config, num_blocks, block_size, device=env.device)
    with Gathering() as copied:
        attend.copy_blocks([tuple(pair) for pair in pairs])
    return copied.bytes


def gathered_bytes(env: Any, model: str, length: int, block_size: int, spare: int) -> int:
    """Bytes that the attention of one decode step copies, in all layers, at one context length.

    The table is twice as long as the context, so that who reads all of it shows.
    """
    attend, layers = planned_to_attend(env, model, [length], block_size, spare=spare, reserved=1)
    with Gathering() as copied:
        for layer, tensors in enumerate(layers):
            attend(layer, *tensors)
    return copied.bytes
