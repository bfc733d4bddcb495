"""Workers for solutions that a test writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from check.fork_server import ForkServer
from check.workers import Workshop
from course.check import host


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def forked(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked instead of started: see `fork_server`."""
    names = ("DEVNULL", "STDOUT", "TimeoutExpired")
    kept = {name: getattr(host.subprocess, name) for name in names}
    stand_in = SimpleNamespace(**kept, Popen=fork_server.popen)
    monkeypatch.setattr(host, "subprocess", stand_in)


@pytest.fixture
def workshop(forked: None, tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path)
    yield shop
    shop.close()
