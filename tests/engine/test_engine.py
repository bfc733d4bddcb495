"""The loop around a scheduler, and the place where its decisions meet the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course.engine import Engine, Runner
from course.parts import PagedAttention, PrefixCachingAllocator, Scheduler, step_batch
from course.types import FinishReason, Output, Request, SamplingParams, Sequence, Step
from engine.soak import nano, solo


def engine(num_blocks: int = 16, block_size: int = 4) -> Engine:
    attention = PagedAttention(nano().config, num_blocks, block_size, dtype=torch.float64)
    allocator = PrefixCachingAllocator(num_blocks, block_size)
    scheduler = Scheduler(allocator, nano().config, max_running=4)
    return Engine(scheduler, Runner(nano(), attention, step_batch))


def request(name: str, prompt: tuple[int, ...], new: int) -> Request:
    return Request(name, prompt, SamplingParams(max_new_tokens=new))


def test_requests_are_served_together() -> None:
    """Two requests, step by step, each as if it were alone."""
    served, said = engine(), {"a": [], "b": []}
    prompts = {"a": (1, 2, 3), "b": (9, 8, 7, 6, 5)}
    for name, prompt in prompts.items():
        assert served.add(request(name, prompt, 6)) is None
    steps = 0
    while served.has_work:
        for output in served.step():
            said[output.request_id] += output.token_ids
        steps += 1
    assert steps == 6
    assert {name: tuple(tokens) for name, tokens in said.items()} == {
        name: solo(prompt, 6) for name, prompt in prompts.items()
    }
    assert served.step() == []


def test_what_can_never_fit_is_refused_with_its_numbers() -> None:
    output = engine(num_blocks=2).add(request("a", (1,) * 8, 2))
    assert output == Output(
        "a", finish_reason=FinishReason.REFUSED, reason="it needs 3 blocks, and the pool has 2"
    )


def test_an_abort_gives_everything_back() -> None:
    served = engine()
    served.add(request("a", (1, 2, 3, 4, 5), 9))
    served.step()
    assert served.scheduler.allocator.num_free == 14
    assert served.abort("a") == Output("a", finish_reason=FinishReason.ABORT)
    assert served.abort("a") is None
    assert not served.has_work
    assert served.scheduler.allocator.num_free == 16


def test_a_scheduler_that_finds_nothing_to_do_is_not_asked_for_ever() -> None:
    class Idle(Scheduler):
        def schedule(self) -> Step:
            return Step()

    served = engine()
    served.scheduler.__class__ = Idle
    served.add(request("a", (1,), 1))
    with pytest.raises(RuntimeError, match="has work, and its step is empty"):
        served.step()


def test_blocks_are_copied_before_anything_is_written() -> None:
    """A fork whose last block was copied reads what its parent wrote, and then its own."""
    runner = engine().runner
    parent = Sequence(request("a", (1, 2, 3, 4, 5), 1), [1, 2, 3, 4, 5], 0, [0, 1])
    runner(Step([parent], [5], []))
    child = Sequence(parent.request, [1, 2, 3, 4, 5, 6], 5, [0, 2])
    token: list[Any] = runner(Step([child], [1], [(1, 2)]))
    assert tuple(token) == solo((1, 2, 3, 4, 5, 6), 1)
