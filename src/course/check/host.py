"""The judge's side of a worker: start it, step it, time it, bound it, end it.

All clocks and limits are here, in the judge's process. A reply that does not come in time, a tree
of processes that outgrows its memory, or one that ends, becomes a GateFailure with its own code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from course.check.channel import BadFrame, Channel, ChannelClosed, ChannelTimeout
from course.check.codes import Code
from course.check.failure import GateFailure
from course.paths import course_home

OUTPUT_TAIL = 2000  # characters of captured output shown with a failure
LOAD_SECONDS = 120.0  # a cold disk can take long to bring torch in


@dataclass(frozen=True)
class Limits:
    """What a worker may use: seconds per reply, and resident bytes of its whole process tree."""

    seconds: float = 60.0
    memory_bytes: int = 6000 << 20


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker runs, and how far it is trusted."""

    solution: Path
    scenarios: Path
    stage: int
    builds: tuple[str, ...]
    forbidden: tuple[Path, ...] = ()
    trusted: bool = False  # baselines are the course's own
    device: str = "cpu"
    threads: int = 1
    limits: Limits = Limits()


@dataclass(frozen=True)
class Step:
    """One reply of a scenario, and how long it took by the judge's clock."""

    value: Any
    seconds: float
    done: bool


class SolutionError(Exception):
    """The solution raised. Bad-input checks expect this; elsewhere it becomes CRASHED."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.type: str = error["type"]
        self.bases: list[str] = error["bases"]
        self.message: str = error["message"]
        self.where: str = error["where"]
        self.traceback: str = error["traceback"]


class WorkerHost:
    """A worker process, seen from the judge.

    Raises GateFailure from the constructor when the solution cannot be loaded.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.seconds = config.limits.seconds  # for the next reply
        self._runs = 0
        self._killed: GateFailure | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        command = [sys.executable, "-m", "course.check.worker"]
        command += [str(down_read), str(up_write), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=(down_read, up_write),
            env=worker_environment(config.threads),
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        os.close(down_read)
        os.close(up_write)
        self.channel = Channel(up_read, down_write)
        self._done = threading.Event()
        threading.Thread(target=self._watch_memory, daemon=True).start()
        self._loaded = False
        self.channel.send(
            {
                "solution": str(config.solution),
                "scenarios": str(config.scenarios),
                "stage": config.stage,
                "builds": list(config.builds),
                "forbidden": [str(path) for path in config.forbidden],
                "trusted": config.trusted,
                "device": config.device,
                "threads": config.threads,
            }
        )

    def wait_loaded(self) -> WorkerHost:
        """Return when the solution has been loaded, or raise the GateFailure that says why not.

        Starting is asynchronous, so that two workers load side by side.
        """
        if self._loaded:
            return self
        self._expect_ready()
        reply = self._receive(LOAD_SECONDS)
        if "error" in reply:
            raise loading_failure(SolutionError(reply["error"]), self.config.solution)
        if "missing" in reply:
            names = ", ".join(f"`{name}`" for name in reply["missing"])
            raise GateFailure(
                Code.MISSING_NAME, f"{self.config.solution.name} does not define {names}"
            )
        self._loaded = True
        return self

    def _expect_ready(self) -> None:
        try:
            self.channel.receive(LOAD_SECONDS)
        except (ChannelTimeout, ChannelClosed, BadFrame):
            self.kill()
            raise GateFailure(
                Code.BROKEN_GATE, "the worker process did not start", detail=self.output()
            ) from None

    # -- scenarios ---------------------------------------------------------------------------

    def start(self, scenario: str, **args: Any) -> Run:
        """Begin a scenario; a plain function runs to its end and its value waits in the Run."""
        self.wait_loaded()
        self._runs += 1
        message = {"op": "start", "run": self._runs, "scenario": scenario, "args": args}
        reply, seconds = self._ask(message)
        finished = Step(reply["value"], seconds, True) if reply.get("done") else None
        return Run(self, self._runs, scenario, finished)

    def call(self, scenario: str, **args: Any) -> Any:
        """Run a plain function, or a generator to its end, and return its value."""
        run = self.start(scenario, **args)
        while run.finished is None:
            run.step()
        return run.finished.value

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], float]:
        try:
            start = time.perf_counter()
            self.channel.send(message)
            reply = self._receive(self.seconds)
            seconds = time.perf_counter() - start
        except ChannelClosed:
            raise self._ended() from None
        if "error" in reply:
            error = SolutionError(reply["error"])
            conduct = conduct_failure(error)
            if conduct is not None:
                raise conduct
            raise error
        return reply, seconds

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            reply = self.channel.receive(timeout)
        except ChannelTimeout:
            self.kill()
            raise GateFailure(
                Code.TIMEOUT,
                f"no answer within {timeout:g} seconds; the process was stopped",
                detail=self.output(),
            ) from None
        except ChannelClosed:
            raise self._ended() from None
        except BadFrame as error:
            self.kill()
            raise GateFailure(
                Code.CHANNEL_FORGED,
                "what came over the result channel is not a message of the course",
                detail=str(error),
            ) from None
        if not isinstance(reply, dict):
            self.kill()
            raise GateFailure(Code.CHANNEL_FORGED, "a message without its envelope came")
        if reply.get("violations"):
            raise GateFailure(
                Code.FORBIDDEN_IMPORT,
                "the solution reached for what it may not use",
                got="; ".join(reply["violations"]),
                expected="course.types, course.model, course.parts (earlier stages), libraries",
            )
        if reply.get("patched"):
            raise GateFailure(
                Code.CLOCK_PATCHED, "the solution replaced a clock", got=", ".join(reply["patched"])
            )
        return reply

    def _ended(self) -> GateFailure:
        """Why the process is gone."""
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            status = None
        if self._killed is not None:
            return self._killed
        if status is not None and status < 0:
            how = f"it was ended by {signal.Signals(-status).name}"
        else:
            how = f"exit status {status}"
        return GateFailure(
            Code.EXITED, f"the solution's process ended in the middle: {how}", detail=self.output()
        )

    # -- bounds ------------------------------------------------------------------------------

    def _watch_memory(self) -> None:
        limit = self.config.limits.memory_bytes
        while not self._done.wait(0.05):
            used = sum(_quietly(lambda p=p: p.memory_info().rss, 0) for p in self.tree())
            if used > limit:
                self._killed = GateFailure(
                    Code.MEMORY_LIMIT,
                    f"the process held {used >> 20} MiB; the limit is {limit >> 20} MiB",
                    detail=self.output(),
                )
                self._kill_tree()
                return

    def tree(self) -> list[psutil.Process]:
        """The worker and every process below it."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def output(self) -> str:
        """The last of what the solution printed."""
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - OUTPUT_TAIL))
        return self._output.read().decode(errors="replace").strip()

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and everything below it, now."""
        self._done.set()
        self._kill_tree()

    def _kill_tree(self) -> None:
        for process in reversed(self.tree()):
            _quietly(process.kill, None)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and everything it started."""
        self.kill()
        self.process.wait()
        self.channel.close()
        self._output.close()


class Run:
    """A scenario under way."""

    def __init__(self, host: WorkerHost, number: int, scenario: str, finished: Step | None) -> None:
        self.host = host
        self.number = number
        self.scenario = scenario
        self.finished = finished

    def step(self) -> Step:
        """Let the scenario go on to its next yield.

        Raises:
            SolutionError: the solution raised.
            GateFailure: the worker ended, ran too long, or misbehaved.
        """
        if self.finished is not None:
            return self.finished
        reply, seconds = self.host._ask({"op": "step", "run": self.number})
        step = Step(reply["value"], seconds, bool(reply.get("done")))
        if step.done:
            self.finished = step
        return step

    def __iter__(self) -> Iterator[Step]:
        """The steps that yield; the return value is in `finished` afterwards."""
        while not (step := self.step()).done:
            yield step

    def stop(self) -> None:
        """Close the scenario before its end."""
        if self.finished is None and self.host.alive:
            self.host._ask({"op": "stop", "run": self.number})
            self.finished = Step(None, 0.0, True)


def conduct_failure(error: SolutionError) -> GateFailure | None:
    """The failure that an exception means wherever it is raised, or None."""
    if "NotImplementedError" in error.bases:
        return GateFailure(
            Code.NOT_IMPLEMENTED, error.message or "this part is still a stub", where=error.where
        )
    if "OutcomeException" in error.bases:
        return GateFailure(
            Code.SKIPPED,
            "the solution called a pytest outcome; that is never a pass",
            where=error.where,
        )
    if "SystemExit" in error.bases:
        return GateFailure(
            Code.EXITED, "the solution called exit() instead of returning", where=error.where
        )
    if error.type in ("ForbiddenImport", "ForbiddenFile"):
        return GateFailure(Code.FORBIDDEN_IMPORT, error.message, where=error.where)
    if "MemoryError" in error.bases:
        return GateFailure(Code.MEMORY_LIMIT, "memory ran out", where=error.where)
    return None


def loading_failure(error: SolutionError, path: Path) -> GateFailure:
    """What went wrong while the file was being imported."""
    conduct = conduct_failure(error)
    if conduct is not None:
        return conduct
    if "SyntaxError" in error.bases:
        return GateFailure(Code.SYNTAX_ERROR, error.message, where=error.where)
    if "UnicodeDecodeError" in error.bases or "null bytes" in error.message:
        return GateFailure(Code.SYNTAX_ERROR, f"{path.name} is not a text file in UTF-8")
    if "OSError" in error.bases and not error.where:
        return GateFailure(Code.MISSING_FILE, f"{path} cannot be read: {error.message}")
    return GateFailure(
        Code.LOAD_ERROR,
        f"importing {path.name} raised {error.type}: {error.message}",
        where=error.where,
        detail=error.traceback,
    )


def forbidden_paths(stage: int, folders: Sequence[str]) -> tuple[Path, ...]:
    """What a solution of `stage` may not open: later references, and the gates."""
    home = course_home()
    later = [name for name in folders if int(name.split("_")[1]) >= stage]
    return (*(home / "reference" / name for name in later), home / "gates")


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker: quiet, offline, and with a fixed number of threads."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    environment.update(
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONUNBUFFERED="1",
        PYTHONSAFEPATH="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        COURSE_HOME=str(course_home()),
    )
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTHONSTARTUP", "PYTHONINSPECT"):
        environment.pop(name, None)
    return environment


def adopt_orphans() -> None:
    """Let daemons that a solution leaves behind become children of this process (Linux).

    A process whose parent ends is handed to the nearest ancestor that asked for it; without this it
    would go to init, out of sight.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def descendants_cpu_seconds(apart_from: WorkerHost) -> float:
    """Processor time used by all processes below this one, save those of one worker.

    Daemons that left a worker are counted too, once `adopt_orphans` was called.
    """
    spared = {process.pid for process in apart_from.tree()}
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        times = None if process.pid in spared else _quietly(process.cpu_times, None)
        if times is not None:
            total += times.user + times.system
    return total


def end_orphans(known: Sequence[int]) -> list[str]:
    """Kill every descendant of this process except `known`, and name what was found."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if process.pid not in known:
            found.append(_quietly(lambda p=process: " ".join(p.cmdline())[:80], "?"))
            _quietly(process.kill, None)
    return found


def _quietly(function: Any, default: Any) -> Any:
    """A process may be gone by the time it is asked."""
    try:
        return function()
    except (psutil.Error, OSError):
        return default
