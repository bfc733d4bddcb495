"""Attention: the object that a forward pass is handed, and dense causal attention."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Attend", "FullAttention", "causal_attention"]


class Attend(Protocol):
    """What the decoder calls once per layer. Whoever implements it owns the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with this step's queries, after taking in its keys and values.

        layer: 0-based; q: [B, T, Hq, D]; k, v: [B, T, Hkv, D], rotated already, of the T
        positions of this step. Returns [B, T, Hq, D]. The tensors may be views: copy to keep.
        """
        ...


class FullAttention:
    """Attends over exactly the positions of this step, and keeps nothing: no KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, T, Hq, D]; k, v: [B, T, Hkv, D] -> [B, T, Hq, D]."""
        return causal_attention(q, k, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention, aligned bottom-right: query t sees keys 0 .. S - T + t.

    q: [B, T, Hq, D]; k, v: [B, S, Hkv, D]; Hq a multiple of Hkv. Returns [B, T, Hq, D].
    The last query sees every key, so one query (T = 1) attends over a whole cache.

    Raises:
        ValueError: fewer keys than queries, or shapes that do not fit together.
    """
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if k.shape != v.shape or k.shape != (batch, keys, kv_heads, dim) or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} disagree")
    if keys < queries:
        raise ValueError(f"k holds {keys} positions, fewer than the {queries} of q")
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hkv, S, D]
    if queries == keys > 1:
        grouped = heads != kv_heads
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    # The G query heads that share a KV head become G * T rows against it: nothing is repeated.
    groups = heads // kv_heads
    q = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = None
    if queries > 1:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        mask = visible.repeat(groups, 1)  # [G * T, S]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, Hkv, G * T, D]
    return out.unflatten(2, (groups, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
