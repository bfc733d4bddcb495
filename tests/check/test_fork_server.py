"""Workers that are forked, and the one that cannot be."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest

from course.check import host
from course.check.fork_server import ForkServer


def test_a_worker_with_another_seed_of_hashes_is_started_anew(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, str]] = []

    def start_anew(channel: Any, output: Any, environment: dict[str, str], cwd: str) -> str:
        begun.append(environment)
        return "a new Python"

    monkeypatch.setattr(host, "start_anew", start_anew)
    seeded = {**os.environ, "PYTHONHASHSEED": "1234"}
    with tempfile.TemporaryFile() as output:
        process = fork_server.fork((0, 1), output, seeded, tempfile.gettempdir())
    assert (process, begun) == ("a new Python", [seeded])
