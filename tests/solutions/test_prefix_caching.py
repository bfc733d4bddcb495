"""Stage 10: the judge's random lives, by solutions that are wrong and by two that are right."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from course.check.edits import edited_solution
from course.check.failure import GateFailure
from course.syllabus import load_syllabus
from loading import module_at
from solutions.local_worker import local_gate

STAGE = load_syllabus().find(10)
SPACES = [("", ""), ("", "a"), ("a", ""), ("ab", "c"), ("a", "bc")]

# Mistakes that show in what operations do, as against what is refused and how long it takes.
FOUND_BY_CHANCE = [
    "all_but_one_computed", "cleared_on_free", "computes_again_what_it_found", "drops_everything",
    "evicted_and_still_found", "finds_blocks_after_a_gap", "first_in_first_out",
    "half_an_admission", "head_before_tail", "hit_is_not_counted", "hit_stays_in_the_free_list",
    "hits_are_free_as_well", "hits_counted_as_new", "hits_counted_twice", "hits_leave_too_late",
    "lookup_touches", "model_and_salt_joined", "never_evicts", "newest_block_only", "newest_first",
    "one_block_less", "one_queue", "outputs_not_published", "parent_by_block_id",
    "parent_by_identity", "prompt_only", "published_at_admission",
    "publishes_half_a_block", "publishes_what_is_not_computed", "remembers_how_far",
    "reserve_ignored", "salt_ignored", "sampling_in_the_key", "taken_and_still_published",
    "twins_are_given_back", "twins_are_merged", "twins_not_noted", "twins_overwrite",
    "twins_wait_in_the_cache", "whole_prompt",
]  # fmt: skip
FOUND_BY_COLLISIONS = [
    "collision_trusted", "parent_by_hash", "parent_not_compared", "space_not_compared",
    "tokens_not_compared",
]  # fmt: skip


def play(solution: ModuleType, collisions: tuple[str | None, ...], seeds: int) -> None:
    """The gate's random lives, and nothing that was thought of beforehand."""
    for seed in range(seeds):
        for collide in collisions:
            gate = local_gate(STAGE, solution, seed)
            from prefix_pool import PrefixPool, live

            pool: Any = PrefixPool(gate, 9 + seed, 2, "a pool", collide=collide)
            live(pool, random.Random(seed), 200, 2, SPACES if seed % 2 else SPACES[:1])


def wrong(name: str, scratch: Path) -> ModuleType:
    (path,) = (path for path in STAGE.wrong if path.stem == name)
    return module_at(edited_solution(STAGE.reference, path, scratch))


@pytest.mark.parametrize("name", FOUND_BY_CHANCE)
def test_random_lives_find_the_mistake(name: str, tmp_path: Path) -> None:
    """Without any of the cases that were thought of beforehand."""
    with pytest.raises(GateFailure):
        play(wrong(name, tmp_path), (None,), 12)


@pytest.mark.parametrize("name", FOUND_BY_COLLISIONS)
def test_collisions_find_the_mistake(name: str, tmp_path: Path) -> None:
    """A planted hash shows who trusts it; the usual one does not."""
    solution = wrong(name, tmp_path)
    play(solution, (None,), 2)
    with pytest.raises(GateFailure):
        play(solution, ("all", "texts", "beginnings"), 6)


@pytest.mark.parametrize("path", [STAGE.reference, Path(__file__).with_name("whole_texts.py")])
def test_who_is_right_passes(path: Path) -> None:
    """The reference, and a solution that is built differently."""
    play(module_at(path), (None, "none", "all", "texts", "beginnings"), 4)
