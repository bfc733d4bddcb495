"""The proof that a gate is a gate, and that this proof can fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from course.check.codes import Code, Kind
from course.check.edits import edited
from course.check.gate import GateOptions
from course.check.prove import FIRST_LINE, MORE_RUNS, BadWrongSolution, Proof, claims, prove, trials
from course.check.result import Exit
from course.study.workspace import stub_source
from course.syllabus import Stage, load_syllabus
from toy_course import ToyCourse

STAGES = load_syllabus().published
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)

DOUBLES = "def double(number):\n    if type(number) is not int: raise TypeError('number')\n"
RIGHT = DOUBLES + "    return 2 * number\ndef work(): return 5\ndef seconds(): return [0.5]\n"


def toy_stage() -> Stage:
    return load_syllabus().find(1)


def try_all(toy: ToyCourse, folder: Path) -> dict[str, Proof]:
    def options(stage: Stage, path: Path) -> GateOptions:
        return GateOptions(path, model="nano")

    stage = toy_stage()
    proofs = prove(trials(stage, options, stub_source(stage), folder))
    return {f"{p.claim.kind}:{p.claim.path.stem}": p for p in proofs}


def wrong(toy: ToyCourse, name: str, text: str, suffix: str = ".py") -> Path:
    path = toy.home / "gates" / "wrong" / "stage_01_toy" / f"{name}{suffix}"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("forked")
def test_a_proof_that_holds(toy: ToyCourse, tmp_path: Path) -> None:
    toy.mine.write_text("this is a student's own work, and not looked at")
    proofs = try_all(toy, tmp_path)
    assert list(proofs) == [
        "reference:toy", "stub:toy", "wrong:leaves", "wrong:slow", "control:too_much",
        "wrong:triples",
    ]  # fmt: skip
    for name, proof in proofs.items():
        assert proof.holds, f"{name}: {proof.problem}"
    # A wrong solution runs only the layer that it must fail.
    assert not proofs["wrong:triples"].result.numbers
    assert proofs["control:too_much"].result.numbers
    assert len({proof.result.seed for proof in proofs.values()}) == len(proofs)


HALVES = "# WRONG_VALUE: half of it\n@@\n-    return 2 * number\n+    return number // 2\n"


@pytest.mark.usefixtures("forked")
def test_an_edit_of_the_reference_is_proved(toy: ToyCourse, tmp_path: Path) -> None:
    diff = wrong(toy, "halves", HALVES, ".diff")
    for name in ("leaves", "slow", "triples"):
        diff.with_name(f"{name}.py").unlink()
    proof = try_all(toy, tmp_path)["wrong:halves"]
    assert proof.holds, proof.problem
    assert proof.claim.path == diff
    assert "return number // 2" in (tmp_path / "halves.py").read_text()


BROKEN: dict[str, tuple[str, str]] = {
    "a contract fault that is right": (f"# WRONG_VALUE: three times\n{RIGHT}",
                                       "should fail with WRONG_VALUE, but: PASS"),
    "a slow one that is fast": (f"# TOO_SLOW: slow\n{RIGHT}",
                                "should fail with TOO_SLOW, but: PASS"),
    "one that fails otherwise": ("# TOO_SLOW: slow\ndef double(number): return 3 * number\n",
                                 "should fail with TOO_SLOW, but: WRONG_VALUE"),
    "one that is only noisy": (f"# TOO_SLOW: slow\n{RIGHT.replace('0.5', '0.3, 3.0')}",
                               "should fail with TOO_SLOW, but: INCONCLUSIVE"),
    "a control that breaks the contract": (
        f"# WRONG_COUNT (control): more\n{DOUBLES}    return 0.5\n",
        "should fail with WRONG_COUNT, but: WRONG_TYPE"),
    "one that does not load": ("# WRONG_VALUE: three\nraise KeyError\n",
                               "should fail with WRONG_VALUE, but: LOAD_ERROR"),
}  # fmt: skip


@pytest.mark.usefixtures("forked")
def test_a_proof_can_fail(toy: ToyCourse, tmp_path: Path) -> None:
    for index, (text, _) in enumerate(BROKEN.values()):
        wrong(toy, f"x{index}", text)
    proofs = try_all(toy, tmp_path)
    for index, (name, (_, problem)) in enumerate(BROKEN.items()):
        kind = "control" if "control" in name else "wrong"
        proof = proofs[f"{kind}:x{index}"]
        assert not proof.holds, name
        assert proof.problem.startswith(problem), name
    # Noise is tried again, with what was measured so far, and is no verdict in the end.
    noisy = proofs["wrong:x3"].result
    assert noisy.status is Exit.INCONCLUSIVE
    assert noisy.numbers[1].slices == 100 * (1 + MORE_RUNS)


@pytest.mark.usefixtures("forked")
def test_a_reference_that_fails_and_a_stub_that_does_something(
    toy: ToyCourse, tmp_path: Path
) -> None:
    begin = "    # solution: begin\n    return"
    text = toy.reference.read_text()
    assert begin in text
    toy.reference.write_text(text.replace(begin, "    return 3 * number\n" + begin))
    proofs = try_all(toy, tmp_path)
    assert proofs["reference:toy"].problem.startswith("should pass, but: WRONG_VALUE")
    assert proofs["stub:toy"].problem.startswith("should fail with NOT_IMPLEMENTED, but: WRONG")


def test_a_control_has_to_keep_its_contract(toy: ToyCourse) -> None:
    """The right code is not enough: WRONG_COUNT may come from a contract test, too."""
    from check.test_result import check, result
    from course.check.failure import GateFailure
    from course.check.prove import Claim

    claim = Claim(toy_stage(), "control", Path("x.py"), Code.WRONG_COUNT, "more")
    failure = GateFailure(Code.WRONG_COUNT, "a pass too many")
    bad = result(failure=failure, checks=[check(), check("failed")])
    good = result(failure=failure, checks=[check(), check("failed", "number")])
    assert Proof(claim, good).holds
    assert Proof(claim, bad).problem.startswith("the control must keep the contract")
    passing = Claim(toy_stage(), "reference", Path("x.py"), None, "passes")
    assert Proof(passing, result()).holds
    assert not Proof(passing, result(contract_only=True)).holds


# -- the first lines ------------------------------------------------------------------------------

FIRST = {
    "no comment": "import os\n",
    "no code": "# three times instead of two\n",
    "no reason": "# WRONG_VALUE\n",
    "an empty reason": "# WRONG_VALUE: \n",
    "a code that does not exist": "# QUITE_WRONG: really\n",
    "small letters": "# wrong_value: three\n",
    "another remark": "# WRONG_VALUE (wrong): three\n",
    "a control about the contract": "# WRONG_VALUE (control): three\n",
    "nothing": "",
    "a second line": "\n# WRONG_VALUE: three\n",
}


@pytest.mark.parametrize("text", FIRST.values(), ids=FIRST.keys())
def test_a_wrong_solution_must_say_how_it_fails(toy: ToyCourse, text: str) -> None:
    wrong(toy, "unclear", text)
    with pytest.raises(BadWrongSolution, match=r"unclear\.py"):
        claims(toy_stage())


def test_an_edit_must_fit_the_reference(toy: ToyCourse) -> None:
    wrong(toy, "lost", HALVES.replace("2 * number", "5 * number"), ".diff")
    with pytest.raises(BadWrongSolution, match=r"lost\.diff: hunk 1 "):
        claims(toy_stage())


def test_there_must_be_a_control(toy: ToyCourse) -> None:
    (toy.home / "gates" / "wrong" / "stage_01_toy" / "too_much.py").unlink()
    with pytest.raises(BadWrongSolution, match="control"):
        claims(toy_stage())
    baseline = toy.home / "gates" / "baseline" / "stage_01_toy.py"
    baseline.write_text("# WRONG_COUNT (control): the stage before\n")
    found = {claim.path: claim.kind for claim in claims(toy_stage())}
    assert found[baseline] == "control"


@each_stage
def test_every_wrong_solution_is_a_claim_of_its_own(stage: Stage) -> None:
    found = claims(stage)
    kinds = Counter(claim.kind for claim in found)
    assert kinds["reference"] == kinds["stub"] == 1
    assert kinds["control"] >= 1
    assert kinds["wrong"] >= 8
    wrongs = [claim for claim in found if claim.kind in ("wrong", "control")]
    reasons = Counter(claim.why for claim in wrongs)
    assert reasons.most_common(1)[0][1] == 1, "two wrong solutions have the same reason"
    sources = Counter(
        edited(stage.reference, path)
        if path.suffix == ".diff"
        else path.read_text(encoding="utf-8").partition("\n")[2]
        for path in stage.wrong
    )
    assert sources.most_common(1)[0][1] == 1, "two wrong solutions are the same"
    for claim in wrongs:
        assert claim.code is not None
        assert claim.code.page.kind is not Kind.COURSE, claim.path
        assert len(claim.why) > 10, claim.path
    # One that is right but slow (or does too much), and one that is fast but wrong.
    assert any(c.code.page.kind is Kind.NUMBER for c in wrongs if c.code)
    assert any(c.code.page.kind is Kind.CONTRACT for c in wrongs if c.code)


def test_every_wrong_folder_belongs_to_a_published_stage() -> None:
    folder = STAGES[0].gate.parent / "wrong"
    assert {p.name for p in folder.iterdir() if p.is_dir() and p.name != "__pycache__"} == {
        stage.folder for stage in STAGES
    }
    for path in (*folder.rglob("*.py"), *folder.rglob("*.diff")):
        with path.open(encoding="utf-8") as file:
            assert FIRST_LINE.fullmatch(file.readline().strip()), path


def test_every_code_that_a_solution_can_earn_is_shown_by_one() -> None:
    """What no wrong solution fails with may be a check that nothing can fail."""
    shown = {claim.code for stage in STAGES for claim in claims(stage)}
    never = {
        Code.MISSING_FILE, Code.NOT_MEASURABLE, Code.BROKEN_GATE, Code.TOO_NOISY,
    }  # fmt: skip
    assert set(Code) - shown - never == set()
