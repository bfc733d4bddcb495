"""Stage 14, the judge: weight quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bills import Bills, split_words
from offline_builds import judge_builds

from course.check import expect
from course.check.channel import type_name
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import Run, WorkerHost
from course.check.session import REAL_MODEL
from course.data import passage
from course.measure import StepWork
from course.measure.ratio import PairedRatio
from course.model import FullAttention
from course.model.describe import load_config, load_tokenizer
from course.model.seeded import NANO, seeded_decoder
from course.model.store import cached_folder, source_of

STAGE = 14
TINY = 2.0**-126  # the least scale that anybody can be asked for
KINDS = {8: "int8", 4: "int4"}

# Of the root of the sum of (x w)^2, the natural size of a product: bfloat16 activations and
# results, float32 sums.
KERNEL = 0.03
# What rounding the weights of a normal row costs, relative to the result: 0.8% and 8% are expected.
ROUNDING = {8: 0.016, 4: 0.13}

Tensors = list[torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _interpreter(gate: GateRun) -> None:
    """Begin starting it: it loads while the first contracts are checked."""
    interpreted(gate)


def interpreted(gate: GateRun) -> WorkerHost:
    """The solution in triton's interpreter, on the CPU."""
    return gate.candidate_in("cpu", TRITON_INTERPRET="1")


def normal(gate: GateRun, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fresh normal numbers."""
    generator = torch.Generator().manual_seed(gate.rng.randrange(1 << 30))
    return torch.randn(shape, generator=generator).to(dtype)


def levels(parts: Tensors, group_size: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight that quantized parts stand for, and the scale of each of them; float64 [N, K]."""
    values, scales = parts[0].double(), parts[1].double()
    if len(parts) == 2:
        return values * scales[:, None], scales[:, None].expand_as(values)
    scales, zeros = (p.double().repeat_interleave(group_size, 1)[:, :depth] for p in parts[1:])
    return (values - 8) * scales + zeros, scales


def exact_weight(
    gate: GateRun, columns: int, depth: int, bits: int, group_size: int
) -> tuple[torch.Tensor, Tensors]:
    """A weight that lies on its levels, so that quantizing it changes nothing; and its parts.

    Each row, or group, holds both ends of its range, and its scale is a power of two. The last
    group may be short.
    """
    generator = torch.Generator().manual_seed(gate.rng.randrange(1 << 30))

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if bits == 8:
        values = draw(-127, 128, columns, depth)
        values[:, gate.rng.randrange(depth)] = 127
        scales = 2.0 ** draw(-9, 0, columns).float()
        parts = [values.to(torch.int8), scales.bfloat16()]
    else:
        groups = -(-depth // group_size)
        values = draw(0, 16, columns, groups, group_size)
        values[:, :, 0], values[:, :, 1] = 0, 15
        scales = 2.0 ** draw(-7, 0, columns, groups).float()
        zeros = draw(-6, 8, columns, groups) * scales
        parts = [
            values.flatten(1)[:, :depth].to(torch.uint8), scales.bfloat16(), zeros.bfloat16(),
        ]  # fmt: skip
    return levels(parts, group_size, depth)[0].float(), parts


def packed(parts: Tensors, group_size: int) -> Tensors:
    """The parts as `quant_matmul` takes them, by the layout that the docstring gives."""
    if len(parts) == 2:
        return parts
    values = parts[0]
    values = F.pad(values, (0, -values.shape[1] % group_size))
    return [values[:, 0::2] + 16 * values[:, 1::2], *parts[1:]]


def are_tensors(got: Any, what: str, wanted: dict[str, tuple[list[int], torch.dtype]]) -> Tensors:
    """A tuple of tensors of those shapes and dtypes, by name."""
    if not isinstance(got, (tuple, list)) or len(got) != len(wanted):
        raise GateFailure(
            Code.WRONG_TYPE, f"{what} returns something else", ", ".join(wanted), type_name(got)
        )
    for part, (name, (shape, dtype)) in zip(got, wanted.items(), strict=True):
        expect.is_tensor(part, f"{what}: {name}", shape)
        if part.dtype != dtype:
            raise GateFailure(
                Code.WRONG_TYPE, f"{what}: {name} have the wrong dtype", str(dtype),
                str(part.dtype),
                likely="The dtypes are part of the contract: they are what kernels read, and the "
                "bytes that are counted.",
            )  # fmt: skip
    return list(got)


def check_parts(
    got: Any, weight: torch.Tensor, bits: int, group_size: int, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in their range, scales of the right size, and every weight near its level.

    Returns the weight that they stand for, and the scales, in float64.
    """
    columns, depth = weight.shape
    exact = weight.double()
    groups = -(-depth // group_size)
    if bits == 8:
        wanted = {"values": ([columns, depth], torch.int8), "scales": ([columns], torch.bfloat16)}
        low, high = -127, 127
        span = exact.abs().amax(dim=1, keepdim=True).expand_as(exact) / 127
        bound = 0.5
    else:
        step = ([columns, groups], torch.bfloat16)
        wanted = {"values": ([columns, depth], torch.uint8), "scales": step, "zeros": step}
        low, high = 0, 15
        padded = F.pad(exact, (0, -depth % group_size))
        pieces = padded.unflatten(1, (-1, group_size))
        span = (pieces.amax(2).clamp(min=0) - pieces.amin(2).clamp(max=0)) / 15
        span = span.repeat_interleave(group_size, 1)[:, :depth]
        bound = 0.55
    parts = are_tensors(got, what, wanted)
    values = parts[0].int()
    if int(values.min()) < low or int(values.max()) > high:
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: values out of range", f"{low} .. {high}",
            f"{int(values.min())} .. {int(values.max())}",
            likely="A symmetric range leaves -128 out: its counterpart, 128, does not exist."
            if bits == 8 else "4 bits hold 16 levels.",
        )  # fmt: skip
    stands_for, scales = levels(parts, group_size, depth)
    if not bool((scales > 0).all()):
        at = int((scales <= 0).flatten().int().argmax())
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a scale is not above 0", "at least 2^-126",
            f"{float(scales.flatten()[at]):.3g}", where=f"row {at // depth}, column {at % depth}",
            likely="A row or a group of nothing but zeros: weights were divided by 0, and what "
            "an integer makes of NaN is up to the processor.",
        )  # fmt: skip
    times = (scales - TINY) / span.clamp(min=1e-300)  # what is needed; bfloat16 rounds by 2^-9
    if float(times.max()) > 1 + 2.0**-6:
        at = int(times.flatten().argmax())
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a scale is larger than its {unit_of(bits)} needs",
            f"{float(span.flatten()[at]):.4g}", f"{float(scales.flatten()[at]):.4g}",
            where=f"row {at // depth}, column {at % depth}",
            likely="One scale is shared by too many: by all rows, by a whole row, or across rows.",
        )  # fmt: skip
    error = (exact - stands_for).abs()
    allowed = bound * scales * (1 + 1e-5) + TINY
    if not bool((error <= allowed).all()):
        at = int((error / allowed).flatten().argmax())
        off = float(error.flatten()[at] / scales.flatten()[at].clamp(min=1e-300))
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a weight lies too far from its level",
            f"at most {bound} scales", f"{off:.3g} scales",
            where=f"row {at // depth}, column {at % depth}: "
            f"{float(exact.flatten()[at]):.5g} became {float(stands_for.flatten()[at]):.5g}",
            likely="Rounded toward zero, clipped, or divided by a scale that was rounded later."
            if off < 2 else "The levels do not reach that weight: what the range of its row or "
            "group starts from is lost, or belongs to another one.",
        )  # fmt: skip
    return stands_for, scales


def unit_of(bits: int) -> str:
    """What shares a scale."""
    return "row" if bits == 8 else "group"


def quantized(
    gate: GateRun, weight: torch.Tensor, bits: int, what: str, group_size: int = 32,
    layout: str = "plain",
) -> Any:  # fmt: skip
    """What the solution makes of a weight, checked; returns what it found."""
    reply = expect.result_of(
        lambda: gate.candidate.call(
            "quantized", weight=weight, bits=bits, group_size=group_size, layout=layout
        ),
        what,
    )
    if not torch.equal(reply["weight"], weight):
        raise GateFailure(
            Code.MUTATED_INPUT, f"{what}: the weight was changed", "the same numbers", "others",
            likely="It is the model's own. An operation in place has written into it.",
        )  # fmt: skip
    check_parts(reply["found"], weight, bits, group_size, what)
    if bits == 8 and not reply["contiguous"]:
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: values are not contiguous", "rows that lie end to end",
            f"those of a {layout} weight", likely="An operation keeps the layout of its input.",
        )  # fmt: skip
    return reply["found"]


BITS = pytest.mark.parametrize("bits", [8, 4], ids=lambda b: KINDS[b])


@pytest.mark.contract
class TestQuantize:
    """`quantize_int8` and `quantize_int4`, against the weight in float64."""

    @BITS
    def test_every_weight_is_near_its_level(self, gate: GateRun, bits: int) -> None:
        """rounding to nearest: no weight is further than half a scale"""
        for columns, depth in ((24, 96), (1, 64), (5, 32)):
            weight = normal(gate, columns, depth) * torch.logspace(-3, 2, columns)[:, None]
            quantized(gate, weight, bits, f"{KINDS[bits]} of [{columns}, {depth}]")

    @BITS
    def test_a_row_cannot_disturb_another(self, gate: GateRun, bits: int) -> None:
        """an outlier in one place coarsens its own row or group, and nothing else"""
        weight = normal(gate, 6, 128)
        weight[2, 40] = 1000.0
        quantized(gate, weight, bits, f"{KINDS[bits]} of a weight with one outlier")

    @BITS
    def test_zeros(self, gate: GateRun, bits: int) -> None:
        """a row or a group of zeros gives zeros, not NaN"""
        weight = normal(gate, 5, 96)
        weight[1] = 0.0
        weight[3, 32:64] = 0.0
        weight[4] *= 1e-42  # below the least scale
        what = f"{KINDS[bits]} of a weight with rows and groups of zeros"
        found = quantized(gate, weight, bits, what)
        stands_for, _ = levels(list(found), 32, 96)
        for name, part in (("a row", stands_for[1]), ("a group", stands_for[3, 32:64])):
            if (bits == 4 or name == "a row") and bool((part != 0).any()):
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: {name} of zeros", "zeros",
                    f"{float(part.abs().max()):.3g}",
                )  # fmt: skip

    @BITS
    def test_one_sign(self, gate: GateRun, bits: int) -> None:
        """rows of one sign, and constant ones"""
        weight = normal(gate, 6, 64).abs() * -1 - 0.01
        weight[1] *= -1
        weight[2] = -3.7
        weight[3] = 0.3
        weight[4, :] = torch.linspace(-1.0, -0.9, 64)
        quantized(gate, weight, bits, f"{KINDS[bits]} of rows of one sign")

    @BITS
    def test_any_size_of_numbers(self, gate: GateRun, bits: int) -> None:
        """weights of 1e-30 and of 3e38: scales neither vanish nor overflow"""
        sizes = torch.tensor([1e-30, 1e-12, 1e-6, 1.0, 7e4, 1e12, 1e30, 1e38])
        weight = normal(gate, len(sizes), 64) * sizes[:, None]
        weight[-1] = torch.tensor([-3e38, 3e38]).repeat(32)  # further apart than float32 counts
        quantized(gate, weight, bits, f"{KINDS[bits]} of weights of 1e-30 to 3e38")

    @BITS
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_types_and_layouts(self, gate: GateRun, bits: int, dtype: str) -> None:
        """weights of any floating type, contiguous or not"""
        weight = normal(gate, 8, 64, dtype=getattr(torch, dtype))
        for layout in ("plain", "transposed", "strided"):
            what = f"{KINDS[bits]} of a {layout} {dtype} weight"
            quantized(gate, weight, bits, what, layout=layout)

    def test_ties_go_to_even(self, gate: GateRun) -> None:
        """halves go to the even level, of 127 on each side and of 16"""
        row = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]
        values = quantized(gate, torch.tensor([row, row[::-1]]), 8, "int8 of halves")[0]
        wanted = [127, 0, 2, 2, 0, -2, -126, 126]
        if values.tolist() != [wanted, wanted[::-1]]:
            raise GateFailure(
                Code.WRONG_VALUE, "int8 of halves, with a scale of 1", str(wanted),
                str(values[0].tolist()), likely="Ties go to the even neighbour.",
            )  # fmt: skip
        row = [-8.0, 7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -7.5, 6.5]
        values = quantized(gate, torch.tensor([row, row[::-1]]), 4, "int4 of halves")[0]
        wanted = [0, 15, 8, 10, 10, 8, 6, 0, 14]
        if values.tolist() != [wanted, wanted[::-1]]:
            raise GateFailure(
                Code.WRONG_VALUE, "int4 of halves, with a scale of 1", str(wanted),
                str(values[0].tolist()), likely="Ties go to the even neighbour.",
            )  # fmt: skip

    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize("depth", [32, 100, 128, 129, 320])
    def test_groups(self, gate: GateRun, group_size: int, depth: int) -> None:
        """groups lie along K, and the last one may be short"""
        weight = normal(gate, 3, depth)
        for group in range(0, depth, group_size):  # each its own size
            weight[:, group : group + group_size] *= 10.0 ** gate.rng.uniform(-3, 3)
        what = f"groups of {group_size} in rows of {depth}"
        quantized(gate, weight, 4, what, group_size=group_size)

    def test_two_in_a_byte(self, gate: GateRun) -> None:
        """pack_int4: value 2j in the lower half of byte j, value 2j + 1 in the upper one"""
        for depth, group_size in ((64, 32), (100, 32), (130, 64)):
            generator = torch.Generator().manual_seed(gate.rng.randrange(1 << 30))
            values = torch.randint(0, 16, (3, depth), generator=generator).to(torch.uint8)
            what = f"pack_int4 of rows of {depth} in groups of {group_size}"
            got = expect.result_of(
                lambda v=values, g=group_size: gate.candidate.call(
                    "packed", values=v, group_size=g
                ),
                what,
            )
            width = -(-depth // group_size) * group_size // 2
            found = are_tensors([got], what, {"bytes": ([3, width], torch.uint8)})[0].int()
            both = torch.stack((found & 15, found >> 4), dim=-1).flatten(1)[:, :depth]
            if not torch.equal(both, values.int()):
                raise GateFailure(
                    Code.WRONG_VALUE, what, str(values[0, :6].tolist()), str(both[0, :6].tolist()),
                    where="the first six values", likely="The halves of a byte are exchanged, or "
                    "those share one that are no neighbours.",
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "weight", "more", "kinds", "what"),
        [
            ("weight", [4], {}, ["ValueError"], "a vector"),
            ("weight", [2, 3, 4], {}, ["ValueError"], "three dimensions"),
            ("weight", [0, 4], {}, ["ValueError"], "no rows"),
            ("weight", [4, 0], {}, ["ValueError"], "no columns"),
            ("weight", math.nan, {}, ["ValueError"], "NaN among the weights"),
            ("weight", math.inf, {}, ["ValueError"], "infinity among the weights"),
            ("weight", "int", {}, ["TypeError"], "a weight of integers"),
            ("weight", "list", {}, ["TypeError"], "a list"),
            ("group_size", [4, 64], {"group_size": 0}, ["ValueError"], "groups of nothing"),
            ("group_size", [4, 64], {"group_size": 48}, ["ValueError"], "groups of 48"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, weight: Any, more: Any, kinds: Any, what: str
    ) -> None:
        """what cannot be quantized is refused, by name"""
        given: Any = torch.ones(weight) if isinstance(weight, list) else torch.ones(4, 64)
        if isinstance(weight, float):
            given[1, 2] = weight
        elif weight == "int":
            given = given.int()
        elif weight == "list":
            given = given.tolist()
        for bits in (4,) if more else (8, 4):

            def attempt(bits: int = bits) -> None:
                gate.candidate.call("quantized", weight=given, bits=bits, **more)

            expect.rejects(attempt, argument, f"{KINDS[bits]}: {what}", kinds=kinds)


def product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T in float64, and the natural size of each of its elements."""
    x, weight = x.double(), weight.double()
    return x @ weight.T, (x.square() @ weight.T.square()).sqrt()


def check_product(
    got: Any, x: torch.Tensor, weight: torch.Tensor, what: str, *, tolerance: float = KERNEL,
    bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """[..., N] as float64 gives it; the tolerance is in units of each element's natural size."""
    shape = [*x.shape[:-1], len(weight)]
    rows = x.reshape(-1, x.shape[-1])
    wanted, size = product(rows, weight)
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    got = expect.is_tensor(got, what, shape)
    if got.dtype != x.dtype:
        raise GateFailure(
            Code.WRONG_TYPE, f"{what}: the result has another dtype", str(x.dtype), str(got.dtype),
            likely="A layer gives what it was given, whatever its kernel computes in.",
        )  # fmt: skip
    off = (got.reshape(wanted.shape).double() - wanted).abs() / size.clamp(min=1e-30)
    if off.numel() and float(off.max()) > tolerance:
        at = int(off.flatten().argmax())
        row, column = divmod(at, len(weight))
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a result is wrong", f"{float(wanted.flatten()[at]):.5g}",
            f"{float(got.flatten()[at]):.5g}", where=f"row {row}, output {column}",
        )  # fmt: skip


def layer(
    gate: GateRun, weight: torch.Tensor, inputs: Tensors, what: str, *, bits: int,
    group_size: int = 32, bias: torch.Tensor | None = None, layout: str = "plain",
    worker: WorkerHost | None = None,
) -> list[Any]:  # fmt: skip
    """What a QuantLinear says to each input."""
    reply = expect.result_of(
        lambda: (worker or gate.candidate).call(
            "linear", weight=weight, bias=bias, bits=bits, group_size=group_size, inputs=inputs,
            layout=layout,
        ),
        what,
    )  # fmt: skip
    if not reply["module"]:
        raise GateFailure(Code.WRONG_TYPE, "QuantLinear", "a torch.nn.Module", "something else")
    if not torch.equal(reply["weight"], weight) or not reply["inputs"]:
        which = "x" if not reply["inputs"] else "the weight"
        raise GateFailure(Code.MUTATED_INPUT, f"{what}: {which} was changed", "the same", "others")
    return list(reply["outputs"])


# N, K, rows, bits, group size: one row and many, ragged widths, outputs that are no multiple of 16.
LAYERS = [
    (64, 96, 1, 8, 32), (16, 100, 3, 8, 32), (1, 33, 2, 8, 32), (7, 17, 20, 8, 32),
    (64, 96, 1, 4, 32), (16, 100, 3, 4, 32), (1, 33, 2, 4, 64), (40, 320, 20, 4, 128),
    (24, 65, 5, 4, 64),
]  # fmt: skip


@pytest.mark.contract
class TestLinear:
    """`QuantLinear`, against the product in float64."""

    @pytest.mark.parametrize("case", LAYERS, ids=lambda c: f"{KINDS[c[3]]}-{c[0]}x{c[1]}x{c[2]}")
    def test_equals_the_product(self, gate: GateRun, case: Any) -> None:
        """a weight that lies on its levels loses nothing"""
        columns, depth, rows, bits, group_size = case
        weight, _ = exact_weight(gate, columns, depth, bits, group_size)
        inputs = [normal(gate, rows, depth, dtype=torch.bfloat16).float() for _ in range(3)]
        what = f"{KINDS[bits]} layer of [{columns}, {depth}], {rows} rows"
        outputs = layer(gate, weight, inputs, what, bits=bits, group_size=group_size)
        for x, got in zip(inputs, outputs, strict=True):
            check_product(got, x, weight, what)

    @BITS
    def test_rounding_costs_what_the_chapter_derives(self, gate: GateRun, bits: int) -> None:
        """normal weights: the error is that of rounding, and no more"""
        weight, x = normal(gate, 128, 512), normal(gate, 8, 512)
        (got,) = layer(gate, weight, [x], f"{KINDS[bits]} layer of normal weights", bits=bits)
        wanted, _ = product(x, weight)
        got = expect.is_tensor(got, f"{KINDS[bits]} layer", wanted.shape)
        error = float(
            (got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        )
        if error > ROUNDING[bits]:
            raise GateFailure(
                Code.WRONG_VALUE, f"{KINDS[bits]} layer of normal weights: the error is too large",
                f"at most {ROUNDING[bits]:.1%} of the result", f"{error:.1%}",
                likely="More than the weights is rounded, or with one scale for too many of them.",
            )  # fmt: skip

    @BITS
    def test_shapes(self, gate: GateRun, bits: int) -> None:
        """[..., K], no rows, and a bias"""
        weight, _ = exact_weight(gate, 32, 64, bits, 32)
        bias = normal(gate, 32, dtype=torch.bfloat16).float() * 30
        shapes = ([64], [2, 3, 64], [0, 64], [2, 0, 64], [1, 1, 64])
        inputs = [normal(gate, *s, dtype=torch.bfloat16).float() for s in shapes]
        what = f"{KINDS[bits]} layer"
        for given in (None, bias):
            outputs = layer(gate, weight, inputs, what, bits=bits, bias=given)
            for x, got in zip(inputs, outputs, strict=True):
                about = f"{what} of {list(x.shape)}{' with a bias' if given is not None else ''}"
                check_product(got, x, weight, about, bias=given)

    @BITS
    def test_types(self, gate: GateRun, bits: int) -> None:
        """x of any floating type, x and weights of any layout, a bias of another type"""
        weight, _ = exact_weight(gate, 48, 96, bits, 32)
        x = normal(gate, 4, 96, dtype=torch.bfloat16)
        kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
        inputs = [x.to(k) for k in kinds]
        for layout in ("plain", "transposed", "strided"):
            for bias in (None, normal(gate, 48, dtype=torch.bfloat16).float()):
                more = "" if bias is None else ", a bias in float32"
                what = f"{KINDS[bits]} layer of {layout} x and weight{more}"
                outputs = layer(gate, weight, inputs, what, bits=bits, layout=layout, bias=bias)
                for x, got in zip(inputs, outputs, strict=True):
                    check_product(got, x, weight, f"{what}, x in {x.dtype}", bias=bias)

    @BITS
    def test_rows_anywhere(self, gate: GateRun, bits: int) -> None:
        """bfloat16 rows that begin at an odd address"""
        weight, _ = exact_weight(gate, 16, 64, bits, 32)
        x = normal(gate, 3, 64, dtype=torch.bfloat16)
        what = f"{KINDS[bits]} layer of rows that begin at an odd element"
        got = expect.result_of(
            lambda: gate.candidate.call("misaligned", weight=weight, bits=bits, x=x), what
        )
        check_product(got, x, weight, what)

    @BITS
    def test_a_neighbour_changes_nothing(self, gate: GateRun, bits: int) -> None:
        """an outlier in another row changes no bit of this one"""
        weight = normal(gate, 64, 128)
        x = normal(gate, 4, 128)
        other = x.clone()
        other[1:] = normal(gate, 3, 128)
        other[2, 17] = 3000.0
        what = f"{KINDS[bits]} layer of four rows"
        one, two = layer(gate, weight, [x, other], what, bits=bits)
        expect.is_tensor(one, what, [4, 64])
        expect.is_tensor(two, what, [4, 64])
        if not torch.equal(one[0], two[0]):
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: an outlier in row 2 changes row 0", "the same bits",
                f"off by {float((one[0] - two[0]).abs().max()):.3g}",
                likely="Activations are quantized with one scale for all rows.",
            )  # fmt: skip

    @BITS
    def test_activations_are_not_quantized(self, gate: GateRun, bits: int) -> None:
        """an outlier in a row leaves the rest of that row as exact as it was"""
        weight, _ = exact_weight(gate, 32, 64, bits, 32)
        spared = gate.rng.randrange(2, 32)
        weight[:, spared] = 0.0
        x = normal(gate, 3, 64, dtype=torch.bfloat16).float()
        x[1, spared] = 3072.0
        x[2] /= 1024  # a small row with a small outlier: no threshold sets it apart
        x[2, spared] = 3.0
        what = f"{KINDS[bits]} layer, rows with a large activation that meets weights of 0"
        (got,) = layer(gate, weight, [x], what, bits=bits)
        check_product(got, x, weight, what)

    @BITS
    @pytest.mark.parametrize("biased", [False, True])
    def test_only_the_quantized_form_is_kept(self, gate: GateRun, bits: int, biased: bool) -> None:
        """bytes alive: integers, scales and the bias, and nothing of the weight"""
        columns, depth, group_size = 320, 512, 64
        wanted = layer_bytes(columns, depth, bits, group_size) + (4 * columns if biased else 0)
        what = f"a {KINDS[bits]} layer of [{columns}, {depth}]{' with a bias' if biased else ''}"
        held = expect.result_of(
            lambda: gate.candidate.call(
                "held_bytes", shape=[columns, depth], bits=bits, group_size=group_size,
                biased=biased, dtype="float32",
            ),
            what,
        )  # fmt: skip
        for count, when in zip(held, ("once it is made", "once it was used"), strict=True):
            if count != wanted:
                raise GateFailure(
                    Code.TOO_MUCH_MEMORY if count > wanted else Code.WRONG_COUNT,
                    f"{what}: bytes alive {when}", f"{wanted:,}", f"{count:,}",
                    likely="The weight, or a second form of it, is kept." if count > wanted
                    else "Something of it is missing.",
                )  # fmt: skip

    @BITS
    @pytest.mark.parametrize("rows", [1, 24])
    def test_no_weight_in_full_precision(self, gate: GateRun, bits: int, rows: int) -> None:
        """no operation of a call makes, or reads, a weight of floating type, or pieces of it"""
        columns, depth = 1024, 1024
        found = expect.result_of(
            lambda: gate.candidate.call(
                "made_bytes", shape=[columns, depth], bits=bits, group_size=64, rows=rows
            ),
            f"a {KINDS[bits]} layer",
        )
        # The scales of a weight in groups are a sixteenth of it; x and the result, four times over.
        most = columns * depth // 4 + 16 * rows * (columns + depth)
        for name, verb in (("made", "makes"), ("read_float", "reads")):
            if found[name] > most:
                raise GateFailure(
                    Code.TOO_MUCH_TRAFFIC, f"a {KINDS[bits]} layer {verb} a weight in a call",
                    f"at most {most:,} bytes for rows of x: {rows}", f"{found[name]:,}",
                    likely="The weight is brought back to full precision in memory, and then "
                    "multiplied: more bytes move than without quantization.",
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "more", "what"),
        [
            ("bits", {"bits": 2}, "2 bits"),
            ("bits", {"bits": 16}, "16 bits"),
            ("group_size", {"bits": 4, "group_size": 20}, "groups of 20"),
            ("bias", {"bias": torch.ones(8)}, "a bias of another length"),
            ("bias", {"bias": torch.ones(1)}, "a bias of one number"),
            ("weight", {"weight": torch.ones(64)}, "a vector for a weight"),
            ("weight", {"weight": torch.full((16, 64), math.nan)}, "NaN for a weight"),
            ("x", {"inputs": [torch.ones(2, 32)]}, "rows that are too short"),
            ("x", {"inputs": [torch.ones(2, 65)]}, "rows that are too long"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, more: dict[str, Any], what: str
    ) -> None:
        """what does not fit is refused, by name"""
        usual: dict[str, Any] = {
            "weight": torch.ones(16, 64), "bias": None, "bits": 8, "group_size": 32,
            "inputs": [torch.ones(2, 64)],
        }  # fmt: skip

        def attempt() -> None:
            gate.candidate.call("linear", **{**usual, **more})

        expect.rejects(attempt, argument, what)


def layer_bytes(columns: int, depth: int, bits: int, group_size: int) -> int:
    """Bytes of a layer whose sizes the kernels take as they are."""
    if bits == 8:
        return columns * depth + 2 * columns
    return columns * depth // 2 + 4 * columns * depth // group_size


def model_bytes(config: Any, bits: int, group_size: int) -> tuple[int, int]:
    """Bytes of a model's quantized layers, the head at 8 bits; and how many weights they hold."""
    total = weights = 0
    names = [n for n in config.weight_shapes() if n.endswith(("qkv.weight", "o.weight",
             "gate_up.weight", "down.weight"))]  # fmt: skip
    for name in names:
        columns, depth = config.weight_shapes()[name]
        total += layer_bytes(columns, depth, bits, group_size)
        weights += columns * depth
    head = (config.vocab_size, config.hidden_size)
    return total + layer_bytes(*head, 8, group_size), weights + math.prod(head)


# Options of nano, and what is said of it.
VARIANTS = [
    ({}, 32, "a tied head"), ({}, 64, "groups of 64"),
    ({"tie_embeddings": False, "qkv_bias": True}, 32, "biases"),
]  # fmt: skip


@pytest.mark.contract
class TestModel:
    """`quantize_model`, on a small model."""

    @BITS
    @pytest.mark.parametrize(("options", "group_size", "name"), VARIANTS, ids=lambda v: str(v)[:12])
    def test_a_model(
        self, gate: GateRun, bits: int, options: Any, group_size: int, name: str
    ) -> None:
        """near the original's logits, out of as many bytes as predicted; the original stays"""
        config = replace(NANO, **options)
        prompt = [gate.rng.randrange(256) for _ in range(96)]
        what = f"nano with {name}, {KINDS[bits]}"
        reply = expect.result_of(
            lambda: gate.candidate.call(
                "nano", bits=bits, group_size=group_size, options=options, prompt=prompt
            ),
            what,
        )
        if reply["same"] or not torch.equal(reply["before"], reply["after"]):
            raise GateFailure(
                Code.MUTATED_INPUT, f"{what}: the model that was given is not what it was",
                "a second model beside it", "other logits, or the same object",
            )  # fmt: skip
        wanted = oracle_logits(config, prompt)
        got = expect.is_tensor(reply["logits"], what, wanted.shape).double()
        error = float((got - wanted).square().mean().sqrt() / wanted.std())
        most = {8: 0.1, 4: 0.65}[bits]
        if not error <= most:
            raise GateFailure(
                Code.WRONG_LOGITS, f"{what}: logits are off", f"by {most:g} of their spread",
                f"{error:.3g}",
            )  # fmt: skip
        predicted, _ = model_bytes(config, bits, group_size)
        if reply["bytes"] != predicted:
            raise GateFailure(
                Code.TOO_MUCH_MEMORY if reply["bytes"] > predicted else Code.WRONG_COUNT,
                f"{what}: bytes that quantizing has made", f"{predicted:,}", f"{reply['bytes']:,}",
                likely="Every weight layer is quantized, the head at 8 bits; embedding, norms and "
                "biases are shared with the original.",
            )  # fmt: skip


def oracle_logits(config: Any, prompt: list[int]) -> torch.Tensor:
    """[T, V] in float64, with the biases that the scenario puts in."""
    model = seeded_decoder(config, device=torch.device("cpu"), dtype=torch.float64)
    if config.qkv_bias:
        for _, linear in model.linears():
            if linear.bias is not None:
                values = torch.linspace(-1, 1, len(linear.bias))  # float32, as the scenario's
                linear.bias.data.copy_(values)
    positions = torch.arange(len(prompt))[None]
    return model.forward(torch.tensor([prompt]), positions, FullAttention())[0]


# Rows, N, K, bits, group size.
PRODUCTS = [
    (1, 16, 64, 8, 32), (3, 40, 300, 8, 32), (20, 70, 100, 8, 32), (2, 5, 17, 8, 32),
    (1, 16, 64, 4, 32), (3, 40, 300, 4, 32), (20, 70, 320, 4, 64), (2, 5, 130, 4, 128),
    (17, 33, 96, 4, 64), (150, 150, 64, 8, 32), (150, 150, 64, 4, 64),  # several tiles each way
]  # fmt: skip

# The same, where no tile ends with the rows, the columns or K.
RAGGED = [(3, 40, 272, 8, 32), (15, 30, 160, 4, 32), (70, 70, 96, 4, 32)]


def loaded(gate: GateRun, case: Any) -> tuple[str, dict[str, Any], int]:
    """What a case is called, what its kernel loads, and the bytes of its values; it is right."""
    rows, columns, depth, bits, group_size = case
    weight, parts = exact_weight(gate, columns, depth, bits, group_size)
    x, given = normal(gate, rows, depth), packed(parts, group_size)
    what = f"{KINDS[bits]} kernel, {rows} rows, [{columns}, {depth}]"
    found = expect.result_of(
        lambda: interpreted(gate).call("loaded", x=x, weight=given, group_size=group_size), what
    )
    check_product(found["out"], x, weight, what, tolerance=1e-4)
    size = given[0].numel()
    if found["values"] < size or found["steps"] == 0:
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: the kernel itself must read weight and scales",
            f"{size:,} bytes of values", f"{found['values']:,}, and {found['steps']:,} more",
        )  # fmt: skip
    return what, found, size


@pytest.mark.needs("triton")
@pytest.mark.contract
class TestKernel:
    """`quant_matmul`, in the interpreter."""

    @pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: f"{KINDS[c[3]]}-{c[0]}x{c[1]}x{c[2]}")
    def test_equals_the_product(self, gate: GateRun, case: Any) -> None:
        """the kernel equals the product in float64, for float32 rows that lie apart"""
        rows, columns, depth, bits, group_size = case
        weight, parts = exact_weight(gate, columns, depth, bits, group_size)
        x = normal(gate, rows, depth)
        what = f"{KINDS[bits]} kernel, {rows} rows, [{columns}, {depth}], groups of {group_size}"
        got = expect.result_of(
            lambda: interpreted(gate).call(
                "matmul", x=x, weight=packed(parts, group_size), group_size=group_size
            ),
            what,
        )
        check_product(got, x, weight, what, tolerance=1e-4)

    @BITS
    def test_half_precision(self, gate: GateRun, bits: int) -> None:
        """x in float16: so is the result, and sums that float16 does not hold are scaled first"""
        weight, parts = exact_weight(gate, 40, 320, bits, 32)
        if bits == 8:
            weight, parts = weight / 256, [parts[0], parts[1] / 256]
        x = (normal(gate, 3, 320) * 64).half()
        what = f"{KINDS[bits]} kernel, x in float16"
        got = expect.result_of(
            lambda: interpreted(gate).call(
                "matmul", x=x, weight=packed(parts, 32), group_size=32
            ),
            what,
        )  # fmt: skip
        check_product(got, x, weight, what, tolerance=0.005)

    @BITS
    def test_layers_use_it(self, gate: GateRun, bits: int) -> None:
        """a layer goes through the kernel where it can"""
        weight, _ = exact_weight(gate, 24, 96, bits, 32)
        inputs = [normal(gate, 3, 96, dtype=kind) for kind in (torch.float32, torch.float64)]
        what = f"{KINDS[bits]} layer in the interpreter"
        outputs = layer(gate, weight, inputs, what, bits=bits, worker=interpreted(gate))
        for x, got in zip(inputs, outputs, strict=True):  # PyTorch's kernels round to bfloat16
            check_product(got, x, weight, f"{what}, x in {x.dtype}", tolerance=1e-4)

    @pytest.mark.parametrize("case", RAGGED, ids=lambda c: f"{KINDS[c[3]]}-{c[0]}x{c[1]}x{c[2]}")
    def test_reads_nothing_past_a_tensor(self, gate: GateRun, case: Any) -> None:
        """lanes past the rows, the columns and K read nothing: on a GPU nothing may be there"""
        what, found, _ = loaded(gate, case)
        for name, count in found["past"].items():
            if count:
                raise GateFailure(
                    Code.WRONG_COUNT, f"{what}: bytes that are loaded from {name}", "0",
                    f"{count:,}", likely="A load without a mask for rows, columns, K or groups.",
                )  # fmt: skip
        if "tf32" in found["precisions"]:
            raise GateFailure(
                Code.WRONG_TYPE, f"{what}: float32 is not multiplied as float32", "ieee", "tf32",
                likely="`tl.dot` on a GPU cuts float32 to 10 bits of mantissa, unless its "
                "`input_precision` says otherwise. The interpreter does not show it.",
            )  # fmt: skip

    @BITS
    def test_a_weight_of_gigabytes(self, gate: GateRun, bits: int) -> None:
        """offsets into a weight of more than 2^31 bytes do not wrap round"""
        depth, columns = 8192, (1 << 21) // bits + 128
        what = f"{KINDS[bits]} kernel, the last tile of a weight of [{columns:,}, {depth:,}]"
        found = expect.result_of(
            lambda: interpreted(gate).call("far_end", columns=columns, depth=depth, bits=bits),
            what,
        )
        if found["before"] or not found["values"]:
            raise GateFailure(
                Code.WRONG_COUNT, f"{what}: bytes loaded from the weight, and from before it",
                "some, and 0", f"{found['values']:,}, and {found['before']:,}",
                likely="Offsets are counted in 32 bits: 256,000 words of 12,288 numbers are more. "
                "Make the index of a row int64 before it is multiplied.",
            )  # fmt: skip

    def test_bad_input_is_refused(self, gate: GateRun) -> None:
        """x of another width is refused"""
        for bits in (8, 4):
            _, parts = exact_weight(gate, 16, 64, bits, 32)

            given = packed(parts, 32)

            def attempt(weight: Tensors = given) -> None:
                interpreted(gate).call("matmul", x=torch.ones(2, 96), weight=weight, group_size=32)

            expect.rejects(attempt, "x", "rows of another width")


# Widths just past a tile, so that what is read past a row shows.
COUNTED = [(1, 48, 272, 8, 32), (15, 32, 528, 8, 32), (1, 48, 288, 4, 32), (15, 32, 576, 4, 64)]


@pytest.mark.needs("triton")
@pytest.mark.number
def test_kernel_bytes(gate: GateRun) -> None:
    """bytes of the weight that the kernel loads, over those that it has"""
    worst = 0.0
    for case in COUNTED:
        _, found, size = loaded(gate, case)
        worst = max(worst, found["values"] / size)
    gate.exact(
        "kernel_bytes", round(worst, 3), at_most=gate.bar("kernel_bytes"), unit="x",
        code=Code.TOO_MUCH_TRAFFIC,
        text=f"{worst:.3f} times the values of a weight are loaded, for up to 15 rows",
        message="the weight is loaded more than once",
        likely="One program for each row reads all of it. Rows share what is loaded.",
    )  # fmt: skip


BUILDS = [
    {"rows": 1, "columns": 4096, "depth": 4096, "bits": 8, "group": 32},
    {"rows": 8, "columns": 4096, "depth": 14336, "bits": 4, "group": 32},
    {"rows": 512, "columns": 4096, "depth": 4096, "bits": 4, "group": 64},
]


@pytest.mark.needs("triton")
@pytest.mark.number
def test_builds(gate: GateRun) -> None:
    """registers, spills and load widths of the kernel, built for sm_80 and sm_90"""
    judge_builds(gate, BUILDS, reads="reads_weight", what="the weight", handed="the values")


class Race:
    """Decode steps at batch 1, of the model as it is and of its quantized form, in turn.

    Both are fed the same random tokens, and every timed step's logits are compared.
    """

    PAST, STEPS = 64, 330  # more than are ever timed
    AT_ONCE = 3  # steps of one side in a row: a look lasts longer; see course.measure.ratio
    # Of the spread of the logits, in a single step. The reference reaches 0.04 and 0.55 with random
    # weights; logits that have nothing to do with these are off by 1.4.
    LIMIT = {8: 0.1, 4: 0.9}  # noqa: RUF012

    def __init__(self, gate: GateRun, model: str, bits: int) -> None:
        self.gate, self.model, self.bits = gate, model, bits
        self.found: dict[str, list[torch.Tensor]] = {"baseline": [], "candidate": []}
        self.runs = dict(self._open())

    def baseline(self) -> float:
        """A step of the model as it is, in seconds."""
        return self._steps("baseline")

    def candidate(self) -> float:
        """A step of the quantized model, in seconds."""
        return self._steps("candidate")

    @property
    def context(self) -> int:
        """Tokens that a step has read of its past, in the middle of what was timed."""
        return self.PAST + len(self.found["candidate"]) // 2

    def _steps(self, side: str) -> float:
        return sum(self._step(side) for _ in range(self.AT_ONCE)) / self.AT_ONCE

    def _step(self, side: str) -> float:
        what = f"a decode step on {self.model} in {self.bits} bits"
        reply = expect.result_of(self.runs[side].step, what)
        vocab = load_config(self.model, self.gate.device).vocab_size
        self.found[side].append(expect.is_tensor(reply.value, what, [vocab]).float())
        at = min(map(len, self.found.values())) - 1
        if at >= 0:
            one, other = (self.found[name][at] for name in ("baseline", "candidate"))
            error = float((one - other).square().mean().sqrt() / one.std())
            if not error <= self.LIMIT[self.bits]:
                raise GateFailure(
                    Code.WRONG_LOGITS, f"{what}: logits of a timed step are off",
                    f"by at most {self.LIMIT[self.bits]:g} of their spread", f"{error:.3g}",
                    where=f"step {at}",
                )  # fmt: skip
        return reply.seconds

    def _open(self) -> Iterator[tuple[str, Run]]:
        """Both sides, ready for their first step: quantizing is not part of it."""
        config = load_config(self.model, self.gate.device)
        shared = {
            "model": self.model, "group_size": 32, "past": self.PAST,
            "tokens": [self.gate.rng.randrange(config.vocab_size) for _ in range(self.STEPS)],
            "seed": self.gate.rng.randrange(1 << 20),
        }  # fmt: skip
        for side, worker, bits in (
            ("baseline", self.gate.baseline, None), ("candidate", self.gate.candidate, self.bits)
        ):  # fmt: skip
            self.gate.tell(f"quantizing {self.model} to {self.bits} bits")
            run = worker.start("decode", bits=bits, **shared)
            expect.result_of(run.step, f"{self.model} in {self.bits} bits")
            yield side, run


@pytest.fixture(scope="module")
def bills(gate: GateRun) -> Bills:
    """What steps of the timed model cost, measured in this run."""
    return Bills(gate, timed_model(gate))


def timed_model(gate: GateRun) -> str:
    """What is timed: wide layers, whose weights no cache holds."""
    return "bench" if gate.device == "cpu" else gate.model


@pytest.mark.number
@BITS
def test_time(gate: GateRun, bills: Bills, bits: int) -> None:
    """tokens per second at batch 1, over the layers that are not quantized"""
    race = Race(gate, timed_model(gate), bits)
    size = bills.dtype.itemsize

    def words(ratio: PairedRatio) -> str:
        return (
            f"{ratio.median:.2f}x as many tokens per second at batch 1 "
            f"({1 / ratio.candidate_s:.0f} for {1 / ratio.baseline_s:.0f}) in {bits} bits"
        )

    def notes(ratio: PairedRatio) -> list[str]:
        plain = bills.decode([race.context])
        total, weights = model_bytes(bills.config, bits, 32)
        less = StepWork(float(total), plain.kv_bytes, plain.flops)
        one = bills.split(plain, ratio.baseline_s)
        other = bills.split(less, ratio.candidate_s)
        return [
            f"{size * weights / total:.2f}x fewer bytes; {one.predicted / other.predicted:.2f}x "
            f"from the bills",
            split_words(one, f"in {8 * size} bits"), split_words(other, f"in {bits} bits"),
        ]  # fmt: skip

    gate.ratio(f"time_{KINDS[bits]}", race.baseline, race.candidate, text=words, notes=notes)


@dataclass
class Reading:
    """What a model said of the passage: logits [n, V]."""

    made_bytes: Any  # that quantizing made
    text: torch.Tensor  # of the whole text, in one pass
    steps: torch.Tensor  # of its first tokens, one by one
    generated: torch.Tensor  # where each generated token was chosen
    tokens: list[int]  # those


class Text:
    """The passage, read by the model as it is and by its quantized forms."""

    PROMPT, NEW, CHUNK = 64, 32, 256

    def __init__(self, gate: GateRun) -> None:
        self.gate = gate
        self.model = text_model(gate)
        self.ids = load_tokenizer(self.model).encode(passage())
        self.config = load_config(self.model, gate.device)

    @cached_property
    def had_four_bits(self) -> bool:
        """Whether the weights come from the 4-bit file, and not from the hub or a seed."""
        folder = cached_folder(self.model)
        return folder is not None and "Q4_1" in source_of(folder)

    @cached_property
    def plain(self) -> Reading:
        """By the model as it is. It also chooses what is generated after the first tokens."""
        return self._read(None, self.NEW)

    @cached_property
    def int8(self) -> Reading:
        """In 8 bits."""
        return self._read(8, self.plain.tokens)

    @cached_property
    def int4(self) -> Reading:
        """In 4 bits, groups of 32."""
        return self._read(4, self.plain.tokens)

    def _read(self, bits: int | None, generated: Any) -> Reading:
        """Read the text; `generated` is a number of tokens to choose, or those that were chosen."""
        worker = self.gate.baseline if bits is None else self.gate.candidate
        form = "as it is" if bits is None else f"in {bits} bits"
        tokens, steps = self.gate.bar("text_int8" if bits is None else f"text_{KINDS[bits]}")
        ids = self.ids[: min(tokens, self.config.max_context)]
        run = worker.start(
            "text", model=self.model, bits=bits, group_size=32, ids=ids, chunk=self.CHUNK,
            steps=0 if bits is None else steps, prompt=self.PROMPT, generated=generated,
        )  # fmt: skip

        def piece(rows: int) -> torch.Tensor:
            what = f"{self.model} {form}: logits"
            self.gate.tell(f"reading the passage {form}")
            got = expect.result_of(run.step, what).value
            return expect.is_tensor(got, what, [rows, self.config.vocab_size])

        made = expect.result_of(run.step, f"quantizing {self.model}").value
        rows = [len(ids[at : at + self.CHUNK]) for at in range(0, len(ids), self.CHUNK)]
        whole = torch.cat([piece(count) for count in rows])
        one_by_one = whole[:0] if bits is None else piece(steps)
        following = piece(self.NEW)
        ended = expect.result_of(run.step, f"{self.model} {form}").value
        return Reading(made, whole, one_by_one, following, ended if bits is None else generated)

    def surprise(self, logits: torch.Tensor, tokens: int) -> float:
        """Mean of -log p of the next token, over the first tokens of the text, in nats."""
        return float(F.cross_entropy(logits[: tokens - 1].double(), self.tensor[1:tokens]))

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The text."""
        return torch.tensor(self.ids)


def text_model(gate: GateRun) -> str:
    """What the passage is read by: trained weights, where they can be had.

    On a GPU the numbers of other stages are taken on random weights, which say nothing of a text.
    """
    if gate.device == "cuda" and cached_folder(REAL_MODEL) is not None:
        return REAL_MODEL
    return gate.model


def divergence(plain: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence of the second's next tokens from the first's, in nats; logits [n, V]."""
    p, q = plain.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).double().mean())


@pytest.fixture(scope="module")
def text(gate: GateRun) -> Text:
    """Read once, for all the numbers about it."""
    return Text(gate)


@pytest.mark.number
def test_bytes(gate: GateRun, text: Text) -> None:
    """bytes of the quantized layers, as predicted"""
    for bits, reading in ((8, text.int8), (4, text.int4)):
        predicted, weights = model_bytes(text.config, bits, 32)
        made = expect.is_int(reading.made_bytes, "bytes")
        gate.exact(
            f"bytes_{KINDS[bits]}", made, equals=predicted, unit="bytes",
            code=Code.TOO_MUCH_MEMORY if made > predicted else Code.WRONG_COUNT,
            text=f"{made:,} bytes of layers, {8 * made / weights:.2f} bits a weight: "
            f"{4 * weights / made:.2f}x fewer than in 32 bits",
        )  # fmt: skip


@pytest.mark.number
def test_quality(gate: GateRun, text: Text) -> None:
    """perplexity and divergence, in one pass and token by token"""
    for bits, reading in ((8, text.int8), (4, text.int4)):
        tokens = len(reading.text)
        plain, other = (text.surprise(r.text, tokens) for r in (text.plain, reading))
        ratio = math.exp(other - plain)
        judged = partial(hold, gate, text, bits)
        judged(
            f"perplexity_{KINDS[bits]}", round(ratio, 4), "x",
            f"{math.exp(other):.2f} over {tokens} tokens, {ratio:.4f} times the "
            f"{math.exp(plain):.2f} of the unquantized model",
        )  # fmt: skip
        for name, logits, way in (
            (f"divergence_{KINDS[bits]}", reading.text, "in one pass"),
            (f"steps_{KINDS[bits]}", reading.steps, "token by token"),
        ):
            found = divergence(text.plain.text[: len(logits)], logits)
            words = f"{found:.4f} nats a token from the unquantized model, {way}"
            judged(name, round(found, 5), "nats", words)


def hold(
    gate: GateRun, text: Text, bits: int, name: str, value: float, unit: str, words: str
) -> None:
    """Hold a figure of the text against its bar, or report it.

    What 4 bits do to weights that did not have 4 before is not the solution's doing.
    """
    if bits == 4 and not text.had_four_bits:
        gate.report(name, value, words, unit=unit)
        return
    bar = gate.bar(name.replace("steps", "divergence"))  # one bar, however the text is read
    gate.exact(
        name, value, at_most=bar, unit=unit, counted=False, code=Code.WRONG_LOGITS,
        text=words, message=f"{text.model} in {bits} bits expects other tokens than before",
        note="its layers come from a 4-bit file, in groups of 32" if bits == 4 else "",
    )  # fmt: skip


@pytest.mark.number
def test_agreement(gate: GateRun, text: Text) -> None:
    """agreement along a generated text: what a draft of the quantized weights would be worth"""
    for bits, reading in ((8, text.int8), (4, text.int4)):
        p, q = text.plain.generated.softmax(-1), reading.generated.softmax(-1)
        same = float((p.argmax(-1) == q.argmax(-1)).double().mean())
        shared = float(torch.minimum(p, q).sum(-1).mean())
        gate.report(
            f"agreement_{KINDS[bits]}", round(same, 4),
            f"{same:.0%} of {text.NEW} generated tokens are the likeliest in {bits} bits too; "
            f"{100 * shared:.1f}% of the probability is shared, the divergence "
            f"{divergence(text.plain.generated, reading.generated):.4f} nats",
        )  # fmt: skip
