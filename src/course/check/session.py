"""What `course check` does around a gate: tier, model, secret, earlier slices, and the record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateOptions
from course.check.progress import Progress, ProgressUnreadable
from course.check.result import Exit, StageResult
from course.check.runner import new_seed, run_gate
from course.check.solutions import solution_hash, solution_path
from course.measure.machine import Machine, fingerprint
from course.model.describe import load_config
from course.paths import course_home
from course.syllabus import Stage

REAL_MODEL = "smollm2-135m"
NO_MODEL = "no model"  # what results say of a stage that needs none


@dataclass(frozen=True)
class Wish:
    """What the person at the keyboard asked for."""

    solution: str = "mine"
    tier: str = "best"  # "cpu", "cuda", or the best that this machine has
    model: str | None = None
    contract_only: bool = False
    seed: int | None = None


class Session:
    """Checks on one machine, with one store of progress."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Progress()
        self.machine: Machine = fingerprint()
        self.remarks: list[str] = []  # said once, before the first result

    def check(
        self, stage: Stage, wish: Wish, say: Callable[[str], None] | None = None
    ) -> StageResult:
        """Run one gate as wished, and store what it found."""
        path = solution_path(stage, wish.solution)
        tier = self.tier(wish.tier)
        if wish.model is not None and stage.model != "none":
            self._must_exist(wish.model)
        seed = new_seed() if wish.seed is None else wish.seed
        if tier == "cuda" and not has_cuda():
            return self._not_here(stage, path, seed)
        model = self.model_for(stage, wish, tier, say)
        digest, gate_digest = solution_hash(path), gate_hash(stage, model)
        prior = self._prior(stage, tier, digest, gate_digest) if wish.seed is None else {}
        options = GateOptions(
            solution=path,
            tier=tier,
            model=model,
            seed=seed,
            threads=max(1, self.machine.cores - 1),
            contract_only=wish.contract_only,
            prior=prior,
        )
        result = run_gate(stage, options, progress=say)
        result.remarks[:0] = self.remarks
        self.remarks = []
        if result.status is Exit.BROKEN:
            return result  # of the solution nothing was found: there is nothing to keep
        try:
            self.progress.save(
                result, machine=self.machine.key, mine=wish.solution == "mine",
                gate_hash=gate_digest, keep_slices=wish.seed is None,
            )  # fmt: skip
        except (ProgressUnreadable, OSError) as error:
            result.remarks.append(f"this result could not be stored ({error})")
        return result

    @staticmethod
    def _must_exist(model: str) -> None:
        """An unknown model is the asker's mistake; in a gate it would be the solution's."""
        try:
            load_config(model)
        except ValueError as error:
            raise ValueError(f"--model: {error}") from None

    def tier(self, wished: str) -> str:
        """The tier that `--tier` means on this machine."""
        if wished == "best":
            return "cuda" if has_cuda() else "cpu"
        return wished

    def model_for(
        self, stage: Stage, wish: Wish, tier: str, say: Callable[[str], None] | None = None
    ) -> str:
        """The model that the numbers of a stage are measured on; contracts run on `nano`."""
        if stage.model == "none":
            return NO_MODEL
        if stage.model == "nano" or (wish.contract_only and wish.model is None):
            return "nano"
        if wish.model is not None:
            return wish.model
        return "bench" if stage.model == "bench" else self._text_model(tier, say)

    def _text_model(self, tier: str, say: Callable[[str], None] | None) -> str:
        """The model of real text on a CPU, the 1B shape on a GPU.

        A GPU runs the small real model faster than Python can launch it, so its times would be
        those of Python. Where the real model cannot be had, `bench` stands in, and that is said.
        """
        if tier == "cuda":
            return "bench-1b"
        from course.model import ModelUnavailable, fetch
        from course.model.store import cached_folder

        if cached_folder(REAL_MODEL) is None:
            if say is not None:
                say(f"fetching {REAL_MODEL}, about 100 MB, once")
            try:
                fetch(REAL_MODEL)
            except ModelUnavailable as error:
                self.remarks.append(f"{error} Random weights (`bench`) stand in for it.")
                return "bench"
        return REAL_MODEL

    def _prior(
        self, stage: Stage, tier: str, digest: str, gate_digest: str
    ) -> dict[str, list[tuple[float, float]]]:
        try:
            return self.progress.slices(
                machine=self.machine.key, stage=stage.id, tier=tier,
                solution_hash=digest, gate_hash=gate_digest,
            )  # fmt: skip
        except (OSError, ProgressUnreadable):
            return {}  # a read-only home, or a damaged store: go on without

    def _not_here(self, stage: Stage, path: Path, seed: int) -> StageResult:
        result = StageResult(
            stage=stage.id, title=stage.title, tier="cuda", device="none", model="-",
            solution=str(path), solution_hash=solution_hash(path), seed=seed,
        )  # fmt: skip
        result.failure = GateFailure(
            Code.NOT_MEASURABLE, "this machine has no CUDA GPU that torch can use",
            "tier cuda", "tier cpu is what can be measured here",
        )  # fmt: skip
        return result


def has_cuda() -> bool:
    """Whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


def gate_hash(stage: Stage, model: str) -> str:
    """Changes with anything that a measurement depends on besides the solution and the machine."""
    digest = hashlib.sha256(model.encode())
    for path in gate_files(stage):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def gate_files(stage: Stage) -> Iterable[Path]:
    """Every file that a gate is made of."""
    gates, own = course_home() / "gates", (stage.gate, stage.scenarios, stage.baseline)
    modules = sorted([*gates.glob("*.py"), *gates.glob("scenarios/*.py")])
    shared = [p for p in modules if not p.name.startswith(("test_stage_", "stage_"))]
    return [*(p for p in own if p.exists()), *shared, course_home() / "course.toml"]


def prediction_line(stage: Stage, result: StageResult, progress: Progress) -> str:
    """How far the last prediction was off, once the number is measured; empty without one."""
    try:
        made = progress.predictions(stage.id)
    except (ProgressUnreadable, OSError):
        return ""
    number = next((n for n in result.numbers if n.name == stage.predicts), None)
    if not made or number is None or not number.value:
        return ""
    guess = made[-1][1]
    factor = max(guess, number.value) / min(guess, number.value) if guess > 0 else float("inf")
    if guess == number.value:
        near = "exactly right"
    else:
        near = "well predicted" if factor <= 1.25 else f"off by a factor of {factor:.1f}"
    found, said = (
        f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
        for value in (number.value, guess)
    )
    return f"you predicted {said}{number.unit}, measured {found}{number.unit}: {near}"
