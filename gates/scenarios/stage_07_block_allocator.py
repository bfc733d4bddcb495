"""Stage 07, the half that runs beside the solution."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from growth import grown_by

from course.types import OutOfBlocks

POOLS: dict[str, "Pool"] = {}  # by the name that the judge gives them


class Pool:
    """An allocator, and the block tables that its caller keeps."""

    def __init__(self, allocator: Any, num_blocks: int, watched: bool) -> None:
        self.allocator = allocator
        self.num_blocks = num_blocks
        self.watched = watched
        self.tables: dict[str, Any] = {}
        self.refusal: dict[str, Any] = {}  # the numbers of the last error

    def state(self) -> dict[str, Any]:
        """All that the judge may see."""
        allocator = self.allocator
        return {
            "tables": dict(self.tables),
            "num_free": allocator.num_free,
            "ref_counts": [allocator.ref_count(block) for block in range(self.num_blocks)],
            "taken": list(allocator.taken) if self.watched else [],
            "given": list(allocator.given) if self.watched else [],
        }

    def resolve(self, value: Any) -> Any:
        """A text is the name of a table; a list may hold such names. {"one by one": list} becomes
        something that can be walked once.
        """
        if isinstance(value, dict):
            return iter(self.resolve(value["one by one"]))
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        return self.tables[value] if isinstance(value, str) else value


def new(env: Any, pool: str, num_blocks: Any, block_size: Any, watched: bool = False) -> None:
    """Make an allocator; `watched` makes it one of a subclass that notes takes and returns."""
    kind = env.solution.BlockAllocator
    allocator = (watch(kind) if watched else kind)(num_blocks, block_size)
    POOLS[pool] = Pool(allocator, num_blocks, watched)


def watch(kind: Any) -> Any:
    """A subclass that sees the free list at work, as that of a later stage does."""

    class Watched(kind):
        taken, given = [], []  # the class has one object

        def take(self) -> Any:
            block = super().take()
            self.taken.append(block)
            return block

        def give_back(self, block: Any) -> None:
            self.given.append(block)
            super().give_back(block)

    return Watched


def do(env: Any, pool: str, op: str, args: list[Any], into: str = "") -> dict[str, Any]:
    """Call a method, and look. Tables are given by their names; `into` names a new one."""
    kept = POOLS[pool]
    kept.refusal = {}
    try:
        result = getattr(kept.allocator, op)(*kept.resolve(args))
    except Exception as error:
        kept.refusal = {name: getattr(error, name, None) for name in ("needed", "free")}
        raise
    if into:
        kept.tables[into] = result
    return {"result": result, **kept.state()}


def look(env: Any, pool: str) -> dict[str, Any]:
    """The state, and what the last refusal said in numbers."""
    return {"refusal": POOLS[pool].refusal, **POOLS[pool].state()}


# -- numbers --------------------------------------------------------------------------------------


def fill(
    env: Any, num_blocks: int, block_size: int, requests: list[Any], token_bytes: int
) -> dict[str, Any]:
    """Serve requests one after the other and free none, until the pool is full.

    The pool is real memory, of `token_bytes` for each token. What a sequence writes there is its
    own number, and what is read back in the end is the first and the last number in every block.

    requests: (prompt tokens, new tokens); of the new ones the last is never stored.
    """
    memory = torch.full(
        (num_blocks, block_size * token_bytes // 4), -1, dtype=torch.int32, device=env.device
    )
    allocator = env.solution.BlockAllocator(num_blocks, block_size)
    tables: list[Any] = []
    for prompt, new in requests:
        try:
            table = allocator.allocate(prompt)
            for stored in range(prompt, prompt + new - 1):
                allocator.append(table, stored, 1)
        except OutOfBlocks:
            break
        memory[torch.tensor(table, device=env.device)] = len(tables)
        tables.append(table)
    owners = memory[:, [0, -1]].cpu()
    del memory
    if env.device == "cuda":
        torch.cuda.empty_cache()  # the other side needs it
    return {"tables": tables, "owners": owners}


def free_bytes(env: Any) -> int:
    """Bytes of a GPU that nobody holds."""
    return int(torch.cuda.mem_get_info(env.device)[0])


def sample(env: Any, num_blocks: int, block_size: int, groups: list[Any]) -> dict[str, Any]:
    """Several continuations of each prompt: forks that grow token by token, in turn.

    groups: (prompt tokens, stored tokens of each continuation).
    """
    allocator = env.solution.BlockAllocator(num_blocks, block_size)
    copies, tables = 0, []
    for prompt, lengths in groups:
        first = allocator.allocate(prompt)
        group = [first, *(allocator.fork(first) for _ in lengths[1:])]
        for step in range(max(lengths)):
            for table, length in zip(group, lengths, strict=True):
                if step < length:
                    copies += len(allocator.append(table, prompt + step, 1))
        tables += group
    allocator.check(tables)
    return {"copies": copies, "used": num_blocks - allocator.num_free}


def kept_bytes(env: Any, num_blocks: int, rounds: int) -> int:
    """Bytes of Python objects by which a pool grows while sequences begin, fork, copy and end.

    The first `num_blocks` rounds are left out: every block has been taken by then.
    """
    allocator = env.solution.BlockAllocator(num_blocks, 2)

    def play(count: int) -> None:
        for _ in range(count):
            table = allocator.allocate(3)
            other = allocator.fork(table)
            allocator.append(other, 3, 2)  # into a copy, and a new block
            allocator.free(table)
            allocator.free(other)

    return grown_by(lambda: play(rounds), after=lambda: play(num_blocks))


def churn(env: Any, size: int, block_size: int, batch: int, seed: int) -> Iterator[int]:
    """Batches of operations on a pool of `size` blocks, a tenth of it in use: random sequences end,
    others begin, are forked and grow. All have four blocks, the last of which has one place left.
    Before each begins somebody asks how many blocks are free.
    """
    rng = random.Random(seed)
    allocator = env.solution.BlockAllocator(size, block_size)
    tokens = 4 * block_size - 1
    tables = [allocator.allocate(tokens) for _ in range(size // 40)]
    rng.shuffle(tables)
    while True:
        for _ in range(batch):
            place = rng.randrange(len(tables))
            allocator.free(tables[place])
            _ = allocator.num_free
            table = tables[place] = allocator.allocate(tokens)
            other = allocator.fork(table)
            allocator.append(other, tokens, 1)
            allocator.free(other)
        yield allocator.num_free


def grow(env: Any, size: int, block_size: int, batch: int) -> Iterator[int]:
    """Single tokens, appended to a table of `size` full blocks; after a batch of them, the blocks
    that they took are given back, so that the table keeps its length.
    """
    allocator = env.solution.BlockAllocator(size + batch, block_size)
    stored = size * block_size
    table = allocator.allocate(stored)
    while True:
        for place in range(stored, stored + batch):
            allocator.append(table, place, 1)
        grown = len(table)
        new = table[size:]
        del table[size:]
        allocator.free(new)
        yield grown


def whole(env: Any, size: int, block_size: int, batch: int, num_blocks: int) -> Iterator[int]:
    """What is done to whole tables, of `size` blocks: allocate one, fork it, free both.

    A round of a batch works on `num_blocks` blocks, whatever the size: on many short tables one
    after the other, or on few long ones. The pool has as many, so that it is equally large for all.
    """
    allocator = env.solution.BlockAllocator(num_blocks, block_size)
    while True:
        for _ in range(batch * (num_blocks // size)):
            table = allocator.allocate(size * block_size)
            other = allocator.fork(table)
            allocator.free(table)
            allocator.free(other)
        yield allocator.num_free
