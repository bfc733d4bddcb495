"""What a solution may not reach, kept up inside the worker.

A solution may import `course.types`, `course.model`, `course.parts` and any library. It may not
import or open the reference of its own stage or a later one, a gate, or the course's measuring
code. An audit hook sees every file that Python opens, by whatever name; an import finder says which
module was asked for. Both only *record* and refuse: the judge decides. A solution that swallows the
refusal is recorded all the same.

No guard inside a process can hold against whoever wants to break it. This one sees to it that
nobody gets past by accident, or without having to hide what they do. What a verdict rests on, the
oracle, the clock and the secret inputs, is in another process.

The clocks are compared with what they were before the solution was loaded. A patched clock changes
nothing, since the judge times from another process, but it deserves a name.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

OPEN_TO_SOLUTIONS = ("course.types", "course.model", "course.parts")
COURSE_SOURCE = str(Path(__file__).resolve().parents[1])
IMPORT_SYSTEM = ("<frozen importlib", os.path.dirname(importlib.__file__) + os.sep)

# Events whose arguments may name a file that another program, or another name, then opens.
PASSED_ON = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.link",
    "os.symlink", "os.rename",
)  # fmt: skip


class ForbiddenImport(ImportError):
    """A solution asked for a module that it may not have."""


class ForbiddenFile(PermissionError):
    """A solution opened a file that it may not read."""


class Guard(MetaPathFinder):
    """Records and refuses forbidden imports and files, from `close_doors` on."""

    def __init__(self, forbidden: Sequence[Path]) -> None:
        self.forbidden = tuple(os.path.realpath(path) + os.sep for path in forbidden)
        self.violations: list[str] = []
        self.closed = False

    def close_doors(self) -> None:
        """Start refusing. Modules that are loaded already and not open to solutions are hidden."""
        for name in list(sys.modules):
            if name.startswith("course.") and not _open(name):
                parent, _, child = name.rpartition(".")
                if parent in sys.modules and hasattr(sys.modules[parent], child):
                    delattr(sys.modules[parent], child)
                del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")
        sys.meta_path.insert(0, self)
        self.closed = True
        sys.addaudithook(self._audit)

    def found(self) -> list[str]:
        """What was reached for so far."""
        gone = self.closed and self not in sys.meta_path
        return self.violations + ["the guard of imports, which was removed"] * gone

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Refuse a forbidden module; leave any other to the finders behind this one."""
        top = fullname.partition(".")[0]
        if top in ("reference", "gates") or (top == "course" and not _open(fullname)):
            frame = _importer()
            if frame is None or not frame.f_code.co_filename.startswith(COURSE_SOURCE + os.sep):
                where = f" (line {frame.f_lineno})" if frame else ""
                self.violations.append(f"import {fullname}{where}")
                raise ForbiddenImport(f"a solution may not import {fullname}")
        return None  # leave it to the finders behind this one

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            for name in _names(args[:1]):
                path = os.path.realpath(name)
                # The folder itself counts: files can be opened relative to it.
                if (path + os.sep).startswith(self.forbidden):
                    self._refuse("open", path)
        elif event in PASSED_ON:
            for name in _names(args):
                if any(folder in name for folder in self.forbidden):
                    self._refuse(event, name)

    def _refuse(self, what: str, path: str) -> None:
        folder = os.path.basename(os.path.dirname(path))
        self.violations.append(f"{what} {folder}/{os.path.basename(path)}"[:200])
        raise ForbiddenFile(f"a solution may not open {path}"[:300])


def _open(name: str) -> bool:
    return name == "course" or any(name == m or name.startswith(m + ".") for m in OPEN_TO_SOLUTIONS)


def _names(values: Any) -> Iterator[str]:
    """Everything among `values`, and in lists among them, that could be a path."""
    for value in values:
        if isinstance(value, (str, bytes, os.PathLike)):
            yield os.fsdecode(value)
        elif isinstance(value, (list, tuple)):
            yield from _names(value)


def _importer() -> FrameType | None:
    """The frame whose import statement is being carried out."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
        frame = frame.f_back
    return frame


class Clocks:
    """The clocks as they were, and which of them have been replaced since."""

    def __init__(self) -> None:
        self.original = dict(self._now())

    def patched(self) -> list[str]:
        """Names of the clocks that are not what they were."""
        return [name for name, value in self._now() if value is not self.original.get(name)]

    @staticmethod
    def _now() -> list[tuple[str, Callable[..., Any] | None]]:
        names = ("perf_counter", "perf_counter_ns", "time", "time_ns", "monotonic", "process_time")
        found: list[tuple[str, Any]] = [(f"time.{n}", getattr(time, n, None)) for n in names]
        torch = sys.modules.get("torch")
        if torch is not None:
            found += [
                (f"torch.cuda.{n}", getattr(torch.cuda, n, None)) for n in ("Event", "synchronize")
            ]
        return found
