"""Stage 04, the half that runs beside the solution."""

from collections.abc import Iterator
from typing import Any

import torch
from models import nano_in_float64
from poison import poison

from course.measure.counters import NewTensors

__all__ = [
    "batch",
    "counted_stream",
    "in_float64",
    "left_behind",
    "pad",
    "pad_elsewhere",
    "passes",
    "stream",
    "visible",
]


KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "frozenset": frozenset}


def batch(
    env: Any, model: str, prompts: Any, max_new_tokens: Any, eos_ids: list[int],
    eos_kind: str = "list", limits_kind: str = "list", prompts_kind: str = "list",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """`generate_batch` on a counting model: first its type, then each step with the passes so far.

    Ends with the counts, with the arguments as they are then, and with what was yielded as it is
    then.
    """
    counting = env.counting(model)
    if isinstance(max_new_tokens, list):
        max_new_tokens = KINDS[limits_kind](max_new_tokens)
    if prompts_kind != "list":
        prompts = KINDS[prompts_kind](map(KINDS[prompts_kind], prompts))
    ends = KINDS[eos_kind](eos_ids)
    steps = env.solution.generate_batch(counting, prompts, max_new_tokens, ends)
    kept = []
    kind = type(steps)
    yield {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "iterator": hasattr(steps, "__next__"),
    }
    try:
        for step in steps:
            kept.append(step)
            yield {"tokens": step, "passes": counting.counts.forward_passes}
    finally:
        if hasattr(steps, "close"):
            steps.close()
    counts = counting.counts
    return {
        "passes": counts.forward_passes,
        "positions": counts.positions,
        "head_rows": counts.logit_rows,
        "arguments": [prompts, max_new_tokens, list(ends)],
        "kept": kept,
    }


def in_float64(env: Any, prompts: list[list[int]], max_new_tokens: int) -> list[Any]:
    """Every step of `generate_batch` on nano in float64."""
    return list(env.solution.generate_batch(nano_in_float64(env), prompts, max_new_tokens))


def pad(env: Any, prompts: list[list[int]], pad_id: int) -> list[Any]:
    """What `pad_left` returns."""
    return list(env.solution.pad_left(prompts, pad_id, device=env.device))


def pad_elsewhere(env: Any, prompts: list[list[int]]) -> list[str]:
    """The devices of what `pad_left` returns, asked for a device without memory."""
    return [t.device.type for t in env.solution.pad_left(prompts, 0, device="meta")]


def left_behind(env: Any, model: str, prompts: list[list[int]], times: int) -> list[int]:
    """Bytes of tensors that are alive when a batch has ended, after the first one and the last."""
    decoder, made = env.model(model), NewTensors()
    found = []
    for _ in range(times):
        for _ in env.solution.generate_batch(decoder, prompts, 3):
            pass
        found.append(made.bytes())
    return [found[0], found[-1]]


def visible(env: Any, model: str, starts: list[int], fed: int, queries: int) -> Any:
    """What a PaddedCache lets the next columns see, `fed` columns after its beginning."""
    decoder = env.model(model)
    cache = env.solution.PaddedCache(
        decoder.config, fed + queries, torch.tensor(starts, device=env.device), device=env.device
    )
    if fed:
        token_ids = torch.zeros((len(starts), fed), dtype=torch.int64, device=env.device)
        decoder.forward(token_ids, token_ids, cache, [0])
    return cache.visible(queries)


def passes(
    env: Any, model: str, prompts: list[list[int]], more: list[list[list[int]]], pad_id: int
) -> Iterator[torch.Tensor]:
    """Logits [B, T, V] of the prompts, and of chunks [B, T] fed after them, through PaddedCache.

    Ids and positions are the course's own, so that a fault of `pad_left` does not show here. What
    the cache reserves is poisoned with NaN: what was never written must never be read.
    """
    decoder = env.model(model)
    width = max(map(len, prompts))
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=env.device)
    rows = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
    fed = 0
    capacity = width + sum(len(chunk[0]) for chunk in more)
    cache = env.solution.PaddedCache(
        decoder.config, capacity, starts, dtype=decoder.dtype, device=env.device
    )
    poison(cache)
    for chunk in [rows, *more]:
        token_ids = torch.tensor(chunk, device=env.device)
        columns = torch.arange(fed, fed + token_ids.shape[1], device=env.device)
        positions = (columns - starts[:, None]).clamp(min=0)
        fed += token_ids.shape[1]
        yield decoder.forward(token_ids, positions, cache)


def stream(
    env: Any, model: str, prompts: list[list[int]], max_new_tokens: int
) -> Iterator[list[int]]:
    """The tokens of each step and nothing else: what is timed."""
    yield from env.solution.generate_batch(env.model(model), prompts, max_new_tokens)


def counted_stream(
    env: Any, model: str, prompts: list[list[int]], max_new_tokens: int
) -> Iterator[dict[str, Any]]:
    """As `stream`, each step with the passes made so far: nobody may run ahead of the clock."""
    counting = env.counting(model)
    for step in env.solution.generate_batch(counting, prompts, max_new_tokens):
        yield {"tokens": step, "passes": counting.counts.forward_passes}
