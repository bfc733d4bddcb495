"""Traces that several gates serve: the lengths of requests, which only the judge knows."""

from __future__ import annotations

import math
import random


def log_uniform(
    rng: random.Random, count: int, shortest: int, longest: int, prompt: int
) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of `count` requests: many short outputs, and a few long ones.

    Outputs are log-uniform from `shortest` to `longest`, prompts uniform from half of `prompt` up.
    The outputs are spread evenly over their distribution and then shuffled, so that two seeds
    differ in their order and not in their luck.
    """
    span = math.log(longest / shortest)
    news = [round(shortest * math.exp(span * (i + 0.5) / count)) for i in range(count)]
    rng.shuffle(news)
    return [(rng.randrange(prompt // 2, prompt + 1), new) for new in news]
