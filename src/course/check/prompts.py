"""Real text for the gates, cut to an exact number of tokens."""

from __future__ import annotations

import random
from functools import cache

from course.data import prompts
from course.model.describe import load_tokenizer


@cache
def _tokens(model: str) -> list[list[int]]:
    """Every prompt of the chat and code workloads, as tokens of this model."""
    tokenizer = load_tokenizer(model)
    texts = [prompt for name in ("chat", "code") for prompt in prompts(name)]
    return [tokenizer.encode(text + "\n\n") for text in texts]


def real_prompt(model: str, rng: random.Random, length: int) -> list[int]:
    """`length` tokens of real text: prompts of the course in random order, cut at the end."""
    ids: list[int] = []
    while len(ids) < length:
        ids += rng.choice(_tokens(model))
    return ids[:length]
