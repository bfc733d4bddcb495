"""Traces that several gates serve: the lengths of requests, which only the judge knows."""

from __future__ import annotations

import math
import random


def log_uniform(
    rng: random.Random, count: int, shortest: int, longest: int, prompt: int, *, hand: int = 1
) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of `count` requests: many short outputs, and a few long ones.

    Outputs are log-uniform from `shortest` to `longest`, prompts uniform from half of `prompt` up.
    The outputs are spread evenly over their distribution and dealt like cards: `hand` requests in a
    row hold one of the longest, one of the next longest, and so on. So two seeds differ in their
    order and not in their luck: static batches of that size always take the same steps.

    Raises ValueError when `count` is no multiple of `hand`.
    """
    if count % hand:
        raise ValueError(f"count must be a multiple of hand = {hand}, got {count}")
    span = math.log(longest / shortest)
    news = [round(shortest * math.exp(span * (i + 0.5) / count)) for i in range(count)]
    each = count // hand
    decks = [news[i : i + each] for i in range(0, count, each)]
    for deck in decks:
        rng.shuffle(deck)
    hands = [list(cards) for cards in zip(*decks, strict=True)]
    for cards in hands:
        rng.shuffle(cards)
    dealt = [new for cards in hands for new in cards]
    return [(rng.randrange(prompt // 2, prompt + 1), new) for new in dealt]
