"""Runs kernels of the tests' own, in a process whose TRITON_INTERPRET the caller has set.

Prints, as JSON, what `loads`, `far` or `builds` returns: its first argument says which.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from course.measure.interpreted import dot_precisions, last_programs
from course.measure.kernel_builds import Build, build, read_build, recorded_launches
from course.measure.kernel_loads import LoadedBytes


@triton.jit
def load_thrice(out, x, other, count, TILE: tl.constexpr):
    """The first `count` of x, then each second of these twice, then all of another tensor."""
    lane = tl.arange(0, TILE)
    once = tl.load(x + lane, mask=lane < count, other=0.0)
    twice = tl.load(x + lane // 2, mask=lane < count, other=0.0)
    elsewhere = tl.load(other + lane)
    tl.store(out + lane, once + twice + elsewhere)


@triton.jit
def load_one(out, x):
    """A single element, without a mask."""
    tl.store(out, tl.load(x))


@triton.jit
def copy_rows(out, x, stride, scale, shift=0, ROWS: tl.constexpr = 32, COLUMNS: tl.constexpr = 64):
    """A tile whose neighbours lie `stride` elements apart."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = (row[:, None] * COLUMNS + column) * stride + shift
    tl.store(out + row[:, None] * COLUMNS + column, tl.load(x + at) * scale)


@triton.jit
def keep_all(out, x, SIZE: tl.constexpr):
    """A square that has to be held as a whole: each element is needed after the last was read."""
    index = tl.arange(0, SIZE)
    at = index[:, None] * SIZE + index
    square = tl.load(x + at)
    tl.store(out + at, square - tl.sum(tl.sum(square, axis=0), axis=0))


@triton.jit
def place(out, rows, columns):
    """Each program notes where it is, and the size of the grid."""
    row, column = tl.program_id(0), tl.program_id(1)
    tl.store(out + row * columns + column, row * 100 + column * 10 + tl.num_programs(1))


@triton.jit
def multiply(out, x, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """The square of a matrix."""
    index = tl.arange(0, 16)
    at = index[:, None] * 16 + index
    square = tl.load(x + at).to(KIND)
    tl.store(out + at, tl.dot(square, square, input_precision=PRECISION))


def far() -> dict[str, Any]:
    """What the last program of a launch writes; and how kernels multiply float32."""
    out, x = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(16, 16)
    found: dict[str, Any] = {}
    with last_programs():
        place[(3, 4)](out, 3, 4)
        found["last"] = out.tolist()
        out.zero_()
        place[lambda given: (given["rows"], given["columns"])](out, 2, 4)
        found["last of fewer"] = out.tolist()
    place[(3, 4)](out, 3, 4)
    found["afterwards"] = int(out.count_nonzero())
    for name, kind, precision in (
        ("left open", tl.float32, None), ("ieee", tl.float32, "ieee"), ("half", tl.float16, None),
    ):  # fmt: skip
        with dot_precisions() as noted:
            multiply[(1,)](torch.zeros(16, 16), x, kind, precision)
        found[name] = sorted(noted)
    multiply[(1,)](torch.zeros(16, 16), x, tl.float32, "tf32x3")
    found["outside"] = sorted(noted)
    return found


def loads() -> dict[str, Any]:
    """Bytes that `load_thrice` and `load_one` load, by the tensor they lie in."""
    x = torch.arange(16.0)
    other = torch.ones(16, dtype=torch.float16)
    whole, count = torch.arange(9), 10
    found: dict[str, Any] = {}
    out = torch.zeros(16)
    with LoadedBytes({"x": x, "untouched": torch.ones(16)}) as loaded:
        load_thrice[(1,)](out, x, other, count, TILE=16)
        found["first"] = [loaded.of("x"), loaded.of("untouched"), loaded.elsewhere, loaded.loads]
        load_thrice[(3,)](out, x, other, 0, TILE=16)
        found["nothing of x"] = [loaded.of("x"), loaded.elsewhere, loaded.total]
    load_thrice[(1,)](out, x, other, count, TILE=16)
    found["after it was left"] = loaded.total
    found["out"] = out.tolist()
    with LoadedBytes({"part": whole[2:4], "rest": whole[4:], "none": whole[:0]}) as loaded:
        load_one[(2,)](torch.zeros(1, dtype=torch.int64), whole[3:])
        load_one[(1,)](torch.zeros(1, dtype=torch.int64), whole[1:])
    found["views"] = [loaded.of("part"), loaded.of("part", "rest"), loaded.elsewhere]
    rows = torch.zeros(4, 6)
    found["refused"] = []
    for tensors in (
        {"far": torch.ones(2, device="meta")},
        {"all": rows, "some": rows[1:, 2:4]},
        {"left": rows[:, :3], "right": rows[:, 3:]},
    ):
        try:
            LoadedBytes(tensors)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


def builds() -> dict[str, Any]:
    """What the machine code of several launches says."""
    x, out = torch.zeros(1 << 14), torch.zeros(1 << 14)
    half = x.to(torch.bfloat16)
    with recorded_launches() as launches:
        copy_rows[(1,)](out, x, 1, 2.0)
        copy_rows[(1,)](half.clone(), half, 1, 2.0)
        copy_rows[(1,)](out, x, stride=7, scale=2.0, shift=1 << 40)
        copy_rows[(1,)](out, x[1:], 1, 2.0)
        keep_all[(1,)](out, x, SIZE=128, num_warps=1)
        keep_all[(1,)](out, x, SIZE=16, num_warps=4)
        copy_rows[(1,)](out, x, 1, "no number")
    names = ("wide", "wide_half", "narrow", "misaligned", "spilling", "small")
    found: dict[str, Any] = {
        "kernels": [launch.name for launch in launches],
        "default": launches[0].arguments["shift"],
        "reads": [launches[0].reads({t.untyped_storage().data_ptr()}) for t in (x, half)],
        "untouched": float(out.sum()),
    }
    for capability in (80, 90):
        for name, launch in zip(names, launches, strict=False):
            cubin, shared = build(launch, capability)
            found[f"{name} {capability}"] = {**shown(read_build(cubin)), "shared": shared}
    try:
        build(launches[-1], 80)
    except TypeError as error:
        found["refused"] = str(error)
    return found


def shown(read: Build) -> dict[str, Any]:
    """A build, as plain values."""
    return {
        "registers": read.registers,
        "stack": read.stack_bytes,
        "spills": read.spills,
        "loads": {str(width): count for width, count in read.loads.items()},
        "wide": read.wide_share,
    }


if __name__ == "__main__":
    print(json.dumps({"loads": loads, "far": far, "builds": builds}[sys.argv[1]]()))
