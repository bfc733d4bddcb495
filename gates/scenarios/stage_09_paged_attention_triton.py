"""Stage 09, the half that runs beside the solution."""

from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from paged import as_views, batch_from, decode, random_past
from poison import poison

from course import parts
from course.measure.counters import CopiedBytes
from course.measure.kernel_builds import build, recorded_launches
from course.measure.kernel_loads import LoadedBytes
from course.types import StepBatch

__all__ = [
    "attention",
    "attention_alone",
    "big_pool",
    "builds",
    "copied_by_gathering",
    "gathered",
    "kernel",
    "loaded",
    "splits",
    "triton_paged",
]


def kernel(
    env: Any, arguments: list[Any], max_queries: Any, num_splits: Any, out: Any = None
) -> Any:
    """What `paged_attention` returns for tensors that the judge has made; or what it writes."""
    tensors = [tensor.to(env.device) for tensor in arguments]
    q = tensors[0]
    gap = q.new_full((len(q), 1, q.shape[2]), float("nan"))
    tensors[0] = torch.cat((q, gap), dim=1)[:, : q.shape[1]]  # a view, as the decoder hands it over
    given = {} if out is None else {"out": out.to(env.device)}
    found = env.solution.paged_attention(
        *tensors, max_queries=max_queries, num_splits=num_splits, **given
    )
    return given.get("out", found)


def loaded(env: Any, arguments: list[Any], max_queries: int, num_splits: int) -> dict[str, Any]:
    """The same in the interpreter, with the bytes that the kernels load."""
    names = ("q", "keys", "values", "block_tables", "context_lens", "query_start_loc")
    tensors = dict(zip(names, arguments, strict=True))
    with LoadedBytes(tensors) as bytes_loaded:
        out = env.solution.paged_attention(
            *arguments, max_queries=max_queries, num_splits=num_splits
        )
    return {
        "out": out,
        "pool": bytes_loaded.of("keys", "values"),
        "q": bytes_loaded.of("q"),
        "total": bytes_loaded.total,
    }


def attention(
    env: Any, model: str, heads: list[int], num_blocks: int, block_size: int, todo: list[Any],
    num_splits: int | None,
) -> Iterator[Any]:  # fmt: skip
    """Steps of `TritonPagedAttention` on a pool full of NaN, as stage 08's scenario does it.

    Yields the outputs of each layer, the bytes that kernels have loaded from the pool, the bytes
    that torch has copied, and what `paged_attention` was asked for.
    """
    config = replace(
        env.model(model).config, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=heads[2],
    )  # fmt: skip
    attend = env.solution.TritonPagedAttention(
        config, num_blocks, block_size, device=env.device, num_splits=num_splits
    )
    poison(attend)
    pools = {"keys": attend.keys, "values": attend.values}
    calls = noted_calls(env.solution)
    for _, batch, layers in todo:
        calls.clear()
        attend.plan(batch_from(batch, env.device))
        given = [as_views(*(t.to(env.device)[None] for t in tensors)) for tensors in layers]
        with LoadedBytes(pools) as loaded, CopiedBytes() as copied:
            outputs = [attend(layer, *tensors)[0] for layer, tensors in enumerate(given)]
        yield {
            "outputs": outputs,
            "loaded": loaded.of(*pools),
            "copied": copied.bytes,
            "calls": list(calls),
        }


def noted_calls(solution: Any) -> list[dict[str, int]]:
    """From now on, the numbers that `paged_attention` is called with, by name."""
    calls: list[dict[str, int]] = []
    original = solution.paged_attention

    @wraps(original)
    def noted(*args: Any, max_queries: int, num_splits: int = 1, **named: Any) -> Any:
        calls.append({"max_queries": max_queries, "num_splits": num_splits})
        return original(*args, max_queries=max_queries, num_splits=num_splits, **named)

    solution.paged_attention = noted
    return calls


def splits(env: Any, asked: list[list[int]]) -> list[Any]:
    """What `splits_for` says for numbers of programs and longest contexts."""
    device = torch.device(env.device)
    return [env.solution.splits_for(programs, longest, device) for programs, longest in asked]


def big_pool(env: Any, length: int, heads: list[int], block_size: int) -> Any:
    """A sequence in the last blocks of a pool of more than 2**31 elements.

    Only the pages that are touched take memory. Keys and values are the same tensor.
    """
    from triton.runtime.interpreter import GridExecutor

    # It copies whole storages onto themselves after a launch: all of a pool would become resident.
    GridExecutor._restore_args_dev = lambda *_: None
    query_heads, kv_heads, width = heads
    per_block = block_size * kv_heads * width
    num_blocks = (1 << 31) // per_block + 8
    pool = torch.empty(num_blocks, block_size, kv_heads, width, dtype=torch.float16)
    used = -(-length // block_size)
    table = torch.arange(num_blocks - used, num_blocks, dtype=torch.int32)[None]
    generator = torch.Generator().manual_seed(length)
    past = torch.randn(used * block_size, kv_heads, width, generator=generator).half()
    pool[num_blocks - used :] = past.unflatten(0, (used, block_size))
    q = torch.randn(1, query_heads, width, generator=generator).half()
    out = env.solution.paged_attention(
        q, pool, pool, table, torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), max_queries=1, num_splits=1,
    )  # fmt: skip
    return {"q": q, "past": past[:length], "out": out}


def builds(env: Any, shapes: list[dict[str, Any]], capabilities: list[int]) -> Iterator[Any]:
    """Every kernel that `paged_attention` launches, built for GPUs that are not here.

    For each shape and capability: the machine code, and whether the kernel is handed the pool.
    """
    for shape in shapes:
        sequences, queries = shape["sequences"], shape["queries"]
        q = torch.zeros(sequences * queries, shape["heads"], shape["width"], dtype=torch.bfloat16)
        keys, values = (
            torch.zeros(
                32, shape["block_size"], shape["kv_heads"], shape["width"], dtype=torch.bfloat16
            )
            for _ in range(2)
        )
        with recorded_launches() as launches:
            env.solution.paged_attention(
                q, keys, values, torch.zeros(sequences, 16, dtype=torch.int32),
                torch.full((sequences,), 100, dtype=torch.int32),
                torch.arange(sequences + 1, dtype=torch.int32) * queries,
                max_queries=queries, num_splits=shape["splits"],
            )  # fmt: skip
        pools = {tensor.untyped_storage().data_ptr() for tensor in (keys, values)}
        for capability in capabilities:
            found = []
            for launch in launches:
                cubin, shared = build(launch, capability)
                found.append(
                    {
                        "name": launch.name,
                        "cubin": cubin,
                        "shared": shared,
                        "reads_pool": launch.reads(pools),
                    }
                )
            yield found


def triton_paged(env: Any, **arguments: Any) -> Iterator[Any]:
    """Timed decode steps through the kernel."""
    solution = SimpleNamespace(
        PagedAttention=env.solution.TritonPagedAttention, step_batch=part("step_batch")
    )
    yield from decode(env, solution, **arguments)


def gathered(env: Any, **arguments: Any) -> Iterator[Any]:
    """The same through stage 08: the baseline."""
    yield from decode(env, env.solution, **arguments)


def copied_by_gathering(
    env: Any, model: str, heads: list[int], lengths: list[int], block_size: int
) -> int:
    """Bytes that stage 08's attention copies in one layer of a decode step, each text one token."""
    config = replace(
        env.model(model).config, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=heads[2],
    )  # fmt: skip
    batch, num_blocks = decode_batch(lengths, block_size, env.device)
    attend = env.solution.PagedAttention(config, num_blocks, block_size, device=env.device)
    attend.plan(batch)
    q, k, v = next(random_past(config, len(lengths), 1, env.device, torch.float32))
    with CopiedBytes() as copied:
        attend(0, q, k, v)
    return copied.bytes


def decode_batch(lengths: list[int], block_size: int, device: Any) -> tuple[StepBatch, int]:
    """A step in which every text has one query and nothing is written; and the blocks it needs.

    Blocks lie in random order.
    """
    needed = [-(-length // block_size) for length in lengths]
    generator = torch.Generator().manual_seed(sum(needed))
    ids = torch.randperm(sum(needed), generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for row, own in enumerate(ids.split(needed)):
        tables[row, : len(own)] = own
    batch = {
        "token_ids": [7] * len(lengths),
        "positions": [length - 1 for length in lengths],
        "query_start_loc": list(range(len(lengths) + 1)),
        "context_lens": lengths,
        "block_tables": tables.tolist(),
        "slot_mapping": [-1] * len(lengths),
        "logit_rows": list(range(len(lengths))),
    }
    return batch_from(batch, device), sum(needed)


def part(name: str) -> Any:
    """A part of an earlier stage."""
    return getattr(parts, name)


def attention_alone(
    env: Any, model: str, lengths: list[int], block_size: int, repeats: int
) -> Iterator[float]:
    """Attention of a decode step over one layer, on a GPU: seconds of each repeat, by its events.

    Blocks lie in random order, and each repeat reads another layer's pool, so that nothing of it
    is still in a cache.
    """
    config = env.model(model).config
    batch, num_blocks = decode_batch(lengths, block_size, env.device)
    attend = env.solution.TritonPagedAttention(
        config, num_blocks, block_size, dtype=torch.bfloat16, device=env.device
    )
    for pool in (attend.keys, attend.values):
        pool.normal_()
    attend.plan(batch)
    q, k, v = next(random_past(config, len(lengths), 1, env.device, torch.bfloat16))
    for repeat in range(-3, repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attend(repeat % config.num_layers, q, k, v)
        end.record()
        end.synchronize()
        if repeat >= 0:
            yield begin.elapsed_time(end) / 1e3
