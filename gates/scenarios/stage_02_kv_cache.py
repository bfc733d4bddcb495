"""Stage 02, the half that runs beside the solution."""

from collections.abc import Iterator
from typing import Any

import torch
from generation import generate, stream

from course.measure.counters import CopiedBytes, tensor_bytes

__all__ = ["cache_memory", "copied_bytes", "fill", "generate", "passes", "stream"]


def passes(
    env: Any, model: str, chunks: list[list[list[int]]], capacity: Any, batch_size: Any = 1
) -> Iterator[Any]:
    """Feed chunks of token ids [B, T], one pass each, through the solution's cache.

    The memory that the cache reserved is poisoned with NaN first: what was never written must
    never be read.
    """
    decoder = env.model(model)
    cache = make(env, decoder, capacity, batch_size)
    poison(cache)
    yield {"length": cache.length}
    for chunk in chunks:
        token_ids = torch.tensor(chunk, device=env.device)
        start = cache.length
        positions = torch.arange(start, start + token_ids.shape[1], device=env.device)
        logits = decoder.forward(token_ids, positions.expand_as(token_ids), cache)
        yield {"logits": logits, "length": cache.length}


def fill(env: Any, model: str, capacity: int, first: int, second: int) -> Iterator[Any]:
    """Write `first`, then `second` positions into every layer; the length after each."""
    config = env.model(model).config
    cache = make(env, env.model(model), capacity, 1)
    for count in (first, second):
        k = torch.ones(1, count, config.num_kv_heads, config.head_dim, device=env.device)
        lengths = []
        for layer in range(config.num_layers):
            cache.append(layer, k, k)
            lengths.append(cache.length)
        yield lengths


def after_overflow(env: Any, model: str, capacity: int) -> dict[str, Any]:
    """What a refused write leaves behind: the length, and whether stored values changed."""
    config = env.model(model).config
    cache = make(env, env.model(model), capacity, 1)
    shape = (1, capacity, config.num_kv_heads, config.head_dim)
    ones = torch.ones(shape, device=env.device)
    stored = [cache.append(layer, ones, ones) for layer in range(config.num_layers)]
    keys, values = stored[0]  # of the layer that is written to next
    kept = [keys.clone(), values.clone()]
    try:
        cache.append(0, 2 * ones[:, :1], 2 * ones[:, :1])
        error = None
    except ValueError as refused:
        error = str(refused)
    same = torch.equal(kept[0], keys) and torch.equal(kept[1], values)
    return {"error": error, "length": cache.length, "unchanged": same}


def cache_memory(env: Any, model: str, capacity: int) -> int:
    """Bytes of every tensor that a cache holds, full."""
    decoder = env.model(model)
    cache = make(env, decoder, capacity, 1)
    token_ids = torch.zeros(1, capacity, dtype=torch.int64, device=env.device)
    positions = torch.arange(capacity, device=env.device)[None]
    decoder.forward(token_ids, positions, cache, logit_rows=[-1])
    return tensor_bytes(cache)


def copied_bytes(env: Any, model: str, lengths: list[int]) -> list[int]:
    """Bytes that one decode step copies inside the cache, at each length."""
    decoder = env.model(model)
    config = decoder.config
    found = []
    for length in lengths:
        cache = make(env, decoder, length + 1, 1)
        shape = (1, length, config.num_kv_heads, config.head_dim)
        past = torch.randn(shape, device=env.device)
        for layer in range(config.num_layers):
            cache.append(layer, past, past)
        new = torch.randn(1, 1, config.num_kv_heads, config.head_dim, device=env.device)
        query = torch.randn(1, 1, config.num_heads, config.head_dim, device=env.device)
        with CopiedBytes() as copied:
            for layer in range(config.num_layers):
                cache(layer, query, new, new)
        found.append(copied.bytes)
    return found


def make(env: Any, decoder: Any, capacity: Any, batch_size: Any) -> Any:
    return env.solution.KVCache(
        decoder.config, capacity, batch_size=batch_size, dtype=decoder.dtype, device=env.device
    )


def poison(cache: Any) -> None:
    """NaN into every floating-point tensor that the cache holds so far."""
    for value in list(vars(cache).values()):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))
