"""Triton kernels built for GPUs that are not here, and what their machine code says.

`recorded_launches` notes the launches that some code makes, on tensors of the CPU, without running
them; `build` compiles one of them for a compute capability; `read_build` reads registers, spills
and the widths of loads from the result, with the programs that come in triton's own wheel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

__all__ = ["Build", "Launch", "build", "read_build", "recorded_launches"]

ALIGNMENT = 16  # bytes, or a divisor of an int: what triton's launcher specialises on

POINTERS = {
    "torch.bool": "*i1", "torch.int8": "*i8", "torch.uint8": "*u8", "torch.int16": "*i16",
    "torch.int32": "*i32", "torch.int64": "*i64", "torch.float16": "*fp16",
    "torch.bfloat16": "*bf16", "torch.float32": "*fp32", "torch.float64": "*fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments it was launched with."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]  # num_warps, num_stages, ...

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    def reads(self, storages: set[int]) -> bool:
        """Whether a tensor whose storage begins at one of these addresses is an argument."""
        return any(
            hasattr(value, "untyped_storage") and value.untyped_storage().data_ptr() in storages
            for value in self.arguments.values()
        )


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """While it is entered, kernels are not run: their launches are noted, in order.

    Raises RuntimeError in the interpreter, where kernels are not compiled.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must not be set: the interpreter builds nothing")
    found: list[Launch] = []
    original = JITFunction.run

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        del grid, warmup
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        options: dict[str, Any] = {}
        for name, value in named.items():
            (arguments if name in kernel.arg_names else options)[name] = value
        for parameter in kernel.params:
            if parameter.name not in arguments and parameter.has_default:
                arguments[parameter.name] = parameter.default
        found.append(Launch(kernel, arguments, options))

    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = original


def build(launch: Launch, capability: int) -> tuple[bytes, int]:
    """Compile a launch as triton's launcher would on a GPU of that capability (80, 90).

    Returns the machine code (a cubin), and the bytes of shared memory that a program takes.

    Raises whatever triton raises for a kernel that cannot be compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[parameter.name] = _type(value)
        aligned = value.data_ptr() if hasattr(value, "data_ptr") else value
        if isinstance(aligned, int) and not isinstance(value, bool) and aligned % ALIGNMENT == 0:
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch.options
    )
    return bytes(compiled.asm["cubin"]), int(compiled.metadata.shared)


def _type(value: Any) -> str:
    if hasattr(value, "dtype"):
        return POINTERS[str(value.dtype)]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel argument of type {type(value).__name__} cannot be built")


@dataclass(frozen=True)
class Build:
    """What the machine code of a kernel says."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread: arrays, and registers that found no room
    spills: int  # instructions that read or write such memory
    loads: Counter[int] = field(default_factory=Counter)  # width in bits -> load instructions

    @property
    def wide_share(self) -> float:
        """The share of the loaded bytes that comes in 128-bit loads; 0 without a load."""
        total = sum(width * count for width, count in self.loads.items())
        return self.loads[128] * 128 / total if total else 0.0


LOAD = re.compile(r"\bLDG(?:STS)?((?:\.\w+)+)")
SPILL = re.compile(r"\b(?:LDL|STL)\b")
NARROW = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


def read_build(cubin: bytes) -> Build:
    """Read a cubin.

    Raises RuntimeError when triton is not here, or its programs cannot read these bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", str(path))
        code = _run("nvdisasm", "-c", str(path))
    figures = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    if set(figures) != {"REG", "STACK"}:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage[:200]!r}")
    loads: Counter[int] = Counter()
    for suffixes in LOAD.findall(code):
        widths = [NARROW[word] for word in suffixes.split(".") if word in NARROW]
        loads[widths[-1] if widths else 32] += 1
    return Build(int(figures["REG"]), int(figures["STACK"]), len(SPILL.findall(code)), loads)


def _run(program: str, *arguments: str) -> str:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("triton is not installed")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / program
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise RuntimeError(f"{program} of triton's wheel cannot be run: {error}") from None
    if done.returncode:
        raise RuntimeError(f"{program} cannot read the kernel: {done.stderr.strip()[:300]}")
    return done.stdout
