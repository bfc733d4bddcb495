"""Scenarios of every stage that has a `generate`. They run beside the solution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def generate(
    env: Any,
    model: str,
    prompt_ids: Any,
    max_new_tokens: Any,
    eos_ids: list[int],
    eos_kind: str = "list",
) -> Iterator[Any]:
    """First what kind of thing came back; then each token, with the passes made so far."""
    counting = env.counting(model)
    given = {"list": list, "tuple": tuple, "frozenset": frozenset}[eos_kind](eos_ids)
    stream = env.solution.generate(counting, prompt_ids, max_new_tokens, given)
    kind = type(stream)
    yield {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "iterator": hasattr(stream, "__next__"),
    }
    try:
        for token in stream:
            yield {"token": token, "passes": counting.counts.forward_passes}
    finally:
        if hasattr(stream, "close"):
            stream.close()  # a reader may walk away at any token
    counts = counting.counts
    return {
        "passes": counts.forward_passes,
        "positions": counts.positions,
        "head_rows": counts.logit_rows,
        "prompt_ids": prompt_ids,
        "eos_ids": list(given),
    }


def stream(env: Any, model: str, prompt_ids: list[int], max_new_tokens: int) -> Iterator[Any]:
    """Tokens and nothing else: what is timed, a step at a time."""
    yield from env.solution.generate(
        model=env.model(model), prompt_ids=prompt_ids, max_new_tokens=max_new_tokens
    )


def counted_stream(
    env: Any, model: str, prompt_ids: list[int], max_new_tokens: int
) -> Iterator[Any]:
    """As `stream`, each token with the passes made so far: nobody may run ahead of the clock."""
    counting = env.counting(model)
    for token in env.solution.generate(counting, prompt_ids, max_new_tokens):
        yield {"tokens": token, "passes": counting.counts.forward_passes}
