"""Where fetched models lie, ``<course home>/.course/models``, and how one gets there whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from course.model.weights import weight_files
from course.paths import state_dir

__all__ = [
    "ModelUnavailable",
    "build",
    "cached_folder",
    "cached_hub_ids",
    "folder_of",
    "require_whole",
    "source_of",
]

SOURCE_FILE = "source.txt"  # one line: where a fetched model came from


class ModelUnavailable(RuntimeError):
    """The model is not on this machine and could not be fetched. The message says why."""


def folder_of(name: str) -> Path:
    """Where a model of this name lies, or would lie."""
    return state_dir() / "models" / name.replace("/", "--")


def cached_folder(name: str) -> Path | None:
    """The folder of a model that was fetched before, whole; None when there is none."""
    try:
        folder = folder_of(name)
    except FileNotFoundError:  # no course home: nothing was ever fetched
        return None
    return folder if _is_whole(folder) else None


def cached_hub_ids() -> list[str]:
    """The hub models ("owner/model") that were fetched before."""
    try:
        names = sorted(folder.name for folder in (state_dir() / "models").glob("[!.]*--*"))
    except FileNotFoundError:
        return []
    return [name.replace("--", "/", 1) for name in names]


def require_whole(folder: Path) -> None:
    """Check that a folder holds all that a model needs.

    Raises:
        FileNotFoundError: naming what is missing.
    """
    weight_files(folder)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}")


def source_of(folder: Path) -> str:
    """Where the model in a folder came from: what `build` noted, else the folder itself."""
    note = folder / SOURCE_FILE
    return note.read_text("utf-8").strip() if note.is_file() else str(folder)


def build(final: Path, fill: Callable[[Path], str]) -> Path:
    """Let `fill` build a model in an empty folder, then give that folder its final name.

    fill: returns one line on where the model came from. What it leaves beside its folder, in the
    folder's parent, is removed. Until the very end nothing has the final name, so that a fetch
    that was killed leaves nothing that could be taken for a model; the next one sweeps it up.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    draft = Path(tempfile.mkdtemp(prefix=f".partial-{os.getpid()}-", dir=final.parent))
    try:
        folder = draft / "model"
        folder.mkdir()
        source = fill(folder)
        require_whole(folder)
        (folder / SOURCE_FILE).write_text(source + "\n", "utf-8")
        if final.exists() and not _is_whole(final):  # someone deleted files from it
            final.rename(draft / "broken")
        try:
            folder.rename(final)
        except OSError:
            if not _is_whole(final):  # else another process was faster, which is as good
                raise
        return final
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        require_whole(folder)
    except FileNotFoundError:
        return False
    return True


def _sweep(models: Path) -> None:
    """Remove the drafts of processes that are no more."""
    import psutil

    for draft in models.glob(".partial-*"):
        if not psutil.pid_exists(int(draft.name.split("-")[1])):
            shutil.rmtree(draft, ignore_errors=True)
