"""Stage 01: the naive loop. Text from a language model, one token at a time, nothing remembered."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from course.model import Decoder, FullAttention
from course.types import check_generation


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
) -> Iterator[int]:
    """Continue a prompt greedily, and yield each new token as soon as it is known.

    Every step runs the model over the *whole* sequence (the prompt and all that was generated so
    far) and takes the most likely token after its last position.

    Args:
        model: `model.forward(token_ids[B, T], positions[B, T], attend, logit_rows=...)`, with
            `model.config`, `model.device`.
        prompt_ids: n token ids, n >= 1.
        max_new_tokens: the most tokens to yield. 0 yields nothing and computes nothing.
        eos_ids: tokens that end the text. The one that ends it is yielded too, as the last.

    Yields:
        Plain Python ints, at most `max_new_tokens` of them; fewer when an end token comes, or when
        the context is full.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    raise NotImplementedError("your code goes here")
