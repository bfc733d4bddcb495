"""The processes below the judge: which there are, what they use, and how they are ended.

A solution may start processes, and those may start others and leave. On Linux none of them gets out
of sight: once `adopt_orphans` was called, a process whose parent has ended becomes a child of the
judge. Elsewhere it is lost, unless it stayed in its worker's session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import TypeVar

import psutil

T = TypeVar("T")


def adopt_orphans() -> None:
    """Let daemons that a solution leaves behind become children of this process (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def children(pid: int) -> list[int]:
    """The processes that this one has started, and those it has adopted."""
    try:
        found: list[int] = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        return found
    except OSError:  # another system, a kernel without this file, or the process is gone
        return _listed_children(pid)


def _listed_children(pid: int) -> list[int]:
    """The same, by looking at every process of the machine."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def tree(pid: int) -> list[int]:
    """The process and every process below it."""
    found = [pid]
    for parent in found:  # grows while it is read
        found += [child for child in children(parent) if child not in found]
    return found


def own_children() -> frozenset[int]:
    """The processes that this one has started and that are still there."""
    return frozenset(children(os.getpid()))


def descendants(known: Collection[int]) -> list[int]:
    """Every process below this one, save its children in `known` and what is below those."""
    found: list[int] = []
    for child in children(os.getpid()):
        if child not in known:
            found += tree(child)
    return found


def resident_bytes(pid: int, *, shared: bool = False) -> int:
    """Memory of a process; 0 if it is gone.

    Args:
        shared: count pages that it shares with others in part only (Linux; slow).
    """
    if shared:
        full = quietly(lambda: psutil.Process(pid).memory_full_info(), None)
        if full is not None:
            return int(getattr(full, "pss", full.uss))
    return int(quietly(lambda: psutil.Process(pid).memory_info().rss, 0))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of those below it that have ended; 0 if it is gone."""
    times = quietly(lambda: psutil.Process(pid).cpu_times(), None)
    if times is None:
        return 0.0
    ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + ended)


def kill(pid: int) -> None:
    """End a process, if it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def end_orphans(known: Collection[int]) -> list[str]:
    """Kill `descendants(known)`, and name those that were still running."""
    found: dict[int, str] = {}
    for _ in range(100):  # what is killed may have started another in the meantime
        left = descendants(known)
        if not left:
            break
        for pid in left:
            process = quietly(lambda p=pid: psutil.Process(p), None)  # type: ignore[misc]
            if process is not None and quietly(process.status, "zombie") != psutil.STATUS_ZOMBIE:
                name = quietly(lambda p=process: " ".join(p.cmdline())[:80], "")  # type: ignore[misc]
                found.setdefault(pid, name or f"process {pid}")
                kill(pid)
            with contextlib.suppress(ChildProcessError):  # it has another parent
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return list(found.values())


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number itself for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def quietly(function: Callable[[], T], default: T) -> T:
    """A process may be gone by the time it is asked."""
    try:
        return function()
    except (psutil.Error, OSError):
        return default
