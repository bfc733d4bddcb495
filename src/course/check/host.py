"""The judge's side of a worker: start it, step it, time it, bound it, end it.

All clocks and limits are here, in the judge's process. A reply that does not come in time, a tree
of processes that outgrows its memory, or one that ends, becomes a GateFailure with its own code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from course.check import processes
from course.check.channel import BadFrame, Channel, ChannelClosed, ChannelTimeout
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.replies import SolutionError, checked
from course.paths import course_home, state_dir

OUTPUT_TAIL = 2000  # bytes of captured output shown with a failure
OUTPUT_LIMIT = 64 << 20  # bytes that a solution may print: a loop that prints must not fill a disk
BROKEN_MEMORY = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT}
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
    environment: Mapping[str, str] = field(default_factory=dict)  # beside what all workers have


@dataclass(frozen=True)
class Step:
    """One reply of a scenario, and how long it took by the judge's clock."""

    value: Any
    seconds: float
    done: bool


class WorkerProcess(Protocol):
    """What a host needs of its worker's process; `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> int: ...  # noqa: D102


def start_anew(
    channel: tuple[int, int], output: IO[bytes], environment: Mapping[str, str], cwd: str
) -> WorkerProcess:
    """Start a worker as a new Python, in a session of its own.

    Args:
        channel: the descriptors it reads from and writes to.
        output: where what it prints goes.
        environment: all of it.
    """
    command = [sys.executable, "-m", "course.check.worker", *map(str, channel), str(os.getpid())]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        pass_fds=channel, env=dict(environment), cwd=cwd, start_new_session=True,
    )  # fmt: skip


# How workers are started. A proof, which needs hundreds, forks them: `course.check.fork_server`.
launch = start_anew


class WorkerHost:
    """A worker process, seen from the judge. Starting is asynchronous: see `wait_loaded`."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.limits = config.limits  # for the next reply
        self._runs = 0
        self._killed: GateFailure | None = None
        self._refused: GateFailure | None = None  # why the solution could not be loaded
        # Both sides share one file position, unless what is written always goes to the end.
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115  closed in close()
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        self.process = launch(
            (down_read, up_write),
            self._output,
            {**worker_environment(config.threads), **config.environment},
            tempfile.gettempdir(),
        )
        os.close(down_read)
        os.close(up_write)
        os.set_blocking(down_write, False)
        self.channel = Channel(up_read, down_write)
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self._loaded = False
        self._token = secrets.token_hex(16)
        with contextlib.suppress(ChannelClosed):  # gone already: wait_loaded finds out why
            self.channel.send(
                {
                    "token": self._token,
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
        if self._refused is not None:
            raise self._refused
        if not self._loaded:
            try:
                self._load()
            except GateFailure as failure:
                self._refused = failure
                raise
            self._loaded = True
        return self

    def _load(self) -> None:
        self._expect_ready()
        reply = self._receive(LOAD_SECONDS, "loaded", "missing")
        if "error" in reply:
            raise loading_failure(SolutionError(reply["error"]), self.config.solution)
        if "missing" in reply:
            names = ", ".join(f"`{name}`" for name in reply["missing"])
            raise GateFailure(
                Code.MISSING_NAME, f"{self.config.solution.name} does not define {names}"
            )

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
        reply, seconds = self._ask(message, "started", "value")
        finished = Step(reply["value"], seconds, True) if "value" in reply else None
        return Run(self, self._runs, scenario, finished)

    def call(self, scenario: str, **args: Any) -> Any:
        """Run a plain function, or a generator to its end, and return its value."""
        run = self.start(scenario, **args)
        while run.finished is None:
            run.step()
        return run.finished.value

    def _ask(self, message: dict[str, Any], *kinds: str) -> tuple[dict[str, Any], float]:
        self._token = secrets.token_hex(16)
        message["token"] = self._token
        try:
            start = time.perf_counter()
            self.channel.send(message, self.limits.seconds)
            reply = self._receive(self.limits.seconds, *kinds)
            seconds = time.perf_counter() - start
        except ChannelClosed:
            raise self._ended() from None
        except ChannelTimeout:
            raise self._timed_out(self.limits.seconds) from None
        if "error" in reply:
            error = SolutionError(reply["error"])
            conduct = conduct_failure(error)
            if conduct is not None:
                raise conduct
            raise error
        return reply, seconds

    def _timed_out(self, timeout: float) -> GateFailure:
        self.kill()
        return GateFailure(
            Code.TIMEOUT,
            f"no answer within {timeout:g} seconds; the process was stopped",
            detail=self.output(),
        )

    def _receive(self, timeout: float, *kinds: str) -> dict[str, Any]:
        try:
            reply = checked(self.channel.receive(timeout), self._token, *kinds)
        except ChannelTimeout:
            raise self._timed_out(timeout) from None
        except ChannelClosed:
            raise self._ended() from None
        except BadFrame as error:
            self.kill()
            raise GateFailure(
                Code.CHANNEL_FORGED,
                "what came over the result channel is not a message of the course",
                detail=str(error),
            ) from None
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
            status = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()
            message = "the solution's process closed the channel that carries results"
            return GateFailure(Code.EXITED, message, detail=self.output())
        if self._killed is not None:
            return self._killed
        how, likely = f"exit status {status}", ""
        if status < 0:
            how = f"it was ended by {processes.signal_name(-status)}"
            if -status in BROKEN_MEMORY:
                likely = "An address or an index is wrong: memory was used that is not there."
        return GateFailure(
            Code.EXITED, f"the solution's process ended in the middle: {how}",
            detail=self.output(), likely=likely,
        )  # fmt: skip

    # -- bounds ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            excess = self._excess()
            if excess:
                self._killed = GateFailure(Code.MEMORY_LIMIT, excess, detail=self.output())
                self._kill_tree()
                return

    def _excess(self) -> str:
        """What the processes have too much of; empty if nothing."""
        printed = os.fstat(self._output.fileno()).st_size
        if printed > OUTPUT_LIMIT:
            return f"the process printed {printed >> 20} MiB; the limit is {OUTPUT_LIMIT >> 20} MiB"
        limit, tree = self.limits.memory_bytes, self.tree()
        used = sum(map(processes.resident_bytes, tree))
        if used > limit and len(tree) > 1:  # pages that they share were counted more than once
            used = sum(processes.resident_bytes(pid, shared=True) for pid in tree)
        if used > limit:
            return f"the process held {used >> 20} MiB; the limit is {limit >> 20} MiB"
        return ""

    def tree(self) -> list[int]:
        """The worker and every process below it; nothing once it has ended."""
        return processes.tree(self.process.pid) if self.alive else []

    def output(self) -> str:
        """The last of what the solution printed."""
        fd = self._output.fileno()
        start = max(0, os.fstat(fd).st_size - OUTPUT_TAIL)
        return os.pread(fd, OUTPUT_TAIL, start).decode(errors="replace").strip()

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and everything below it, now."""
        self._done.set()
        self._kill_tree()
        with contextlib.suppress(subprocess.TimeoutExpired):  # so that `alive` tells the truth
            self.process.wait(timeout=10)

    def _kill_tree(self) -> None:
        for pid in reversed(self.tree()):
            processes.kill(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and everything it started."""
        self.kill()
        self._watcher.join(timeout=10)
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
        reply, seconds = self.host._ask({"op": "step", "run": self.number}, "value")
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
            self.host._ask({"op": "stop", "run": self.number}, "value")
            self.finished = Step(None, 0.0, True)


def conduct_failure(error: SolutionError) -> GateFailure | None:
    """The failure that an exception means wherever it is raised, or None."""
    # torch raises NotImplementedError too, where it has no kernel: that is a crash, not a stub.
    if "NotImplementedError" in error.bases and "NotImplementedError" in error.where:
        return GateFailure(
            Code.NOT_IMPLEMENTED, error.message or "this part is still a stub", where=error.where
        )
    if {"OutcomeException", "SkipTest"} & set(error.bases):
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
    garbled = "null bytes" in error.message or "encoding" in error.message
    if not error.where and ("UnicodeError" in error.bases or garbled):
        return GateFailure(
            Code.SYNTAX_ERROR, f"{path.name} is not a text file in UTF-8", got=error.message,
            likely="It was saved in another encoding, or is no Python file.",
        )  # fmt: skip
    if "SyntaxError" in error.bases:
        return GateFailure(Code.SYNTAX_ERROR, error.message, where=error.where)
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
        TRITON_INTERPRET="0",  # who wants the interpreter says so in its `environment`
        TRITON_CACHE_DIR=str(state_dir() / "triton"),
    )
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTHONSTARTUP", "PYTHONINSPECT"):
        environment.pop(name, None)
    return environment
