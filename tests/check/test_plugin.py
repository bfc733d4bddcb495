"""Gates under plain pytest: the same verdicts, and a pytest-benchmark record for each number."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from course.check.plugin import ReplayClock
from course.paths import course_home
from toy_course import ToyCourse


def run_pytest(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # As a user starts it, who is not one of several workers of a test run.
    own = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=home, capture_output=True, text=True, timeout=600,
        env={**own, "COURSE_HOME": str(home), "NO_COLOR": "1", **environment},
    )  # fmt: skip


def records(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    return {
        name: (number, record["stats"])
        for record in document["benchmarks"]
        for name, number in record["extra_info"].items()
    }


def test_plain_pytest_leaves_nothing_out(toy: ToyCourse) -> None:
    gate = toy.home / "gates" / "test_stage_01_toy.py"
    marked = '@pytest.mark.needs("no_such_module")\ndef test_work'
    gate.write_text(gate.read_text().replace("def test_work", marked))
    done = run_pytest(toy.home, "gates", "--solution", "reference", "--gate-model", "nano")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT_MEASURABLE: this cannot be checked here: there is no no_such_module" in done.stdout
    assert "4 passed, 1 error" in done.stdout


def test_a_reference_under_plain_pytest(toy: ToyCourse, tmp_path: Path) -> None:
    """Beside tests that are no gates, which it lets alone."""
    other = toy.write("other/test_other.py", "def test_other(): pass\n")
    found = tmp_path / "x.json"
    done = run_pytest(
        toy.home, "gates", str(other), "--solution", "reference", "--gate-model", "nano",
        f"--benchmark-json={found}", "-v",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert "test_other" in done.stdout
    numbers = records(found)
    assert set(numbers) == {"work", "time", "share"}
    time, stats = numbers["time"]
    assert time["verdict"] == "pass"
    assert time["slices"] == stats["rounds"] == 12
    assert stats["median"] == pytest.approx(0.5)  # the seconds that the judge measured
    assert numbers["work"][0]["value"] == 5


def run_inside(toy: ToyCourse, *arguments: str) -> tuple[int, str]:
    """Plain pytest in this process, where its workers can be forked."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = pytest.main(
            [
                str(toy.home / "gates"), "-p", "no:cacheprovider", "-p", "no:benchmark", "-s",
                "-c", "/dev/null", "--rootdir", str(toy.home), "--import-mode=importlib",
                "--color=no", *arguments,
            ]
        )  # fmt: skip
    return int(status), said.getvalue()


@pytest.mark.usefixtures("forked")
def test_a_wrong_solution_under_plain_pytest(toy: ToyCourse) -> None:
    """Every test goes on, and says in a few lines what a check would say."""
    wrong = toy.home / "gates" / "wrong" / "stage_01_toy" / "triples.py"
    status, said = run_inside(toy, "--solution", str(wrong), "-m", "contract")
    assert status == 1
    assert "3 failed" in said
    assert "WRONG_VALUE: double(" in said
    assert "1.5 times that" in said
    assert "NO_ERROR_RAISED: double('x') is accepted" in said
    assert "src/course/check/host.py" not in said  # not the judge's own source


@pytest.mark.usefixtures("forked")
def test_a_worker_that_ends_is_started_again(toy: ToyCourse) -> None:
    wrong = toy.home / "gates" / "wrong" / "stage_01_toy" / "leaves.py"
    status, said = run_inside(toy, "--solution", str(wrong), "-m", "contract")
    assert status == 1
    assert said.count("EXITED: the solution's process ended in the middle: exit status 0") >= 3


@pytest.mark.usefixtures("forked")
def test_a_solution_that_does_not_load_under_plain_pytest(toy: ToyCourse) -> None:
    toy.mine.write_text("def double(:\n")
    status, said = run_inside(toy)
    assert status == 1
    assert "5 failed" in said
    assert "SYNTAX_ERROR" in said
    assert "line 1: def double(:" in said


@pytest.mark.usefixtures("forked")
def test_the_seed_repeats_the_secret(toy: ToyCourse) -> None:
    toy.solve(double="3 * number")
    _, said = run_inside(toy, "--gate-seed", "5", "-k", "1000", "-m", "contract")
    secret = random.Random("5:stage-01").randrange(1, 1000)
    assert f"  expected  {2 * secret:,}" in said


@pytest.mark.usefixtures("forked")
def test_what_a_solution_leaves_behind_is_ended_here_too(toy: ToyCourse) -> None:
    from course.check.processes import own_children

    before = own_children()
    toy.solve(double="leave(number)")
    with toy.mine.open("a") as file:
        file.write(
            "def leave(number):\n"
            "    import os\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0: os.execvp('sleep', ['sleep', '300'])\n"
            "        os._exit(0)\n"
            "    os.wait()\n"
            "    return 2 * number\n"
        )
    status, said = run_inside(toy, "-m", "contract")
    assert status == 0, said
    assert own_children() <= before


@pytest.mark.usefixtures("forked")
def test_usage(toy: ToyCourse) -> None:
    for arguments in (["--tier", "tpu"], ["--solution", "nowhere.py"]):
        status, said = run_inside(toy, *arguments)
        assert status != 0
        assert " passed" not in said


def test_the_clock_replays() -> None:
    clock = ReplayClock()
    start = clock.now()
    clock.advance(1.5)
    assert clock.now() - start == 1.5


@pytest.mark.slow
def test_a_real_gate_under_plain_pytest(tmp_path: Path) -> None:
    found = tmp_path / "x.json"
    done = run_pytest(
        course_home(), "gates/test_stage_01_naive_loop.py", "--solution", "reference",
        "--gate-model", "nano", f"--benchmark-json={found}", "-q", "-p", "no:randomly",
    )  # fmt: skip
    assert found.exists(), done.stdout + done.stderr
    numbers = records(found)
    assert {"positions", "head_rows", "step_time", "ms_per_token"} <= set(numbers)
    assert numbers["positions"][0]["value"] == 16320
    assert numbers["positions"][0]["verdict"] == "pass"
    time, stats = numbers["step_time"]
    assert time["slices"] == stats["rounds"] >= 12
    # A step of nano is all overhead, so what its time is worth depends on the machine.
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert all("test_step_time" in line for line in failed), done.stdout
