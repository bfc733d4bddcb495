"""The memory of graphs: what a capture allocates lies in a pool that outlives the capture."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

__all__ = ["Address", "Block", "Handle", "Pool", "graph_pool_handle", "pool_of", "reserved_bytes"]

Handle = tuple[int, int]  # as in torch.cuda: names a pool, and says nothing else

GRAIN = 512  # bytes: blocks are a multiple of this, as those of torch.cuda's allocator are
POISON = 0xFF  # in every byte: NaN in any floating-point type, -1 in any integer


class Block:
    """A piece of a pool, at an address that never changes; who lies there does."""

    def __init__(self, segment: Tensor, start: int, nbytes: int) -> None:
        """
        Args:
            segment: uint8, one piece of memory of a pool; the block keeps it alive.
        """
        self.memory = segment[start : start + nbytes]
        self.start, self.end = start, start + nbytes
        self._tenant: weakref.ref[UntypedStorage] | None = None

    @property
    def free(self) -> bool:
        """Whether no tensor lies here that anybody still holds."""
        return self._tenant is None or self._tenant() is None

    def storage(self) -> UntypedStorage:
        """The memory as a storage that keeps nobody out: for a replay."""
        return torch.frombuffer(self.memory.numpy(), dtype=torch.uint8).untyped_storage()

    def let(self) -> UntypedStorage:
        """The memory as a storage that is taken for as long as a tensor uses it."""
        storage = self.storage()
        self._tenant = weakref.ref(storage)
        return storage

    def poison(self) -> None:
        """Spoil what lies here, as on a GPU nothing has been written yet."""
        self.memory.fill_(POISON)


# Every block in use, by its address: a tensor made in one graph may be read by another.
_BLOCKS: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


class Pool:
    """Memory that captures share. Best fit: the smallest gap that is large enough is cut."""

    def __init__(self) -> None:
        self._segments: list[tuple[Tensor, list[Block]]] = []  # blocks in use, by their start

    @property
    def nbytes(self) -> int:
        """Bytes of all memory, free or not."""
        return sum(memory.nbytes for memory, _ in self._segments)

    def place(self, tensor: Tensor) -> tuple[Tensor, Block]:
        """The same values and strides in memory of the pool."""
        nbytes = tensor.untyped_storage().nbytes()
        block = self._take(-(-max(nbytes, 1) // GRAIN) * GRAIN)
        placed = torch.empty(0, dtype=tensor.dtype).set_(
            block.let(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        placed.copy_(tensor)
        return placed, block

    def _take(self, nbytes: int) -> Block:
        """A block in the smallest gap that has room, or in new memory of just this size."""
        gaps = [gap for gap in self._gaps() if gap[0] >= nbytes]
        if gaps:
            _, index, start = min(gaps)
        else:
            self._segments.append((torch.empty(nbytes, dtype=torch.uint8), []))
            index, start = len(self._segments) - 1, 0
        memory, blocks = self._segments[index]
        block = Block(memory, start, nbytes)
        bisect.insort(blocks, block, key=lambda b: b.start)
        _BLOCKS[block.memory.data_ptr()] = block
        return block

    def _gaps(self) -> Iterator[tuple[int, int, int]]:
        """(bytes, segment, start) of all that is free."""
        for index, (memory, blocks) in enumerate(self._segments):
            blocks[:] = [block for block in blocks if not block.free]
            ends = [0, *(block.end for block in blocks)]
            starts = [*(block.start for block in blocks), memory.nbytes]
            for end, start in zip(ends, starts, strict=True):
                if start > end:
                    yield start - end, index, end


_POOLS: dict[Handle, weakref.ref[Pool]] = {}
_numbers = itertools.count(1)


def graph_pool_handle() -> Handle:
    """A new name for a pool, to be handed to several captures: they share its memory."""
    return (0, next(_numbers))


def pool_of(handle: Handle) -> Pool:
    """The pool of that name. It lives for as long as a graph that uses it."""
    found = _POOLS[handle]() if handle in _POOLS else None
    if found is None:
        found = Pool()
        _POOLS[handle] = weakref.ref(found)
    return found


def reserved_bytes(handle: Handle) -> int:
    """Bytes that a pool holds; 0 if no graph uses it. Not in torch.cuda, which has memory_stats."""
    found = _POOLS[handle]() if handle in _POOLS else None
    return 0 if found is None else found.nbytes


@dataclass(frozen=True)
class Address:
    """Where a tensor lies and how it is laid out: all that a graph knows of it."""

    memory: Block | weakref.ref[UntypedStorage]  # of a pool, or somebody else's, who may free it
    pointer: int  # of that memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        """The address of a tensor."""
        storage = tensor.untyped_storage()
        block = _BLOCKS.get(storage.data_ptr())
        return cls(
            block if block is not None else weakref.ref(storage), storage.data_ptr(),
            tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()),
        )  # fmt: skip

    @property
    def in_pool(self) -> bool:
        """Whether a graph owns the memory."""
        return isinstance(self.memory, Block)

    def storage(self) -> UntypedStorage:
        """The memory itself.

        Raises:
            RuntimeError: it was freed, or its owner lies elsewhere now (`resize_`).
        """
        if isinstance(self.memory, Block):
            return self.memory.storage()
        storage = self.memory()
        if storage is None or storage.data_ptr() != self.pointer:
            raise RuntimeError(
                f"CUDA graph replay: the {self.dtype} tensor of shape {list(self.size)} that the "
                "capture read or wrote was freed since. A GPU would use whatever lies at its "
                "address now. Keep what a graph uses alive, and copy into it."
            )
        return storage

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """What lies there now."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
