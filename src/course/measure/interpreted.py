"""What a GPU would do otherwise than Triton's interpreter, seen in the interpreter.

`dot_precisions` notes how `tl.dot` is to multiply float32; `last_programs` runs the far end of a
launch alone, where offsets are largest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["dot_precisions", "last_programs"]


@contextlib.contextmanager
def dot_precisions() -> Iterator[set[str]]:
    """While it is entered: the `input_precision` of every `tl.dot` of float32, in lower case.

    The interpreter multiplies in float32 whatever it says. A GPU rounds to tf32 unless told not to.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    found: set[str] = set()
    original = InterpreterBuilder.create_dot

    def noted(builder: Any, a: Any, b: Any, total: Any, precision: Any, *rest: Any) -> Any:
        if a.dtype.scalar.is_fp32() and b.dtype.scalar.is_fp32():
            found.add(precision.name.lower())
        return original(builder, a, b, total, precision, *rest)

    InterpreterBuilder.create_dot = noted
    try:
        yield found
    finally:
        InterpreterBuilder.create_dot = original


@contextlib.contextmanager
def last_programs() -> Iterator[None]:
    """While it is entered, each launch runs one program: the last along every axis of its grid.

    Programs are told the whole grid. A launch over gigabytes takes as long as one tile of it, and
    memory that none of it touches need not exist. What other programs would write is not written.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    replaced = [
        (GridExecutor, "__call__"), (GridExecutor, "_restore_args_dev"),
        (InterpreterBuilder, "set_grid_dim"), (InterpreterBuilder, "set_grid_idx"),
    ]  # fmt: skip
    originals = [getattr(owner, name) for owner, name in replaced]
    whole = (1, 1, 1)

    def call(executor: Any, *args: Any, **named: Any) -> Any:
        grid = executor.grid

        def one(given: Any) -> tuple[int, ...]:
            nonlocal whole
            sizes = tuple(grid(given) if callable(grid) else grid)
            whole = (*sizes, 1, 1)[:3]
            return (1,)

        executor.grid = one
        return originals[0](executor, *args, **named)

    def keep(executor: Any, *args: Any) -> None:
        """Tensors of a CPU are used where they lie; copied onto themselves, they would exist."""

    def dim(builder: Any, *_: int) -> None:
        builder.grid_dim = whole

    def index(builder: Any, *_: int) -> None:
        builder.grid_idx = tuple(size - 1 for size in whole)

    for (owner, name), new in zip(replaced, (call, keep, dim, index), strict=True):
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)
