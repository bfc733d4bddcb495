"""Scenarios of every stage that has a `generate`. They run beside the solution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def generate(
    env: Any, model: str, prompt_ids: list[int], max_new_tokens: Any, eos_ids: list[int]
) -> Iterator[Any]:
    """First what kind of thing came back; then each token, with the passes made so far."""
    counting = env.counting(model)
    stream = env.solution.generate(counting, prompt_ids, max_new_tokens, eos_ids)
    kind = type(stream)
    yield {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "iterator": hasattr(stream, "__next__"),
    }
    for token in stream:
        yield {"token": token, "passes": counting.counts.forward_passes}
    counts = counting.counts
    return {
        "passes": counts.forward_passes,
        "positions": counts.positions,
        "head_rows": counts.logit_rows,
        "prompt_ids": prompt_ids,
        "eos_ids": eos_ids,
    }


def stream(env: Any, model: str, prompt_ids: list[int], max_new_tokens: int) -> Iterator[Any]:
    """Tokens and nothing else: what is timed, a step at a time."""
    yield from env.solution.generate(env.model(model), prompt_ids, max_new_tokens, ())
