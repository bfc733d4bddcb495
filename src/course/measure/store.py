"""Records kept in one JSON file, each with a checksum: damage is noticed, never believed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["load_record", "save_record"]


def load_record(path: Path, key: str) -> dict[str, Any] | None:
    """Return the record stored under ``key``; None when there is none, or it is damaged.

    Damaged is a file that is not JSON, an entry of another form, or one that does not match its
    checksum (cut off, edited, or garbled on disk).
    """
    entry = _entries(path).get(key)
    if not isinstance(entry, dict):
        return None
    record = entry.get("record")
    if not isinstance(record, dict) or entry.get("checksum") != _checksum(record):
        return None
    return record


def save_record(path: Path, key: str, record: dict[str, Any]) -> bool:
    """Store ``record`` under ``key``, beside the others; False where nothing can be written.

    The file is replaced as a whole: who is killed meanwhile leaves the old one.
    """
    entries = _entries(path)
    entries[key] = {"checksum": _checksum(record), "record": record}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def _entries(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, not readable, not JSON, not even text
        return {}
    return entries if isinstance(entries, dict) else {}


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
