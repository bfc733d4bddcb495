"""Workers in milliseconds: one process imports torch and the worker, and then forks.

A worker that starts by itself takes a second or two, nearly all of them for importing torch. A
proof tries hundreds of solutions, and each needs a fresh process. What is forked is a real worker
in a process of its own, in the state in which `python -m course.check.worker` would be. A check
starts it that way, and so does a proof where a clock decides.
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
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course.check.host import WorkerProcess

HASH_SEED = "PYTHONHASHSEED"


class ForkServer:
    """The process that forks workers: `host.launch = server.fork` has hosts use it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.lock = threading.Lock()  # a worker's memory is watched from another thread
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "course.check.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env={**os.environ, **quiet},
        )  # fmt: skip
        theirs.close()
        self._ask({"do": "ready?"})

    def fork(
        self, channel: tuple[int, int], output: IO[bytes], environment: Mapping[str, str], cwd: str
    ) -> WorkerProcess:
        """Fork a worker. The arguments are those of `course.check.host.start_anew`.

        Python reads the seed of its hashes as it starts. A worker that is to have another one than
        this process is started anew: forked, it would have the same.
        """
        if environment.get(HASH_SEED) != os.environ.get(HASH_SEED):
            from course.check.host import start_anew  # a forked worker has no use for it

            return start_anew(channel, output, environment, cwd)
        message = {"do": "fork", "env": dict(environment), "cwd": cwd}
        answer = self._ask(message, *channel, output.fileno())
        return ForkedProcess(self, answer["pid"])

    def status(self, pid: int) -> int | None:
        """The exit status of a worker, negative for a signal; None while it runs."""
        status: int | None = self._ask({"do": "poll", "pid": pid})["status"]
        return status

    def _ask(self, message: dict[str, Any], *fds: int) -> dict[str, Any]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self.lock:
            self.socket.sendmsg([json.dumps(message).encode()], rights)
            answer: dict[str, Any] = json.loads(self.socket.recv(65536))
        return answer

    def close(self) -> None:
        """End the server. Workers that still run end with it."""
        self.socket.close()
        self.process.wait(timeout=30)


class ForkedProcess:
    """A worker that was forked: as much of `subprocess.Popen` as its host uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server = server
        self.pid = pid
        self.returncode: int | None = None
        self.lock = threading.Lock()  # a process can be waited for only once

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with self.lock:
            if self.returncode is None:
                self.returncode = self.server.status(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.005)
        return status


def serve(control: socket.socket) -> None:
    """The server's side: answer until whoever asks is gone, were it in the middle of a question."""
    import course.check.worker  # noqa: F401  brings torch

    with contextlib.suppress(ConnectionError):
        while answer_one(control):
            pass
    os._exit(0)


def answer_one(control: socket.socket) -> bool:
    """Do what the next message asks for; whether there was one."""
    data, ancillary, _, _ = control.recvmsg(65536, 4096)
    if not data:
        return False
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
    return True


def be_a_worker(message: dict[str, Any], fds: list[int]) -> None:
    """Be what `course.check.host.start_anew` would have started."""
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
