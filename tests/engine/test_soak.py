"""Everything composes: continuous batching, paging, prefix caching, preemption, chunked prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from course.check.edits import edited_solution
from course.syllabus import load_syllabus
from engine.soak import Soak
from loading import module_at

REQUESTS = 120


@pytest.fixture
def one_thread() -> Iterator[None]:
    """nano's tensors are too small to share: two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_random_lives(seeds: int) -> None:
    """Whatever comes, the books are right, and each request says what it says alone."""
    total: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            tally = Soak(seed).run(REQUESTS)
        except Exception as error:
            error.add_note(f"seed {seed}: Soak({seed}).run({REQUESTS}) shows it again")
            raise
        total.update({k: v for k, v in vars(tally).items() if isinstance(v, int)})
        total.update(tally.ended)
    for event in ("refused", "aborted", "preempted", "hits", "chunks", "stop", "length"):
        assert total[event] > 10, f"a soak without {event} proves nothing about it: {total}"
    assert total["steps"] > 300 * seeds, total


# Wrong solutions of stages 10 to 12, and a life in which each shows.
MISTAKES = {
    "10 collision_trusted": 0,
    "10 hit_is_not_counted": 0,
    "10 hit_stays_in_the_free_list": 0,
    "10 hits_leave_too_late": 0,
    "10 model_ignored": 0,
    "10 published_at_admission": 3,
    "10 publishes_half_a_block": 3,
    "10 salt_ignored": 3,
    "10 whole_prompt": 0,
    "11 drops_the_newest_token": 0,
    "11 leaks_at_an_abort": 1,
    "11 never_fits_by_the_prompt": 0,
    "11 newest_first": 0,
    "11 oldest_gives_way": 0,
    "11 passes_over_the_long": 0,
    "11 preempts_what_is_scheduled": 0,
    "12 begins_again": 2,
    "12 drops_preempted_prompts": 3,
    "12 one_over": 2,
    "12 positions_restart": 2,
    "12 publishes_the_whole_prompt": 3,
    "12 samples_from_chunks": 2,
}
PARTS = {
    10: ("allocator", "PrefixCachingAllocator"),
    11: ("scheduler", "Scheduler"),
    12: ("chunked", "ChunkedScheduler"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("mistake", "seed"), MISTAKES.items(), ids=MISTAKES)
def test_a_soak_can_fail(mistake: str, seed: int, tmp_path: Path) -> None:
    number, name = mistake.split()
    stage = load_syllabus().find(int(number))
    wrong = next(path for path in stage.wrong if path.stem == name)
    module = module_at(edited_solution(stage.reference, wrong, tmp_path))
    argument, part = PARTS[stage.number]
    parts = {argument: getattr(module, part)}
    if stage.number == 11:
        parts["chunked"] = None  # it extends the reference
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        Soak(seed, **parts).run(60)
