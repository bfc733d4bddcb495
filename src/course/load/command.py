"""`course load`: what was typed, made into a load, and what came of it, shown and written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from course import parts
from course.load.client import Client
from course.load.progress import Shown
from course.load.prompts import prompts_of
from course.load.report import as_dict, print_report
from course.load.run import Load, Measured, drive
from course.syllabus import load_syllabus

STAGE = 6
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Wish:
    """What the person at the keyboard asked for."""

    url: str
    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    warmup: int | None = None
    prompts: str = "chat"
    max_tokens: int = 128
    model: str = ""
    api: str = "chat"
    stream: bool = True
    chunk_usage: bool = False
    tokenizer: str = ""
    api_key: str = ""  # the name of the environment variable
    timeout: float = 600.0
    seed: int = 0
    parts: str = "reference"
    json_file: Path | None = None
    plot_file: Path | None = None


def measure(wish: Wish, console: Console, progress: Console) -> int:
    """Put the load on the server and report; the exit status.

    Raises:
        ValueError: what was asked for makes no sense, the server cannot be reached, the part that
            should measure is a stub, or a file cannot be written.
    """
    try:
        return _measure(wish, console, progress)
    except NotImplementedError as error:
        raise ValueError(
            f"stage {STAGE:02d} is not written yet ({error}); --parts reference measures with the "
            "course's own"
        ) from None


def _measure(wish: Wish, console: Console, progress: Console) -> int:
    load = _load(wish)
    harness = _harness(wish.parts)
    prompts = prompts_of(wish.prompts)
    _check_files(wish)
    client = Client(
        wish.url, model=wish.model, api=wish.api, max_tokens=wish.max_tokens, stream=wish.stream,
        chunk_usage=wish.chunk_usage, count_tokens=_counter(wish.tokenizer),
        api_key=_key(wish.api_key), timeout=wish.timeout, connections=load.concurrency,
    )  # fmt: skip
    measured = Measured(load, harness)

    async def main() -> None:
        with _stoppable(measured):
            async with Shown(progress, measured):
                await drive(measured, client, prompts)

    try:
        asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        measured.interrupted = True
    except BaseExceptionGroup as group:
        raise _first(group) from None
    print_report(console, measured, client.name, len(set(prompts[: load.requests])))
    _write_files(wish, measured, client.name)
    return 0 if any(timeline.finished for timeline in measured.timelines) else 1


def _check_files(wish: Wish) -> None:
    """Whether what comes of the load can be written, before it is put on the server.

    Raises:
        ValueError: naming the option.
    """
    for name, path in (("--json", wish.json_file), ("--plot", wish.plot_file)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"{name}: there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"{name} must be a file, and {path} is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{name}: {path} cannot be written")
    if wish.plot_file is not None and wish.plot_file.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot must end in .png, .svg or .pdf, got {wish.plot_file}")


def _write_files(wish: Wish, measured: Measured, target: str) -> None:
    """Write what was asked for. One file that cannot be written is no loss of the other.

    Raises:
        ValueError: naming the options and the files that could not be written.
    """

    def as_json(path: Path) -> None:
        document = as_dict(measured, target, _settings(wish))
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def as_picture(path: Path) -> None:
        from course.load.plot import plot

        plot(measured, path, f"{target}, {measured.load.words}")

    problems = []
    for name, path, write in (
        ("--json", wish.json_file, as_json), ("--plot", wish.plot_file, as_picture),
    ):  # fmt: skip
        try:
            if path is not None:
                write(path)
        except OSError as error:
            problems.append(f"{name}: {path} cannot be written: {error.strerror or error}")
    if problems:
        raise ValueError("; ".join(problems))


@contextmanager
def _stoppable(measured: Measured) -> Iterator[None]:
    """SIGTERM and SIGHUP cancel the task that is inside, as asyncio does it with Ctrl-C.

    The command line makes them a KeyboardInterrupt. Raised in the middle of any task, that would
    leave the others as they are.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(*_: object) -> None:
        measured.interrupted = True
        task.cancel()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop

    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    ours = [n for n in numbers if n and signal.getsignal(n) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may say what a signal does
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)


def _load(wish: Wish) -> Load:
    if wish.concurrency is not None and wish.rate is not None:
        raise ValueError("--concurrency is for a closed loop and --rate for an open one: name one")
    if wish.rate is not None and not 0 < wish.rate < float("inf"):
        raise ValueError(f"--rate must be above 0, got {wish.rate}")
    if wish.arrivals not in ("poisson", "constant"):
        raise ValueError(f"--arrivals must be poisson or constant, got {wish.arrivals!r}")
    if not 0 < wish.timeout < float("inf"):
        raise ValueError(f"--timeout must be above 0, got {wish.timeout}")
    return Load.planned(
        concurrency=wish.concurrency, rate=wish.rate, requests=wish.requests, warmup=wish.warmup,
        process=wish.arrivals, seed=wish.seed,
    )  # fmt: skip


def _harness(whose: str) -> ModuleType:
    """Stage 06 as a module, the reference's or the student's."""
    if whose not in ("reference", "mine"):
        raise ValueError(f"--parts must be reference or mine, got {whose!r}")
    parts.bind(parts.Binding(mine=frozenset({STAGE} if whose == "mine" else ())))
    return parts.load_part(load_syllabus().find(STAGE))


def _key(variable: str) -> str:
    """The API key. It is named and not typed, so that it is in no list of processes.

    Raises:
        ValueError: there is none, or no header can carry it. The message does not show it.
    """
    if not variable:
        return ""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):  # it may be the key itself
        raise ValueError("--api-key takes the name of an environment variable, not the key itself")
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"--api-key names the environment variable {variable}, which is not set")
    if key != key.strip():
        raise ValueError(
            f"--api-key: the key in {variable} begins or ends with a space or a line break, which "
            "belongs to no key"
        )
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            f"--api-key: the key in {variable} holds a character that no header can carry: a "
            "space, a line break or another control character, or one that is not ASCII"
        )
    return key


def _counter(tokenizer: str) -> Callable[[str], int] | None:
    """Counts the tokens of a piece of text."""
    if not tokenizer:
        return None
    from course.model.describe import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return lambda text: len(loaded.encode(text))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What is inside a group of errors."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _settings(wish: Wish) -> dict[str, Any]:
    """What was asked of the server. Not the key, nor where it came from."""
    names = ("prompts", "max_tokens", "api", "stream", "chunk_usage", "tokenizer", "timeout")
    return {**{name: getattr(wish, name) for name in names}, "parts": wish.parts}
