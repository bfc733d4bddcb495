"""Streams: queues of work on a GPU. Here they only tell warm-up from everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Stream", "current_stream", "stream", "synchronize"]

# Operations whose first call sets up a library (a handle, a workspace, a choice of kernel), which
# cannot be recorded.
LIBRARY_CALLS = frozenset({
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "dot", "linear", "mm", "mv",
    "vdot",
})  # fmt: skip
WARM: set[str] = set()  # those that have run inside `stream(...)` in this process

_IN_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd
_capturing = False


def is_capturing() -> bool:
    """Whether a capture is under way."""
    return _capturing


def set_capturing(value: bool) -> None:
    """Note that a capture begins or ends."""
    global _capturing
    _capturing = value


class Stream:
    """A queue of work. Here all work is done at once, so there is nothing to wait for.

    device, priority: as in torch.cuda; here they change nothing.
    """

    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        """Let what comes next on this stream wait for what is queued on the other."""

    def synchronize(self) -> None:
        """Wait until everything on this stream is done."""
        synchronize()


_default = Stream()
_current = _default


def current_stream() -> Stream:
    """The stream that work goes to now."""
    return _current


def synchronize() -> None:
    """Wait for the device.

    Raises:
        RuntimeError: in a capture, where nothing runs that could be waited for.
    """
    if is_capturing():
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing (synchronize)"
        )


def in_parts(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run `func` as the operations that it is made of, each seen by the mode.

    Inside `torch.inference_mode` torch hands out `matmul` or `reshape` as they are, of which one
    cannot tell what they compute, or whether they copy; elsewhere it takes them apart itself.

    Returns NotImplemented for what is one operation.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _IN_PARTS):
        return NotImplemented
    with mode:
        return func.decompose(*args, **kwargs)


class _Warming(TorchDispatchMode):
    """Notes which libraries have been used."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note its name."""
        kwargs = kwargs or {}
        if (result := in_parts(self, func, args, kwargs)) is not NotImplemented:
            return result
        WARM.add(func.overloadpacket.__name__)
        return func(*args, **kwargs)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Send the work of this context to a stream. None leaves it where it is."""
    global _current
    if stream is None:
        yield
        return
    before, _current = _current, stream
    try:
        with _Warming():
            yield
    finally:
        _current = before
