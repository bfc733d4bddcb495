"""The process that runs one solution, for a judge that sits in another.

Started by `course.check.host` as `python -m course.check.worker READ_FD WRITE_FD PID`. The first
message says what to load; after that the judge starts *scenarios* and steps them. A scenario is a
function in `gates/scenarios/`: it calls the solution and yields what came out, raw. It judges
nothing.

    start  {run, scenario, args} -> {started} or, for a plain function, {done, value}
    step   {run}                 -> {value} or {done, value}
    stop   {run}                 -> {done, value}

Every message carries a token that nobody could guess, and its reply carries it back: see
`course.check.replies`.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from course import parts
from course.check.channel import BadFrame, Channel, ChannelClosed
from course.check.guard import Clocks, Guard
from course.measure.counters import CountingModel
from course.model import load


class Env:
    """What a scenario gets: the solution's module, and the models it asks for by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.solution: ModuleType = ModuleType("solution")
        self._models: dict[str, Any] = {}

    def loaded(self, name: str) -> Any:
        """A `LoadedModel`, kept for the life of this worker."""
        if name not in self._models:
            self._models[name] = load(name, device=self.device)
        return self._models[name]

    def model(self, name: str) -> Any:
        """The decoder of that name."""
        return self.loaded(name).model

    def counting(self, name: str) -> Any:
        """The model behind a proxy that counts what is asked of it, in `.counts`."""
        return CountingModel(self.model(name))


def read_source(path: Path) -> str:
    """A Python file as Python reads it: a byte order mark and a coding line are honoured.

    Raises:
        SyntaxError, UnicodeDecodeError: it is not text. OSError: it cannot be read.
    """
    return importlib.util.decode_source(path.read_bytes())


def load_text(source: str, path: Path, name: str) -> ModuleType:
    """Run a Python source as a module, without writing bytecode beside its file."""
    module = ModuleType(name)
    module.__file__ = str(path)
    remember_lines(source, path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def remember_lines(source: str, path: Path) -> None:
    """Let tracebacks show lines of a file that the guard will not let them open."""
    linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))


def load_scenarios(path: Path) -> ModuleType:
    """The judge's half that runs here. It may import its neighbours; the solution may not."""
    before = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    module = load_text(path.read_text(encoding="utf-8"), path, path.stem)
    sys.path.remove(str(path.parent))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == path.parent:
            remember_lines(Path(file).read_text(encoding="utf-8"), Path(file))
            del sys.modules[name]
    return module


def describe_error(error: BaseException, solution: str) -> dict[str, Any]:
    """An exception as plain data: its type and bases, its message, where in the solution."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f.filename == solution]
    where = ""
    if inside:
        last = inside[-1]
        place = "" if last.name == "<module>" else f", in {last.name}"
        where = f"line {last.lineno}{place}: {last.line}"
    if isinstance(error, SyntaxError) and error.filename == solution:
        where = f"line {error.lineno}: {(error.text or '').strip()}"
    kept = inside + [f for f in frames[len(frames) - 1 :] if f.filename != solution]
    lines = traceback.format_list(kept) + traceback.format_exception_only(error)
    return {
        "type": type(error).__name__,
        "bases": [c.__name__ for c in type(error).__mro__],
        "module": type(error).__module__,
        "message": message_of(error)[:2000],
        "where": where,
        "traceback": "".join(lines)[-4000:],
    }


def message_of(error: BaseException) -> str:
    """`str(error)`, even when the error's own `__str__` is broken."""
    try:
        return str.__str__(str(error))  # of a subclass of str: its plain text
    except BaseException:
        return f"<{type(error).__name__} that cannot be printed>"


class Worker:
    """The loop that answers the judge."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.runs: dict[int, Generator[Any, None, Any]] = {}
        self.guard: Guard | None = None
        self.clocks = Clocks()
        self.threads = 1

    def load(self, config: dict[str, Any]) -> dict[str, Any]:
        """Prepare the process, then run the solution's file inside closed doors."""
        self.threads = config["threads"]
        torch.set_num_threads(self.threads)
        self.device = config["device"]
        self.env = Env(self.device)
        self.solution_path = config["solution"]
        parts.bind(parts.Binding(before=config["stage"]))
        scenarios = load_scenarios(Path(config["scenarios"]))
        self.scenarios = {
            name: value for name, value in vars(scenarios).items() if inspect.isfunction(value)
        }
        self.clocks = Clocks()
        gc.collect()
        gc.freeze()  # torch's objects outlive the solution; who looks for tensors passes them by
        if not config["trusted"]:
            self.guard = Guard([Path(p) for p in config["forbidden"]])
        try:
            path = Path(self.solution_path)
            source = read_source(path)
            compile(source, str(path), "exec")  # a syntax error is told apart from what it causes
            if self.guard:
                self.guard.close_doors()
            self.env.solution = load_text(source, path, "solution")
        except BaseException as error:
            return {"error": describe_error(error, self.solution_path)}
        missing = [n for n in config["builds"] if not hasattr(self.env.solution, n)]
        return {"missing": missing} if missing else {"loaded": True}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out one message. An error of the solution becomes part of the reply."""
        run = message["run"]
        try:
            if message["op"] == "start":
                result: Any = self.scenarios[message["scenario"]](self.env, **message["args"])
                if isinstance(result, Generator):
                    self.runs[run] = result
                    return {"started": True}
                return {"done": True, "value": result}
            if message["op"] == "step":
                try:
                    return {"value": next(self.runs[run])}
                except StopIteration as stop:
                    del self.runs[run]
                    return {"done": True, "value": stop.value}
            self.runs.pop(run).close()
            return {"done": True, "value": None}
        except BaseException as error:
            self.runs.pop(run, None)
            return {"error": describe_error(error, self.solution_path)}

    def finish(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Wait for the device, and add what the guard has seen."""
        if self.device == "cuda":
            torch.cuda.synchronize()  # a result that is only queued is not a result
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        patched = self.clocks.patched()
        if patched:
            reply["patched"] = patched
        violations = self.guard.found() if self.guard else []
        if violations:
            reply["violations"] = violations[:5]
        return reply

    def serve(self) -> None:
        """Answer until the judge is gone."""
        self.channel.send({"ready": True})  # whatever ends this process from here on: the solution
        message = self.channel.receive()
        self.reply(message, self.load(message))
        while True:
            message = self.channel.receive()
            self.reply(message, self.answer(message))

    def reply(self, message: dict[str, Any], reply: dict[str, Any]) -> None:
        """Send a reply; a value that cannot be sent becomes the solution's error."""
        token = {"token": message["token"]}
        try:
            self.channel.send(self.finish(reply) | token)
        except ChannelClosed:
            raise
        except BaseException as error:
            self.channel.send({"error": describe_error(error, self.solution_path)} | token)


def die_with_parent(parent: int) -> None:
    """End this process when the judge's ends, even inside a solution's endless loop."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def keep_to_oneself(channel: Channel) -> None:
    """See to it that only this process holds the channel: not its forks, not its subprocesses.

    A fork would answer beside it; and while somebody else holds the channel open, the judge does
    not see this process end.
    """
    for fd in (channel.read_fd, channel.write_fd):
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=channel.close)


def main() -> None:
    """Read what to load, load it, and answer."""
    read_fd, write_fd, parent = (int(word) for word in sys.argv[1:4])
    die_with_parent(parent)
    channel = Channel(read_fd, write_fd)
    keep_to_oneself(channel)
    try:
        Worker(channel).serve()
    except (ChannelClosed, BadFrame):
        os._exit(0)  # the judge is done with us


if __name__ == "__main__":
    main()
