"""A gate run from end to end, on a stage that takes no time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateOptions, GateRun
from course.check.libraries import is_here
from course.check.result import Exit, StageResult
from course.check.runner import new_seed, run_gate
from course.measure.ratio import Verdict
from course.syllabus import Stage, load_syllabus
from toy_course import ToyCourse

pytestmark = pytest.mark.usefixtures("forked")


def stage() -> Stage:
    return load_syllabus().find(1)


def run(toy: ToyCourse, **options: object) -> StageResult:
    chosen = replace(GateOptions(toy.mine, model="nano", seed=7), **options)  # type: ignore[arg-type]
    return run_gate(stage(), chosen)


def test_a_pass(toy: ToyCourse) -> None:
    toy.solve()
    said: list[str] = []
    result = run_gate(stage(), GateOptions(toy.mine, model="nano", seed=7), progress=said.append)
    assert result.failure is None, result.failure
    assert result.status is Exit.PASS
    assert result.passed
    assert [c.outcome for c in result.checks] == ["passed"] * 5
    assert [c.layer for c in result.checks] == ["contract"] * 3 + ["number"] * 2
    assert [n.name for n in result.numbers] == ["work", "time", "share"]
    time = result.numbers[1]
    assert time.verdict is Verdict.PASS
    assert time.value == 2.0
    assert len(time.pairs) == time.slices == 12
    assert said[0] == "double gives twice its argument"
    assert "time against the baseline" in said
    assert result.remarks == []


def test_contract_only_is_never_a_pass(toy: ToyCourse) -> None:
    toy.solve()
    result = run(toy, contract_only=True)
    assert result.status is Exit.PASS
    assert not result.passed
    assert result.numbers == []


def test_the_first_failure_ends_the_gate(toy: ToyCourse) -> None:
    toy.solve(double="2.0 * number")
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.WRONG_TYPE
    assert len(result.checks) == 1
    assert result.status is Exit.FAIL
    assert not result.passed


def test_what_a_failing_solution_printed_is_shown(toy: ToyCourse) -> None:
    toy.solve(double="print('twice', number) or 2.0 * number")
    result = run(toy)
    assert result.failure is not None
    assert result.printed.splitlines()[-1].startswith("twice ")
    assert len(result.printed.splitlines()) <= 10
    toy.solve(double="print('twice', number) or 2 * number")
    assert run(toy).printed == ""


def test_numbers_are_kept_on_red(toy: ToyCourse) -> None:
    toy.solve(seconds="[2.0]")
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.TOO_SLOW
    assert [n.name for n in result.numbers] == ["work", "time"]
    assert "0.50x" in result.failure.got
    assert result.failure.expected == ">= 1.5x"


def test_a_count_may_know_its_likely_cause(toy: ToyCourse) -> None:
    toy.solve(work="11")
    path = toy.home / "gates" / "test_stage_01_toy.py"
    path.write_text(path.read_text().replace("at_most=10,", "at_most=10, likely='Idle work.',"))
    result = run(toy)
    assert result.failure is not None
    assert (result.failure.code, result.failure.likely) == (Code.WRONG_COUNT, "Idle work.")


def test_noise_is_no_verdict_and_no_blame(toy: ToyCourse) -> None:
    toy.solve(seconds="[0.3, 3.0]")
    result = run(toy)
    assert result.failure is None
    assert result.status is Exit.INCONCLUSIVE
    assert not result.passed
    assert result.numbers[1].slices == 100


@pytest.mark.parametrize(("max_spread", "status"), [(None, Exit.INCONCLUSIVE), (6.0, Exit.PASS)])
def test_a_gate_may_let_a_wide_interval_decide(
    toy: ToyCourse, max_spread: float | None, status: Exit
) -> None:
    rng = random.Random(7)
    seconds = [rng.choice((0.1, 0.5)) for _ in range(200)]  # 10x or 2x, against a bar of 1.5x
    toy.solve(seconds=str(seconds))
    path = toy.home / "gates" / "test_stage_01_toy.py"
    path.write_text(
        path.read_text().replace("text=lambda", f"max_spread={max_spread}, text=lambda")
    )
    assert run(toy).status is status


def test_slices_of_earlier_runs_count(toy: ToyCourse) -> None:
    toy.solve(seconds="[0.5]")
    result = run(toy, prior={"time": [(1.0, 0.5)] * 10})
    assert result.numbers[1].slices == 12
    assert result.numbers[1].pairs[:10] == [(1.0, 0.5)] * 10


def test_the_stub(toy: ToyCourse) -> None:
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.NOT_IMPLEMENTED


def test_a_file_that_does_not_load_has_no_checks(toy: ToyCourse) -> None:
    toy.mine.write_text("def double(:\n")
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.SYNTAX_ERROR
    assert result.checks == []
    assert result.status is Exit.FAIL


def test_a_number_that_is_not_brought_is_missing(toy: ToyCourse) -> None:
    toy.solve()
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    gate.write_text(gate.read_text().replace('gate.exact("work"', 'gate.exact("toil"'))
    result = run(toy)
    assert result.failure is None
    assert result.missing == ["work"]
    assert result.status is Exit.FAIL
    assert not result.passed


def rewrite(toy: ToyCourse, old: str, new: str) -> None:
    """Change the syllabus of the toy."""
    path = toy.home / "course.toml"
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    load_syllabus.cache_clear()


def test_a_machine_without_what_the_stage_is_about(toy: ToyCourse) -> None:
    toy.solve()
    rewrite(toy, "seconds = 20.0", 'modules = ["json", "no_such_module"]\nseconds = 20.0')
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.NOT_MEASURABLE
    assert "there is no no_such_module" in result.failure.message
    assert result.checks == []
    assert result.status is Exit.NOT_HERE
    assert not result.passed
    rewrite(toy, '"json", "no_such_module"', '"json"')
    assert run(toy).passed


def test_a_machine_without_what_a_part_needs(toy: ToyCourse) -> None:
    """The rest is judged; what is not is named, and is no pass; nor does it hide a failure."""
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    for name in ("def test_bad_input", "def test_work"):
        marked = f'@pytest.mark.needs("json", "no_such_module")\n{name}'
        gate.write_text(gate.read_text().replace(name, marked))
    toy.solve()
    result = run(toy)
    assert result.failure is None, result.failure
    assert [c.name for c in result.checks] == [
        "test_doubles[10]",
        "test_doubles[1000]",
        "test_time",
    ]
    named = ["bad input gets an error that names the argument", "work, counted"]
    assert result.left_out == {"no_such_module": named}
    assert result.missing == ["work"]
    assert result.status is Exit.NOT_HERE
    assert not result.passed
    only = run(toy, contract_only=True)
    assert only.left_out == {"no_such_module": named[:1]}
    assert only.status is Exit.NOT_HERE
    toy.solve(double="3 * number")
    assert run(toy).status is Exit.FAIL


def test_a_library_that_is_broken_is_not_here(toy: ToyCourse, monkeypatch: Any) -> None:
    toy.write("broken/broken_library.py", "raise OSError('a shared object is missing')\n")
    monkeypatch.syspath_prepend(str(toy.home / "broken"))
    assert not is_here("broken_library")
    assert is_here("json")


def test_numbers_of_a_gpu_are_wanted_on_a_gpu(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from course.check import gate
    from course.check.host import WorkerConfig

    toy.solve()
    rewrite(toy, "seconds = 20.0", 'gpu_numbers = ["share", "heat"]\nseconds = 20.0')
    assert run(toy).missing == []

    def on_a_cpu(**options: Any) -> WorkerConfig:
        return WorkerConfig(**{**options, "device": "cpu"})

    monkeypatch.setattr(gate, "WorkerConfig", on_a_cpu)
    result = run(toy, tier="cuda")
    assert result.failure is None, result.failure
    assert result.missing == ["heat"]
    assert result.status is Exit.FAIL


def test_a_worker_in_an_environment_of_its_own(toy: ToyCourse) -> None:
    toy.solve(double="__import__('os').environ.get('COLOUR', 'none')")
    run = GateRun(stage(), GateOptions(toy.mine, model="nano"))
    try:
        red = run.candidate_in("cpu", COLOUR="red", SIZE="2")
        assert run.candidate_in("cpu", SIZE="2", COLOUR="red") is red
        blue = run.candidate_in("cpu", COLOUR="blue")
        seen = [worker.call("call", name="double", args=[1]) for worker in
                (run.candidate, red, blue, run.candidate_in("cpu"))]  # fmt: skip
        assert seen == ["none", "red", "blue", "none"]
        workers = [red, blue, run.candidate]
        assert all(worker.alive for worker in workers)
    finally:
        run.close()
    assert not any(worker.alive for worker in workers)


BROKEN = {
    "a judge that raises": ("return expect", "{}['no']; expect", "the judge raised KeyError"),
    "a judge that skips": ("return expect", "pytest.skip('later'); return expect", "skipped"),
    "a judge that xfails": ("return expect", "pytest.xfail('later'); return expect", "skipped"),
    "a judge that cannot be imported": ("STAGE = 1", "import no_such_module", "pytest ended"),
    "a test without a mark": ("@pytest.mark.contract\ndef test_bad", "def test_bad", "neither"),
    "no tests at all": ("def test_", "def check_", "pytest ended with status 5"),
    "a test that stops pytest": ("return expect", "pytest.exit('no'); expect", "pytest ended"),
}


@pytest.mark.parametrize(("old", "new", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_gate_is_the_courses_fault(toy: ToyCourse, old: str, new: str, said: str) -> None:
    toy.solve()
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    text = gate.read_text()
    assert old in text
    gate.write_text(text.replace(old, new))
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.BROKEN_GATE
    assert said in result.failure.message + result.failure.detail
    assert result.status is Exit.BROKEN


def test_an_interruption_comes_through_and_ends_the_workers(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from course.check.host import WorkerHost
    from course.check.processes import own_children

    toy.solve()
    before = own_children()
    asked = []

    def interrupt(self: WorkerHost, *args: object, **kwargs: object) -> None:
        asked.append(self.process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerHost, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(toy)
    assert asked
    assert own_children() <= before
    assert not psutil.pid_exists(asked[0]) or psutil.Process(asked[0]).status() == "zombie"


DAEMON = """
def daemon(action, many=1):
    import os
    if os.fork() == 0:
        os.setsid()
        for _ in range(many):
            if os.fork() == 0:
                action()
        os._exit(0)
    os.wait()
    return 5
def sleep():
    import os
    os.execvp("sleep", ["sleep", "300"])
def spin():
    while True: pass
"""


def test_what_is_left_behind_is_ended_and_said(toy: ToyCourse) -> None:
    toy.solve(work="daemon(sleep)")
    with toy.mine.open("a") as file:
        file.write(DAEMON)
    result = run(toy)
    assert result.passed
    assert result.remarks == ["processes that the solution left behind were ended: sleep 300"]


def test_secret_inputs_follow_the_seed(toy: ToyCourse) -> None:
    toy.solve(double="print('seen', number) or 2 * number + (number > 9)")
    seen = [run(toy, seed=seed).failure for seed in (3, 3, 4)]
    assert seen[0] is not None
    assert str(seen[0]) == str(seen[1])
    assert str(seen[0]) != str(seen[2])
    assert len({new_seed() for _ in range(20)}) == 20


def test_work_during_the_baselines_turn_is_seen(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the processor time of everything below the judge, daemons included."""
    import time

    from course.check import gate

    monkeypatch.setattr(gate, "ENOUGH_SECONDS", 0.2)
    toy.solve(work="daemon(spin, many=4)")
    with toy.mine.open("a") as file:
        file.write(DAEMON)
    path = toy.home / "gates" / "test_stage_01_toy.py"
    steps = "lambda: 1.0, lambda: next(told)"
    slow = "lambda: time.sleep(0.1) or 1.0, lambda: next(told)"
    path.write_text("import time\n" + path.read_text().replace(steps, slow))
    begin = time.monotonic()
    result = run(toy)
    assert result.failure is not None
    assert result.failure.code is Code.BACKGROUND_WORK, result.failure
    assert time.monotonic() - begin < 60
    assert result.remarks  # and it was ended


def test_an_honest_solution_does_no_background_work(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from course.check import gate

    monkeypatch.setattr(gate, "ENOUGH_SECONDS", 0.2)
    toy.solve()
    path = toy.home / "gates" / "test_stage_01_toy.py"
    path.write_text(
        "import time\n"
        + path.read_text().replace("lambda: 1.0,", "lambda: time.sleep(0.02) or 1.0,")
    )
    assert run(toy).passed


@pytest.mark.parametrize("itself", [True, False])
def test_a_solution_against_itself_may_work_in_both_turns(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch, itself: bool
) -> None:
    """There the watch would see it do what it was asked to do."""
    from course.check import gate

    def always(watch: gate.BackgroundWatch) -> None:
        raise GateFailure(Code.BACKGROUND_WORK, "busy")

    monkeypatch.setattr(gate.BackgroundWatch, "judge", always)
    toy.solve()
    path = toy.home / "gates" / "test_stage_01_toy.py"
    path.write_text(path.read_text().replace("text=lambda", f"itself={itself}, text=lambda"))
    result = run(toy)
    assert result.passed is itself
    assert itself or result.failure.code is Code.BACKGROUND_WORK


def test_a_tick_of_the_clock_is_no_background_work(toy: ToyCourse) -> None:
    """Steps of microseconds, and processor time that is counted in hundredths of a second."""
    from course.check.gate import BackgroundWatch, GateRun

    watch = BackgroundWatch(GateRun(stage(), GateOptions(toy.mine)))
    watch.used, watch.elapsed = 0.02, 0.0001
    watch.judge()
    watch.used, watch.elapsed = 0.2, 0.4
    with pytest.raises(GateFailure, match="BACKGROUND_WORK"):
        watch.judge()


def test_a_part_whose_library_is_here(toy: ToyCourse) -> None:
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    marked = '@pytest.mark.needs("json")\ndef test_work'
    gate.write_text(gate.read_text().replace("def test_work", marked))
    toy.solve()
    assert run(toy).passed
