"""Each way in which a solution can end or misbehave, in real worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from check.workers import Workshop
from course.check import host as host_module
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.host import Limits
from course.check.processes import end_orphans, own_children, signal_name


def test_a_value_comes_back(workshop: Workshop) -> None:
    assert workshop.call("def f(): return [1, (2.5, None), {'a': b'x'}]") == [
        1, (2.5, None), {"a": b"x"},
    ]  # fmt: skip


# -- loading -------------------------------------------------------------------------------------

HARMLESS = "def f():\n    return 'ran'\n"

UNREADABLE = {
    "a bracket is missing": b"x = (1\n",
    "null bytes": b"x = 1\n\0\0\n",
    "latin-1 without saying so": "naïve = 'café'\n".encode("latin-1"),
    "latin-1 after the second line": b"\n\n\n# caf\xe9\n",
    "a coding that does not exist": b"# -*- coding: klingon -*-\n",
    "UTF-16": "x = 1\n".encode("utf-16"),
    "binary": bytes(range(256)),
    "return outside of a function": b"return 3\n",
}


@pytest.mark.parametrize("source", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_python_cannot_parse_is_a_syntax_error(workshop: Workshop, source: bytes) -> None:
    failure = workshop.failure(source, Code.SYNTAX_ERROR)
    assert failure.message


READABLE = {
    "a byte order mark": b"\xef\xbb\xbf" + HARMLESS.encode(),
    "carriage returns": HARMLESS.replace("\n", "\r\n").encode(),
    "latin-1 that says so": "# -*- coding: latin-1 -*-\nx = 'café'\n".encode("latin-1")
    + HARMLESS.encode(),
    "empty lines and comments": b"\n\n# hello\n" + HARMLESS.encode(),
}


@pytest.mark.parametrize("source", READABLE.values(), ids=READABLE.keys())
def test_what_python_can_parse_is_loaded(workshop: Workshop, source: bytes) -> None:
    assert workshop.start(source).call("call", name="f") == "ran"


def test_a_syntax_error_says_where(workshop: Workshop) -> None:
    failure = workshop.failure("x = 1\ny = = 2\n", Code.SYNTAX_ERROR)
    assert failure.where == "line 2: y = = 2"


def test_a_missing_file(workshop: Workshop) -> None:
    failure = workshop.failure(workshop.folder / "nowhere.py", Code.MISSING_FILE)
    assert "nowhere.py" in failure.message


def test_a_folder_is_no_file(workshop: Workshop) -> None:
    workshop.failure(workshop.folder, Code.MISSING_FILE)


def test_a_file_that_the_solution_misses_is_its_own_fault(workshop: Workshop) -> None:
    failure = workshop.failure("data = open('no-such-data')\n", Code.LOAD_ERROR)
    assert "no-such-data" in failure.message
    assert failure.where.startswith("line 1")
    assert failure.where.endswith(": data = open('no-such-data')")


def test_text_that_the_solution_cannot_read_is_its_own_fault(workshop: Workshop) -> None:
    workshop.failure(r"x = b'\xff'.decode()", Code.LOAD_ERROR)


def test_a_name_that_does_not_exist(workshop: Workshop) -> None:
    failure = workshop.failure("import os\nx = undefined_name\n", Code.LOAD_ERROR)
    assert "undefined_name" in failure.message
    assert failure.where.startswith("line 2")
    assert failure.where.endswith(": x = undefined_name")
    assert "NameError" in failure.detail


def test_names_that_are_missing(workshop: Workshop) -> None:
    failure = workshop.failure("a = 1", Code.MISSING_NAME, builds=("a", "generate", "KVCache"))
    assert "`generate`, `KVCache`" in failure.message
    assert "`a`" not in failure.message


def test_a_load_failure_is_said_again_and_at_once(workshop: Workshop) -> None:
    """Plain pytest goes on after the first failure, and asks for the same worker."""
    host = workshop.start("x = (")
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(GateFailure) as caught:
            host.start("call", name="f")
        assert caught.value.code is Code.SYNTAX_ERROR
    assert time.monotonic() - begin < 1


def test_a_loop_at_the_top_of_the_file(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "LOAD_SECONDS", 0.5)
    workshop.failure("while True: pass", Code.TIMEOUT)


# -- what a solution raises -----------------------------------------------------------------------

RAISED = {
    "a stub": ("raise NotImplementedError('your code goes here')", Code.NOT_IMPLEMENTED),
    "pytest.skip": ("import pytest; pytest.skip('not today')", Code.SKIPPED),
    "pytest.xfail": ("import pytest; pytest.xfail('known')", Code.SKIPPED),
    "unittest.SkipTest": ("import unittest; raise unittest.SkipTest('no')", Code.SKIPPED),
    "sys.exit": ("import sys; sys.exit()", Code.EXITED),
    "exit": ("raise SystemExit(0)", Code.EXITED),
    "MemoryError": ("raise MemoryError", Code.MEMORY_LIMIT),
    "a caught exit": ("import sys\ntry: sys.exit()\nfinally: pass", Code.EXITED),
}


@pytest.mark.parametrize(("source", "code"), RAISED.values(), ids=RAISED.keys())
def test_some_exceptions_mean_something(workshop: Workshop, source: str, code: Code) -> None:
    """When the file is loaded, and when a function is called."""
    failure = workshop.failure(source, code)
    assert failure.where.startswith("line")
    body = "\n".join("    " + line for line in source.splitlines())
    failure = workshop.failure(f"def f():\n{body}\n", code)
    assert failure.where.startswith("line")


ORDINARY = """
import torch

def value(): raise ValueError("bad \\x1b[31m \\ud800 number")
def key(): return {}["nothing"]
def interrupt(): raise KeyboardInterrupt("me")
def generator_exit(): raise GeneratorExit
def stop(): raise StopIteration(3)
def no_kernel(): return torch.zeros(3, device="meta").cpu()
def deep(n=0): return deep(n + 1)
def chained():
    try: key()
    except KeyError as error: raise ValueError("outer") from error
def noted():
    error = ValueError("with a note")
    error.__notes__ = ["a note", 7]
    raise error

class NoText(Exception):
    def __str__(self): raise SystemExit("from __str__")
    __repr__ = __str__
class WrongText(Exception):
    def __str__(self): return 7
class Text(str):
    def __getitem__(self, key): raise SystemExit
    def __str__(self): raise SystemExit
class OddText(Exception):
    def __str__(self): return Text("odd")
class Meta(type):
    def __getattribute__(cls, name): raise SystemExit
class OddClass(metaclass=Meta): pass
class NoRepr:
    def __repr__(self): raise SystemExit
    def __reduce__(self): raise SystemExit
    __str__ = __format__ = __hash__ = __eq__ = __bool__ = __len__ = __iter__ = __repr__
class LongRepr:
    def __repr__(self): return "x" * 10_000_000

def no_text(): raise NoText
def wrong_text(): raise WrongText
def odd_text(): raise OddText
def odd_values():
    yield NoRepr()
    yield OddClass()
    yield LongRepr()
    yield [NoRepr(), {NoRepr: 1}, {"a": NoRepr()}]
    yield Text("hidden")
    yield 10 ** 10_000
    nested = []
    nested.append(nested)
    yield nested
    yield lambda: None
    yield torch.zeros(3).to_sparse()
    yield "\\ud800"
    yield "still here"
def too_large(): return "x" * (17 << 20)
def after(): return "still here"
"""


def test_errors_come_with_their_type_and_place_and_end_nothing(workshop: Workshop) -> None:
    from course.check.replies import SolutionError

    host = workshop.start(ORDINARY)
    expected = {
        "value": "ValueError", "key": "KeyError", "interrupt": "KeyboardInterrupt",
        "generator_exit": "GeneratorExit", "stop": "StopIteration",
        "no_kernel": "NotImplementedError", "deep": "RecursionError", "chained": "ValueError",
        "noted": "ValueError", "no_text": "NoText", "wrong_text": "WrongText",
        "odd_text": "OddText", "too_large": "TooLarge",
    }  # fmt: skip
    for name, kind in expected.items():
        with pytest.raises(SolutionError) as caught:
            host.call("call", name=name)
        error = caught.value
        assert error.type == kind
        assert isinstance(error.message, str)
        assert isinstance(error.traceback, str)
        assert kind in error.bases
        if name != "too_large":
            assert error.where.startswith("line"), name
    assert host.call("call", name="after") == "still here"


def test_odd_values_arrive_as_descriptions_of_themselves(workshop: Workshop) -> None:
    from course.check.channel import Foreign

    host = workshop.start(ORDINARY)
    values = [step.value for step in host.start("steps", name="odd_values")]
    assert values[-1] == "still here"
    assert values[-2] == "\ud800"
    for value in (*values[:3], *values[4:6], *values[7:9]):
        assert isinstance(value, Foreign), value
        assert len(value.repr) <= 210
    assert values[4].type.endswith("Text")
    assert values[8].type.startswith("torch.Tensor (")


# -- ending ---------------------------------------------------------------------------------------

ENDINGS = {
    "os._exit": ("os._exit(0)", "exit status 0"),
    "os._exit with a status": ("os._exit(3)", "exit status 3"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "a signal without a name": ("os.kill(os.getpid(), 40)", "signal 40"),
    "a null pointer": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "closing every file": ("os.closerange(3, 200)", "exit status"),
}


@pytest.mark.parametrize(("source", "how"), ENDINGS.values(), ids=ENDINGS.keys())
def test_a_process_that_ends(workshop: Workshop, source: str, how: str) -> None:
    failure = workshop.failure(f"import os, signal\ndef f():\n    {source}\n", Code.EXITED)
    assert how in failure.message


def test_a_process_that_ends_while_it_is_loaded(workshop: Workshop) -> None:
    workshop.failure("import os\nprint('last words')\nos._exit(0)", Code.EXITED)
    host = workshop.start("import os, sys\nprint('last words', file=sys.stderr)\nos._exit(0)")
    with pytest.raises(GateFailure) as caught:
        host.wait_loaded()
    assert "last words" in caught.value.detail


def test_a_channel_that_is_closed_by_a_process_that_goes_on(workshop: Workshop) -> None:
    source = "import os, time\ndef f():\n    os.closerange(3, 200)\n    time.sleep(60)\n"
    begin = time.monotonic()
    failure = workshop.failure(source, Code.EXITED)
    assert "closed the channel" in failure.message
    assert time.monotonic() - begin < 15


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


def test_a_loop_that_never_ends(workshop: Workshop) -> None:
    host = workshop.start("def f():\n    print('round and round')\n    while True: pass")
    host.limits = Limits(seconds=0.5)
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="f")
    assert caught.value.code is Code.TIMEOUT
    assert "0.5 seconds" in caught.value.message
    assert "round and round" in caught.value.detail
    assert not host.alive


def test_native_code_that_never_ends(workshop: Workshop) -> None:
    """A regular expression that holds Python's lock: no thread of the worker can stop it."""
    host = workshop.start("import re\ndef f(): re.match('(a+)+b', 'a' * 60)")
    host.limits = Limits(seconds=0.5)
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="f")
    assert caught.value.code is Code.TIMEOUT


def test_a_message_that_nobody_takes(workshop: Workshop) -> None:
    """A reply that came too early leaves a solution busy, and the next message unread."""
    host = workshop.start("def f(x): return len(x)")
    assert host.call("call", name="f", args=["x" * 500_000]) == 500_000
    os.kill(host.process.pid, signal.SIGSTOP)
    host.limits = Limits(seconds=0.5)
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="f", args=["x" * 5_000_000])
    assert caught.value.code is Code.TIMEOUT


# -- memory ---------------------------------------------------------------------------------------

GROWS = """
import time
def hoard():
    kept = []
    while True:
        kept.append(bytearray(20 << 20)); kept[-1][::4096] = b"x" * len(kept[-1][::4096])
        time.sleep(0.005)
"""
IN = {
    "the process": "f = hoard",
    "a child": "import os\ndef f():\n    if os.fork() == 0: hoard()\n    os.wait()",
    "a thread": "import threading\ndef f():\n    t = threading.Thread(target=hoard)\n"
    "    t.start(); t.join()",
    "a program": "import subprocess, sys, inspect\ndef f():\n    subprocess.run([sys.executable, "
    "'-c', open(__file__).read().split('import subprocess')[0] + 'hoard()'])",
}  # fmt: skip


@pytest.mark.parametrize("source", IN.values(), ids=IN.keys())
def test_memory_that_grows(workshop: Workshop, source: str) -> None:
    failure = workshop.failure(GROWS + source, Code.MEMORY_LIMIT, memory_mb=700)
    assert "the limit is 700 MiB" in failure.message


def test_pages_that_children_share_are_counted_once(workshop: Workshop) -> None:
    """Forks of a process that has torch would each count as hundreds of megabytes."""
    source = """
    import os, time
    def f():
        for _ in range(6):
            if os.fork() == 0:
                time.sleep(0.6)
                os._exit(0)
        time.sleep(0.4)
        return "fine"
    """
    assert workshop.call(source, memory_mb=700) == "fine"


def test_printing_without_end(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "OUTPUT_LIMIT", 1 << 20)
    source = "def f():\n    while True: print('x' * 1000)"
    failure = workshop.failure(source, Code.MEMORY_LIMIT)
    assert "printed" in failure.message


# -- what is printed ------------------------------------------------------------------------------


def test_what_is_printed_is_kept_and_cut(workshop: Workshop) -> None:
    source = """
    import os, sys
    def f(text):
        print(text)
        print("to stderr", file=sys.stderr)
        os.write(1, b"\\xff raw \\n")
    """
    host = workshop.start(source)
    host.call("call", name="f", args=["hello"])
    assert host.output().split("\n") == ["hello", "to stderr", "\ufffd raw"]
    host.call("call", name="f", args=["y" * 5000])
    assert len(host.output()) <= host_module.OUTPUT_TAIL
    assert host.output().endswith("raw")


def test_reading_the_output_does_not_move_where_it_is_written(workshop: Workshop) -> None:
    """Both sides hold the same open file: a seek of one would move the other."""
    host = workshop.start("def f():\n    for i in range(20000): print(f'{i:05}')\n    return 1")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            host.output()

    reader = threading.Thread(target=look)
    reader.start()
    assert host.call("call", name="f") == 1
    stop.set()
    reader.join()
    size = os.fstat(host._output.fileno()).st_size
    assert os.pread(host._output.fileno(), size, 0) == b"".join(b"%05d\n" % i for i in range(20000))


def test_a_replaced_stdout_does_no_harm(workshop: Workshop) -> None:
    source = """
    import io, os, sys
    sys.stdout = sys.stderr = io.StringIO()
    class Broken:
        def write(self, text): raise OSError("no")
        def flush(self): raise OSError("no")
    def f():
        sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = Broken()
        os.close(0); os.close(1); os.close(2)
        return "fine"
    """
    assert workshop.call(source) == "fine"


# -- processes ------------------------------------------------------------------------------------


def living(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_nothing_survives(workshop: Workshop) -> None:
    """Children, daemons with a session of their own, and those who ignore signals."""
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
    import os, signal, subprocess, sys
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    def program(**options):
        subprocess.Popen([sys.executable, "-c", code, "{marker}"], **options)
    def f():
        program()
        program(start_new_session=True)
        os.system(f"'{{sys.executable}}' -c '{{code}}' {marker} &")
        if os.fork() == 0:  # a daemon, as it is in the book
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                program(start_new_session=True)
            os._exit(0)
        return "started"
    """
    host = workshop.start(source)
    assert host.call("call", name="f") == "started"
    deadline = time.monotonic() + 20
    while len(living(marker)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(living(marker)) == 4
    left = workshop.close()
    assert living(marker) == []
    assert left
    assert all("-c import signal" in name for name in left)


def test_what_ended_by_itself_is_nothing_left_behind(workshop: Workshop) -> None:
    source = """
    import subprocess
    def f():
        for _ in range(3): subprocess.Popen(["true"])
        if subprocess.os.fork() == 0: subprocess.os._exit(0)
        return "done"
    """
    host = workshop.start(source)
    assert host.call("call", name="f") == "done"
    deadline = time.monotonic() + 20
    while {psutil.Process(pid).status() for pid in host.tree()[1:]} - {psutil.STATUS_ZOMBIE}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert workshop.close() == []
    assert own_children() <= workshop.bystanders


def test_processes_that_were_there_before_are_let_alone(workshop: Workshop) -> None:
    import subprocess

    mine = subprocess.Popen(["sleep", "60"])
    try:
        assert end_orphans(own_children()) == []
        assert mine.poll() is None
        assert end_orphans(own_children() - {mine.pid}) == ["sleep 60"]
        assert mine.poll() is not None
    finally:
        mine.kill()


FORKS = """
import os, sys, threading, time, multiprocessing
def both():
    pid = os.fork()
    yield "parent" if pid else "child"
    yield "again"
def pool():
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as workers:
        return workers.map(abs, [-1, -2, -3])
def threads():
    def spin():
        while True: time.sleep(0.001)
    for _ in range(4): threading.Thread(target=spin).start()
    return "started"
def child_that_hangs():
    if os.fork() == 0: time.sleep(60)
    os._exit(5)
"""


def test_a_fork_is_not_a_second_worker(workshop: Workshop) -> None:
    host = workshop.start(FORKS)
    assert [step.value for step in host.start("steps", name="both")] == ["parent", "again"]
    assert host.call("call", name="pool") == [1, 2, 3]
    assert host.call("call", name="threads") == "started"
    assert [step.value for step in host.start("steps", name="both")] == ["parent", "again"]


def test_a_child_does_not_hide_the_end_of_its_parent(workshop: Workshop) -> None:
    host = workshop.start(FORKS)
    begin = time.monotonic()
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="child_that_hangs")
    assert caught.value.code is Code.EXITED
    assert "exit status 5" in caught.value.message
    assert time.monotonic() - begin < 15


def test_closing_twice_is_no_harm(workshop: Workshop) -> None:
    host = workshop.start(HARMLESS)
    assert host.call("call", name="f") == "ran"
    host.kill()
    assert not host.alive
    host.close()
    assert host.tree() == []
