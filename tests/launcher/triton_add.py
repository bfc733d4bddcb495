"""A tiny Triton kernel, run in the interpreter or compiled for a GPU that need not be here.

Run as a program, since the interpreter is chosen before triton is imported:

    TRITON_INTERPRET=1 python triton_add.py interpret
    python triton_add.py compile 80
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)


def interpret() -> None:
    n, block = 1000, 256  # the last block is not full
    x, y = torch.randn(n), torch.randn(n)
    out = torch.full((n + 8,), torch.nan)
    add[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block)
    assert torch.equal(out[:n], x + y)
    assert out[n:].isnan().all()
    print("interpreted")


def compile_for(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=add,
        signature={"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 256},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert "ld.global" in compiled.asm["ptx"]
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    print("compiled")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        interpret()
    else:
        compile_for(int(sys.argv[2]))
