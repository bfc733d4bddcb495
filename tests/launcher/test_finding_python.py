"""Which Python the environment is made with, and what is said when none fits."""

from __future__ import annotations

import pytest

from launcher.fake_checkout import Checkout, too_long


def test_newest_tried_version_comes_first(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    checkout.add_python("python3.13", "3.13.1")
    assert "3.13.1" in checkout.run().stderr


def test_too_old(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.9.6", code=3)
    result = checkout.run("check")
    assert result.returncode == 2
    assert "Python 3.11 or newer is needed, and python3 is 3.9.6." in result.stderr
    assert "apt install" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not checkout.venv.exists()
    assert not checkout.lock.exists()


def test_none_at_all(checkout: Checkout) -> None:
    (checkout.bin / "python3").unlink()
    result = checkout.run()
    assert result.returncode == 2
    assert "none was found" in result.stderr
    assert too_long(result.stderr) == []


def test_names_that_do_not_run_are_passed_over(checkout: Checkout) -> None:
    """Version managers leave such names on PATH."""
    shim = checkout.bin / "python3.13"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    result = checkout.run()
    assert result.returncode == 0
    assert "3.11.7" in result.stderr


def test_one_without_ensurepip_is_passed_over(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13.1", code=4)
    assert "3.11.7" in checkout.run().stderr


def test_no_ensurepip_anywhere(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12.3", code=4)
    result = checkout.run()
    assert result.returncode == 2
    assert "ensurepip" in result.stderr
    assert "apt install python3.12-venv" in result.stderr
    assert too_long(result.stderr) == []
    assert not checkout.venv.exists()


def test_python_can_be_named(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13.1")
    checkout.add_python("mine", "3.12.9")
    assert "3.12.9" in checkout.run(PYTHON="mine").stderr


@pytest.mark.parametrize("name", ["/no/such/python", "cat"])
def test_named_python_that_is_none(checkout: Checkout, name: str) -> None:
    result = checkout.run(PYTHON=name)
    assert result.returncode == 2
    assert f"PYTHON={name} does not run as a Python" in result.stderr


def test_named_python_too_old_is_not_replaced_by_another(checkout: Checkout) -> None:
    checkout.add_python("old", "3.10.2", code=3)
    result = checkout.run(PYTHON="old")
    assert result.returncode == 2
    assert "old is 3.10.2" in result.stderr
