"""constraints.txt: complete, free of what ties it to one machine, and fitting together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for pin in [Requirement(line)]
}


def pinned(name: str) -> Version:
    (only,) = PINS[canonicalize_name(name)].specifier
    assert only.operator == "=="
    return Version(only.version)


def test_every_pin_is_exact_and_names_no_build() -> None:
    """A local tag (+cpu, +cu130) would tie the file to one kind of machine."""
    for name in PINS:
        assert pinned(name).local is None, name


def test_torch_chooses_its_own_cuda_libraries() -> None:
    assert [name for name in PINS if re.match(r"nvidia|cuda", name)] == []


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, asked):
        assert pinned(requirement.name) in requirement.specifier, requirement
    for requirement in map(Requirement, ["pip", "flit_core"]):  # what the launcher needs
        assert canonicalize_name(requirement.name) in PINS


def test_everything_that_the_dependencies_need_is_pinned() -> None:
    """Walks the metadata of what is installed here. (Other systems need a few more, or fewer.)"""
    seen: set[str] = set()
    todo = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or re.match(r"nvidia|cuda|triton", name):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        seen.add(name)
        assert name in PINS, f"{name} is needed and has no pin"
        try:
            todo.extend(requires(name) or [])
        except PackageNotFoundError:
            continue
    assert len(seen) > 50


def test_triton_is_the_one_that_torch_asks_for() -> None:
    """Where torch is a CUDA build it names its triton; the CPU build names none."""
    asked = [Requirement(text) for text in requires("torch") or [] if text.startswith("triton")]
    for requirement in asked:
        assert pinned("triton") in requirement.specifier
    assert "sys_platform" in str(PINS[canonicalize_name("triton")].marker)


@pytest.mark.parametrize("name", ["torch", "triton", "transformers"])
def test_installed_version_is_the_pinned_one(name: str) -> None:
    """Fails when somebody works with other versions than the tested ones and should know."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed on this system")
    assert Version(installed).public == pinned(name).public


def run_triton(*arguments: str, **extra: str) -> str:
    pytest.importorskip("triton", reason="triton exists on Linux only")
    program = Path(__file__).with_name("triton_add.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | extra
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_pinned_triton_interprets() -> None:
    assert "interpreted" in run_triton("interpret", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_pinned_triton_compiles_without_a_gpu(capability: int, tmp_path: Path) -> None:
    said = run_triton("compile", str(capability), TRITON_CACHE_DIR=str(tmp_path))
    assert "compiled" in said
