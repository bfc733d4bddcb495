"""What this machine can measure, why not the rest, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from course.check.libraries import where
from course.check.progress import Progress, ProgressUnreadable
from course.measure.machine import fingerprint
from course.paths import course_home, state_dir


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: fine, a limit of this machine, or something to mend."""

    state: str  # "ok", "limit", "mend"
    subject: str
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything that a check depends on. What cannot be looked at is a finding, too."""
    for look in (
        _python, _memory, _processor, _load, _torch, _cuda, _triton, _pins, _model, _disk,
        _progress, _watching,
    ):  # fmt: skip
        try:
            yield look()
        except Exception as error:
            yield Finding("mend", look.__name__.strip("_"), f"{type(error).__name__}: {error}")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok", "python", version)


def _processor() -> Finding:
    machine = fingerprint()
    return Finding("ok", "processor", f"{machine.cpu}, {machine.cores} cores")


def _memory() -> Finding:
    total = fingerprint().memory_bytes
    found = f"{total / 2**30:.0f} GiB"
    if total < 6 << 30:
        advice = "two workers of the real model need about 4 GiB; use --model bench"
        return Finding("limit", "memory", found, advice)
    return Finding("ok", "memory", found)


def _load() -> Finding:
    if not hasattr(os, "getloadavg"):
        return Finding("ok", "other load", "not known here")
    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        advice = "close other programs before you measure; noise ends in `inconclusive`"
        return Finding("limit", "other load", f"{load:.1f} processes busy", advice)
    return Finding("ok", "other load", f"{load:.1f} processes busy")


def _torch() -> Finding:
    import torch

    return Finding("ok", "tier cpu", f"torch {torch.__version__}: contracts, counters and times")


def _cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return Finding("ok", "tier cuda", f"{name}: kernels, graphs, GPU times")
    built = torch.version.cuda is not None
    why = "torch sees no GPU" if built else "this torch is a CPU build"
    advice = "numbers of tier cuda are reported as not measured; no gate of tier cpu needs them"
    return Finding("limit", "tier cuda", f"not measurable here: {why}", advice)


def _triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        advice = f"stage 09 and the kernel of stage 14 cannot be judged here. {where('triton')}"
        return Finding("limit", "triton", "not on this system", advice)
    return Finding("ok", "triton", f"{version}: interpreter and offline builds")


def _pins() -> Finding:
    """Installed versions against constraints.txt."""
    from packaging.requirements import InvalidRequirement, Requirement

    differ = []
    for line in (course_home() / "constraints.txt").read_text("utf-8").splitlines():
        text = line.split("#")[0].strip()
        if not text:
            continue
        try:
            pin = Requirement(text)
        except InvalidRequirement:
            continue
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            installed = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # belongs to an extra that is not installed
        if not pin.specifier.contains(installed.split("+")[0], prereleases=True):
            differ.append(f"{pin.name} {installed}")
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        advice = "the tested versions are in constraints.txt; ./course installs them"
        return Finding(
            "limit", "versions", "not as tested: " + ", ".join(differ[:3]) + more, advice
        )
    return Finding("ok", "versions", "as tested")


def _model() -> Finding:
    from course.check.session import REAL_MODEL
    from course.model.store import cached_folder

    if cached_folder(REAL_MODEL) is None:
        return Finding("mend", "real model", "not fetched", f"course model fetch {REAL_MODEL}")
    return Finding("ok", "real model", f"{REAL_MODEL} is here")


def _disk() -> Finding:
    free = shutil.disk_usage(course_home()).free
    if free < 2 << 30:
        return Finding(
            "mend", "disk", f"{free / 2**30:.1f} GiB free", "the model needs about 1 GiB"
        )
    return Finding("ok", "disk", f"{free / 2**30:.0f} GiB free")


def _progress() -> Finding:
    folder = state_dir()
    try:
        checks = Progress().checks()
    except (ProgressUnreadable, OSError) as error:
        return Finding("mend", "progress", "cannot be read", str(error))
    where = folder if folder.exists() else folder.parent
    if not os.access(where, os.W_OK):
        advice = f"{where} is read-only: results are shown but not kept"
        return Finding("limit", "progress", "cannot be written", advice)
    what = "check" if len(checks) == 1 else "checks"
    return Finding("ok", "progress", f"{len(checks)} {what} recorded")


def _watching() -> Finding:
    from course.study.watching import events_work

    if events_work(course_home() / "stages"):
        return Finding("ok", "watch", "file events work")
    return Finding("ok", "watch", "no file events here: `course watch` polls")
