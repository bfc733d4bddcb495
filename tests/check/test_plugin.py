"""Gates under plain pytest: the same verdicts, and a pytest-benchmark record for each number."""

from __future__ import annotations

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
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=home, capture_output=True, text=True, timeout=600,
        env={**os.environ, "COURSE_HOME": str(home), "NO_COLOR": "1", **environment},
    )  # fmt: skip


def records(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    return {
        name: (number, record["stats"])
        for record in document["benchmarks"]
        for name, number in record["extra_info"].items()
    }


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
    assert time["slices"] == stats["rounds"] == 25
    assert stats["median"] == pytest.approx(0.5)  # the seconds that the judge measured
    assert numbers["work"][0]["value"] == 5


def test_a_wrong_solution_under_plain_pytest(toy: ToyCourse) -> None:
    """Every test goes on, and says in a few lines what a check would say."""
    wrong = toy.home / "gates" / "wrong" / "stage_01_toy" / "triples.py"
    done = run_pytest(toy.home, "gates", "--solution", str(wrong), "-m", "contract")
    assert done.returncode == 1
    assert "3 failed" in done.stdout
    assert "WRONG_VALUE: double(" in done.stdout
    assert "1.5 times that" in done.stdout
    assert "NO_ERROR_RAISED: double('x') is accepted" in done.stdout
    assert "src/course/check/host.py" not in done.stdout  # not the judge's own source


def test_a_solution_that_does_not_load_under_plain_pytest(toy: ToyCourse) -> None:
    toy.mine.write_text("def double(:\n")
    done = run_pytest(toy.home, "gates")
    assert done.returncode == 1
    assert "5 failed" in done.stdout
    assert "SYNTAX_ERROR" in done.stdout
    assert "line 1: def double(:" in done.stdout


def test_the_seed_repeats_the_secret(toy: ToyCourse) -> None:
    toy.solve(double="3 * number")
    done = run_pytest(toy.home, "gates", "--gate-seed", "5", "-k", "1000", "-m", "contract")
    secret = random.Random("5:stage-01").randrange(1, 1000)
    assert f"  expected  {2 * secret:,}" in done.stdout


def test_usage(toy: ToyCourse) -> None:
    for arguments in (["--tier", "tpu"], ["--solution", "nowhere.py"]):
        done = run_pytest(toy.home, "gates", *arguments)
        assert done.returncode != 0
        assert "passed" not in done.stdout


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
    assert time["slices"] == stats["rounds"] >= 25
    # A step of nano is all overhead, so what its time is worth depends on the machine.
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert all("test_step_time" in line for line in failed), done.stdout
