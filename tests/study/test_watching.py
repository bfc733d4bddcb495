"""Waiting for a save, with file events and without, in all the ways in which editors save."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import watchfiles

from course.study import watching
from course.study.watching import changes, events_work

SOON = 20.0  # seconds until a change must have been seen, on a machine at work


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text("first\n")
    return path


class Watcher:
    """Runs `changes` in a thread, and tells what it saw."""

    def __init__(self, file: Path, poll: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: queue.Queue[str] = queue.Queue()
        self.stop = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

        def watch(*paths: Path, **options: object) -> Iterator[object]:
            options["stop_event"] = self.stop
            options["raise_interrupt"] = False
            return watchfiles.watch(*paths, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(watching, "watch", watch)

        def run() -> None:
            for _ in changes(file, poll=poll):
                self.seen.put(file.read_text() if file.exists() else "gone")
                self.go_on.wait()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def next(self) -> str:
        return self.seen.get(timeout=SOON)

    def end(self) -> None:
        self.go_on.set()
        self.stop.set()
        self.thread.join(timeout=10)
        assert not self.thread.is_alive()


@pytest.fixture(params=[True, False], ids=["poll", "events"])
def watcher(
    request: pytest.FixtureRequest, file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watcher]:
    found = Watcher(file, request.param, monkeypatch)
    yield found
    found.end()


def rewrite(file: Path) -> None:
    file.write_text("second\n")


def replace(file: Path) -> None:
    """As vim and others do: a new file takes the name of the old."""
    scratch = file.with_suffix(".tmp")
    scratch.write_text("second\n")
    os.replace(scratch, file)


def remove_and_write(file: Path) -> None:
    file.rename(file.with_suffix(".bak"))
    file.write_text("second\n")


def same_size_and_time(file: Path) -> None:
    stat = file.stat()
    file.write_text("tsrif\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("save", [rewrite, replace, remove_and_write, same_size_and_time])
def test_a_save_is_noticed(watcher: Watcher, file: Path, save: Callable[[Path], None]) -> None:
    assert watcher.next() == "first\n"  # at once
    time.sleep(0.2)
    save(file)
    expected = file.read_text()
    while (found := watcher.next()) == "gone":
        pass
    assert found == expected


def test_a_save_during_the_check_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes seconds; what is saved meanwhile must not wait for the next save."""
    watcher = Watcher(file, True, monkeypatch)
    watcher.go_on.clear()
    assert watcher.next() == "first\n"
    file.write_text("second\n")
    watcher.go_on.set()
    assert watcher.next() == "second\n"
    watcher.go_on.clear()
    file.write_text("third\n")
    assert watcher.next() == "third\n"  # noticed, and being checked
    file.write_text("fourth\n")
    watcher.go_on.set()
    assert watcher.next() == "fourth\n"
    watcher.end()


def test_what_is_no_change(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(file, True, monkeypatch)
    assert watcher.next() == "first\n"
    (file.parent / "other.py").write_text("beside")
    file.touch()
    file.write_text("first\n")
    with pytest.raises(queue.Empty):
        watcher.seen.get(timeout=1.0)
    file.write_text("second\n")
    assert watcher.next() == "second\n"
    watcher.end()


def test_events_are_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir(tmp_path))
    assert isinstance(events_work(tmp_path), bool)
    assert sorted(os.listdir(tmp_path)) == before  # nothing is left lying about
    assert not events_work(tmp_path / "nowhere", seconds=0.2)

    def silent(*_: object, **options: object) -> Iterator[object]:
        options["stop_event"].wait()  # type: ignore[attr-defined]
        return iter(())

    monkeypatch.setattr(watching, "watch", silent)
    assert not events_work(tmp_path, seconds=0.2)
    polled = []

    def note(*_: object, **options: object) -> Iterator[object]:
        polled.append(options["force_polling"])
        return iter(())

    monkeypatch.setattr(watching, "events_work", lambda folder: False)
    monkeypatch.setattr(watching, "watch", note)
    (tmp_path / "x.py").write_text("")
    list(changes(tmp_path / "x.py"))
    list(changes(tmp_path / "x.py", poll=False))
    assert polled == [True, False]
