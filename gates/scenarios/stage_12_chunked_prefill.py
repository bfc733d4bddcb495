"""Stage 12, the half that runs beside the solution: an engine around its scheduler."""

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from stage_05_continuous_batching import plain

from course.engine import Engine, Runner
from course.model.describe import load_config
from course.parts import PagedAttention, PrefixCachingAllocator, Scheduler, step_batch
from course.types import Output, Request, SamplingParams, Step

__all__ = ["arrivals", "fed_in_one_step", "looked_at", "mismatched", "new", "serve"]


class PoisonedAllocator(PrefixCachingAllocator):
    """A block that is taken holds NaN until it is written: what nobody may read, shows."""

    attention: Any = None

    def take(self) -> int:
        block = super().take()
        if self.attention is not None:
            self.attention.keys[:, block] = self.attention.values[:, block] = torch.nan
        return block


def new(env: Any, **settings: Any) -> None:
    """Make a scheduler; settings may be bad ones."""
    allocator = PrefixCachingAllocator(8, 4)
    env.solution.ChunkedScheduler(allocator, load_config("nano"), **settings)


def serve(
    env: Any, arrivals: list[Any], aborts: list[Any], num_blocks: int, block_size: int,
    stage_11: bool = False, **settings: Any,
) -> Iterator[Any]:  # fmt: skip
    """Requests through one scheduler on nano; every step from all sides.

    arrivals: [step, request], in order: added before that step. aborts: [step, id], likewise. A
    step is made even where there is no work yet.
    stage_11: serve with the scheduler of stage 11, which has no budget.
    """
    model = env.counting("nano")
    attention = PagedAttention(model.config, num_blocks, block_size, dtype=model.dtype)
    allocator = PoisonedAllocator(num_blocks, block_size)
    allocator.attention = attention
    if stage_11:
        del settings["max_tokens"]
    kind = Scheduler if stage_11 else env.solution.ChunkedScheduler
    scheduler = kind(allocator, model.config, **settings)
    runner = Runner(model, attention, step_batch)
    arrivals, aborts = list(arrivals), list(aborts)
    index = 0
    while arrivals or scheduler.has_work:
        at_once = []
        while aborts and aborts[0][0] <= index:
            output = scheduler.abort(aborts.pop(0)[1])
            at_once += [] if output is None else [output]
        while arrivals and arrivals[0][0] <= index:
            output = scheduler.add(request_of(arrivals.pop(0)[1]))
            at_once += [] if output is None else [output]
        before = {
            **queues(scheduler), "free": allocator.num_free,
            "tables": [list(s.block_table) for s in scheduler.running],
        }  # fmt: skip
        step = scheduler.schedule()
        fed = fed_by(step)
        scheduled = {**queues(scheduler), "fits": head_fits(scheduler, allocator, settings)}
        sequences = list(step.sequences)  # as they were: `update` is the solution's
        counts = step.counts.copy()
        outputs: Any = []
        refused = mutated = ""
        short = [
            s.request.request_id
            for s in scheduler.running
            if len(s.block_table) < allocator.blocks_for(len(s.tokens))
        ]
        if sequences:
            try:
                tokens = runner(step)
            except (ValueError, IndexError) as error:  # a step that cannot be laid out
                refused = f"{type(error).__name__}: {error}"
            else:
                noted = tokens.copy()
                outputs = scheduler.update(step, noted)
                if noted != tokens:
                    mutated = "token_ids"
                elif (counts, sequences) != (step.counts, step.sequences):
                    mutated = "step"
        yield {
            "at_once": plain(at_once),
            "before": before,
            "fed": fed,
            "scheduled": scheduled,
            "refused": refused,
            "mutated": mutated,
            "short": short,
            "outputs": plain(outputs),
            "after": queues(scheduler),
            "fed_after": [[s.num_computed, len(s.tokens)] for s in sequences],
            "found": [len(allocator.cached_blocks(s)) for s in scheduler.running],
            "books": books(allocator, scheduler),
            "positions": model.counts.positions,
        }
        index += 1
    step = scheduler.schedule()
    return {"idle": fed_by(step), "free": allocator.num_free, "kept": kept_by(scheduler)}


def kept_by(scheduler: Any) -> int:
    """How many elements a scheduler holds on to, the pool and the model's shape aside."""
    own = [value for name, value in vars(scheduler).items() if name not in ("allocator", "config")]
    seen: dict[int, Any] = {id(scheduler): scheduler}
    elements = 0
    while own:
        one = own.pop()
        atom = one is None or isinstance(one, int | float | str)
        if id(one) not in seen and not atom and not callable(one):
            seen[id(one)] = one
            elements += len(one) if hasattr(one, "__len__") else 1
            own += gc.get_referents(one)
    return elements


def fed_by(step: Step) -> list[list[Any]]:
    """[id, first position, tokens] of each sequence of a step."""
    return [
        [sequence.request.request_id, sequence.num_computed, count]
        for sequence, count in zip(step.sequences, step.counts, strict=True)
    ]


def queues(scheduler: Any) -> dict[str, Any]:
    """[id, computed, tokens] of who runs, and the ids of who waits."""
    return {
        "running": [
            [s.request.request_id, s.num_computed, len(s.tokens)] for s in scheduler.running
        ],
        "waiting": [s.request.request_id for s in scheduler.waiting],
    }


def head_fits(scheduler: Any, allocator: Any, settings: dict[str, Any]) -> bool:
    """Whether the pool has room for the one that waits longest, as admission reckons it."""
    if not scheduler.waiting:
        return False
    head = scheduler.waiting[0]
    cached = allocator.cached_blocks(head)
    needed = allocator.blocks_for(len(head.tokens)) - len(cached)
    needed += sum(allocator.ref_count(block) == 0 for block in cached)
    needed += settings.get("watermark", 0) if scheduler.running else 0
    return bool(needed <= allocator.num_free)


def books(allocator: Any, scheduler: Any) -> str:
    """What is wrong with the pool and the tables; empty if nothing is."""
    try:
        allocator.check([s.block_table for s in scheduler.running])
    except RuntimeError as error:
        return str(error)
    held = sum(bool(s.block_table) for s in scheduler.waiting)
    return f"{held} that wait hold blocks" if held else ""


def mismatched(env: Any, requests: list[Any], more: int, **settings: Any) -> Iterator[Any]:
    """Make a step, and update it with `more` tokens too many or too few.

    Yields the state before and after the refusal, and raises that.
    """
    allocator = PrefixCachingAllocator(64, 4)
    scheduler = env.solution.ChunkedScheduler(allocator, load_config("nano"), **settings)
    for request in requests:
        scheduler.add(request_of(request))
    step = scheduler.schedule()
    before = [queues(scheduler), [len(allocator.cached_blocks(s)) for s in scheduler.running]]
    error: BaseException | None = None
    try:
        for _ in scheduler.update(step, [7] * (len(step.sequences) + more)):
            pass  # a generator has done nothing so far; what it is shows elsewhere
    except Exception as raised:
        error = raised
    after = [queues(scheduler), [len(allocator.cached_blocks(s)) for s in scheduler.running]]
    yield [before, after]
    if error is not None:
        raise error


def fed_in_one_step(env: Any, lengths: list[int], **settings: Any) -> list[list[Any]]:
    """What the first step feeds of prompts longer than nano's context; nothing is computed."""
    allocator = PrefixCachingAllocator(sum(-(-length // 16) for length in lengths), 16)
    config = load_config("bench-8b")  # for its long context
    scheduler = env.solution.ChunkedScheduler(allocator, config, **settings)
    for index, length in enumerate(lengths):
        scheduler.add(Request(f"r{index}", (index,) * length, SamplingParams(max_new_tokens=1)))
    return fed_by(scheduler.schedule())


def arrivals(
    env: Any, model: str, running: list[Any], prompts: list[Any], steps: int, num_blocks: int,
    block_size: int, **settings: Any,
) -> Iterator[Any]:  # fmt: skip
    """Requests decode; a long prompt joins them, and so many steps are made. Again and again.

    prompts: one for each time, each of which ends within those steps. The others begin anew each
    time, so that it is always the same work; what can be cached of them is.
    """
    decoder = env.model(model)
    attention = PagedAttention(
        decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
    )
    allocator = PrefixCachingAllocator(num_blocks, block_size)
    scheduler = env.solution.ChunkedScheduler(allocator, decoder.config, **settings)
    engine = Engine(scheduler, Runner(decoder, attention, step_batch))
    for prompt in prompts:
        for request in running:
            engine.abort(request["id"])
        for request in running:
            engine.add(request_of(request))
        said: list[Output] = []
        while any(len(s.tokens) == s.num_prompt for s in (*scheduler.waiting, *scheduler.running)):
            said += engine.step()
        yield plain(said)  # ready: what follows is timed
        engine.add(request_of(prompt))
        for _ in range(steps):
            yield plain(engine.step())


class Watched(list):  # type: ignore[type-arg]
    """A list that counts the elements that somebody has looked at, in all lists of its kind."""

    looked_at = 0

    def _count(self, elements: int) -> None:
        Watched.looked_at += elements

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self._count(len(found) if isinstance(place, slice) else 1)
        return found

    def __iter__(self) -> Iterator[Any]:
        self._count(len(self))
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        self._count(len(self))
        return super().__eq__(other)

    def __contains__(self, value: object) -> bool:
        self._count(len(self))
        return super().__contains__(value)

    def copy(self) -> list[Any]:
        self._count(len(self))
        return super().copy()


class WatchedQueue(deque):  # type: ignore[type-arg]
    """A queue that counts, with Watched, who is looked at behind its head."""

    def __iter__(self) -> Iterator[Any]:
        Watched.looked_at += len(self)
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        Watched.looked_at += len(self)
        return super().__contains__(value)

    def copy(self) -> Any:
        Watched.looked_at += len(self)
        return super().copy()


def looked_at(
    env: Any, length: int, count: int, chunk: int, waiting: int, steps: int
) -> dict[str, int]:
    """Decisions alone, nothing computed: `count` sequences decode at a length, for some steps, and
    the budget leaves `chunk` tokens for one that has fed as many and has as many left.
    So many others wait.

    Returns the tokens that were fed, and the tokens, table entries and requests looked at.
    """
    blocks = -(-(2 * length + steps) // 16)
    allocator = PrefixCachingAllocator((count + 1) * blocks, 16)
    config = load_config("bench-8b")  # for its long context
    scheduler = env.solution.ChunkedScheduler(
        allocator, config, max_running=count + 1, max_tokens=count + chunk
    )
    for index in range(count + 1 + waiting):
        params = SamplingParams(max_new_tokens=length + steps)
        scheduler.add(Request(f"r{index}", (index,), params))
    scheduler.update(scheduler.schedule(), [7] * (count + 1))
    for index, sequence in enumerate(scheduler.running):  # a past that nobody computed
        allocator.append(sequence.block_table, 1, length - 1)
        total = length if index < count else 2 * length
        allocator.append(sequence.block_table, length, total - length)
        sequence.tokens = Watched(sequence.tokens[:1] + [7] * (total - 1))
        sequence.block_table = Watched(sequence.block_table)
        sequence.num_computed = length - (index < count)
        allocator.publish(sequence)
    scheduler.waiting = WatchedQueue(scheduler.waiting)
    Watched.looked_at = 0
    fed = 0
    for _ in range(steps):
        step = scheduler.schedule()
        fed += step.num_tokens
        scheduler.update(step, [7] * len(step.sequences))
    return {"fed": fed, "looked_at": Watched.looked_at}


def request_of(given: dict[str, Any]) -> Request:
    """A request from the plain values that the judge sends."""
    params = SamplingParams(max_new_tokens=given["new"], ignore_eos=given.get("ignore_eos", False))
    return Request(
        given["id"], tuple(given["prompt"]), params, tuple(given.get("eos", ())),
        cache_salt=given.get("salt", ""),
    )  # fmt: skip
