"""Capture and replay: operations are recorded with the addresses of their tensors, and redone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from course.graphs.pool import Address, Handle, Pool, graph_pool_handle, pool_of
from course.graphs.streams import (
    LIBRARY_CALLS,
    WARM,
    Stream,
    in_parts,
    is_capturing,
    set_capturing,
)

__all__ = ["CUDAGraph", "graph", "to_host"]

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"

# Methods and functions that look at values, or bring values from the host, without an operation
# that could be seen below. `apply_` and `map_` are for tensors on the host alone.
READS = (
    "tolist", "numpy", "cpu", "__array__", "__repr__", "__format__", "__dlpack__", "apply_", "map_",
)  # fmt: skip
BRINGS = ("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer")

# Memory is taken, and nothing runs: what lies there afterwards is whoever wrote it last.
ALLOCATES = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
)  # fmt: skip

ATTENTION = "_scaled_dot_product"  # tagged as random for its dropout, which is 0 here


@dataclass(frozen=True)
class Operation:
    """One entry of a graph. Tensors are replaced by addresses."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]


class CUDAGraph:
    """A list of operations on fixed addresses, made by `graph(...)`.

    keep_graph: as in torch.cuda; here it changes nothing.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._operations: list[Operation] | None = None
        self._handle: Handle | None = None
        self._pool: Pool | None = None

    @property
    def num_operations(self) -> int:
        """Operations of one replay: on a GPU, roughly its kernels. Not in torch.cuda."""
        return len(self._operations or ())

    def pool(self) -> Handle:
        """The pool that this graph's tensors lie in."""
        if self._handle is None:
            raise RuntimeError("Called CUDAGraph::pool without a preceding successful capture.")
        return self._handle

    def reset(self) -> None:
        """Forget what was captured."""
        self._operations = self._handle = self._pool = None

    def replay(self) -> None:
        """Carry out what was captured, on whatever lies at its addresses now.

        Raises:
            RuntimeError: nothing was captured, a capture is under way, or memory that the capture
                used was freed.
        """
        if self._operations is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if is_capturing():
            raise RuntimeError(f"{NOT_PERMITTED} (replay)")
        there = _Memory()
        # Nobody who counts operations sees these: no Python asks for them on a GPU.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for operation in self._operations:
                kwargs = {name: there(value) for name, value in operation.kwargs.items()}
                result = operation.func(*there(operation.args), **kwargs)
                for place, value in zip(operation.results, _leaves(result), strict=True):
                    target = there(place)
                    if isinstance(target, Tensor) and target.data_ptr() != value.data_ptr():
                        target.copy_(value)


class _Memory:
    """What lies at the addresses of a graph, for one replay."""

    def __init__(self) -> None:
        self._storages: dict[int, UntypedStorage] = {}
        self._tensors: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """A recorded argument, with tensors in the place of addresses."""
        if isinstance(value, (list, tuple)):
            return [self(part) for part in value]
        if not isinstance(value, Address):
            return value
        if id(value) not in self._tensors:
            memory = id(value.memory)
            if memory not in self._storages:
                self._storages[memory] = value.storage()
            self._tensors[id(value)] = value.tensor(self._storages[memory])
        return self._tensors[id(value)]


class graph:
    """Record the operations of this context into a CUDAGraph.

    Args:
        cuda_graph: a new one.
        pool: of `graph_pool_handle()`, or another graph's; one of its own by default.
        stream, capture_error_mode: as in torch.cuda; here they change nothing.

    Raises:
        RuntimeError: when the context is entered: a capture is under way, or the graph has one
            already. Inside: what cannot be captured, after which the capture is lost.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Handle | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.cuda_graph = cuda_graph
        self.handle = graph_pool_handle() if pool is None else pool

    def __enter__(self) -> None:
        if is_capturing():
            raise RuntimeError(f"{NOT_PERMITTED} (a second capture)")
        if self.cuda_graph._operations is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
                "create a new instance."
            )
        self._pool = pool_of(self.handle)
        self._recorder = _Recorder(self._pool)
        self._values = _NoValues(self._recorder)
        self._recorder.__enter__()
        self._values.__enter__()
        set_capturing(True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_capturing(False)
        self._values.__exit__(kind, error, trace)
        self._recorder.__exit__(kind, error, trace)
        self._recorder.poison()
        if error is not None:
            return
        if self._recorder.refused:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture: "
                + self._recorder.refused
            )
        self.cuda_graph._operations = self._recorder.operations
        self.cuda_graph._handle, self.cuda_graph._pool = self.handle, self._pool


class _Recorder(TorchDispatchMode):
    """Records what torch is asked for.

    An operation is carried out on a CPU, because its result's shape must be known, but only where
    nobody outside can see it: what it would write to memory of others is left out.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.operations: list[Operation] = []
        self.refused = ""
        self._made: dict[int, Any] = {}  # blocks that this capture has written, by identity
        self._numbers: list[Tensor] = []  # of Python's, that torch has wrapped
        self._addresses: dict[Address, Address] = {}

    def refuse(self, what: str) -> None:
        """End the capture: `what` cannot be recorded."""
        self.refused = what
        raise RuntimeError(f"{NOT_PERMITTED} ({what})")

    def poison(self) -> None:
        """Spoil what the capture has made: on a GPU it has not been computed."""
        for block in self._made.values():
            block.poison()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record `func`, and give a result of the right shape."""
        kwargs = kwargs or {}
        if (result := in_parts(self, func, args, kwargs)) is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        if name == "lift_fresh":  # a tensor out of Python's numbers
            if args[0].dim() > 0:
                self.refuse("a list is copied to the device")
            self._numbers.append(args[0])  # `x[i] = 0.0`: a GPU takes the number as an argument
            return args[0]
        self._check(func, name, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # `unsqueeze_`: another shape, and no operation
            return func(*args, **kwargs)
        written = [t for t in _written(func, args, kwargs) if not self._is_made_here(t)]
        result = _handed_back(func, args, kwargs) if written else func(*args, **kwargs)
        if func.is_view:
            return result
        known = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = tree_map(lambda part: self._in_pool(part, known), result)
        if name in ALLOCATES:
            return result
        self.operations.append(
            Operation(
                func, tree_map(self._address, args), tree_map(self._address, kwargs),
                [self._address(part) for part in _leaves(result)],
            )
        )  # fmt: skip
        return result

    def _check(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what must wait for the device, is random, or sets up a library."""
        tags = func.tags
        if name == "index" or name.startswith("index_put"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            # `x[mask] = 0.0` is no trouble: torch fills where the mask says so.
            if masks and not (len(args) > 2 and self._is_number(args[2])):
                self.refuse("a mask as an index: how much it selects is a value on the device")
        elif name == "repeat_interleave" and kwargs.get("output_size") is not None:
            pass
        elif torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self.refuse(f"{name} brings a value to the host: item, bool, int, or a shape")
        if torch.Tag.nondeterministic_seeded in tags and not name.startswith(ATTENTION):
            self.refuse(f"{name} draws random numbers, which this recorder does not replay")
        if name in LIBRARY_CALLS and name not in WARM:
            self.refuse(
                f"the first use of {name} sets up a library: run the pass before the capture, "
                "inside `graphs.stream(...)`"
            )

    def _is_made_here(self, tensor: Tensor) -> bool:
        """Whether this capture has made a tensor; another graph's is somebody else's."""
        return id(Address.of(tensor).memory) in self._made

    def _is_number(self, value: Any) -> bool:
        """Whether a tensor is a number of Python's that torch has wrapped."""
        return any(value is number for number in self._numbers)

    def _in_pool(self, part: Any, known: set[int]) -> Any:
        """A result, in memory of the pool unless it lies in that of an argument."""
        if not isinstance(part, Tensor) or part.layout != torch.strided or _place(part) in known:
            return part
        placed, block = self.pool.place(part)
        self._made[id(block)] = block
        return placed

    def _address(self, value: Any) -> Any:
        """What stands for an argument in the record; equal addresses become the same object."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        if self._is_number(value):
            return value
        address = Address.of(value)
        return self._addresses.setdefault(address, address)


def _leaves(result: Any) -> Any:
    """What an operation returned, as a list."""
    return result if isinstance(result, (list, tuple)) else [result]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among some values."""
    return [value for value in values if isinstance(value, Tensor)]


def to_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is `x.to("cpu")`. On a CPU that moves nothing, so only the word tells.

    A `torch.device` is not looked at: it is the model's, and on a GPU would be another one.
    """
    words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return name == "to" and any(word.startswith("cpu") for word in words)


def _place(tensor: Tensor) -> int:
    """Names the memory of a tensor."""
    return -1 if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operation writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _handed_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation that writes to its arguments returns: those arguments."""
    written = _written(func, args, kwargs)
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    if returns == len(written):
        return written[0] if returns == 1 else tuple(written)
    raise NotImplementedError(f"{func} writes to its arguments and returns more than those")


class _NoValues(TorchFunctionMode):
    """Refuses what looks at values, or brings some, in ways that no operation shows."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, unless it waits for the device."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            self.recorder.refuse(f"{name} brings values to the host")
        if to_host(name, args, kwargs):
            self.recorder.refuse(f'{name}("cpu") brings values to the host')
        if name == "tensor_split" and _tensors((*args[1:], *kwargs.values())):
            self.recorder.refuse("tensor_split by a tensor: where it cuts is a value on the device")
        if name in BRINGS and not _tensors([*args, *kwargs.values()][name == "new_tensor" :]):
            self.recorder.refuse(f"{name} copies from the host, which waits for the device")
        return func(*args, **kwargs)
