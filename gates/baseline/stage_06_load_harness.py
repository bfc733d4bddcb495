"""The baseline of stage 06: a server whose delays are known, since it writes down what it does."""

from __future__ import annotations

import random

from course.load.fake_server import Answer, FakeServer

TOKENS = 40  # of a long answer


def server(seed: int, kind: str) -> FakeServer:
    """A server for a closed loop (long answers in ragged chunks) or an open one (short answers)."""
    plan = long_answer if kind == "closed" else short_answer
    return FakeServer(lambda index: plan(random.Random(f"{seed}:{index}")))


def long_answer(rng: random.Random) -> Answer:
    """Chunks of 1 to 3 tokens, a few of them after a stall."""
    tokens: list[int] = []
    while sum(tokens) < TOKENS:
        tokens.append(min(rng.choices((1, 2, 3), (7, 2, 1))[0], TOKENS - sum(tokens)))
    gaps = [
        rng.uniform(0.12, 0.20) if rng.random() < 0.08 else rng.uniform(0.02, 0.05)
        for _ in tokens[1:]
    ]
    return Answer(rng.uniform(0.3, 0.6), tuple(gaps), tuple(tokens))


def short_answer(rng: random.Random) -> Answer:
    """A wait for the first token, and three more."""
    return Answer(rng.uniform(0.3, 0.6), (0.02, 0.02, 0.02))
