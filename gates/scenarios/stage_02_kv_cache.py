"""Stage 02, the half that runs beside the solution."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from generation import counted_stream, generate, stream
from poison import poison

from course.measure.counters import CopiedBytes, tensor_bytes

__all__ = [
    "cache_memory",
    "capacities",
    "copied_bytes",
    "counted_stream",
    "fill",
    "generate",
    "overflow",
    "passes",
    "store",
    "stream",
]


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


def store(
    env: Any, model: str, head_dim: int, dtype: str, pieces: list[torch.Tensor]
) -> Iterator[Any]:
    """Append pieces [B, T, Hkv, D] to every layer; what `append` returns for the last of them.

    The values are the keys plus 1, and layer i gets the pieces plus i: nothing may be mixed up.
    """
    config = replace(env.model(model).config, head_dim=head_dim)
    cache = env.solution.KVCache(
        config,
        sum(piece.shape[1] for piece in pieces) + 2,
        batch_size=len(pieces[0]),
        dtype=getattr(torch, dtype),
        device=env.device,
    )
    for piece in pieces:
        new = piece.to(env.device, getattr(torch, dtype))
        for layer in range(config.num_layers):
            keys, values = cache.append(layer, new + layer, new + layer + 1)
            if piece is pieces[-1]:
                yield {"keys": keys, "values": values}


def overflow(env: Any, model: str, capacity: int, stored: int, more: int) -> dict[str, Any]:
    """Store, try to store more than fits, and store one more that fits again, if there is room."""
    config = env.model(model).config
    cache = make(env, env.model(model), capacity, 1)

    def append(count: int, value: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = (1, count, config.num_kv_heads, config.head_dim)
        new = torch.full(shape, value, device=env.device)
        return [cache.append(layer, new, new) for layer in range(config.num_layers)]

    keys, values = append(stored, 1.0)[0]  # of the layer that is written to next
    kept = [keys.clone(), values.clone()]
    try:
        append(more, 2.0)
        error = kind = None
    except Exception as refused:
        error, kind = str(refused), type(refused).__name__
    same = torch.equal(kept[0], keys) and torch.equal(kept[1], values)
    report = {"error": error, "kind": kind, "length": cache.length, "unchanged": same}
    if error is not None and stored < capacity:
        append(1, 3.0)
        report["length_after"] = cache.length
    return report


def capacities(env: Any, model: str, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The capacity of every KVCache that `generate` makes."""
    made: list[int] = []
    cache_class = env.solution.KVCache

    class Noted(cache_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, capacity: int, **rest: Any) -> None:
            made.append(capacity)
            super().__init__(config, capacity, **rest)

    env.solution.KVCache = Noted
    try:
        for _ in env.solution.generate(env.model(model), prompt_ids, max_new_tokens):
            pass
    finally:
        env.solution.KVCache = cache_class
    return made


def cache_memory(env: Any, model: str, capacity: int) -> list[int]:
    """Bytes of every tensor that a cache holds: new, and full."""
    decoder = env.model(model)
    cache = make(env, decoder, capacity, 1)
    new = tensor_bytes(cache)
    token_ids = torch.zeros(1, capacity, dtype=torch.int64, device=env.device)
    positions = torch.arange(capacity, device=env.device)[None]
    decoder.forward(token_ids, positions, cache, logit_rows=[-1])
    return [new, tensor_bytes(cache)]


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
