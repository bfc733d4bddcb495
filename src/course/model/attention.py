"""Attention: the object that a forward pass is handed, and dense causal attention."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Attend", "FullAttention", "causal_attention", "masked_attention"]


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
    _check_shapes(q, k, v)
    queries, keys = q.shape[1], k.shape[1]
    if keys < queries:
        raise ValueError(f"k holds {keys} positions, fewer than the {queries} of q")
    if queries == keys > 1:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=True, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return out.transpose(1, 2)
    visible = None  # one query sees everything
    if queries > 1:
        visible = torch.ones(1, queries, keys, dtype=torch.bool, device=q.device)
        visible = visible.tril(keys - queries)
    return _grouped_attention(q, k, v, visible)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Dense attention in which each query sees the keys that a mask allows.

    q: [B, T, Hq, D]; k, v: [B, S, Hkv, D]; Hq a multiple of Hkv. Returns [B, T, Hq, D].
    visible: bool [B, T, S], or [1, T, S] for the same in every row; True where query t sees key s.
    A query that sees nothing has no defined result: some kernels give zeros, others NaN.

    Raises:
        TypeError: `visible` is not bool. ValueError: shapes do not fit together.
    """
    _check_shapes(q, k, v)
    if visible.dtype != torch.bool:
        raise TypeError(f"visible must be bool, got {visible.dtype}")
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    if visible.shape not in ((batch, queries, keys), (1, queries, keys)):
        raise ValueError(
            f"visible must be [B, T, S] = {(batch, queries, keys)}, got {tuple(visible.shape)}"
        )
    return _grouped_attention(q, k, v, visible)


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """The G query heads that share a KV head become G * T rows against it: nothing is repeated."""
    queries, kv_heads = q.shape[1], k.shape[2]
    groups = q.shape[2] // kv_heads
    rows = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = None if visible is None else visible.repeat(1, groups, 1)[:, None]  # [B, 1, G * T, S]
    out = F.scaled_dot_product_attention(  # [B, Hkv, G * T, D]
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.unflatten(2, (groups, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, _, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if k.shape != v.shape or k.shape != (batch, keys, kv_heads, dim) or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} disagree")
