"""Waiting for a file to change, with file events or without."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from watchfiles import watch


def events_work(folder: Path, seconds: float = 1.0) -> bool:
    """Whether a change in `folder` brings a file event. Some mounts have none."""
    stop, seen = threading.Event(), threading.Event()

    def listen() -> None:
        try:
            for _ in watch(
                folder, stop_event=stop, debounce=50, step=20, rust_timeout=100,
                raise_interrupt=False, yield_on_timeout=False, force_polling=False,
            ):  # fmt: skip
                seen.set()
                return
        except (OSError, RuntimeError):
            return  # no events at all, or no more watches to be had

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not seen.is_set():
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe", suffix=".tmp"):
                time.sleep(0.1)
    except OSError:
        pass  # a read-only folder: nothing will change in it either
    stop.set()
    listener.join(timeout=2)
    return seen.is_set()


def changes(file: Path, *, poll: bool | None = None) -> Iterator[None]:
    """Yield at once, and then after every change of `file`, until interrupted.

    A change made while the caller is at work on the last one is not missed.

    Args:
        poll: True looks every 300 ms instead of waiting for events; None finds out which works.
    """
    seen = _state(file)  # before the caller reads it, so that a later change is seen as one
    yield
    polling = not events_work(file.parent) if poll is None else poll
    for _ in watch(
        file.parent, force_polling=polling, poll_delay_ms=300, raise_interrupt=True,
        rust_timeout=1000, yield_on_timeout=True,
    ):  # fmt: skip
        # An editor may replace the file, and its backup may change beside it: only contents count.
        now = _state(file)
        if now != seen:
            seen = now
            yield


def _state(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
