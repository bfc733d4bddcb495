"""What is right, computed by somebody else: the course's decoder in double precision, no cache.

The decoder is proved against transformers in `tests/model`. Here it runs in float64 with dense
attention, recomputing everything, in the judge's own process.
"""

from __future__ import annotations

import random
from functools import cache

import torch

from course.model import FullAttention, LoadedModel, load

# Top-2 logits of a float32 model closer than this may swap by rounding alone. Contract prompts are
# chosen so that no step comes near it.
NEAR_TIE = 1e-3


class Oracle:
    """Greedy text and logits of a small model, in float64."""

    def __init__(self, name: str) -> None:
        self.loaded: LoadedModel = load(name, device="cpu", dtype=torch.float64)
        self.config = self.loaded.config

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V] float64: logits at every position of one sequence."""
        ids = torch.tensor([token_ids])
        positions = torch.arange(len(token_ids))[None]
        return self.loaded.model.forward(ids, positions, FullAttention())[0]

    def greedy(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        """`new` tokens after the prompt, and the smallest top-2 gap on the way."""
        tokens, gap = list(prompt), float("inf")
        for _ in range(new):
            top = self.logits(tokens)[-1].topk(2)
            gap = min(gap, float(top.values[0] - top.values[1]))
            tokens.append(int(top.indices[0]))
        return tokens[len(prompt) :], gap

    def first_wrong(self, prompt: list[int], tokens: list[int]) -> tuple[int, int] | None:
        """Where a greedy text goes wrong: (index, what should stand there); None if nowhere.

        One pass over the whole text, each token judged by what stands before it. A near-tie is not
        wrong.
        """
        if not tokens:
            return None
        logits = self.logits(prompt + tokens[:-1])[len(prompt) - 1 :]  # [N, V]
        gaps = logits.amax(dim=-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        wrong = (gaps > NEAR_TIE).nonzero().flatten()
        if len(wrong) == 0:
            return None
        first = int(wrong[0])
        return first, int(logits[first].argmax())

    def prompt(self, rng: random.Random, length: int, new: int) -> tuple[list[int], list[int]]:
        """A random prompt whose greedy continuation is clear of near-ties, and the continuation."""
        for _ in range(100):
            prompt = [rng.randrange(256) for _ in range(length)]
            expected, gap = self.greedy(prompt, new)
            if gap > NEAR_TIE:
                return prompt, expected
        raise RuntimeError(f"no prompt of {length} tokens is clear of near-ties")


@cache
def nano_oracle() -> Oracle:
    """The oracle that contracts use."""
    return Oracle("nano")


def near_tie(model: str, device: str, prefix: list[int], one: int, other: int) -> bool:
    """Whether two next tokens are so close that the rounding of the timed dtype may swap them.

    The gap is taken in float32. What rounding can do is 1e-3 in float32; in bfloat16, which the
    numbers of a GPU run in, it is a tenth of the logits' own spread.
    """
    loaded = load(model, device=device, dtype=torch.float32)
    if not 0 <= one < loaded.config.vocab_size:
        return False
    ids = torch.tensor([prefix], device=device)
    positions = torch.arange(len(prefix), device=device)[None]
    logits = loaded.model.forward(ids, positions, FullAttention(), logit_rows=[-1])[0]
    limit = NEAR_TIE if device == "cpu" else 0.1 * float(logits.std())
    return float(logits.max() - logits[one]) < limit and float(logits.max() - logits[other]) < limit
