"""What `course check` does around a gate: tier, model, slices of earlier runs, and the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course.check import session as session_module
from course.check.codes import Code
from course.check.progress import Progress
from course.check.result import Exit, StageResult
from course.check.session import Session, Wish, gate_files, gate_hash
from course.check.solutions import NoSuchSolution, solution_hash, solution_path
from course.syllabus import load_syllabus
from toy_course import ToyCourse

pytestmark = pytest.mark.usefixtures("forked")


def check(toy: ToyCourse, **wish: object) -> StageResult:
    known: dict[str, object] = {"model": "nano"}
    return Session().check(load_syllabus().find(1), Wish(**(known | wish)))  # type: ignore[arg-type]


def slices(found: StageResult) -> int:
    return {n.name: n.slices for n in found.numbers}["time"]


def test_slices_add_up_while_nothing_changes(toy: ToyCourse) -> None:
    toy.solve(seconds="[0.3, 3.0]")  # too noisy for any verdict
    assert [slices(check(toy)) for _ in range(2)] == [100, 200]
    source = toy.mine.read_text()
    toy.mine.write_text(source + "# a comment\n")
    assert slices(check(toy)) == 100  # another file: from the start
    toy.mine.write_text(source)
    assert slices(check(toy, seed=5)) == 100  # a repeated run stands for itself ...
    assert slices(check(toy)) == 300  # ... and takes nothing away
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    gate.write_text(gate.read_text() + "# another gate\n")
    assert slices(check(toy)) == 100


def test_a_verdict_ends_the_adding_up(toy: ToyCourse) -> None:
    toy.solve(seconds="[0.3, 3.0]")
    check(toy)
    toy.solve()
    assert slices(check(toy)) == 12
    assert slices(check(toy)) == 12


def test_another_model_is_another_measurement(toy: ToyCourse) -> None:
    toy.solve(seconds="[0.3, 3.0]")
    assert slices(check(toy)) == 100
    assert slices(check(toy, model="bench")) == 100
    assert slices(check(toy)) == 200


def test_what_is_stored(toy: ToyCourse) -> None:
    toy.solve()
    found = check(toy)
    assert found.passed
    check(toy, solution="reference")
    check(toy, contract_only=True)
    rows = Progress().checks("stage-01")
    assert [(row.mine, row.passed) for row in rows] == [(True, True), (False, True), (True, False)]
    assert rows[0].solution_hash == solution_hash(toy.mine) == found.solution_hash
    assert rows[0].document["seed"] == found.seed
    assert rows[2].document["model"] == "nano"


def test_a_store_that_cannot_be_written_is_a_remark(toy: ToyCourse) -> None:
    toy.solve()
    (toy.home / ".course").write_text("in the way")
    found = check(toy)
    assert found.passed
    assert any("could not be stored" in remark for remark in found.remarks)


def test_a_store_that_is_damaged_during_the_check(toy: ToyCourse) -> None:
    toy.solve()
    session = Session()
    run_gate = session_module.run_gate

    def damage(*args: object, **kwargs: object) -> StageResult:
        found = run_gate(*args, **kwargs)  # type: ignore[arg-type]
        toy.progress.write_bytes(b"garbage" * 1000)
        return found

    session_module.run_gate = damage  # type: ignore[assignment]
    try:
        found = session.check(load_syllabus().find(1), Wish(model="nano"))
    finally:
        session_module.run_gate = run_gate
    assert found.passed
    assert any("move it away" in remark for remark in found.remarks)


def test_tiers(toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "has_cuda", lambda: False)
    toy.solve()
    session = Session()
    assert session.tier("best") == "cpu"
    assert session.tier("cuda") == "cuda"
    found = check(toy, tier="cuda")
    assert found.status is Exit.NOT_HERE
    assert found.failure is not None
    assert found.failure.code is Code.NOT_MEASURABLE
    assert not Progress().checks()
    monkeypatch.setattr(session_module, "has_cuda", lambda: True)
    assert session.tier("best") == "cuda"
    assert session.tier("cpu") == "cpu"


def test_models(toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    import course.model
    from course.model import ModelUnavailable, store

    session, stage = Session(), load_syllabus().find(1)

    def model(tier: str = "cpu", **wish: Any) -> str:
        return session.model_for(stage, Wish(**wish), tier, said.append)

    said: list[str] = []
    assert model(contract_only=True) == "nano"
    assert model(contract_only=True, model="bench") == "bench"
    assert model("cuda") == "bench-1b"
    assert model("cuda", model="bench-8b") == "bench-8b"

    def fail(name: str) -> Path:
        raise ModelUnavailable("no hub, no wheel.")

    monkeypatch.setattr(course.model, "fetch", fail)
    assert model() == "bench"
    assert "100 MB" in said[0]
    assert "no hub, no wheel." in session.remarks[0]
    monkeypatch.setattr(course.model, "fetch", lambda name: None)
    assert model() == "smollm2-135m"
    monkeypatch.setattr(store, "cached_folder", lambda name: Path("here"))
    monkeypatch.setattr(course.model, "fetch", fail)
    assert model() == "smollm2-135m"


def test_stages_that_measure_on_random_weights_fetch_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Session, "_text_model", lambda *_: pytest.fail("a model was asked for"))
    session, stage = Session(), load_syllabus().stages[0]
    wishes = [Wish(), Wish(contract_only=True), Wish(model="smollm2-135m")]
    for kind, models in (
        ("bench", ["bench", "nano", "smollm2-135m"]),
        ("nano", ["nano"] * 3),
        ("none", ["no model"] * 3),
    ):
        of_kind = replace(stage, model=kind)
        assert [session.model_for(of_kind, wish, "cpu") for wish in wishes] == models


def test_a_remark_on_the_model_is_made_once(toy: ToyCourse) -> None:
    toy.solve()
    session = Session()
    session.remarks = ["bench stands in"]
    stage = load_syllabus().find(1)
    assert "bench stands in" in session.check(stage, Wish(contract_only=True)).remarks
    assert "bench stands in" not in session.check(stage, Wish(contract_only=True)).remarks


@pytest.mark.parametrize("name", ["foo", "no/such/folder", ""])
def test_an_unknown_model_is_the_askers_mistake(
    toy: ToyCourse, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_HUB", "off")
    toy.solve()
    with pytest.raises((ValueError, OSError)):
        check(toy, model=name)


def test_solutions(toy: ToyCourse) -> None:
    stage = load_syllabus().find(1)
    assert solution_path(stage, "mine") == toy.mine
    assert solution_path(stage, "reference") == toy.reference
    other = toy.write("elsewhere/stages/stage_01_toy/toy.py", "x = 1\n")
    for name in (
        other, other.parent, other.parent.parent, other.parent.parent.parent,
        f"{other.parent}/../stage_01_toy/toy.py",
    ):  # fmt: skip
        assert solution_path(stage, str(name)) == other
    for name in ("nowhere.py", str(toy.home / "gates"), ""):
        with pytest.raises(NoSuchSolution, match="--solution must be"):
            solution_path(stage, name)
    assert len(solution_hash(toy.mine)) == 16
    assert solution_hash(toy.home / "nowhere") == "missing"
    assert solution_hash(toy.home) == "missing"


def test_an_edit_of_the_reference_is_a_solution(toy: ToyCourse) -> None:
    stage = load_syllabus().find(1)
    diff = "# WRONG_VALUE: half of it\n@@\n-    return {} * number\n+    return number / 2\n"
    fits, lost = toy.home / "halves.diff", toy.home / "lost.diff"
    fits.write_text(diff.format(2))
    lost.write_text(diff.format(5))
    path = solution_path(stage, str(fits))
    assert path == toy.home / ".course" / "edited" / "halves.py"
    assert path.read_text().count("return number / 2") == 1
    with pytest.raises(NoSuchSolution, match=r"--solution: lost\.diff: hunk 1 "):
        solution_path(stage, str(lost))


def test_links_in_a_circle_and_homes_of_nobody(toy: ToyCourse) -> None:
    circle = toy.home / "circle.py"
    circle.symlink_to(circle)
    for path in (str(circle), "~nobody-of-that-name/toy.py"):
        with pytest.raises(NoSuchSolution, match="--solution"):
            solution_path(load_syllabus().find(1), path)


def test_a_gate_is_all_of_its_files(toy: ToyCourse) -> None:
    stage = load_syllabus().find(1)
    names = {path.relative_to(toy.home).as_posix() for path in gate_files(stage)}
    assert names == {
        "gates/test_stage_01_toy.py", "gates/scenarios/stage_01_toy.py",
        "gates/baseline/stage_01_toy.py", "gates/conftest.py", "course.toml",
    }  # fmt: skip
    before = gate_hash(stage, "nano")
    assert gate_hash(stage, "nano") == before
    assert gate_hash(stage, "bench") != before
    for path in gate_files(stage):
        text = path.read_text()
        path.write_text(text + "\n")
        assert gate_hash(stage, "nano") != before, path
        path.write_text(text)
    assert gate_hash(stage, "nano") == before


def test_a_stage_that_needs_no_model_fetches_none(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.solve()
    syllabus = toy.home / "course.toml"
    text = syllabus.read_text()
    syllabus.write_text(text.replace('slug = "toy"', 'slug = "toy"\nmodel = "none"'))
    load_syllabus.cache_clear()
    monkeypatch.setattr(Session, "_text_model", lambda *_: pytest.fail("a model was asked for"))
    found = check(toy, model=None)
    assert (found.model, found.passed) == ("no model", True)
    assert check(toy, model="no-such-model").model == "no model"  # as `--all --model` would
