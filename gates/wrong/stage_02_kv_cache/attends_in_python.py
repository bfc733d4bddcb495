# TOO_SLOW: right, with the same counts, but a step loops over its past in Python
import torch

from course.model import causal_attention
from course.types import check_generation


class KVCache:
    def __init__(self, config, capacity, *, batch_size=1, dtype=torch.float32, device="cpu"):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        shape = (config.num_layers, batch_size, capacity, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(self, layer, k, v):
        start, end = self.length, self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"capacity is {self.capacity} positions, but {end} are needed")
        self.keys[layer, :, start:end] = k
        self.values[layer, :, start:end] = v
        if layer == len(self.keys) - 1:
            self.length = end
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def __call__(self, layer, q, k, v):
        keys, values = self.append(layer, k, v)
        if q.shape[1] > 1:
            return causal_attention(q, keys, values)
        out = torch.empty_like(q)
        group = q.shape[2] // k.shape[2]
        for head in range(k.shape[2]):
            mine = slice(head * group, (head + 1) * group)
            query = q[:, 0, mine] / q.shape[-1] ** 0.5
            past = range(keys.shape[1])
            scores = [torch.einsum("bgd,bd->bg", query, keys[:, i, head]) for i in past]
            weights = torch.stack(scores, -1).softmax(-1)
            found = sum(weights[..., i, None] * values[:, i, None, head] for i in past)
            out[:, 0, mine] = found
        return out


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
