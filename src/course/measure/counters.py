"""Counters: what a solution asked of the model, moved and kept. Exact on every machine."""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CopiedBytes", "CountingModel", "NewTensors", "WorkCounts", "tensor_bytes"]


@dataclass(frozen=True)
class WorkCounts:
    """Work done by a model. Counts of two moments can be subtracted."""

    forward_passes: int = 0
    positions: int = 0  # token positions that went through the layers
    logit_rows: int = 0  # rows that went through the LM head

    def __sub__(self, earlier: WorkCounts) -> WorkCounts:
        return WorkCounts(
            self.forward_passes - earlier.forward_passes,
            self.positions - earlier.positions,
            self.logit_rows - earlier.logit_rows,
        )


class CountingModel:
    """A model that counts its forward passes, and behaves like the model in everything else.

    It offers what a solution needs and no more: the layers cannot be reached past the counter.
    A call that raises is not counted. ``with_linears`` gives a model that counts into the same
    ``counts``.
    """

    def __init__(self, model: Any, *, _tally: list[WorkCounts] | None = None) -> None:
        """``model`` is a ``course.model.Decoder`` or anything that is called like one."""
        self._model = model
        self._tally = [WorkCounts()] if _tally is None else _tally

    @property
    def counts(self) -> WorkCounts:
        """What was counted since the start or the last :meth:`reset`."""
        return self._tally[0]

    def reset(self) -> None:
        """Count from zero again."""
        self._tally[0] = WorkCounts()

    @property
    def config(self) -> Any:
        """The model's ``ModelConfig``."""
        return self._model.config

    @property
    def device(self) -> torch.device:
        """Where the model's weights lie."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return self._model.dtype

    def parameters(self) -> Iterator[Parameter]:
        """The model's parameters."""
        return self._model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The model's parameters with their names."""
        return self._model.named_parameters()

    def with_linears(self, factory: Callable[..., Any]) -> CountingModel:
        """Return the model with other weight layers; it adds to the same counts."""
        return CountingModel(self._model.with_linears(factory), _tally=self._tally)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Any,
        logit_rows: Sequence[int] | Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Any:
        """See ``course.model.Decoder.forward``; counts one pass, its positions and its rows."""
        result = self._model.forward(token_ids, positions, attend, logit_rows, taps)
        rows = token_ids.numel() if logit_rows is None else len(logit_rows)
        done = self._tally[0]
        self._tally[0] = WorkCounts(
            done.forward_passes + 1, done.positions + token_ids.numel(), done.logit_rows + rows
        )
        return result

    __call__ = forward


# Operations whose every output element is an input element, moved. They return new memory, or the
# tensor given as `out`, so the size of the result is what was written. Arithmetic, fills and the
# embedding lookup are not copying.
_INTO_RESULT = frozenset({
    "_reshape_copy", "_to_copy", "_unsafe_index", "_unsafe_index_put", "cat", "clone",
    "constant_pad_nd", "copy", "copy_", "expand_copy", "flip", "gather", "index", "index_copy",
    "index_put", "index_select", "lift_fresh_copy", "masked_scatter", "masked_select",
    "narrow_copy", "permute_copy", "repeat", "roll", "scatter", "select_copy", "select_scatter",
    "slice_copy", "slice_scatter", "split_copy", "split_with_sizes_copy", "stack", "take",
    "transpose_copy", "unbind_copy", "unfold_copy", "view_copy", "where",
})  # fmt: skip


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copying operations write while it is entered; arithmetic is free.

    Counted are the operations that move elements without computing anything: ``cat``, ``stack``,
    ``clone`` (hence ``contiguous`` and a ``reshape`` that must copy), ``copy_`` (hence
    ``cache[i] = x``), type and device conversion, ``index_put``, ``index_select``, ``gather``,
    indexing by a tensor, ``scatter``, ``slice_scatter``, ``repeat``, ``pad``, ``roll``, ``where``.
    An operation in place writes the elements that it addresses, one that returns a new tensor
    writes all of that. Views and ``expand`` move nothing.

    Fused kernels (attention, linear layers, Triton) are opaque: what they copy inside is not seen.

    Example: appending a token to a cache of n costs n + 1 slots with ``cat``, and 1 in place::

        with CopiedBytes() as copied:
            cache[:, n] = k
        assert copied.bytes == k.nbytes
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_op: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes written by copying since the start or the last :meth:`reset`."""
        return self._by_op.total()

    @property
    def by_op(self) -> dict[str, int]:
        """The same by ATen operation, largest first."""
        return dict(self._by_op.most_common())

    def reset(self) -> None:
        """Count from zero again."""
        self._by_op.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and add what it copied."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten":
            if name in _INTO_RESULT:
                self._by_op[name] += _size(result)
            elif name in _IN_PLACE:
                self._by_op[name] += _IN_PLACE[name](*args, **(kwargs or {}))
        return result


def _size(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(_size(part) for part in result)


def _index_put(target: Tensor, indices: Sequence[Tensor | None], *_: Any, **__: Any) -> int:
    """Bytes of ``target`` that ``target[indices] = values`` addresses."""
    index_shapes: list[tuple[int, ...]] = []
    kept = 1  # elements per index: the dimensions that no index replaces
    dim = 0
    for index in indices:
        if index is None:
            kept *= target.shape[dim]
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):  # a mask stands for its true elements
            index_shapes.append((int(index.count_nonzero()),))
            dim += index.dim()
        else:
            index_shapes.append(tuple(index.shape))
            dim += 1
    kept *= math.prod(target.shape[dim:])
    chosen = math.prod(torch.broadcast_shapes(*index_shapes)) if index_shapes else 1
    return chosen * kept * target.element_size()


def _index_copy(target: Tensor, dim: int, index: Tensor, source: Tensor) -> int:
    return source.numel() * target.element_size()


def _scatter(target: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> int:
    return index.numel() * target.element_size()


def _masked_scatter(target: Tensor, mask: Tensor, source: Tensor) -> int:
    return int(mask.expand_as(target).count_nonzero()) * target.element_size()


def _foreach_copy(targets: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _size(targets)


_IN_PLACE: dict[str, Callable[..., int]] = {
    "_foreach_copy_": _foreach_copy,
    "_index_put_impl_": _index_put,
    "index_copy_": _index_copy,
    "index_put_": _index_put,
    "masked_scatter_": _masked_scatter,
    "scatter_": _scatter,
}


def tensor_bytes(obj: Any, *, exclude: Iterable[Any] = (), max_depth: int = 16) -> int:
    """Bytes of the distinct tensor storages that can be reached from ``obj``.

    Follows attributes (``__dict__`` and ``__slots__``), lists, tuples, sets, dicts and deques;
    cycles are safe. A storage counts once and whole, however many views look into it. Storages
    reachable from ``exclude`` do not count: pass the model, when a cache holds a reference to it.
    What lies in closures, in running generators or on the far side of ``max_depth`` steps is not
    seen.

    Raises ValueError when ``max_depth`` is negative.
    """
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    not_ours = _storages(list(exclude), max_depth + 1)
    found = _storages(obj, max_depth)
    return sum(size for key, size in found.items() if key not in not_ours)


class NewTensors:
    """What tensors were made since, and are alive: in an object, a module, a closure or a cache.

    Unlike `tensor_bytes` it needs no object to begin at, so nothing can be kept where it does not
    look. All that the process holds is walked through: milliseconds, not for a loop.
    """

    def __init__(self) -> None:
        # Held, so that no new storage gets the identity of one that is gone.
        self._before = dict(_living())

    def bytes(self, *, exclude: Iterable[Any] = ()) -> int:
        """Bytes of the distinct storages, each counted whole; those reached from `exclude` not."""
        not_ours = _storages(list(exclude), max_depth=16)
        found = {key: _storage(tensor)[1] for key, tensor in _living()}
        return sum(
            size for key, size in found.items() if key not in self._before and key not in not_ours
        )


def _living() -> Iterator[tuple[int, Tensor]]:
    """Every tensor of the process, with the identity of its storage."""
    gc.collect()
    for obj in gc.get_objects():
        if issubclass(type(obj), Tensor):  # not isinstance: that may run code of the object
            yield _storage(obj)[0], obj


def tensors_in(obj: Any, *, max_depth: int = 16) -> Iterator[Tensor]:
    """Every tensor that can be reached from ``obj``, in the ways that `tensor_bytes` follows.

    Breadth first, so that whatever is reachable within ``max_depth`` steps is found on its
    shortest way.
    """
    alive = {id(obj): obj}  # visited; kept alive, so that no id is used twice
    level = [obj]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for holder in level:
            if isinstance(holder, Tensor):
                yield holder
            for part in _parts(holder):
                if id(part) not in alive:
                    alive[id(part)] = part
                    below.append(part)
        level = below


def _storages(root: Any, max_depth: int) -> dict[int, int]:
    """Size in bytes of each storage reachable from ``root``, by its identity."""
    return dict(_storage(tensor) for tensor in tensors_in(root, max_depth=max_depth))


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(identity, bytes) of the memory behind a tensor."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # opaque layouts, such as oneDNN's, have none
        return id(tensor), tensor.numel() * tensor.element_size()


# Functions and modules lead to the whole program, and hold no state of a solution's objects.
_LEAVES = (
    str, bytes, bytearray, int, float, complex, type(None), type, range,
    ModuleType, FunctionType, BuiltinFunctionType,
)  # fmt: skip


def _parts(obj: Any) -> list[Any]:
    """What ``obj`` holds."""
    if isinstance(obj, _LEAVES):
        return []
    parts: list[Any] = []
    if isinstance(obj, Mapping):
        parts += obj.keys()
        parts += obj.values()
    elif isinstance(obj, (list, tuple, Set, deque)):
        parts += obj
    elif isinstance(obj, MethodType):
        parts.append(obj.__self__)
    parts += getattr(obj, "__dict__", {}).values()
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # how Python stores a private slot
            if hasattr(obj, name):
                parts.append(getattr(obj, name))
    return parts
