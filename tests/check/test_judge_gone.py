"""Workers started the long way, and what becomes of them when the judge does not end well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from check.workers import Workshop
from course.check.codes import Code
from course.check.failure import GateFailure

JUDGE = """
import sys, time
from pathlib import Path
from course.check.host import WorkerConfig, WorkerHost

host = WorkerHost(WorkerConfig(Path(sys.argv[1]), Path(sys.argv[2]), 2, ()))
host.wait_loaded()
print(host.process.pid, flush=True)
host.start("call", name="f")
"""


@pytest.mark.parametrize(
    "source",
    ["while True: pass", pytest.param("import time; time.sleep(600)", marks=pytest.mark.slow)],
)
def test_a_worker_dies_with_its_judge(tmp_path: Path, source: str) -> None:
    shop = Workshop(tmp_path)
    solution = shop.write(f"def f():\n    {source}\n")
    judge = subprocess.Popen(
        [sys.executable, "-c", JUDGE, str(solution), str(shop.scenarios)], stdout=subprocess.PIPE
    )
    assert judge.stdout is not None
    worker = psutil.Process(int(judge.stdout.readline()))
    assert worker.is_running()
    time.sleep(0.1)
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    judge.stdout.close()
    deadline = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    shop.close()


def test_a_worker_started_the_long_way(tmp_path: Path) -> None:
    """Its surroundings: no input, no way to the network hub, nothing of pytest, a fixed folder."""
    shop = Workshop(tmp_path)
    source = """
    import os, sys, threading
    print("hello from the top")
    def f():
        import torch
        names = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "PYTHONSTARTUP")
        return {
            "environment": [os.environ.get(name) for name in names],
            "input": sys.stdin.read(),
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
            "path": "" in sys.path or os.path.dirname(__file__) in sys.path,
            "main": vars(sys.modules["__main__"]).get("Worker"),
            "judge": "pytest" in sys.modules or "course.check.oracle" in sys.modules,
        }
    """
    os.environ["PYTHONSTARTUP"] = "nowhere.py"
    try:
        host = shop.start(source, threads=1)
        found = host.call("call", name="f")
    finally:
        del os.environ["PYTHONSTARTUP"]
    assert found["environment"] == ["1", "1", None, None]
    assert found["input"] == ""
    assert found["threads"] == 1
    assert Path(found["folder"]) not in tmp_path.parents or found["folder"] == "/tmp"
    assert not found["path"]
    assert found["main"] is None
    assert not found["judge"]
    assert "hello from the top" in host.output()
    assert shop.close() == []
    assert not list((tmp_path / "work").glob("__pycache__"))


def test_a_worker_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that the course is at fault, and never the solution."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('a broken installation')")
    shop = Workshop(tmp_path)
    host = shop.start("def f(): return 1")
    with pytest.raises(GateFailure) as caught:
        host.wait_loaded()
    assert caught.value.code is Code.BROKEN_GATE
    assert "a broken installation" in caught.value.detail
    shop.close()
