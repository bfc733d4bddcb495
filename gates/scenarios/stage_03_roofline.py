"""Stage 03, the half that runs beside the solution."""

from collections.abc import Iterator
from typing import Any

import torch

from course.model import ModelConfig
from course.parts import KVCache


def formula(env: Any, function: str, config: dict[str, Any], args: list[Any]) -> Any:
    """One of the solution's closed forms for a model's shape."""
    return getattr(env.solution, function)(ModelConfig(**config), *args)


def readings(env: Any, function: str, args: list[Any]) -> Iterator[Any]:
    """One reading of bandwidth or FLOP/s after the other."""
    device = torch.device(env.device)
    arguments = [getattr(torch, arg) if isinstance(arg, str) else arg for arg in args]
    while True:
        yield getattr(env.solution, function)(device, *arguments)


def decode(env: Any, model: str, prompt_ids: list[int]) -> Iterator[Any]:
    """Decode steps of the course's own stage 02, after a prefill: what a real step takes."""
    decoder = env.model(model)
    cache = KVCache(
        decoder.config, len(prompt_ids) + 400, dtype=decoder.dtype, device=decoder.device
    )
    feed = list(prompt_ids)
    while True:
        token_ids = torch.tensor([feed], device=decoder.device)
        positions = torch.arange(cache.length, cache.length + len(feed), device=decoder.device)
        logits = decoder.forward(token_ids, positions[None], cache, logit_rows=[-1])
        feed = [int(logits[0].argmax())]
        yield feed[0]


def bytes_per_weight(env: Any, model: str) -> int:
    """Bytes that a weight of this model takes."""
    return torch.finfo(env.model(model).dtype).bits // 8
