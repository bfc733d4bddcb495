"""The commands, run in this process or in one of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from course import cli

COURSE = [sys.executable, "-m", "course.cli"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it printed, however it was wrapped."""
        return " ".join(self.out.split())


class Terminal:
    """Runs commands as `course` would, and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, *arguments: str) -> Ended:
        self.monkeypatch.setattr(sys, "argv", ["course", *arguments])
        self.capsys.readouterr()
        status: object = None
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code
        assert isinstance(status, int), "a command ends with a status"
        return Ended(status, *self.capsys.readouterr())

    def refused(self, *arguments: str, status: int = 2) -> str:
        """A mistake that was foreseen: nothing on stdout, one line on stderr."""
        ended = self(*arguments)
        assert ended.status == status, ended
        assert "Traceback" not in ended.err
        lines = ended.err.strip().splitlines()
        if lines[0].startswith("Usage:"):  # typer's own
            return lines[-1]
        assert len(lines) == 1, ended.err
        assert lines[0].startswith("course: ")
        return lines[0]


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ, "COURSE_HOME": str(home), "COURSE_NAME": "course", "COLUMNS": "80",
        "NO_COLOR": "1", "TERM": "dumb",
    }  # fmt: skip
