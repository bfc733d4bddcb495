"""Stage 14: weight quantization. Linear layers that keep, and read, a quarter or an eighth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from course.model import Decoder

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # not on every system; the kernels that PyTorch ships for CPUs do without
    triton = None

    def jit(kernel):
        """Leaves a kernel as it is: nobody can launch it here."""
        return kernel


GROUP_SIZES = (32, 64, 128)  # weights that share a scale and a zero, at 4 bits
KEPT = torch.bfloat16  # what scales and zeros are kept in: the range of float32 in two bytes
SMALLEST = torch.finfo(KEPT).tiny  # the least scale: no group is divided by 0


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as 8-bit integers with one scale for each output channel: w = value * scale.

    Symmetric: the largest magnitude of a row becomes 127, and 0 stays 0. The scale is rounded to
    bfloat16 first, and the weights are divided by what it has become.

    Args:
        weight: [N, K], of any floating type, contiguous or not. It stays as it is.

    Returns:
        values: int8 [N, K], contiguous, in -127 .. 127, each rounded to the nearest, ties to even.
        scales: bfloat16 [N], above 0. No weight is further than half a scale from value * scale.
            A row of zeros gives zeros.

    Raises:
        ValueError: `weight` is not [N, K] with N, K >= 1, or not finite.
        TypeError: `weight` is no tensor of floating type.
    """
    check_weight(weight)
    raise NotImplementedError("your code goes here")


def quantize_int4(
    weight: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight as 4-bit integers, with a scale and a zero for each group of neighbours in a row.

    w = (value - 8) * scale + zero. The 16 levels of a group reach from its least weight to its
    largest, 0 among them. Scale and zero are rounded to bfloat16 first.

    Args:
        weight: [N, K], of any floating type, contiguous or not. It stays as it is. Its least and
            largest may lie further apart than float32 counts.
        group_size: of GROUP_SIZES. The last group of a row is shorter where K is no multiple of it.

    Returns:
        values: uint8 [N, K] in 0 .. 15, one in each byte.
        scales, zeros: bfloat16 [N, G], for G = ceil(K / group_size) groups; scales are above 0. No
            weight is further than 0.55 scales from its level: half a step, and what rounding scale
            and zero costs. A group of zeros gives zeros.

    Raises:
        ValueError: `weight` is not [N, K] with N, K >= 1, or not finite; or `group_size` is none of
            GROUP_SIZES.
        TypeError: `weight` is no tensor of floating type.
    """
    check_weight(weight)
    check_group_size(group_size)
    raise NotImplementedError("your code goes here")


def pack_int4(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Two 4-bit values in a byte, as `quant_matmul` reads them.

    Args:
        values: uint8 [N, K] in 0 .. 15.
        group_size: rows are padded, with any value, to whole groups.

    Returns:
        uint8 [N, G * group_size / 2]. Byte j of a row holds value 2j in its lower four bits, and
        value 2j + 1 in its upper four.
    """
    raise NotImplementedError("your code goes here")


@jit
def quant_matmul_kernel(
    out,  # [M, N]
    x,  # [M, K], with rows `x_stride` elements apart
    values,  # int8 [N, K], or uint8 [N, G * GROUP / 2]
    scales,  # [N], or [N, G]
    zeros,  # [N, G]; not looked at for 8 bits
    rows,  # M
    columns,  # N
    depth,  # K
    groups,  # G
    x_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # a multiple of GROUP
):
    """ROWS x COLUMNS of the product: program (tile of columns, tile of rows)."""
    raise NotImplementedError("your code goes here")


def quant_matmul(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group_size: int = 32,
) -> torch.Tensor:
    """x W^T for a quantized W, in Triton. No weight is ever stored in full precision.

    Args:
        x: [M, K], in bfloat16, float16 or float32; its rows may lie apart. The products are taken
            in its type, float32 not cut to tf32, and summed in float32.
        values, scales: of `quantize_int8`; or of `pack_int4` and `quantize_int4`, and then with
            its `zeros` and their `group_size`. There may be more than 2^31 bytes of values.

    Returns:
        [M, N], in the type of `x`.

    Raises:
        ValueError: the shapes of `x` and `values` do not fit together.
    """
    depth, width = x.shape[1], values.shape[1]
    if depth != width if zeros is None else not 0 <= 2 * width - depth < group_size:
        raise ValueError(f"x {tuple(x.shape)} and values {tuple(values.shape)} do not fit together")
    raise NotImplementedError("your code goes here")


class QuantLinear(nn.Module):
    """x W^T + b for a weight of which only the quantized form is kept.

    Activations are not quantized: each row of `x` is multiplied in bfloat16 by a kernel of
    PyTorch's on a CPU, and in its own type by `quant_matmul` on a GPU and in Triton's interpreter
    (float64 as float32).

    Args:
        weight: [N, K], of any floating type. Neither changed nor kept.
        bias: [N] or None, taken as it is.
        bits: 8, with a scale for each output channel, or 4, with groups.
        group_size: of GROUP_SIZES; for 4 bits.

    Raises:
        ValueError: `bits` is neither, `bias` is not [N], or as `quantize_int8` and `quantize_int4`.
        TypeError: as these.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        bits: int = 8,
        group_size: int = 32,
    ) -> None:
        super().__init__()
        check_weight(weight)
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits!r}")
        check_group_size(group_size)
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be [{len(weight)}], got {list(bias.shape)}")
        self.features = tuple(weight.shape)  # N, K
        self.bits, self.group_size = bits, group_size
        self.bias = bias
        raise NotImplementedError("your code goes here")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], in the type of `x`, which may have any floating type and layout.

        Raises:
            ValueError: `x` is not K wide.
        """
        depth = self.features[1]
        if x.dim() == 0 or x.shape[-1] != depth:
            raise ValueError(f"x must be [..., {depth}], got {list(x.shape)}")
        raise NotImplementedError("your code goes here")


def quantize_model(model: Decoder, bits: int = 8, group_size: int = 32) -> Decoder:
    """The same model with quantized linear layers. Embedding, norms and all else are shared.

    The LM head keeps 8 bits, whatever `bits` says: its errors go straight into the logits. A tied
    head is quantized too, into a copy of its own; the embedding stays as it is, for looking up.

    Raises:
        ValueError: as `QuantLinear`.
    """
    raise NotImplementedError("your code goes here")


def uses_triton(device: torch.device) -> bool:
    """Whether layers on this device go through `quant_matmul`: a GPU, and Triton's interpreter."""
    return device.type == "cuda" or (triton is not None and triton.knobs.runtime.interpret)


def check_weight(weight: torch.Tensor) -> None:
    """Refuse what is no matrix of finite numbers."""
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise TypeError("weight must be a tensor of floating type")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be [N, K], both at least 1, got {list(weight.shape)}")
    if not all(bool(torch.isfinite(end)) for end in weight.aminmax()):
        raise ValueError("weight must be finite, and holds NaN or infinity")


def check_group_size(group_size: int) -> None:
    """Refuse a size of groups that the kernels do not have."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {group_size!r}")
