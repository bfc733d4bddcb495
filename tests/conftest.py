"""What tests in several folders share: quick workers, and a course of one small stage."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from course.check.fork_server import ForkServer
    from toy_course import ToyCourse


def pytest_configure() -> None:
    """Signals must reach what tests start, also where the suite runs in the background.

    A shell without job control starts background jobs with SIGINT ignored, nohup those with SIGHUP.
    Their children inherit that, and a test that stops one of them would wait for ever.
    """
    defaults = {signal.SIGINT: signal.default_int_handler}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, defaults.get(number, signal.SIG_DFL))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    from course.check.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def forked(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked instead of started: see `course.check.fork_server`."""
    from course.check import host

    monkeypatch.setattr(host, "launch", fork_server.fork)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyCourse]:
    """A course of its own, in a folder of its own, as the home of this process."""
    from course.study.glossary import glossary
    from course.syllabus import load_syllabus
    from toy_course import ToyCourse

    home = tmp_path / "home"
    course = ToyCourse(home)
    monkeypatch.setenv("COURSE_HOME", str(home))
    monkeypatch.setenv("COURSE_HUB", "off")  # no test of a toy fetches a real model ...
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # ... by either route
    load_syllabus.cache_clear()
    glossary.cache_clear()
    before, path = set(sys.modules), list(sys.path)
    yield course
    for name in set(sys.modules) - before:
        if str(home) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path
    load_syllabus.cache_clear()
    glossary.cache_clear()
