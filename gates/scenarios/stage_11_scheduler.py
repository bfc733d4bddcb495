"""Stage 11, the half that runs beside the solution."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from growth import grown_by
from models import nano_in_float64
from poison import poison

from course.engine import Engine, Runner
from course.parts import PagedAttention, PrefixCachingAllocator, step_batch
from course.types import FinishReason, Output, Request, SamplingParams, Step

__all__ = ["call", "ids_looked_at", "kept_bytes", "look", "new", "queued", "serve"]


@dataclass
class Config:
    """A model, as far as a scheduler sees it."""

    vocab_size: int
    max_context: int


@dataclass
class Desk:
    """A scheduler, its pool, and what its caller keeps."""

    scheduler: Any
    allocator: Any
    step: Any = None  # the last one
    strangers: list[list[int]] | None = None  # tables of others, who hold some of its blocks


DESKS: dict[str, Desk] = {}  # by the name that the judge gives them


class Pool(PrefixCachingAllocator):
    """The pool of all schedulers here: of one class, so that it does not tell what it is for.

    Args:
        finds: if not, nobody finds anything, and what is preempted is computed anew, all of it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, finds: bool = True) -> None:
        super().__init__(num_blocks, block_size)
        self._finds = finds

    def cached_blocks(self, sequence: Any) -> list[int]:
        """As for every such allocator; or none."""
        return super().cached_blocks(sequence) if self._finds else []


def extended(kind: Any, budget: int) -> Any:
    """A subclass as later stages write them: a step has no more than `budget` tokens.

    Who was given less than all its tokens says nothing yet.
    """

    class Extended(kind):
        def share(self, sequence: Any, step: Any) -> int:
            return min(super().share(sequence, step), budget - step.num_tokens)

        def update(self, step: Any, token_ids: Any) -> list[Output]:
            ended, tokens = Step(), []
            for sequence, count, token in zip(step.sequences, step.counts, token_ids, strict=True):
                if sequence.num_computed + count == len(sequence.tokens):
                    ended.add(sequence, count)
                    tokens.append(token)
                else:
                    sequence.num_computed += count
                    self.allocator.publish(sequence)
            return super().update(ended, tokens)

    return Extended


def new(
    env: Any, desk: str, num_blocks: int, block_size: int, max_running: Any, watermark: Any,
    vocab_size: int, max_context: int, budget: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make a scheduler with a pool of its own; with a `budget` it is one of a subclass."""
    kind = env.solution.Scheduler
    if budget is not None:
        kind = extended(kind, budget)
    allocator = Pool(num_blocks, block_size)
    scheduler = kind(
        allocator, Config(vocab_size, max_context), max_running=max_running, watermark=watermark
    )
    DESKS[desk] = Desk(scheduler, allocator, strangers=[])
    return look(env, desk)


def call(env: Any, desk: str, op: str, args: list[Any]) -> dict[str, Any]:
    """Call a method, and look."""
    kept = DESKS[desk]
    scheduler = kept.scheduler
    known = [*scheduler.running, *scheduler.waiting]  # held on to: some may end now
    if op == "add":
        request = request_of(args[0])
        result = plain(scheduler.add(request))
    elif op == "abort":
        result = plain(scheduler.abort(*args))
    elif op == "schedule":
        kept.step = scheduler.schedule()
        result = plain_step(kept.step)
    elif op == "update":
        result = plain(scheduler.update(kept.step, *args))
    elif op == "fork":  # somebody else holds the blocks of one that runs, from now on
        table = next(s for s in scheduler.running if s.request.request_id == args[0]).block_table
        kept.strangers.append(kept.allocator.fork(table))
        result = list(table)
    else:
        raise ValueError(op)
    finishes = {s.request.request_id: named(s.finish_reason) for s in known}
    return {"result": result, "args": args, "finishes": finishes, **look(env, desk)}


def look(env: Any, desk: str) -> dict[str, Any]:
    """All that the judge may see."""
    kept = DESKS[desk]
    allocator = kept.allocator
    return {
        "waiting": [plain_sequence(s) for s in kept.scheduler.waiting],
        "running": [plain_sequence(s) for s in kept.scheduler.running],
        "has_work": kept.scheduler.has_work,
        "num_free": allocator.num_free,
        "ref_counts": [allocator.ref_count(block) for block in range(allocator.num_blocks)],
    }


def plain_sequence(sequence: Any) -> dict[str, Any]:
    """A sequence as plain values."""
    return {
        "id": sequence.request.request_id,
        "tokens": list(sequence.tokens),
        "num_computed": sequence.num_computed,
        "num_cached": sequence.num_cached,
        "table": list(sequence.block_table),
    }


def named(reason: Any) -> str | None:
    """A FinishReason as plain text; whatever else is there, by its repr."""
    return str(reason) if isinstance(reason, FinishReason) else reason and repr(reason)


def plain_step(step: Any) -> Any:
    """A step as plain values; anything else as it is, for the judge to name."""
    if not isinstance(step, Step):
        return step
    return {
        "sequences": [plain_sequence(sequence) for sequence in step.sequences],
        "counts": list(step.counts),
        "copies": list(step.copies),
    }


def request_of(given: dict[str, Any]) -> Request:
    """A request from the plain values that the judge sends."""
    params = SamplingParams(
        max_new_tokens=given["new"],
        temperature=given.get("temperature", 0.0),
        ignore_eos=given.get("ignore_eos", False),
        seed=given.get("seed"),
    )
    return Request(
        given["id"], tuple(given["prompt"]), params, tuple(given.get("eos", ())),
        model=given.get("model", ""), cache_salt=given.get("salt", ""),
    )  # fmt: skip


def plain(value: Any) -> Any:
    """Outputs as plain values; anything else as it is, for the judge to name."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, Output):
        return value
    reason = FinishReason.STOP if value.finish_reason is None else value.finish_reason
    return {
        "id": value.request_id,
        "tokens": list(value.token_ids),
        "finish": None if value.finish_reason is None else str(value.finish_reason),
        "why": value.reason,
        "types": [type(v).__name__ for v in (value.token_ids, value.text, reason, value.reason)],
    }


# -- on nano --------------------------------------------------------------------------------------


def model_of(env: Any, name: str) -> Any:
    """nano in float64, so that rounding decides no token; others as they are."""
    return nano_in_float64(env) if name == "nano" else env.model(name)


def runner_of(env: Any, decoder: Any, num_blocks: int, block_size: int) -> Runner:
    """What computes steps, over a pool whose memory is NaN until it is written."""
    attention = PagedAttention(
        decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
    )
    poison(attention)
    return Runner(decoder, attention, step_batch)


def say_seven(step: Step) -> list[int]:
    """A model that is always of the same mind: where only steps are counted, it will do."""
    return [7] * len(step.sequences)


def serve(
    env: Any, model: str, arrivals: list[Any], num_blocks: int, block_size: int,
    settings: dict[str, Any], cache: bool = True, context: int = 0,
) -> Iterator[Any]:  # fmt: skip
    """Requests through one engine, until there is no work; what came of each step.

    arrivals: [step, request], in order; a request is added before that step. A step is made even
    where there is no work.

    Args:
        model: "none" for a run in which only steps are counted, with a `context` that is given.

    Yields:
        What `add` and the step returned, who runs afterwards, what the step has fed, and how many
        blocks are free.
    """
    decoder = None if model == "none" else model_of(env, model)
    config = Config(256, context) if decoder is None else decoder.config
    allocator = Pool(num_blocks, block_size, finds=cache)
    scheduler = env.solution.Scheduler(allocator, config, **settings)
    runner = say_seven if decoder is None else runner_of(env, decoder, num_blocks, block_size)
    counted = Counted(runner)
    engine = Engine(scheduler, counted)
    pending, step = list(arrivals), 0
    while pending or engine.has_work:
        added = []
        while pending and pending[0][0] <= step:
            added.append(plain(engine.add(request_of(pending.pop(0)[1]))))
        outputs = plain(engine.step())
        running = [s.request.request_id for s in engine.scheduler.running]
        yield {
            "added": added, "outputs": outputs, "running": running,
            "computed": counted.take(), "fed": counted.fed, "free": allocator.num_free,
        }  # fmt: skip
        step += 1
    allocator.check([])
    return memory_of(env)


class Counted:
    """A runner that counts the tokens it has computed, and for whom."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.count = 0
        self.fed: list[str] = []

    def __call__(self, step: Any) -> list[int]:
        tokens: list[int] = self.runner(step)
        self.count = step.num_tokens
        self.fed = [sequence.request.request_id for sequence in step.sequences]
        return tokens

    def take(self) -> int:
        """Tokens of the last pass; 0 if there has been none since."""
        count, self.count = self.count, 0
        if count == 0:
            self.fed = []
        return count


def memory_of(env: Any) -> int:
    """Bytes of a GPU that this process holds; 0 without one."""
    return int(torch.cuda.memory_allocated(env.device)) if env.device == "cuda" else 0


# -- how long it takes, and what stays ------------------------------------------------------------


def endless(env: Any, waiting: int) -> tuple[Any, Any]:
    """A scheduler with many that wait, which preempts in one step of four.

    Every request is like every other.
    """
    allocator = Pool(10, 4)
    scheduler = env.solution.Scheduler(allocator, Config(256, 64), max_running=8)
    names = iter(range(10**9))

    def add() -> None:
        params = SamplingParams(max_new_tokens=12)
        scheduler.add(Request(f"r{next(names)}", (1, 2, 3, 4, 5), params))

    for _ in range(waiting + 8):
        add()
    return scheduler, add


def queued(env: Any, size: int, block_size: int, batch: int) -> Iterator[int]:
    """Batches of steps with `size` requests that wait: for each that ends, another comes."""
    scheduler, add = endless(env, size)
    while True:
        for _ in range(batch):
            step = scheduler.schedule()
            for output in scheduler.update(step, [7] * len(step.sequences)):
                if output.finish_reason is not None:
                    add()
        yield len(scheduler.waiting) + len(scheduler.running)


class Watched(str):
    """An id that counts how often one of its kind is compared, or its hash is asked for."""

    looked_at = 0

    def __eq__(self, other: object) -> bool:
        Watched.looked_at += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        Watched.looked_at += 1
        return super().__hash__()


def ids_looked_at(env: Any, waiting: int, adds: int) -> dict[str, int]:
    """How often ids are looked at while some more requests are added to those that wait."""
    scheduler = env.solution.Scheduler(Pool(4, 4), Config(256, 64), max_running=1)

    def add(index: int) -> None:
        scheduler.add(Request(Watched(f"r{index}"), (1, 2, 3), SamplingParams(2)))

    for index in range(waiting):
        add(index)
    Watched.looked_at = 0
    for index in range(waiting, waiting + adds):
        add(index)
    return {"looked_at": Watched.looked_at, "waiting": len(scheduler.waiting)}


def kept_bytes(env: Any, rounds: int) -> int:
    """Bytes of Python objects by which a scheduler grows while requests come and go.

    Some are refused, some ask for nothing, some are aborted, some are preempted. The first hundred
    are left out.
    """
    allocator = Pool(6, 4)
    scheduler = env.solution.Scheduler(allocator, Config(256, 64), max_running=3)

    def play(first: int, last: int) -> None:
        for i in range(first, last):
            prompt = tuple((i + k) % 256 for k in range(5))
            for name, new in zip("abcde", (10, 9, 0, 40, 3), strict=True):
                scheduler.add(Request(f"{name}{i}", prompt, SamplingParams(max_new_tokens=new)))
            scheduler.abort(f"e{i}")
            while scheduler.has_work:
                step = scheduler.schedule()
                scheduler.update(step, [7] * len(step.sequences))

    return grown_by(lambda: play(100, 100 + rounds), after=lambda: play(0, 100))
