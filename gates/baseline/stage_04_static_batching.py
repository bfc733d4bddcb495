# WRONG_COUNT (control): stage 02 behind stage 04's functions, so every row is a pass of its own
"""The baseline of stage 04: as many generators of stage 02 as there are prompts, in lock step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from course.model import masked_attention
from course.parts import KVCache, generate
from course.types import check_generation


def pad_left(prompts, pad_id=0, *, device="cpu"):
    """Keeps the contract of stage 04."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    positions = torch.arange(width, device=device).sub(starts[:, None]).clamp(min=0)
    return ids, positions, starts


class PaddedCache(KVCache):
    """As stage 04's."""

    def __init__(self, config, capacity, starts, *, dtype=torch.float32, device="cpu"):
        super().__init__(config, capacity, batch_size=len(starts), dtype=dtype, device=device)
        self.starts = starts

    def visible(self, queries):
        """As stage 04's."""
        columns = torch.arange(self.length + queries, device=self.starts.device)
        own = columns[self.length :, None]
        return (columns >= torch.minimum(self.starts[:, None, None], own)) & (columns <= own)

    def __call__(self, layer, q, k, v):
        """As stage 04's."""
        if layer == 0:
            self.mask = self.visible(q.shape[1])
        return masked_attention(q, *self.append(layer, k, v), self.mask)


def generate_batch(model, prompts, max_new_tokens, eos_ids=()):
    """As stage 04's, one forward pass for each row of a step."""
    limits = max_new_tokens
    if not isinstance(limits, Sequence):
        limits = [max_new_tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise ValueError(f"max_new_tokens must hold {len(prompts)} limits, got {len(limits)}")
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        check_generation(model.config, prompt, limit, eos_ids, name=f"prompts[{i}]")
    texts = [
        generate(model, prompt, limit, eos_ids)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    yield from map(list, zip_longest(*texts))
