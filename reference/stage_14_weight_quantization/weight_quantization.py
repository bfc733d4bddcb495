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
    # solution: begin
    weight = weight.float().contiguous()  # or the layout of a transposed one would be kept
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=SMALLEST).to(KEPT)
    values = (weight / scales.float()[:, None]).round_()
    return values.to(torch.int8), scales
    # solution: end


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
    # solution: begin
    columns = weight.shape[1]
    padded = F.pad(weight.float(), (0, -columns % group_size))  # 0 is in the range of every group
    groups = padded.unflatten(1, (-1, group_size))  # [N, G, group_size]
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = (high / 15 - low / 15).clamp(min=SMALLEST).to(KEPT)
    zeros = (low + 8 * scales.float()).to(KEPT)  # level 8 lies in the middle: a small number
    levels = (groups - zeros.float()[..., None]).div_(scales.float()[..., None]).round_()
    values = levels.add_(8).clamp_(0, 15).to(torch.uint8).flatten(1)[:, :columns]
    return values.contiguous(), scales, zeros
    # solution: end


def pack_int4(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Two 4-bit values in a byte, as `quant_matmul` reads them.

    Args:
        values: uint8 [N, K] in 0 .. 15.
        group_size: rows are padded, with any value, to whole groups.

    Returns:
        uint8 [N, G * group_size / 2]. Byte j of a row holds value 2j in its lower four bits, and
        value 2j + 1 in its upper four.
    """
    # solution: begin
    values = F.pad(values, (0, -values.shape[1] % group_size))
    return values[:, 0::2] | values[:, 1::2] << 4
    # solution: end


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
    # solution: begin
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # In 64 bits: a large vocabulary times a wide layer is more than 32 bits can count.
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = (row < rows)[:, None], (column < columns)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x_tile = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + k, mask=is_row & (k < depth), other=0.0
        )  # [ROWS, DEPTH]
        if BITS == 8:
            weight = tl.load(
                values + column[:, None] * depth + k, mask=is_column & (k < depth), other=0
            )  # [COLUMNS, DEPTH]: -127 .. 127 is exact in bfloat16
        else:
            width = groups * (GROUP // 2)  # bytes of a row
            byte = start // 2 + tl.arange(0, DEPTH // 2)
            pair = tl.load(
                values + column[:, None] * width + byte, mask=is_column & (byte < width), other=0
            )  # [COLUMNS, DEPTH / 2]
            value = tl.interleave(pair & 15, pair >> 4).to(tl.float32)  # [COLUMNS, DEPTH]
            group = start // GROUP + tl.arange(0, DEPTH // GROUP)
            place, is_group = column[:, None] * groups + group, is_column & (group < groups)
            scale = tl.load(scales + place, mask=is_group, other=0.0).to(tl.float32)
            zero = tl.load(zeros + place, mask=is_group, other=0.0).to(tl.float32)
            weight = tl.reshape(value, [COLUMNS, DEPTH // GROUP, GROUP]) - 8.0
            weight = tl.reshape(weight * scale[:, :, None] + zero[:, :, None], [COLUMNS, DEPTH])
        total = tl.dot(
            x_tile, tl.trans(weight.to(x_tile.dtype)), total, input_precision="ieee"
        )  # the weight exists in registers only
    if BITS == 8:  # one scale for all of a channel: it can wait until the sum is there
        scale = tl.load(scales + column, mask=column < columns, other=0.0)
        total = total * scale.to(tl.float32)
    place = row[:, None].to(tl.int64) * columns + column
    is_place = is_row & (column < columns)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)
    # solution: end


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
    # solution: begin
    rows, columns = len(x), len(values)
    groups = 1 if zeros is None else zeros.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    few = rows <= 16  # bound by the bytes of the weight: narrow tiles, so that all processors read
    tile = {"ROWS": 16, "COLUMNS": 16, "DEPTH": 256} if few else {
        "ROWS": 64, "COLUMNS": 64, "DEPTH": 128}  # fmt: skip
    if rows:
        grid = (triton.cdiv(columns, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"]))
        quant_matmul_kernel[grid](
            out, x, values, scales, scales if zeros is None else zeros, rows, columns, depth,
            groups, x.stride(0), BITS=8 if zeros is None else 4, GROUP=group_size, **tile,
        )  # fmt: skip
    return out
    # solution: end


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
        # solution: begin
        with torch.no_grad():
            parts = quantize_int8(weight) if bits == 8 else quantize_int4(weight, group_size)
            if not uses_triton(weight.device):
                self.step = 16 if bits == 8 else group_size  # columns are padded to a multiple
                parts = _packed_for_cpu(*parts, step=self.step)
            elif bits == 4:
                parts = (pack_int4(parts[0], group_size), *parts[1:])
        for name, part in zip(("values", "scales", "zeros"), parts, strict=False):
            self.register_buffer(name, part)
        # solution: end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], in the type of `x`, which may have any floating type and layout.

        Raises:
            ValueError: `x` is not K wide.
        """
        depth = self.features[1]
        if x.dim() == 0 or x.shape[-1] != depth:
            raise ValueError(f"x must be [..., {depth}], got {list(x.shape)}")
        # solution: begin
        columns = self.features[0]
        rows = x.reshape(-1, depth)
        if uses_triton(x.device):
            zeros = self.zeros if self.bits == 4 else None
            rows = rows.float() if x.dtype == torch.float64 else rows
            out = quant_matmul(rows, self.values, self.scales, zeros, self.group_size)
        else:
            # Padding copies, even by 0: the kernels want rows that begin at multiples of 32 bytes.
            rows = F.pad(rows.bfloat16(), (0, -depth % self.step))
            rows = rows.contiguous()  # a copy of a transposed x is transposed
            if self.bits == 8:
                out = torch._weight_int8pack_mm(rows, self.values, self.scales)
            else:
                out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                    rows, self.values, self.group_size, self.scales
                )[:, :columns]
        out = out.to(x.dtype)
        if self.bias is not None:
            out = (out + self.bias).to(x.dtype)  # a bias in float32 would widen what is narrower
        return out.reshape(*x.shape[:-1], columns)
        # solution: end


# solution: begin
def _packed_for_cpu(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels read that PyTorch ships for CPUs. They check no width, and read on past it.

    `_weight_int8pack_mm`: int8 [N, K'] and scales [N], for K' = K in steps of 16.
    `_weight_int4pack_mm_for_cpu`: packed uint8 [N', K' / 2] and (scale, zero) [G, N', 2], for K' =
    K in groups and N' = N in sixteens. How it lays out the values depends on the processor.
    """
    columns, depth = values.shape
    more = (0, -depth % step)
    if zeros is None:
        return F.pad(values, more), scales
    values = F.pad(values, (*more, 0, -columns % 16))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    pairs = torch.stack((scales.T, zeros.T), dim=-1)  # [G, N, 2]
    return packed, F.pad(pairs, (0, 0, 0, -columns % 16)).contiguous()


# solution: end
def quantize_model(model: Decoder, bits: int = 8, group_size: int = 32) -> Decoder:
    """The same model with quantized linear layers. Embedding, norms and all else are shared.

    The LM head keeps 8 bits, whatever `bits` says: its errors go straight into the logits. A tied
    head is quantized too, into a copy of its own; the embedding stays as it is, for looking up.

    Raises:
        ValueError: as `QuantLinear`.
    """
    # solution: begin
    return model.with_linears(
        lambda name, weight, bias: QuantLinear(
            weight, bias, 8 if name == "lm_head" else bits, group_size
        )
    )
    # solution: end


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
