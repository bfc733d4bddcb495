"""Bytes that a Triton kernel loads, counted in the interpreter: exact on every machine.

In the interpreter (`TRITON_INTERPRET=1`, set before triton is imported) every load passes through
one function, with the addresses of its lanes and the mask that says which of them are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LoadedBytes"]


class LoadedBytes:
    """Counts, while it is entered, the bytes that kernels load from some tensors, and from others.

    A lane counts when its mask is true; one that is loaded twice counts twice. Caches are not
    modelled: what is asked for is counted.

    Example::

        with LoadedBytes({"keys": keys, "values": values}) as loaded:
            attend_kernel[grid](...)
        assert loaded.of("keys") == keys.nbytes
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """``tensors``: on a CPU, and kept alive by the caller.

        Raises ValueError for one on another device, and for two that share memory.
        """
        self._ranges: dict[str, tuple[int, int]] = {}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise ValueError(f"tensors[{name!r}] must lie on a CPU, not on {tensor.device}")
            start, end = _span(tensor)
            for other, (low, high) in self._ranges.items():
                if start < high and low < end:
                    raise ValueError(f"tensors[{name!r}] shares memory with tensors[{other!r}]")
            self._ranges[name] = (start, end)
        self._bytes = dict.fromkeys(self._ranges, 0)
        self.elsewhere = 0  # bytes loaded from anywhere else
        self.loads = 0  # load instructions, whatever their width

    def of(self, *names: str) -> int:
        """Bytes loaded from the tensors of those names."""
        return sum(self._bytes[name] for name in names)

    @property
    def total(self) -> int:
        """Bytes loaded in all."""
        return sum(self._bytes.values()) + self.elsewhere

    def __enter__(self) -> LoadedBytes:
        from triton.runtime.interpreter import InterpreterBuilder

        original = self._original = InterpreterBuilder.create_masked_load

        def counted(builder: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self._count(ptrs.data[mask.data.astype(bool)], ptrs.get_element_ty())
            return original(builder, ptrs, mask, *rest, **named)

        InterpreterBuilder.create_masked_load = counted
        return self

    def __exit__(self, *_: object) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        InterpreterBuilder.create_masked_load = self._original

    def _count(self, addresses: Any, element: Any) -> None:
        width = max(1, element.primitive_bitwidth // 8)
        self.loads += 1
        left = addresses.size
        for name, (start, end) in self._ranges.items():
            inside = int(((addresses >= start) & (addresses < end)).sum())
            self._bytes[name] += inside * width
            left -= inside
        self.elsewhere += left * width


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()
