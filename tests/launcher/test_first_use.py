"""First and second use: what is made, what is said, and what is passed on."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from launcher.fake_checkout import Checkout, finish, too_long


def test_first_use_makes_the_environment_and_runs_the_command(
    checkout_in_each_shell: Checkout,
) -> None:
    checkout = checkout_in_each_shell
    result = checkout.run("check", "stage 1", "*")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == [
        "argument check",
        "argument stage 1",
        "argument *",
    ]
    assert "Setting up the course in .venv" in result.stderr
    assert "ready" in result.stderr
    assert (checkout.venv / "course-stamp").exists()
    assert not (checkout.venv / "course-unfinished").exists()
    assert not (checkout.venv / "course-tmp").exists()
    assert not checkout.lock.exists()
    assert checkout.count("venv") == 1


def test_second_use_starts_at_once_and_says_nothing(checkout_in_each_shell: Checkout) -> None:
    checkout = checkout_in_each_shell
    checkout.run("status")
    calls = checkout.calls
    result = checkout.run("status")
    assert result.stderr == ""
    assert result.stdout.splitlines()[1:] == ["argument status"]
    assert checkout.calls == calls


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4])
def test_exit_status_is_passed_on(checkout: Checkout, status: int) -> None:
    assert checkout.run("check", FAKE_STATUS=str(status)).returncode == status
    assert checkout.run("check", FAKE_STATUS=str(status)).returncode == status


def test_the_command_takes_the_place_of_the_launcher(checkout: Checkout) -> None:
    """So signals reach it, and nothing stands between it and its terminal."""
    checkout.run()
    process = checkout.start()
    result = finish(process)
    assert result.stdout.splitlines() == [f"pid {process.pid}"]


def test_installs_from_the_pins_and_names_no_index(checkout: Checkout) -> None:
    checkout.run()
    installs = [call for call in checkout.calls if call.startswith("pip install")]
    assert len(installs) == 2
    for call in installs:
        assert f"-c {checkout.root}/constraints.txt" in call
        assert "index" not in call
        assert "://" not in call
    assert installs[1].endswith(f"-e {checkout.root}")


def test_works_from_anywhere_and_through_links(checkout: Checkout, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    absolute = elsewhere / "absolute"
    absolute.symlink_to(checkout.root / "course")
    relative = elsewhere / "relative"
    relative.symlink_to(Path("..") / "else where" / "absolute")
    for program in (absolute, relative):
        assert checkout.run("x", program=program, cwd=elsewhere).returncode == 0
    assert checkout.count("venv") == 1
    assert sorted(path.name for path in elsewhere.iterdir()) == ["absolute", "relative"]

    on_path = checkout.environment(PATH=f"{elsewhere}:{checkout.bin}")
    by_name = subprocess.run(["absolute", "x"], env=on_path, cwd=tmp_path, check=False)
    assert by_name.returncode == 0


def test_sh_course_works_as_well(checkout: Checkout) -> None:
    result = subprocess.run(
        ["sh", "course", "x"], env=checkout.environment(), cwd=checkout.root, check=False
    )
    assert result.returncode == 0
    assert checkout.venv.exists()


def test_environment_can_lie_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    place = tmp_path / "not made yet" / "venv"
    assert checkout.run(COURSE_VENV=str(place)).returncode == 0
    assert (place / "course-stamp").exists()
    assert not checkout.venv.exists()
    assert checkout.run(COURSE_VENV="inside", cwd=tmp_path).returncode == 0
    assert (tmp_path / "inside" / "course-stamp").exists()


def test_a_folder_that_cannot_be_written_is_named(checkout: Checkout) -> None:
    result = checkout.run(COURSE_VENV="/dev/null/venv")
    assert result.returncode == 2
    assert "cannot write to /dev/null" in result.stderr
    assert "COURSE_VENV=" in result.stderr


def test_dev_commands_bring_their_tools(checkout: Checkout) -> None:
    checkout.run("status")
    first = checkout.run("dev", "test")
    assert "Adding the tools for tests" in first.stderr
    assert checkout.calls[-1].endswith(f"-e {checkout.root}[dev]")
    calls = checkout.calls
    assert checkout.run("dev", "test").stderr == ""
    assert checkout.run("status").stderr == ""
    assert checkout.calls == calls


def test_dev_command_first_of_all_needs_one_set_up_only(checkout: Checkout) -> None:
    assert checkout.run("dev", "test").returncode == 0
    calls = checkout.calls
    assert checkout.run("status").stderr == ""
    assert checkout.calls == calls


def test_failing_to_add_the_dev_tools_leaves_the_rest_usable(checkout: Checkout) -> None:
    checkout.run("status")
    checkout.pip_says("ERROR: No matching distribution found for ruff==1", status=1)
    assert checkout.run("dev", "test").returncode == 2
    after = checkout.run("status")
    assert (after.returncode, after.stderr) == (0, "")


PIP_OUTPUT = """\
Collecting torch==2.13.0 (from course==0.1.0)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)
Progress 0 of 887900000
Progress 300000000 of 887900000
Progress 887900000 of 887900000
Downloading idna-3.20-py3-none-any.whl (71 kB)
Installing collected packages: idna, torch, course
Successfully installed course-0.1.0 idna-3.20 torch-2.13.0"""


def test_progress_without_a_terminal_is_a_few_plain_lines(checkout: Checkout) -> None:
    checkout.pip_says(PIP_OUTPUT, status=1)
    said = checkout.run().stderr
    assert "fetching    torch 2.13.0 (887.9 MB)" in said
    assert "torch 2.13.0: 30 %" in said
    assert "idna" not in said
    assert "installing  3 packages" in said
    assert "\033" not in said
    assert "\r" not in said
    assert too_long(said) == []
    log = (checkout.venv / "course-setup.log").read_text()
    assert "idna-3.20" in log
    assert "Progress" not in log


def run_in_terminal(checkout: Checkout, **extra: str) -> str:
    """What a person sees: stderr on a pseudo-terminal."""
    parent, child = pty.openpty()
    try:
        process = subprocess.Popen(
            [str(checkout.root / "course")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=child,
            env=checkout.environment(**extra),
        )
        os.close(child)
        seen = b""
        try:
            while chunk := os.read(parent, 4096):
                seen += chunk
        except OSError:  # Linux says so when the last writer is gone
            pass
        assert process.wait(timeout=30) == 0
    finally:
        os.close(parent)
    return seen.decode()


def test_progress_on_a_terminal_replaces_its_line(checkout: Checkout) -> None:
    packages = checkout.fake / "pip-packages"
    packages.write_text(f"cat <<'END'\n{PIP_OUTPUT}\nEND\n" + packages.read_text())
    seen = run_in_terminal(checkout)
    assert "torch 2.13.0: 300 of 887 MB" in seen
    assert "\033[1m" in seen
    assert too_long(seen) == []


def test_no_color(checkout: Checkout) -> None:
    assert "\033[1m" not in run_in_terminal(checkout, NO_COLOR="1")
