"""Set-ups that fail, are stopped, are killed, or run twice at the same time."""

from __future__ import annotations

import os
import signal

import pytest

from launcher.fake_checkout import Checkout, finish, is_running, too_long, wait_until

UNREACHABLE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError(...)'
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""

UNREACHABLE_CONFLICT = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError(...)'
ERROR: Cannot install course because these package versions have conflicting dependencies.
Additionally, some packages in these conflicts have no matching distributions available for your \
environment:
    numpy
ERROR: ResolutionImpossible: for help visit the documentation"""

NO_BUILD = """\
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""

DISK_FULL = (
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (UNREACHABLE, ["package index did not answer (missing: torch==2.13.0)", "run ./course"]),
        (UNREACHABLE_CONFLICT, ["package index did not answer (missing: numpy)"]),
        (NO_BUILD, ["Missing: torch==2.13.0", "of it for this machine and Python"]),
        (DISK_FULL, ["disk is full", "COURSE_VENV="]),
        ("ERROR: something new", ["| ERROR: something new", "remove .venv"]),
    ],
    ids=["unreachable", "unreachable-conflict", "no-build", "disk-full", "other"],
)
def test_a_failure_says_why_and_the_next_run_goes_on(
    checkout: Checkout, output: str, expected: list[str]
) -> None:
    checkout.pip_says(output, status=1)
    failed = checkout.run("check")
    assert failed.returncode == 2
    assert failed.stdout == ""
    for words in expected:
        assert words in failed.stderr
    assert ".venv/course-setup.log" in failed.stderr
    assert too_long(failed.stderr) == []
    assert not (checkout.venv / "course-stamp").exists()
    assert not checkout.lock.exists()

    checkout.pip_works()
    again = checkout.run("check")
    assert again.returncode == 0
    assert "did not finish: going on with it" in again.stderr
    assert checkout.count("venv") == 1


def test_installed_but_not_running(checkout: Checkout) -> None:
    (checkout.fake / "torch").write_text("echo 'ImportError: libgomp.so.1' >&2; exit 1\n")
    result = checkout.run()
    assert result.returncode == 2
    assert "torch was installed but does not run here" in result.stderr
    assert "| ImportError: libgomp.so.1" in result.stderr


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_stopped(checkout_in_each_shell: Checkout, name: str) -> None:
    checkout = checkout_in_each_shell
    checkout.pip_waits()
    process = checkout.start()
    worker = checkout.wait_for_pip()
    process.send_signal(getattr(signal, f"SIG{name}"))
    result = finish(process)
    assert result.returncode == -getattr(signal, f"SIG{name}")
    assert "run ./course again" in result.stderr
    assert not checkout.lock.exists()
    assert not (checkout.venv / "course-tmp").exists()
    assert not is_running(worker)

    checkout.let_pip_go()
    again = checkout.run()
    assert again.returncode == 0
    assert "going on with it" in again.stderr


def test_stopped_while_the_environment_is_made(checkout_in_each_shell: Checkout) -> None:
    """venv runs ensurepip in a process of its own, which must not be left at work."""
    checkout = checkout_in_each_shell
    checkout.venv_is_slow()
    process = checkout.start()
    wait_until((checkout.fake / "helper").exists)
    helper = int((checkout.fake / "helper").read_text())
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.returncode == -signal.SIGINT
    assert "Set-up stopped" in result.stderr
    wait_until(lambda: not is_running(helper))
    assert not checkout.lock.exists()


def test_killed_with_all_its_children(checkout: Checkout) -> None:
    checkout.pip_waits()
    process = checkout.start()
    checkout.wait_for_pip()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert checkout.lock.exists()
    assert not (checkout.venv / "course-stamp").exists()

    checkout.let_pip_go()
    again = checkout.run("x")
    assert again.returncode == 0
    assert "waiting" not in again.stderr
    assert "going on with it" in again.stderr
    assert not checkout.lock.exists()


def test_killed_alone_while_its_pip_goes_on(checkout: Checkout) -> None:
    """Two pips must not write into one environment."""
    checkout.pip_waits()
    first = checkout.start()
    checkout.wait_for_pip()
    installs = checkout.count("pip")
    first.send_signal(signal.SIGKILL)
    first.wait()

    second = checkout.start("x")
    with pytest.raises(AssertionError):
        wait_until(lambda: checkout.count("pip") > installs, seconds=1.5)
    checkout.let_pip_go()
    result = finish(second)
    first.communicate()
    assert result.returncode == 0, result.stderr
    assert "waiting for it" in result.stderr
    assert checkout.count("venv") == 1


def test_two_at_once(checkout_in_each_shell: Checkout) -> None:
    checkout = checkout_in_each_shell
    checkout.pip_waits()
    first = checkout.start("first")
    checkout.wait_for_pip()
    second = checkout.start("second")
    checkout.let_pip_go()
    results = [finish(first), finish(second)]
    assert [result.returncode for result in results] == [0, 0], results
    assert checkout.count("venv") == 1
    assert checkout.count("pip") == 2
    assert not checkout.lock.exists()


def test_many_at_once_after_a_kill(checkout: Checkout) -> None:
    """All of them find the same stale lock; one takes it over."""
    checkout.lock.mkdir()
    (checkout.lock / "launcher").write_text("999999999\n")
    results = [finish(process) for process in [checkout.start(str(n)) for n in range(6)]]
    assert [result.returncode for result in results] == [0] * 6, results
    assert checkout.count("venv") == 1
    assert checkout.count("pip") == 2
    assert not checkout.lock.exists()


def test_stale_lock_whose_number_another_process_has_now(checkout: Checkout) -> None:
    checkout.lock.mkdir()
    (checkout.lock / "launcher").write_text(f"{os.getpid()}\n")
    (checkout.lock / "arguments").write_text("/bin/sh ./course ")
    result = checkout.run()
    assert result.returncode == 0
    assert "waiting" not in result.stderr


def test_lock_of_one_killed_before_it_wrote_its_number(checkout: Checkout) -> None:
    checkout.lock.mkdir()
    assert checkout.run().returncode == 0


def test_half_installed_packages_are_installed_again(checkout: Checkout) -> None:
    """pip believes metadata; a kill can leave metadata without all of its files."""
    checkout.pip_says("ERROR: killed", status=1)
    checkout.run()
    packages = checkout.venv / "lib" / "python3.11" / "site-packages"
    whole, half = packages / "whole-1.dist-info", packages / "half-1.dist-info"
    for folder in (whole, half):
        folder.mkdir(parents=True)
        (folder / "METADATA").touch()
    (whole / "INSTALLER").write_text("pip\n")
    replaced = packages / "~alf-0.dist-info"
    replaced.mkdir()
    checkout.pip_works()
    checkout.run()
    assert whole.exists()
    assert not half.exists()
    assert not replaced.exists()
