"""Stage 07: the reference by state machine, and the judge by solutions that are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from course.check.edits import edited_solution
from course.check.failure import GateFailure
from course.syllabus import load_syllabus
from course.types import OutOfBlocks
from loading import module_at
from solutions.local_worker import local_gate

STAGE = load_syllabus().find(7)
SOLUTION = module_at(STAGE.reference)

# Mistakes that show in what operations do, as against what is refused and how long it takes.
FOUND_BY_CHANCE = [
    "block_too_early", "block_too_late", "copies_always", "copies_for_nobody", "copies_full_blocks",
    "copies_the_wrong_way", "counts_from_num_tokens", "double_free_unnoticed",
    "fork_without_a_count", "forks_the_list_itself",
    "frees_what_is_shared", "grows_a_new_table", "half_a_copy", "half_an_allocation",
    "keeps_the_freed_table", "keeps_the_last_block", "leaks_the_source", "no_copy_on_write",
    "replaces_without_copying", "runs_off_the_list", "writes_into_shared_room", "yields_lists",
]  # fmt: skip


@pytest.fixture(scope="module")
def judge() -> Any:
    """The gate, as a module."""
    local_gate(STAGE, SOLUTION)  # so that its neighbours can be imported
    return module_at(STAGE.gate)


class Machine(RuleBasedStateMachine):
    """Any order of operations. The gate's own judge compares each with its model; the invariants
    below know neither model nor judge."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks: int, block_size: int) -> None:
        gate = local_gate(STAGE, SOLUTION)
        from block_pool import BlockPool

        self.pool = BlockPool(gate, num_blocks, block_size, "a pool", watched=True)
        self.kept = gate.candidate.scenarios.POOLS["pool"]
        self.names = iter(f"s{i}" for i in range(10**6))

    def live(self) -> list[str]:
        return [name for name, tokens in self.pool.tokens.items() if tokens]

    def pick(self, data: Any) -> str:
        return data.draw(st.sampled_from(self.live()))

    @rule(num_tokens=st.integers(0, 70))
    def allocate(self, num_tokens: int) -> None:
        self.pool.allocate(next(self.names), num_tokens)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), new_tokens=st.integers(0, 12))
    def append(self, data: Any, new_tokens: int) -> None:
        self.pool.append(self.pick(data), new_tokens)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        self.pool.fork(self.pick(data), next(self.names))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        name = self.pick(data)
        self.pool.rewind(name, data.draw(st.integers(1, len(self.pool.tokens[name]))))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), again=st.booleans())
    def free(self, data: Any, again: bool) -> None:
        (self.pool.free_again if again else self.pool.free)(self.pick(data))

    @invariant()
    def free_and_used_are_all(self) -> None:
        if not hasattr(self, "kept"):
            return
        allocator, tables = self.kept.allocator, list(self.kept.tables.values())
        allocator.check(tables)
        used = {block for table in tables for block in table}
        assert allocator.num_free + len(used) == allocator.num_blocks
        for block in range(allocator.num_blocks):
            assert allocator.ref_count(block) == sum(block in table for table in tables)
        for table in tables:
            assert len(set(table)) == len(table)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", FOUND_BY_CHANCE)
def test_random_operations_find_the_mistake(judge: Any, name: str, tmp_path: Path) -> None:
    """Without any of the cases that were thought of beforehand."""
    (path,) = (path for path in STAGE.wrong if path.stem == name)
    solution = module_at(edited_solution(STAGE.reference, path, tmp_path))

    def play() -> None:
        for seed in range(6):
            pool = judge.BlockPool(local_gate(STAGE, solution), 9, 3, "a pool")
            judge.play(pool, random.Random(seed), 120)

    with pytest.raises(GateFailure):
        play()


def test_the_copies_of_a_whole_step_can_wait() -> None:
    """Several sequences append before anything is copied, and everything is copied before anything
    is written: what a batch does."""
    rng = random.Random(7)
    allocator = SOLUTION.BlockAllocator(60, 4)
    contents: dict[tuple[int, int], int] = {}
    texts: list[list[int]] = []
    tables: list[list[int]] = []
    fresh = iter(range(10**6))

    def write(index: int, token: int) -> None:
        place = len(texts[index])
        contents[tables[index][place // 4], place % 4] = token
        texts[index].append(token)

    for _ in range(60):
        if len(tables) > 8:
            index = rng.randrange(len(tables))
            allocator.free(tables.pop(index))
            texts.pop(index)
        if tables and rng.random() < 0.7:
            index = rng.randrange(len(tables))
            tables.append(allocator.fork(tables[index]))
            texts.append(list(texts[index]))
        else:
            texts.append([])
            tables.append(allocator.allocate(6))
            for _ in range(rng.randrange(1, 7)):
                write(-1, next(fresh))
        while any(len(text) > 18 for text in texts):
            index = next(i for i, text in enumerate(texts) if len(text) > 18)
            allocator.free(tables.pop(index))
            texts.pop(index)
        copies = [
            pair
            for table, text in zip(tables, texts, strict=True)
            for pair in allocator.append(table, len(text), 1)
        ]
        for source, destination in copies:
            for offset in range(4):
                contents[destination, offset] = contents.get((source, offset), -1)
        for index in range(len(texts)):
            write(index, next(fresh))
        for table, text in zip(tables, texts, strict=True):
            assert [contents[table[p // 4], p % 4] for p in range(len(text))] == text
    allocator.check(tables)


DAMAGE: dict[str, Callable[[Any], object]] = {
    "a block is lost": lambda pool: pool._free.pop(),
    "a block is free twice": lambda pool: pool._free.append(pool._free[0]),
    "a block in use is free": lambda pool: pool._free.append(0),
    "a count too high": lambda pool: pool._ref_counts.__setitem__(0, 2),
    "a free block is counted": lambda pool: pool._ref_counts.__setitem__(5, 1),
    "a block in use is not counted": lambda pool: pool._ref_counts.__setitem__(1, 0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_check_finds_damage(damage: Callable[[Any], object]) -> None:
    allocator = SOLUTION.BlockAllocator(6, 2)
    tables = [allocator.allocate(3), allocator.allocate(2)]
    allocator.check(tables)
    damage(allocator)
    with pytest.raises(RuntimeError, match=r"block \d|free \+"):
        allocator.check(tables)


def test_errors_say_what_to_do_next() -> None:
    allocator = SOLUTION.BlockAllocator(4, 16)
    with pytest.raises(OutOfBlocks, match="5 blocks are needed, and 4 are free") as found:
        allocator.allocate(65)
    assert (found.value.needed, found.value.free) == (5, 4)
    table = allocator.allocate(20)
    stale = list(table)
    allocator.free(table)
    assert table == []
    with pytest.raises(ValueError, match="table holds block 0, which is free"):
        allocator.free(stale)
    with pytest.raises(TypeError, match="table must be a list of block ids, got tuple"):
        allocator.free(tuple(stale))
