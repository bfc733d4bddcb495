"""Workers in milliseconds: one process imports torch and the worker, and then forks.

A worker that starts by itself takes two seconds, nearly all of them for importing torch. Tests of
what solutions do need a fresh process each, and there are many. `ForkServer.popen` stands in for
`subprocess.Popen` in `course.check.host`; what it starts is a real worker in a process of its own,
in the state in which `python -m course.check.worker` would be. A few tests start workers the long
way.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any


class ForkServer:
    """The process that forks workers."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.lock = threading.Lock()  # a worker's memory is watched from another thread
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        theirs.close()
        assert self.ask({"do": "ready?"})["ready"]

    def ask(self, message: dict[str, Any], *fds: int) -> dict[str, Any]:
        with self.lock:
            return self._ask(message, fds)

    def _ask(self, message: dict[str, Any], fds: tuple[int, ...]) -> dict[str, Any]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([json.dumps(message).encode()], rights)
        answer: dict[str, Any] = json.loads(self.socket.recv(65536))
        return answer

    def popen(self, command: list[str], **options: Any) -> ForkedProcess:
        assert command[1:3] == ["-m", "course.check.worker"]
        assert options["start_new_session"]
        assert options["stderr"] == subprocess.STDOUT
        read_fd, write_fd = (int(word) for word in command[3:5])
        assert options["pass_fds"] == (read_fd, write_fd)
        output = options["stdout"].fileno()
        answer = self.ask(
            {"do": "fork", "env": options["env"], "cwd": options["cwd"]}, read_fd, write_fd, output
        )
        return ForkedProcess(self, answer["pid"])

    def close(self) -> None:
        self.socket.close()
        self.process.wait(timeout=30)


class ForkedProcess:
    """As much of `subprocess.Popen` as the host uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server = server
        self.pid = pid
        self.returncode: int | None = None
        self.lock = threading.Lock()

    def poll(self) -> int | None:
        with self.lock:  # a process can be waited for only once
            if self.returncode is None:
                self.returncode = self.server.ask({"do": "poll", "pid": self.pid})["status"]
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (3600 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def serve(control: socket.socket) -> None:
    """The server's side: answer until the tests are gone."""
    import course.check.worker  # noqa: F401  brings torch

    while True:
        data, ancillary, _, _ = control.recvmsg(65536, 4096)
        if not data:
            os._exit(0)
        message = json.loads(data)
        answer: dict[str, Any] = {"ready": True}
        if message["do"] == "fork":
            fds = array.array("i")
            for _, _, part in ancillary:
                fds.frombytes(part)
            pid = os.fork()
            if pid == 0:
                control.close()
                be_a_worker(message, list(fds))
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        elif message["do"] == "poll":
            done, status = os.waitpid(message["pid"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if done else None}
        control.send(json.dumps(answer).encode())


def be_a_worker(message: dict[str, Any], fds: list[int]) -> None:
    """Be what `subprocess.Popen` would have started."""
    from course.check import worker

    read_fd, write_fd, output = fds
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["env"])
    sys.argv = ["worker", str(read_fd), str(write_fd), str(os.getppid())]
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    status = 1
    try:
        worker.main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
