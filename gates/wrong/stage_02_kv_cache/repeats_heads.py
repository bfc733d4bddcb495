# TOO_MUCH_MEMORY: every KV head is stored once for each of its query heads
import torch

from course.model import causal_attention
from course.types import check_generation


class KVCache:
    def __init__(self, config, capacity, *, batch_size=1, dtype=torch.float32, device="cpu"):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        shape = (config.num_layers, batch_size, capacity, config.num_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.group = config.num_heads // config.num_kv_heads

    def append(self, layer, k, v):
        start, end = self.length, self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"capacity is {self.capacity} positions, but {end} are needed")
        self.keys[layer, :, start:end] = k.repeat_interleave(self.group, dim=2)
        self.values[layer, :, start:end] = v.repeat_interleave(self.group, dim=2)
        if layer == len(self.keys) - 1:
            self.length = end
        return self.keys[layer, :, :end, :: self.group], self.values[layer, :, :end, :: self.group]

    def __call__(self, layer, q, k, v):
        keys, values = self.append(layer, k, v)
        return causal_attention(q, keys, values)


def generate(model, prompt_ids, max_new_tokens, eos_ids=()):
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    if limit == 0:
        return
    capacity = len(prompt_ids) + limit - 1
    cache = KVCache(model.config, capacity, dtype=model.dtype, device=model.device)
    feed = list(prompt_ids)
    for _ in range(limit):
        token_ids = torch.tensor([feed], device=model.device)
        positions = torch.arange(cache.length, cache.length + len(feed), device=model.device)[None]
        logits = model.forward(token_ids, positions, cache, logit_rows=[-1])
        token = int(logits[0].argmax())
        yield token
        if token in eos_ids:
            return
        feed = [token]
