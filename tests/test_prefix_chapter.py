"""What chapter 10 shows: its conversations counted, and the log of a real wrong solution."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from course.check.edits import edited_solution
from course.syllabus import Stage, load_syllabus
from course.types import Request, Sequence
from loading import module_at
from test_chapters import fences, section

BLOCK = 4


@pytest.fixture
def stage() -> Stage:
    return load_syllabus().find(10)


def eviction_log(solution: ModuleType) -> Iterator[list[str]]:
    """One long document, asked about again and again, and short requests in between."""
    allocator = solution.PrefixCachingAllocator(12, BLOCK)
    fresh = count(1000)
    document = list(range(33))
    for index, name in enumerate("aabacada", start=1):
        own = [next(fresh) for _ in range({"a": 2, "b": 17, "c": 25, "d": 21}[name])]
        tokens = document + own if name == "a" else own
        sequence = Sequence(Request(name, tuple(tokens)), tokens)
        before = held(allocator, document)
        allocator.admit(sequence)
        found = sequence.num_cached
        sequence.num_computed = len(tokens)
        allocator.publish(sequence)
        allocator.free(sequence.block_table)
        yield [str(index), name, str(len(tokens)), str(found), str(before)]


def held(allocator: object, document: list[int]) -> int:
    """How many full blocks of the document are still cached, wherever they stand in it."""
    cached = allocator._cached  # type: ignore[attr-defined]
    wanted = {tuple(document[i : i + BLOCK]) for i in range(0, len(document) - BLOCK + 1, BLOCK)}
    return sum(prefix.tokens in wanted for prefix in cached)


def test_the_log_of_stage_10(stage: Stage, tmp_path: Path) -> None:
    """What the incident shows is what this wrong solution does; the reference does better."""
    diff = next(path for path in stage.wrong if path.stem == "head_before_tail")
    wrong = module_at(edited_solution(stage.reference, diff, tmp_path))
    shown = [line.split() for line in fences(section(stage, "Incident"), "")[0].splitlines()[1:]]
    assert shown == list(eviction_log(wrong))
    answer = section(stage, "Incident").split("<details>")[1]
    right = [row[3] for row in eviction_log(module_at(stage.reference)) if row[1] == "a"]
    assert f"{', '.join(right[:-1])} and {right[-1]}" in re.sub(r"\s+", " ", answer)


def conversations(solution: ModuleType) -> tuple[int, int]:
    """Eight users, four turns, four at a time, lengths of 12: prompt tokens, and those computed."""
    allocator = solution.PrefixCachingAllocator(400, 16)
    fresh = count()
    system = [next(fresh) for _ in range(96)]
    texts = [list(system) for _ in range(8)]
    total = computed = 0
    for _ in range(4):
        for some in (texts[:4], texts[4:]):
            sequences = []
            for text in some:
                text += [next(fresh) for _ in range(12)]
                sequences.append(Sequence(Request("r", tuple(text)), list(text)))
                allocator.admit(sequences[-1])
                total += len(text)
                computed += len(text) - sequences[-1].num_cached
            for text, sequence in zip(some, sequences, strict=True):
                text += [next(fresh) for _ in range(12)]  # the answer, whose last token is not fed
                allocator.append(sequence.block_table, len(sequence.tokens), 11)
                sequence.tokens = text[:-1]
                sequence.num_computed = len(sequence.tokens)
                allocator.publish(sequence)
                allocator.free(sequence.block_table)
    return total, computed


def test_the_conversations_of_stage_10(stage: Stage) -> None:
    """With lengths of exactly 12 the remainders are known, and the chapter gives the counts."""
    total, computed = conversations(module_at(stage.reference))
    text = re.sub(r"\s+", " ", section(stage, "On paper"))
    assert f"{total:,} prompt tokens" in text
    assert f"{computed:,} and {total / computed:.2f}" in text
