"""Finding processes and what they use, with and without the kernel's own list of children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from course.check import processes
from course.check.processes import children, cpu_seconds, own_children, resident_bytes, tree

FAMILY = """
import subprocess, sys, time
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[2:]])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def family(tmp_path: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child that has a child."""
    path = f"{tmp_path}/family.py"
    with open(path, "w") as file:
        file.write(FAMILY)
    parent = subprocess.Popen([sys.executable, path, "a", "b"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    for _ in range(3):
        parent.stdout.readline()
    yield parent
    for pid in tree(parent.pid):
        processes.kill(pid)
    parent.wait()
    parent.stdout.close()


@pytest.mark.parametrize("listed", [False, True], ids=["from the kernel", "from all processes"])
def test_a_tree(
    family: subprocess.Popen[bytes], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed:
        monkeypatch.setattr(processes, "children", processes._listed_children)
    found = processes.tree(family.pid)
    assert len(found) == 3
    assert found[0] == family.pid
    assert psutil.Process(found[2]).ppid() == found[1]
    assert psutil.Process(found[1]).ppid() == family.pid


def test_children_of_a_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        found.append(subprocess.Popen(["sleep", "60"]))
        time.sleep(0.2)

    before = own_children()
    thread = threading.Thread(target=start)
    thread.start()
    while not found:
        time.sleep(0.01)
    try:
        assert found[0].pid in own_children() - before
        thread.join()
        assert found[0].pid in own_children() - before
    finally:
        found[0].kill()
        found[0].wait()
    assert found[0].pid not in own_children()


def test_a_process_that_is_gone() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert children(done.pid) == []
    assert tree(done.pid) == [done.pid]
    assert resident_bytes(done.pid) == resident_bytes(done.pid, shared=True) == 0
    assert cpu_seconds(done.pid) == 0.0
    processes.kill(done.pid)


def test_what_a_process_uses() -> None:
    assert 10 << 20 < resident_bytes(os.getpid(), shared=True) <= resident_bytes(os.getpid())
    before = cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert cpu_seconds(os.getpid()) > before  # of a child that has ended
