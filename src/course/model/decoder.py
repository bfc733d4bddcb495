"""The decoder that every stage runs on. Attention is an object that is handed in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.model.attention import Attend
from course.model.config import ModelConfig
from course.model.layers import (
    HeadNorm,
    Linear,
    RMSNorm,
    fastest_linear,
    rope_tables,
    rotate,
)

__all__ = ["Decoder", "DecoderLayer", "LinearFactory"]

LinearFactory = Callable[[str, Tensor, Tensor | None], Callable[[Tensor], Tensor]]


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        prefix, eps = f"layers.{index}.", config.norm_eps
        w = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        self.index = index
        self.heads = (config.num_heads, config.num_kv_heads)
        self.attn_norm = RMSNorm(w["attn_norm.weight"], eps)
        self.qkv = Linear(w["qkv.weight"], w.get("qkv.bias"))
        self.qk_norm = HeadNorm(w["qk_norm.weight"], eps) if config.qk_norm else None
        self.o = Linear(w["o.weight"])
        self.mlp_norm = RMSNorm(w["mlp_norm.weight"], eps)
        self.gate_up = Linear(w["gate_up.weight"])
        self.down = Linear(w["down.weight"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x: [B, T, H]; cos, sin: [B, T, 1, D] -> [B, T, H]."""
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, cos.shape[-1]))
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotate(qk, cos, sin).split(self.heads, dim=2)  # [B, T, Hq, D], [B, T, Hkv, D]
        out = attend(self.index, q, k, v)
        if out.shape != q.shape:
            raise ValueError(
                f"attend must return [B, T, Hq, D] = {tuple(q.shape)}, got {tuple(out.shape)}"
            )
        x = x + self.o(out.flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # [B, T, I] each
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A Llama-family decoder: embedding, layers, norm, LM head.

    weights: a tensor for every name of `config.weight_shapes()`, taken as they are, so that
    building copies nothing. q, k and v lie below each other in one weight, gate and up likewise.

    Raises:
        ValueError: a tensor is missing, or of another shape; the message names it.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, shape in config.weight_shapes().items():
            if name not in weights:
                raise ValueError(f"weights has no {name!r}")
            if weights[name].shape != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(weights[name].shape)}")
        self.config = config
        self.embed = nn.Embedding.from_pretrained(weights["embed.weight"])
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, weights) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(weights["norm.weight"], config.norm_eps)
        head = "embed.weight" if config.tie_embeddings else "lm_head.weight"
        self.lm_head = Linear(weights[head])
        self.cos: Tensor
        self.sin: Tensor
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            # Always fp32: bf16 cannot tell far positions apart.
            self.register_buffer(name, table.to(self.device), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and logits."""
        return self.embed.weight.dtype

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        logit_rows: Sequence[int] | Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """One pass over the tokens of a step.

        token_ids, positions: int64 [B, T], T >= 1; each position lies in 0 .. max_context - 1.
        attend: called once per layer, see `Attend`.
        logit_rows: None for logits [B, T, V]. Else indices into the B * T rows, negative ones
            from the end: only these L rows go through the final norm and the head, for [L, V].
        taps: layers (0-based) whose output, [B, T, H], is wanted too.

        Returns logits, or (logits, hidden states in the order of `taps`) when there are taps.

        Raises:
            ValueError: naming token_ids, positions, logit_rows or taps. Ids, positions and rows
                out of range are caught on a CPU only: a GPU would have to be waited for.
            TypeError: token_ids, positions or logit_rows are not int64.
        """
        self._check(token_ids, positions, taps)
        x = _lookup("token_ids", self.embed.weight, token_ids)  # [B, T, H]
        cos = _lookup("positions", self.cos, positions).unsqueeze(2)  # [B, T, 1, D]
        sin = _lookup("positions", self.sin, positions).unsqueeze(2)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend)
            if i in taps:
                tapped[i] = x
        if logit_rows is not None:
            x = _pick_rows(x.flatten(0, 1), logit_rows)  # [L, H]
        logits = self.lm_head(self.norm(x))
        return (logits, [tapped[i] for i in taps]) if taps else logits

    def linears(self) -> Iterator[tuple[str, Any]]:
        """(name, layer) of every weight layer, in the order of the forward pass."""
        for i, layer in enumerate(self.layers):
            for name in ("qkv", "o", "gate_up", "down"):
                yield f"layers.{i}.{name}", getattr(layer, name)
        yield "lm_head", self.lm_head

    def with_linears(self, factory: LinearFactory) -> Decoder:
        """A decoder with other weight layers, which shares everything else with this one.

        factory(name, weight [N, K], bias [N] or None) returns what is then called as linear(x),
        [..., K] -> [..., N]; names are those of `linears`. A tied head arrives with the
        embedding's weight; the embedding itself stays as it is.

        Raises:
            TypeError: the factory returned nothing callable, or this decoder's own weight layers
                came from a factory and have no `weight` and `bias` to hand on.
        """
        # A deep copy copies nothing that its memo holds already. It holds what stays shared, and
        # for each old weight layer the new one.
        shared = (self.config, *self.parameters(), *self.buffers())
        memo: dict[int, Any] = {id(thing): thing for thing in shared}
        for name, linear in self.linears():
            try:
                weight, bias = linear.weight, linear.bias
            except AttributeError:
                kind = type(linear).__name__
                raise TypeError(f"{name} is a {kind} that shows no weight and bias") from None
            memo[id(linear)] = _as_module(factory(name, weight, bias))
        return copy.deepcopy(self, memo)

    def pack(self) -> Decoder:
        """Put every large weight, in place, into the fastest exact layout for few rows.

        Changes nothing where there is none better than the plain one: on a GPU, or in another
        dtype. Returns itself.
        """
        for name, linear in self.linears():
            parent, _, attribute = name.rpartition(".")
            layer = fastest_linear(name, linear.weight, linear.bias)
            setattr(self.get_submodule(parent), attribute, layer)
        return self

    def _check(self, token_ids: Tensor, positions: Tensor, taps: Sequence[int]) -> None:
        for name, value in (("token_ids", token_ids), ("positions", positions)):
            if not isinstance(value, Tensor) or value.dtype != torch.int64:
                raise TypeError(f"{name} must be an int64 tensor")
            if value.dim() != 2 or value.numel() == 0:
                raise ValueError(f"{name} must be [B, T] and not empty, got {tuple(value.shape)}")
            if value.device != self.device:
                raise ValueError(f"{name} is on {value.device}, the model on {self.device}")
        if positions.shape != token_ids.shape:
            raise ValueError(
                f"positions must have the shape of token_ids, {tuple(token_ids.shape)}, "
                f"got {tuple(positions.shape)}"
            )
        for tap in taps:
            if not 0 <= tap < len(self.layers):
                raise ValueError(f"taps must lie in 0 .. {len(self.layers) - 1}, got {tap}")


def _lookup(name: str, table: Tensor, indices: Tensor) -> Tensor:
    """table[indices] for a table [N, C], with an error that names what was out of range."""
    try:
        return F.embedding(indices, table)
    except IndexError:
        low, high = int(indices.min()), int(indices.max())
        raise ValueError(f"{name} must lie in 0 .. {len(table) - 1}, got {low} .. {high}") from None


def _pick_rows(x: Tensor, rows: Sequence[int] | Tensor) -> Tensor:
    """x [N, H], rows of L indices -> [L, H]."""
    if not isinstance(rows, Tensor):
        rows = torch.tensor(rows, dtype=torch.int64, device=x.device)
    if rows.dtype != torch.int64:
        raise TypeError(f"logit_rows must be int64, got {rows.dtype}")
    if rows.dim() != 1:
        raise ValueError(f"logit_rows must be one-dimensional, got shape {tuple(rows.shape)}")
    try:
        return x[rows]
    except IndexError:
        raise ValueError(
            f"logit_rows must lie in {-len(x)} .. {len(x) - 1}, got {rows.tolist()}"
        ) from None


def _as_module(linear: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module is kept as it is; any other callable is put into one."""
    if isinstance(linear, nn.Module):
        return linear
    if not callable(linear):
        raise TypeError(f"factory must return something callable, got {type(linear).__name__}")
    module = nn.Module()
    module.forward = linear
    return module
