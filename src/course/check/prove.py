"""`course prove`: the proof that a gate is a gate.

1. the reference passes;
2. the untouched stub fails with NOT_IMPLEMENTED;
3. the baseline fails the number and nothing but the number (where a stage has no baseline of its
   own, a named wrong solution stands in: one whose first line says it is the control);
4. every file in gates/wrong/ fails with the code in its first line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from course.check.codes import Code, Kind
from course.check.edits import SUFFIX, BadEdit, edited, edited_solution
from course.check.gate import GateOptions
from course.check.result import Exit, StageResult
from course.check.runner import new_seed, run_gate
from course.syllabus import Stage

FIRST_LINE = re.compile(r"# (?P<code>[A-Z_]+)(?: \((?P<role>control|timed)\))?: (?P<why>.+)")

MORE_RUNS = 4  # while a machine is too noisy for a verdict; slices add up from run to run


@dataclass(frozen=True)
class Claim:
    """One solution, and how it must fare: a code, or None for a pass."""

    kind: str  # "reference", "stub", "control", "wrong"
    path: Path
    code: Code | None
    why: str
    timed: bool = False  # a fault that shows only while the numbers are taken


@dataclass(frozen=True)
class Proof:
    """A claim and what came of it."""

    claim: Claim
    result: StageResult

    @property
    def holds(self) -> bool:
        """Whether it came out as claimed."""
        return self.problem == ""

    @property
    def problem(self) -> str:
        """Why the claim does not hold; empty if it does."""
        failure = self.result.failure
        got = failure.code.value if failure else self.result.status.name
        if self.claim.code is None:
            if self.result.passed:
                return ""
            return f"should pass, but: {failure or got}"
        if failure is None or failure.code is not self.claim.code:
            return f"should fail with {self.claim.code.value}, but: {failure or got}"
        if self.claim.kind == "control":
            broken = [c.name for c in self.result.checks if c.layer == "contract"
                      and c.outcome != "passed"]  # fmt: skip
            if broken:
                return f"the control must keep the contract, but it fails {broken[0]}"
        return ""


class BadWrongSolution(ValueError):
    """A file in gates/wrong/ that does not say how it must fail, or does not fit the reference."""


def claims(stage: Stage) -> list[Claim]:
    """All that must be shown for one stage."""
    found = [
        Claim("reference", stage.reference, None, "the reference passes"),
        Claim("stub", stage.home / f"{stage.slug}.py", Code.NOT_IMPLEMENTED, "the stub fails"),
    ]
    controls = 0
    baseline = [stage.baseline] if stage.baseline.exists() else []
    for path in [*baseline, *stage.wrong]:
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        match = FIRST_LINE.fullmatch(first)
        if match is None and path == stage.baseline:
            continue  # a peer, not the stage before: it has a contract and numbers of its own
        if match is None or match["code"] not in Code.__members__:
            raise BadWrongSolution(
                f"{path.name}: the first line must be `# CODE: why`, `# CODE (control): why` or "
                f"`# CODE (timed): why` with a code of the closed list, got {first!r}"
            )
        if path.suffix == SUFFIX:
            _must_fit(stage, path)
        if match["role"] == "control" and Code[match["code"]].page.kind is not Kind.NUMBER:
            raise BadWrongSolution(
                f"{path.name}: a control keeps the contract and fails the number, and "
                f"{match['code']} is not about a number"
            )
        kind = "control" if match["role"] == "control" else "wrong"
        controls += kind == "control"
        timed = match["role"] == "timed"
        found.append(Claim(kind, path, Code[match["code"]], match["why"], timed))
    if controls == 0:
        raise BadWrongSolution(
            f"{stage.id} has no control: one wrong solution must keep the contract and fail the "
            "number alone"
        )
    return found


def _must_fit(stage: Stage, diff: Path) -> None:
    try:
        edited(stage.reference, diff)
    except BadEdit as error:
        raise BadWrongSolution(str(error)) from None


def prove(
    stage: Stage,
    options: Callable[[Stage, Path], GateOptions],
    stub_source: str,
    scratch: Path,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Proof]:
    """Try every claim of one stage.

    Args:
        options: gives the options for checking a path, as `course check` would.
        stub_source: the stub as `course dev stubs` generates it. The student's own folder may have
            been worked in, so the stub is written to `scratch` and checked there; so are the
            solutions that edits of the reference describe.

    Raises:
        BadWrongSolution: a first line, or an edit, that says nothing; before anything is run.
    """
    for claim in claims(stage):
        if progress is not None:
            progress(f"{claim.kind}: {claim.path.stem}")
        path = claim.path
        if claim.kind == "stub":
            path = scratch / f"{stage.slug}.py"
            path.write_text(stub_source, encoding="utf-8")
        elif path.suffix == SUFFIX:
            path = edited_solution(stage.reference, path, scratch)
        chosen = replace(options(stage, path), seed=new_seed(), prior={})
        # A wrong solution runs only the layer that it must fail: contract faults show there.
        contract = claim.code is not None and claim.code.page.kind in (Kind.CONTRACT, Kind.LOADING)
        if contract and not claim.timed:
            chosen = replace(chosen, contract_only=True)
        result = run_gate(stage, chosen)
        # Noise is not a verdict: again, with what was measured so far.
        for _ in range(MORE_RUNS):
            if result.status is not Exit.INCONCLUSIVE:
                break
            prior = {n.name: n.pairs for n in result.numbers if n.pairs}
            result = run_gate(stage, replace(chosen, prior=prior))
        yield Proof(claim, result)
