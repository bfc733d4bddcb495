"""The syllabus: `course.toml` as Stage objects, and the many ways to name a stage."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from course.paths import course_home

MODELS = {
    "text": "real text, on the model that --model names",
    "bench": "random weights in wide layers, or the model that --model names",
    "nano": "small random weights: the counts are the same on any model",
    "none": "nothing of it runs on a model",
}
"""What the numbers of a stage are measured on."""


class UnknownStage(ValueError):
    """A name that no stage answers to."""


@dataclass(frozen=True)
class Stage:
    """One stage of the course, as `course.toml` describes it."""

    number: int
    slug: str  # "naive_loop"
    title: str
    because: str  # which bill of the stage before this one pays
    published: bool = False
    given: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()  # the public names that the student writes
    needs: tuple[int, ...] = ()  # earlier stages whose parts are used
    measures: str = ""
    numbers: tuple[str, ...] = ()  # every number that a full check must bring
    gpu_numbers: tuple[str, ...] = ()  # and those that it must bring besides at tier `cuda`
    modules: tuple[str, ...] = ()  # without which a machine cannot measure this stage
    predict: str = ""  # the question of `course predict`
    predicts: str = ""  # the name of the measured number that the prediction is scored against
    terms: tuple[str, ...] = ()
    model: str = "text"  # what its numbers are measured on, of MODELS
    points: int = 5
    seconds: float = 300.0  # the longest that a student's code may run in one reply
    memory_mb: int = 6000  # resident memory of the student's process tree
    bars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # tier -> name -> bar

    @property
    def id(self) -> str:
        """`stage-07`."""
        return f"stage-{self.number:02d}"

    @property
    def folder(self) -> str:
        """`stage_07_block_allocator`."""
        return f"stage_{self.number:02d}_{self.slug}"

    @property
    def home(self) -> Path:
        """Where the student works."""
        return course_home() / "stages" / self.folder

    @property
    def file(self) -> Path:
        """The file that the student writes."""
        return self.home / f"{self.slug}.py"

    @property
    def chapter(self) -> Path:
        """The chapter."""
        return self.home / "README.md"

    @property
    def hints(self) -> Path:
        """The hints, in three levels."""
        return self.home / "hints.md"

    @property
    def reference(self) -> Path:
        """The worked solution."""
        return course_home() / "reference" / self.folder / f"{self.slug}.py"

    @property
    def gate(self) -> Path:
        """The judge."""
        return course_home() / "gates" / f"test_{self.folder}.py"

    @property
    def scenarios(self) -> Path:
        """The half of the gate that runs beside the solution."""
        return course_home() / "gates" / "scenarios" / f"{self.folder}.py"

    @property
    def baseline(self) -> Path:
        """What the number is measured against."""
        return course_home() / "gates" / "baseline" / f"{self.folder}.py"

    @property
    def wrong(self) -> list[Path]:
        """Solutions that must fail, each with the code in its first line.

        A `.py` is a whole solution, a `.diff` an edit of the reference: see `course.check.edits`.
        """
        folder = course_home() / "gates" / "wrong" / self.folder
        return sorted((*folder.glob("*.py"), *folder.glob("*.diff")), key=lambda p: p.stem)

    @property
    def notebook(self) -> Path:
        """The reader's path."""
        return course_home() / "notebooks" / f"{self.number:02d}_{self.slug}.ipynb"

    def bar(self, tier: str, name: str) -> Any:
        """One bar or setting of a tier; a tier without its own takes the CPU's."""
        for table in (self.bars.get(tier, {}), self.bars.get("cpu", {})):
            if name in table:
                return table[name]
        raise KeyError(f"course.toml has no bar {name!r} for {self.id} at tier {tier}")


@dataclass(frozen=True)
class Syllabus:
    """The stages in order."""

    stages: tuple[Stage, ...]

    @property
    def published(self) -> tuple[Stage, ...]:
        """The stages that can be checked."""
        return tuple(s for s in self.stages if s.published)

    def find(self, name: str | int) -> Stage:
        """The stage that `7`, `stage-7`, `stage_07_block_allocator` or `block-allocator` names.

        Raises:
            UnknownStage: no stage answers to that name; the message lists near ones.
        """
        text = str(name).strip().lower().rstrip("/").replace("_", "-")
        text = text.removesuffix(".py").rsplit("/", 1)[-1]
        number = re.fullmatch(r"(?:stage-?)?0*([0-9]{1,4})(?:-(?P<slug>.*))?", text)
        for stage in self.stages:
            slug = stage.slug.replace("_", "-")
            if text == slug:
                return stage
            if number and int(number[1]) == stage.number:
                if number["slug"] in (None, slug):
                    return stage
                raise UnknownStage(f"there is no stage {str(name)!r}: {stage.id} is {slug}")
        import difflib

        slugs = [s.slug.replace("_", "-") for s in self.stages]
        near = difflib.get_close_matches(text, slugs, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        last = self.stages[-1].number
        raise UnknownStage(
            f"there is no stage {str(name)!r}: use 1 to {last}, stage-1, or a name such as "
            f"{slugs[0]}.{hint}"
        )

    def builders(self, name: str) -> list[Stage]:
        """The stages that build a public name, in order; none, if nobody does."""
        return [stage for stage in self.stages if name in stage.builds]

    def providers(self) -> dict[str, Stage]:
        """The public names that stages build, each with the stage that builds it first."""
        found: dict[str, Stage] = {}
        for stage in self.stages:
            for name in stage.builds:
                found.setdefault(name, stage)
        return found


_KINDS = {
    field.name: {
        "int": (int,), "str": (str,), "bool": (bool,), "float": (int, float),
    }.get(str(field.type), (tuple,) if str(field.type).startswith("tuple") else (dict,))
    for field in fields(Stage)
}  # fmt: skip


_ENDS = ({"at_least"}, {"no_worse_than"}, {"at_least", "at_most"})  # of a bar


def _stage(entry: dict[str, Any]) -> Stage:
    known = set(Stage.__dataclass_fields__)
    unknown = set(entry) - known
    if unknown:
        raise ValueError(f"course.toml: unknown key {sorted(unknown)[0]!r} in {entry.get('slug')}")
    for name in ("number", "slug", "title", "because"):
        if name not in entry:
            raise ValueError(f"course.toml: a stage has no {name!r}: {entry}")
    tuples = {k: tuple(v) for k, v in entry.items() if isinstance(v, list)}
    stage = Stage(**{**entry, **tuples})
    for name, kinds in _KINDS.items():
        value = getattr(stage, name)
        if type(value) not in kinds:
            raise ValueError(f"course.toml: {name!r} of {stage.slug!r} cannot be {value!r}")
    if stage.published and stage.predicts not in stage.numbers:
        raise ValueError(f"course.toml: {stage.predicts!r} is no number of {stage.slug!r}")
    for tier, table in stage.bars.items():
        for name, bar in table.items():
            _must_be_bar(f"{stage.slug}.bars.{tier}.{name}", bar)
    return stage


def _must_be_bar(where: str, bar: Any) -> None:
    """A bar has ends; what is no bar is a setting of the gate: a number, or several."""
    ends = bar.values() if isinstance(bar, dict) else bar if isinstance(bar, list) else [bar]
    known = not isinstance(bar, dict) or set(bar) in _ENDS
    if not known or not all(type(end) in (int, float) and end >= 0 for end in ends):
        raise ValueError(f"course.toml: {where} is neither {{at_least = 3.0}} nor numbers: {bar!r}")


@cache
def load_syllabus(path: Path | None = None) -> Syllabus:
    """Read `course.toml` (the course's own, unless `path` is given).

    Raises:
        ValueError: the file is no TOML, or does not describe stages.
    """
    path = path or course_home() / "course.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        stages = tuple(_stage(entry) for entry in document.get("stage", ()))
    except (TypeError, AttributeError, ValueError) as error:  # no TOML, a key missing, no UTF-8
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not stages or [s.number for s in stages] != list(range(1, len(stages) + 1)):
        raise ValueError(f"{path}: the stages must be numbered 1, 2, 3, ... in order")
    return Syllabus(stages)
