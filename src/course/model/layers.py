"""The parts of a decoder layer: normalisation, rotary positions, linear layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.model.config import ModelConfig

__all__ = [
    "HeadNorm",
    "Linear",
    "PackedLinear",
    "RMSNorm",
    "fastest_linear",
    "inverse_frequencies",
    "rope_tables",
    "rotate",
]


class Linear(nn.Module):
    """x W^T + b for a weight [N, K] and a bias [N] or None, which are taken as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], for a weight [H]; the mean is taken in fp32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over each head by itself, with a weight of its own for every head (Qwen3)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] -> [..., heads, D], for a weight [heads, D]."""
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians that each pair of dimensions turns per position, fp32 [D / 2]."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    freq = 1.0 / config.rope_theta ** (dims / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    # llama3: how many turns fit into the context of pre-training decides how far to stretch.
    turns = scaling.original_context * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and signed sin of every angle, fp32 [max_context, D] each; see `rotate`."""
    positions = torch.arange(config.max_context, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimensions (d, d + D/2) of every head by the angle of its position (RoPE).

    x: [B, T, heads, D]; cos, sin: [B, T, 1, D] from `rope_tables`. Returns x's shape and dtype.
    (a, b) -> (a cos - b sin, b cos + a sin): the roll swaps the halves, the sign is in the table.
    """
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    return turned.to(x.dtype)


class PackedLinear(nn.Module):
    """A linear layer whose fp32 weight lies in oneDNN's blocked layout.

    Exact fp32 arithmetic, and on a CPU up to three times faster than `F.linear` for the few rows
    of a decode step, which is bound by reading the weight.
    """

    ROWS = 8  # oneDNN picks the layout for a number of rows; this one serves 1 to some hundreds
    WORTH_IT = 1 << 16  # weights; below, a call's fixed 25 us cost more than the layout saves

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # Not a buffer: an opaque tensor has no storage to move, save or share.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.ROWS)
        self.bias = bias

    @staticmethod
    def usable(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weights on this device and of this dtype can be packed."""
        return (
            device.type == "cpu"
            and dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, [N, K]."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def fastest_linear(name: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The fastest exact layer for a weight [N, K] and a bias [N]; for `Decoder.with_linears`."""
    packs = PackedLinear.usable(weight.device, weight.dtype)
    if packs and weight.numel() >= PackedLinear.WORTH_IT:
        return PackedLinear(weight, bias)
    return Linear(weight, bias)
