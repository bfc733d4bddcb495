"""The doctor: what it finds, on machines that lack one thing or another."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest

from course.study import doctor, watching
from course.study.doctor import Finding, examine
from toy_course import ToyCourse


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "events_work", lambda folder: True)


def findings(toy: ToyCourse) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine()}


def test_everything_is_looked_at(toy: ToyCourse) -> None:
    found = findings(toy)
    assert set(found) == {
        "python", "memory", "processor", "other load", "tier cpu", "tier cuda", "triton",
        "versions", "real model", "disk", "progress", "watch",
    }  # fmt: skip
    assert {finding.state for finding in found.values()} <= {"ok", "limit", "mend"}
    assert found["real model"].state == "mend"  # none in this home
    assert "course model fetch" in found["real model"].advice
    assert all(finding.advice for finding in found.values() if finding.state == "limit")


def test_versions_are_held_against_the_pins(toy: ToyCourse) -> None:
    pins = toy.home / "constraints.txt"
    pins.write_text("# a comment\npytest>=1\nno-such-package==1\nnonsense ===\n-e .\n\n")
    assert findings(toy)["versions"].found == "as tested"
    old = [f"{name}==0.1" for name in ("pytest", "rich", "typer", "numpy")]
    pins.write_text("\n".join([*old, "torch==0.1; python_version < '3'"]))
    finding = findings(toy)["versions"]
    assert finding.state == "limit"
    assert "pytest " in finding.found
    assert "and 1 more" in finding.found


def test_what_cannot_be_looked_at_is_a_finding(toy: ToyCourse) -> None:
    (toy.home / "constraints.txt").unlink()
    found = findings(toy)
    assert found["pins"].state == "mend"
    assert "FileNotFoundError" in found["pins"].found
    assert found["watch"].state == "ok"


def test_damaged_and_unwritable_progress(toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.progress.parent.mkdir(exist_ok=True)
    toy.progress.write_bytes(b"garbage" * 1000)
    assert findings(toy)["progress"].state == "mend"
    assert "move it away" in findings(toy)["progress"].advice
    toy.progress.unlink()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert findings(toy)["progress"].found == "cannot be written"


def test_a_small_and_busy_machine(toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1 << 30))
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0, 0))
    small = SimpleNamespace(memory_bytes=4 << 30, cpu="a small one", cores=2)
    monkeypatch.setattr(doctor, "fingerprint", lambda: small)
    monkeypatch.setattr(watching, "events_work", lambda folder: False)
    version = importlib.metadata.version

    def without_triton(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_triton)
    found = findings(toy)
    assert found["disk"].state == "mend"
    assert found["memory"].state == "limit"
    assert "99.0 processes busy" in found["other load"].found
    assert found["triton"].state == "limit"
    assert found["processor"].found == "a small one, 2 cores"
    assert "polls" in found["watch"].found


@pytest.mark.parametrize(("cuda", "why"), [(None, "a CPU build"), ("12.8", "sees no GPU")])
def test_without_a_gpu(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch, cuda: str | None, why: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = findings(toy)["tier cuda"]
    assert finding.state == "limit"
    assert why in finding.found


def test_with_a_gpu(toy: ToyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert findings(toy)["tier cuda"].found.startswith("H200")
