"""What happens to an environment that is there already: fitting, stale, broken, or not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.fake_checkout import Checkout


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_are_installed(checkout: Checkout, name: str) -> None:
    checkout.run()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    result = checkout.run()
    assert result.returncode == 0
    assert "pinned versions have changed" in result.stderr
    assert checkout.count("venv") == 1
    assert checkout.run().stderr == ""


def test_moved_checkout_is_installed_from_its_new_place(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    checkout.root = checkout.root.rename(tmp_path / "moved")
    result = checkout.run()
    assert result.returncode == 0
    assert "or this folder has" in result.stderr
    assert checkout.calls[-1].endswith(f"-e {tmp_path / 'moved'}")


def test_gone_python_is_rebuilt_and_said(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    (checkout.venv / "bin" / "python").unlink()
    (checkout.venv / "bin" / "python").symlink_to(tmp_path / "gone")
    result = checkout.run()
    assert result.returncode == 0
    assert ".venv is broken (the Python that it was made with is gone): rebuilding" in result.stderr
    assert checkout.count("venv") == 2


def test_other_python_behind_the_same_name_is_noticed(checkout: Checkout) -> None:
    """An upgrade of the system's Python leaves the packages in the old version's folder."""
    checkout.run()
    (checkout.fake / "cache_tag").write_text("cpython-312\n")
    (checkout.fake / "pip-is-broken").touch()
    result = checkout.run()
    assert "its pip does not run" in result.stderr
    assert "rebuilding" in result.stderr


def test_broken_while_unfinished(checkout: Checkout) -> None:
    checkout.pip_says("ERROR: killed", status=1)
    checkout.run()
    (checkout.venv / "bin" / "python").unlink()
    checkout.pip_works()
    result = checkout.run()
    assert result.returncode == 0
    assert "did not finish (it has no Python): starting it again" in result.stderr


def test_removed_script_is_put_back(checkout: Checkout) -> None:
    checkout.run()
    (checkout.venv / "bin" / "course").unlink()
    assert checkout.run("x").returncode == 0


def test_environment_made_by_hand_is_used(checkout: Checkout) -> None:
    checkout.run()
    (checkout.venv / "course-stamp").unlink()
    result = checkout.run()
    assert result.returncode == 0
    assert "Found .venv: installing the tested versions into it." in result.stderr
    assert checkout.count("venv") == 1


def test_folder_that_is_no_environment_is_left_alone(checkout: Checkout, tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    result = checkout.run(COURSE_VENV=str(precious))
    assert result.returncode == 2
    assert "no Python environment" in result.stderr
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_broken_environment_of_somebody_else_is_left_alone(
    checkout: Checkout, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    (other / "pyvenv.cfg").touch()
    result = checkout.run(COURSE_VENV=str(other))
    assert result.returncode == 2
    assert "not made by ./course" in result.stderr
    assert (other / "pyvenv.cfg").exists()


def test_file_in_the_way(checkout: Checkout) -> None:
    checkout.venv.write_text("")
    result = checkout.run()
    assert result.returncode == 2
    assert "in the way" in result.stderr
    assert checkout.venv.read_text() == ""
