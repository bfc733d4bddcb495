"""A terminal at 80 columns, without colour."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cli.terminal import Terminal


@pytest.fixture
def course(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGHUP)}
    yield Terminal(capsys, monkeypatch)
    for name, handler in handlers.items():
        signal.signal(name, handler)
