# WRONG_COUNT (control): stage 01 behind stage 02's functions, so every step computes all positions
"""The baseline of stage 02: the naive loop, with a cache beside it that nobody asks."""

from __future__ import annotations

import torch

from course.model import causal_attention
from course.parts import generate as generate_naively
from course.types import check_generation


class KVCache:
    """Keeps the contract of stage 02."""

    def __init__(self, config, capacity, *, batch_size=1, dtype=torch.float32, device="cpu"):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        shape = (config.num_layers, batch_size, capacity, config.num_kv_heads, config.head_dim)
        self.pages = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        self.length = 0

    def append(self, layer, k, v):
        """As stage 02's."""
        layers, _, capacity = self.pages[0].shape[:3]
        end = self.length + k.shape[1]
        if end > capacity:
            raise ValueError(f"capacity is {capacity} positions, but {end} are needed")
        for page, new in zip(self.pages, (k, v), strict=True):
            page[layer, :, self.length : end] = new
        if layer == layers - 1:
            self.length = end
        return self.pages[0][layer, :, :end], self.pages[1][layer, :, :end]

    def __call__(self, layer, q, k, v):
        """As stage 02's."""
        return causal_attention(q, *self.append(layer, k, v))


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    """As stage 02's, every step over the whole text."""
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    if limit:
        KVCache(model.config, len(prompt_ids) + limit - 1)
    yield from generate_naively(model, prompt_ids, max_new_tokens, eos_ids)
