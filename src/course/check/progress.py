"""What was measured and passed, in one SQLite file under `.course/`.

Rows are keyed by machine, stage, tier and the hash of the solution. Each check is written in one
transaction after it has ended: killing the program loses at most the check that was running.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.check.result import StageResult
from course.paths import state_dir

SCHEMA = """
create table if not exists checks (
    id integer primary key, at real not null, machine text not null, stage text not null,
    tier text not null, solution_hash text not null, mine integer not null,
    status text not null, passed integer not null, document text not null
);
create index if not exists checks_by_stage on checks (stage, machine, tier, solution_hash);
create table if not exists slices (
    machine text not null, stage text not null, tier text not null, solution_hash text not null,
    gate_hash text not null, number text not null, pairs text not null,
    primary key (machine, stage, tier, solution_hash, gate_hash, number)
);
create table if not exists predictions (
    id integer primary key, at real not null, stage text not null, value real not null
);
create table if not exists events (
    id integer primary key, at real not null, stage text not null, kind text not null,
    detail text not null
);
"""

_CHECK_ROW = "id, at, machine, stage, tier, solution_hash, mine, status, passed, document"


@dataclass(frozen=True)
class CheckRow:
    """One stored check."""

    at: float
    machine: str
    stage: str
    tier: str
    solution_hash: str
    mine: bool
    status: str
    passed: bool
    document: dict[str, Any]


class ProgressUnreadable(RuntimeError):
    """The progress file is damaged."""


class ProgressUnavailable(OSError):
    """The progress file cannot be opened or written here and now."""


class Progress:
    """The store. Opening it costs nothing until it is first read or written.

    Every method raises ProgressUnreadable for a damaged file, and an OSError where it cannot be
    opened or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_dir() / "progress.sqlite"

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            connection = sqlite3.connect(self.path, timeout=30)
        except sqlite3.Error as error:
            raise ProgressUnavailable(f"{self.path}: {error}") from None
        try:
            connection.executescript(SCHEMA)
            with connection:
                yield connection
        except sqlite3.OperationalError as error:  # read-only, locked for long, a full disk
            raise ProgressUnavailable(f"{self.path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise ProgressUnreadable(
                f"{self.path} is not a progress file ({error}); move it away, and a new one is made"
            ) from None
        finally:
            connection.close()

    def save(
        self, result: StageResult, *, machine: str, mine: bool, gate_hash: str,
        keep_slices: bool = True,
    ) -> None:  # fmt: skip
        """Store a check, and the slices of numbers that are still undecided.

        Args:
            keep_slices: False for a run that did not start from the slices of earlier ones.
        """
        with self._open() as db:
            db.execute(
                "insert into checks (at, machine, stage, tier, solution_hash, mine, status, passed,"
                " document) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    time.time(), machine, result.stage, result.tier, result.solution_hash, mine,
                    result.status.name, result.passed, json.dumps(result.as_dict()),
                ),
            )  # fmt: skip
            key = (machine, result.stage, result.tier, result.solution_hash, gate_hash)
            for number in result.numbers if keep_slices else ():
                if number.verdict is not None and number.verdict.value == "inconclusive":
                    db.execute(
                        "insert or replace into slices values (?, ?, ?, ?, ?, ?, ?)",
                        (*key, number.name, json.dumps(number.pairs)),
                    )
                elif number.pairs:
                    db.execute(
                        "delete from slices where machine=? and stage=? and tier=? and"
                        " solution_hash=? and gate_hash=? and number=?",
                        (*key, number.name),
                    )

    def slices(
        self, *, machine: str, stage: str, tier: str, solution_hash: str, gate_hash: str
    ) -> dict[str, list[tuple[float, float]]]:
        """Slices of earlier, undecided runs of the same solution against the same gate."""
        with self._open() as db:
            rows = db.execute(
                "select number, pairs from slices where machine=? and stage=? and tier=? and"
                " solution_hash=? and gate_hash=?",
                (machine, stage, tier, solution_hash, gate_hash),
            ).fetchall()
        return {name: [(a, b) for a, b in json.loads(pairs)] for name, pairs in rows}

    def checks(self, stage: str | None = None) -> list[CheckRow]:
        """Stored checks, oldest first."""
        if not self.path.exists():
            return []
        with self._open() as db:
            query = f"select {_CHECK_ROW} from checks"
            rows = db.execute(
                query + (" where stage=?" if stage else "") + " order by id",
                (stage,) if stage else (),
            ).fetchall()
        return [
            CheckRow(at, machine, name, tier, digest, bool(mine), status, bool(passed),
                     self._document(document))
            for _, at, machine, name, tier, digest, mine, status, passed, document in rows
        ]  # fmt: skip

    def _document(self, text: str) -> dict[str, Any]:
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ProgressUnreadable(
                f"{self.path} holds a result that cannot be read; move it away, and a new one is "
                "made"
            )
        return document

    def has_passed(self, stage: str, machine: str | None = None) -> bool:
        """Whether the student's own solution has ever passed this stage (on this machine)."""
        return any(
            row.passed and row.mine and machine in (None, row.machine) for row in self.checks(stage)
        )

    def predict(self, stage: str, value: float) -> None:
        """Write down a prediction."""
        with self._open() as db:
            db.execute(
                "insert into predictions (at, stage, value) values (?, ?, ?)",
                (time.time(), stage, value),
            )

    def predictions(self, stage: str) -> list[tuple[float, float]]:
        """(time, value) of each prediction, oldest first."""
        if not self.path.exists():
            return []
        with self._open() as db:
            return db.execute(
                "select at, value from predictions where stage=? order by id", (stage,)
            ).fetchall()

    def note(self, stage: str, kind: str, detail: str = "") -> None:
        """Record that something happened: a hint shown, a solution given up for."""
        with self._open() as db:
            db.execute(
                "insert into events (at, stage, kind, detail) values (?, ?, ?, ?)",
                (time.time(), stage, kind, detail),
            )

    def events(self, stage: str, kind: str) -> list[str]:
        """The details of all events of one kind, oldest first."""
        if not self.path.exists():
            return []
        with self._open() as db:
            rows = db.execute(
                "select detail from events where stage=? and kind=? order by id", (stage, kind)
            ).fetchall()
        return [detail for (detail,) in rows]
