"""Everything composes: continuous batching, paging, prefix caching, preemption, chunked prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from engine.soak import Soak

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
