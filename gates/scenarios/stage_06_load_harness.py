"""Stage 06, the half that runs beside the solution.

Loads run in virtual time against answers that are written down beforehand, so that every moment is
known exactly. The numbers run in real time, over HTTP, against a server in the baseline's worker.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from course.check.channel import Foreign, short
from course.load import virtual_time
from course.load.client import Client
from course.types import Chunk, RequestFailed, Stamp, Timeline

__all__ = [
    "aggregate", "arrivals_of_a_changed_list", "drive", "function", "load", "metric", "serve",
    "shared_randomness", "summaries",
]  # fmt: skip

Json = dict[str, Any]

EMPTY = (None, "", 0, (), {})  # requests that are all false in an `if`
ENOUGH = 1000  # requests of an endless source: whoever takes so many would take them for ever


class Overloaded(RequestFailed):
    """A failure as a client may have its own: a kind of RequestFailed."""


def function(env: Any, name: str, args: list[Any]) -> Json:
    """A function of plain values, and what became of its arguments."""
    return {"value": getattr(env.solution, name)(*args), "args": args}


def shared_randomness(env: Any) -> bool:
    """Whether drawing arrival times leaves the random numbers of others alone."""
    env.solution.arrival_times(5.0, 10, "poisson", 4)  # imports what it draws with, if anything
    before = shared_states()
    env.solution.arrival_times(5.0, 10, "poisson", 3)
    return shared_states() == before


def shared_states() -> list[Any]:
    """The states of the random numbers that all code shares, of libraries that are there."""
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append([kind, keys.tobytes(), *rest])
    if "torch" in sys.modules:
        states.append(sys.modules["torch"].get_rng_state().tolist())
    return states


def arrivals_of_a_changed_list(env: Any, args: list[Any]) -> list[Any]:
    """Arrival times, and the same asked for again after the caller has emptied the first list."""
    given = env.solution.arrival_times(*args)
    kept = list(given)
    if isinstance(given, list):
        given.clear()
    return [kept, list(env.solution.arrival_times(*args))]


def metric(env: Any, name: str, timeline: Json) -> Any:
    """A figure of one request."""
    return getattr(env.solution, name)(timeline_of(timeline))


def aggregate(env: Any, name: str, timelines: list[Json], args: list[Any]) -> Json:
    """A figure of many requests; a window among the arguments comes as ["window", start, end]."""
    made = [timeline_of(timeline) for timeline in timelines]
    order = list(map(id, made))
    window = env.solution.Window
    value = getattr(env.solution, name)(
        made, *(window(*arg[1:]) if isinstance(arg, list) else arg for arg in args)
    )
    return {"value": plain(value), "unchanged": order == list(map(id, made))}


def summaries(env: Any, timelines: list[Json], windows: list[list[float]]) -> list[Any]:
    """What happened in each of some windows."""
    made = [timeline_of(timeline) for timeline in timelines]
    windows_of = (env.solution.Window(*window) for window in windows)
    return [plain(env.solution.summarize(made, window)) for window in windows_of]


# -- virtual time --------------------------------------------------------------------------------


class Backend:
    """Answers by a script, and notes when a request is taken, sent and over.

    A script says for each request: `chunks`, each [seconds before it, tokens, output_tokens];
    `rest`, the seconds from the last one to the end; `error`, if it fails then; `special`, if that
    is with a subclass of RequestFailed; `bug`, if it fails with an error that no client foresees;
    `at_once`, if it fails as it is called, before there is an answer; `busy`, the seconds for which
    its sending keeps the client from doing anything else; and `busy_chunk`, those for which its
    first chunk does. With `slots`, only so many are answered at a time, and the others wait in
    line.

    Requests are numbers that count up; of `source` "empty" they are those of EMPTY, and of
    "endless" there are more of them than the script has answers.
    """

    def __init__(
        self, script: list[Json], slots: int | None, timelines: list[Any], source: str
    ) -> None:
        self.script = script
        self.source = source
        self.slots = asyncio.Semaphore(slots or len(script) + 1)
        self.timelines = timelines
        self.events: list[tuple[float, str, int]] = []
        self.kept: dict[int, int] = {}  # timelines that there were at a request's first chunk

    def note(self, what: str, index: int) -> None:
        self.events.append((asyncio.get_running_loop().time(), what, index))

    def requests(self) -> Iterator[Any]:
        for index in range(ENOUGH if self.source == "endless" else len(self.script)):
            self.note("taken", index)
            yield EMPTY[index] if self.source == "empty" else index

    def send(self, request: Any) -> AsyncIterator[Chunk]:
        index = EMPTY.index(request) if self.source == "empty" else request
        if self.script[index].get("at_once"):
            self.note("sent", index)
            self.note("over", index)
            self.fail(index)
        return self.answer(index)

    async def answer(self, index: int) -> AsyncIterator[Chunk]:
        answer = self.script[index]
        self.note("sent", index)
        self.compute(answer.get("busy", 0.0))
        try:
            async with self.slots:
                for number, (seconds, tokens, output_tokens) in enumerate(answer["chunks"]):
                    await asyncio.sleep(seconds)
                    if number == 0:
                        self.compute(answer.get("busy_chunk", 0.0))
                        self.kept[index] = len(self.timelines)
                    yield Chunk(tokens, output_tokens)
                await asyncio.sleep(answer.get("rest", 0.0))
                self.fail(index)
        finally:
            self.note("over", index)

    def compute(self, seconds: float) -> None:
        """Let time pass in which the client does nothing else."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        loop.advance(seconds)

    def fail(self, index: int) -> None:
        """Raise what the script says, if anything."""
        if self.script[index].get("bug"):
            raise KeyError("choices")
        if self.script[index].get("error"):
            kind = Overloaded if self.script[index].get("special") else RequestFailed
            raise kind(self.script[index]["error"])


def load(
    env: Any, kind: str, script: list[Json], how: Any, slots: int | None = None,
    cancel_at: float | None = None, source: str = "numbers",
) -> Json:  # fmt: skip
    """A whole load in virtual time; `how` is the concurrency or the arrival times.

    source: what the requests are, as `Backend` says.
    cancel_at: when to cancel it; time then goes on for another 100 seconds. `tasks` counts those
    that are left a millisecond after the load has ended.
    """

    async def main() -> Json:
        clock = asyncio.get_running_loop().time
        timelines: list[Any] = []
        backend = Backend(script, slots, timelines, source)
        drive = env.solution.closed_loop if kind == "closed" else env.solution.open_loop
        job = asyncio.ensure_future(drive(backend.send, backend.requests(), how, timelines))
        if cancel_at is not None:
            await asyncio.sleep(cancel_at)
            job.cancel()
            await asyncio.wait([job])
            await asyncio.sleep(0.001)
            tasks = len(asyncio.all_tasks()) - 1
            await asyncio.sleep(100.0)
        else:
            await job
            tasks = len(asyncio.all_tasks()) - 1
        return {
            "timelines": [plain_timeline(timeline) for timeline in timelines],
            "events": [list(event) for event in backend.events],
            "ended": clock(),
            "kept": [backend.kept.get(index) for index in range(len(script))],
            "cancelled": job.cancelled(),
            "tasks": tasks,
        }

    return unwrapped(lambda: virtual_time.run(main()))


def unwrapped(run: Callable[[], Any]) -> Any:
    """An error that a task group wraps is shown as what it is."""
    try:
        return run()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


# -- real time -----------------------------------------------------------------------------------


def serve(env: Any, seed: int, kind: str) -> Iterator[Any]:
    """The baseline: a server whose delays are known. First its address, then what it recorded."""
    with env.solution.server(seed, kind) as server:
        yield server.url
        yield [
            [record.received, [list(sent) for sent in record.sent], record.ended, record.late]
            for record in server.records
        ]


def drive(env: Any, kind: str, url: str, count: int, how: Any) -> list[Any]:
    """A whole load over HTTP; `how` is the concurrency or the arrival times."""

    async def main() -> list[Any]:
        timelines: list[Any] = []
        drive = env.solution.closed_loop if kind == "closed" else env.solution.open_loop
        async with Client(url, model="fake", chunk_usage=True) as client:
            await drive(client.send, (f"prompt {i}" for i in range(count)), how, timelines)
        return [plain_timeline(timeline) for timeline in timelines]

    return unwrapped(lambda: asyncio.run(main()))


# -- plain values --------------------------------------------------------------------------------


def timeline_of(given: Json) -> Timeline:
    """A timeline from the plain values that the judge sends."""
    chunks = [Stamp(*chunk) for chunk in given["chunks"]]
    return Timeline(**{**given, "chunks": chunks})


def plain_timeline(timeline: Any) -> Any:
    """A timeline as a dict, its stamps as lists; anything else is foreign: the judge names it."""
    if not isinstance(timeline, Timeline):
        return foreign(timeline)
    fields = {field: getattr(timeline, field, None) for field in Timeline.__dataclass_fields__}
    if not isinstance(timeline.chunks, list):
        return fields | {"chunks": foreign(timeline.chunks)}
    chunks = [list(c) if isinstance(c, Stamp) else foreign(c) for c in timeline.chunks]
    return fields | {"chunks": chunks}


def foreign(value: Any) -> Foreign:
    """Something of another type than was asked for."""
    return Foreign(type(value).__name__, short(value))


def plain(value: Any) -> Any:
    """Windows, stats, summaries as plain values; anything else as it is."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return dict(value) if isinstance(value, dict) else value
