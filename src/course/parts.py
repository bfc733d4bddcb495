"""The parts that earlier stages built: `from course.parts import KVCache`.

A name is looked up in the syllabus, and the stage that builds it is loaded from a file; where
several build it, the newest, which is the better part. Which file depends on what this process is
for: in a check it is always the reference, so that a fault in your stage 02 cannot fail your stage
08, and nobody is blocked; in your own engine (`--parts mine`) it is the file that you wrote.

A check of stage N may take parts of the stages before N only.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from course.syllabus import Stage, load_syllabus


@dataclass(frozen=True)
class Binding:
    """Where the parts of this process come from."""

    mine: frozenset[int] = frozenset()  # stages taken from the student's folder; others: reference
    before: int | None = None  # only stages below this number, if set

    def file(self, stage: Stage) -> Path:
        """The file that a stage is taken from."""
        return stage.file if stage.number in self.mine else stage.reference


_binding = Binding()


def bind(binding: Binding) -> None:
    """Decide, once per process and before any part is taken, where parts come from."""
    global _binding
    _binding = binding


def load_part(stage: Stage) -> ModuleType:
    """The module of a stage, under the current binding.

    Raises:
        ImportError: the binding does not allow that stage.
    """
    if _binding.before is not None and stage.number >= _binding.before:
        raise ImportError(
            f"course.parts gives stage {_binding.before:02d} only the stages before it, "
            f"and {stage.id} ({stage.title}) is not"
        )
    name = f"course_parts.{stage.folder}"
    if name not in sys.modules:
        path = _binding.file(stage)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ImportError(f"course.parts: {path} does not exist")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    builders = load_syllabus().builders(name)
    if not builders:
        raise AttributeError(f"course.parts: no stage builds {name!r}")
    before = _binding.before
    allowed = [stage for stage in builders if before is None or stage.number < before]
    return getattr(load_part((allowed or builders)[-1]), name)


def __dir__() -> list[str]:
    return sorted(load_syllabus().providers())
