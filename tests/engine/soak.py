"""One random life of an engine: everything that stages 05 to 12 built, at once, on nano.

Requests come at random, alike and unlike each other, some of them are aborted, and the pool is
anything from roomy to one block too small for the largest. After every step the books are checked,
and a request that ends is compared with its solo run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from course.engine import Engine, Runner
from course.model import Decoder
from course.model.catalogue import load
from course.parts import (
    ChunkedScheduler,
    PagedAttention,
    PrefixCachingAllocator,
    Scheduler,
    generate,
    hash_block,
    step_batch,
)
from course.types import FinishReason, Output, Request, SamplingParams, Sequence, Step

MOST_PROMPT, MOST_NEW = 60, 24
SPACES = [("", ""), ("", "a"), ("b", ""), ("a", "")]


@cache
def nano() -> Decoder:
    """nano in float64: the order of a sum moves a logit by far less than two of them differ."""
    return load("nano", dtype=torch.float64).model


@cache
def solo(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    """What a request says that has the model for itself (stage 02's loop)."""
    return tuple(generate(nano(), list(prompt), new))


def watched(allocator: type[Any], taken: Callable[[int], None]) -> type[Any]:
    """An allocator that tells which block it takes."""

    class Watched(allocator):  # type: ignore[misc]
        def take(self) -> int:
            block = super().take()
            taken(block)
            return block

    return Watched


@dataclass
class Tally:
    """What has happened, so that a test can see that a soak soaks."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    preempted: int = 0
    hits: int = 0  # admissions that found cached blocks
    chunks: int = 0  # parts of a prompt
    ended: Counter[str] = field(default_factory=Counter)


class Soak:
    """A pool, a scheduler and a stream of requests, all from one seed.

    The three parts are those of the references, or others that should be seen to fail. Without
    `chunked`, no step has a budget.
    """

    def __init__(
        self,
        seed: int,
        *,
        allocator: type[Any] = PrefixCachingAllocator,
        scheduler: type[Any] = Scheduler,
        chunked: type[Any] | None = ChunkedScheduler,
    ) -> None:
        rng = self.rng = random.Random(f"soak {seed}")
        self.tally = Tally()
        self.block_size = rng.choice([1, 2, 4, 5, 8, 8, 16])
        largest = -(-(MOST_PROMPT + MOST_NEW - 1) // self.block_size)
        # From one block too small for the largest request to room for nearly all.
        rooms = [largest - 1, largest, largest + 1, largest * 3 // 2, 2 * largest, 6 * largest]
        num_blocks = rooms[seed % len(rooms)]
        attention = PagedAttention(nano().config, num_blocks, self.block_size, dtype=torch.float64)
        self.attention = attention
        self.spaces: dict[int, tuple[str, str]] = {}  # model and salt of what a block holds
        self.allocator = watched(allocator, self.taken)(
            num_blocks, self.block_size,
            hash_block=rng.choice([hash_block, hash_block, lambda parent, tokens: 7]),
        )  # fmt: skip
        max_running = rng.choice([1, 3, 8, 8])
        settings = {"max_running": max_running, "watermark": rng.choice([0, 0, 1, 2])}
        budget = max_running + rng.choice([0, 3, 16, 200])
        kind = scheduler
        self.max_running, self.max_tokens = max_running, 10**9
        if rng.random() < 0.75 and chunked is not None:
            kind, self.max_tokens, settings["max_tokens"] = chunked, budget, budget
        self.scheduler = kind(self.allocator, nano().config, **settings)
        self.runner = Runner(nano(), attention, step_batch)
        self.engine = Engine(self.scheduler, self.compute)
        self.beginnings = [self.draw(rng.randrange(1, 40)) for _ in range(4)]
        self.arrivals = rng.choice([0.1, 0.3, 0.8])  # per step
        self.said: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.names = (f"r{i}" for i in range(10**9))
        self.waited: dict[str, int] = {}

    def taken(self, block: int) -> None:
        """A block is somebody's: until it is written it holds NaN, so that reading it shows."""
        self.attention.keys[:, block] = self.attention.values[:, block] = torch.nan
        self.spaces.pop(block, None)

    def draw(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self.rng.randrange(256) for _ in range(count))

    def request(self) -> Request:
        """A new one: often it begins like others, now and then it is the same as another."""
        rng = self.rng
        if self.requests and rng.random() < 0.2:
            prompt = rng.choice(list(self.requests.values())[-8:]).prompt_ids
        else:
            prompt = rng.choice([(), *self.beginnings])
            rest = MOST_PROMPT - len(prompt)
            prompt += self.draw(rng.choice([rest, rng.randrange(0 if prompt else 1, rest + 1)]))
        new = rng.choice([0, 1, 5, 11, MOST_NEW, MOST_NEW])
        expected = solo(prompt, new)
        eos = (expected[new // 2],) if new and rng.random() < 0.3 else ()
        model, salt = rng.choice(SPACES) if rng.random() < 0.3 else SPACES[0]
        params = SamplingParams(max_new_tokens=new, seed=rng.randrange(9))  # must not matter
        return Request(
            next(self.names), prompt, params, eos_ids=eos, model=model, cache_salt=salt
        )  # fmt: skip

    def run(self, requests: int) -> Tally:
        """Serve this many requests, to the last."""
        for _ in range(requests):
            while self.rng.random() > self.arrivals and self.engine.has_work:
                self.step()
            self.add(self.request())
            if self.rng.random() < 0.08:
                self.abort(self.rng.choice(list(self.said)) if self.said else "nobody")
        while self.engine.has_work:
            self.step()
        self.books(idle=True)
        assert not self.said, f"neither finished nor refused: {list(self.said)}"
        return self.tally

    def add(self, request: Request) -> None:
        """Queue one, which the scheduler may end at once."""
        self.requests[request.request_id] = request
        output = self.engine.add(request)
        if output is None:
            self.said[request.request_id] = []
            return
        new = request.params.max_new_tokens
        self.tally.ended[str(output.finish_reason)] += 1
        if output.finish_reason is FinishReason.REFUSED:
            needed = -(-(len(request.prompt_ids) + new - 1) // self.block_size)
            assert needed > self.allocator.num_blocks
            assert str(needed) in output.reason
            self.tally.refused += 1
        else:
            assert new == 0
            assert output.finish_reason is FinishReason.LENGTH

    def abort(self, request_id: str) -> None:
        """A client goes away, perhaps one that was served long ago."""
        output = self.engine.abort(request_id)
        if request_id not in self.said:
            assert output is None
            return
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        del self.said[request_id]
        self.tally.aborted += 1
        self.tally.ended["abort"] += 1
        self.books()

    def step(self) -> None:
        """One step, seen from all sides."""
        before = {s.request.request_id: s.num_computed for s in self.scheduler.running}
        oldest = [*self.scheduler.running, *self.scheduler.waiting][0]
        progress = (oldest.num_computed, len(oldest.tokens))
        outputs = self.engine.step()
        self.tally.steps += 1
        waiting = {s.request.request_id for s in self.scheduler.waiting}
        self.tally.preempted += len(waiting & set(before))
        for sequence in self.scheduler.running:
            if sequence.request.request_id not in before:
                self.tally.hits += sequence.num_cached > 0
            self.tally.chunks += sequence.num_computed < len(sequence.tokens) - 1
        # The oldest request always gets on: so nothing waits for ever, and nothing is undone again
        # and again.
        assert oldest.finished or (oldest.num_computed, len(oldest.tokens)) > progress
        for output in outputs:
            self.note(output)
        self.books()

    def compute(self, step: Step) -> list[int]:
        """One pass, within the budget."""
        assert 1 <= step.num_tokens <= self.max_tokens
        return self.runner(step)

    def note(self, output: Output) -> None:
        """A token, and perhaps the end of a request."""
        said = self.said[output.request_id]
        said += output.token_ids
        self.tally.tokens += len(output.token_ids)
        request = self.requests[output.request_id]
        expected = solo(request.prompt_ids, request.params.max_new_tokens)
        reason = FinishReason.LENGTH
        stops = [i for i, token in enumerate(expected) if token in request.eos_ids]
        if stops:
            expected, reason = expected[: stops[0] + 1], FinishReason.STOP
        assert tuple(said) == expected[: len(said)], f"{request}: {said}, alone {expected}"
        if output.finish_reason is None:
            assert len(said) < len(expected), f"{request} goes on past its end"
            return
        assert tuple(said) == expected
        assert output.finish_reason is reason
        del self.said[output.request_id]
        self.tally.finished += 1
        self.tally.ended[str(reason)] += 1

    def books(self, *, idle: bool = False) -> None:
        """The pool, the tables and the queues agree."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert not idle or not (running or waiting)
        assert len(running) <= self.max_running
        # Whoever came first runs first: `said` is in the order of arrival.
        assert [s.request.request_id for s in (*running, *waiting)] == list(self.said)
        assert not any(s.block_table for s in waiting)
        tables = [s.block_table for s in running]
        self.allocator.check(tables)
        held = Counter(block for table in tables for block in table)
        for block in range(self.allocator.num_blocks):
            assert self.allocator.ref_count(block) == held[block], f"block {block}"
        assert self.allocator.num_free == self.allocator.num_blocks - len(held)
        for sequence in running:
            assert not sequence.finished
            space = (sequence.request.model, sequence.request.cache_salt)
            for block in sequence.block_table:
                assert self.spaces.setdefault(block, space) == space, f"block {block} is not theirs"
            for block in self.writable(sequence):
                assert held[block] == 1, f"block {block} would be written, and is shared"

    def writable(self, sequence: Sequence) -> Iterator[int]:
        """The blocks that a sequence may still write into."""
        yield from sequence.block_table[sequence.num_computed // self.block_size :]
