"""What a solution may not reach, and what it may: refused by name and by path, and nothing more."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from check.workers import Workshop
from course.check.codes import Code
from course.check.guard import Clocks
from course.paths import course_home

IMPORTS = {
    "import": "import course.check.oracle",
    "import from": "from course.check import oracle",
    "import of the judge": "import course.check",
    "import of the kit": "from course.measure.ratio import PairedRatio",
    "import of the commands": "import course.cli",
    "import of the syllabus": "from course.syllabus import load_syllabus",
    "importlib": "import importlib; importlib.import_module('course.check.oracle')",
    "__import__": "__import__('course.check.oracle')",
    "find_spec": "import importlib.util; importlib.util.find_spec('course.measure.clock')",
    "pkgutil": "import pkgutil; pkgutil.resolve_name('course.check.oracle:nano_oracle')",
    "runpy": "import runpy; runpy.run_module('course.check.oracle')",
    "mock": "from unittest import mock; mock.patch('course.measure.clock.now').start()",
    "exec": "exec('import course.check.oracle')",
    "a file name with importlib": "exec(compile('import course.check.oracle', '/importlib/x', "
    "'exec'))",
    "gates by name": "import sys; sys.path.insert(0, HOME); import gates.scenarios.scenes",
    "reference by name": "import sys; sys.path.insert(0, HOME); import reference.stage_02_two.two",
    "a swallowed refusal": "try: import course.check.oracle\nexcept Exception: pass",
    "a swallowed everything": "try: import course.measure.ratio\nexcept BaseException: pass",
    "in a thread": "import threading\ndef run():\n    import course.check.oracle\n"
    "t = threading.Thread(target=run); t.start(); t.join()",
    "after taking the guard down": "import sys; sys.meta_path.pop(0)",
    "an emptied meta_path": "import sys; sys.meta_path[:] = sys.meta_path[1:]",
}

FILES = {
    "open": "open(SECRET).read()",
    "open as bytes": "open(SECRET.encode(), 'rb').read()",
    "open for writing": "open(SECRET, 'a')",
    "exec(open())": "exec(open(SECRET).read())",
    "os.open": "import os; os.open(SECRET, os.O_RDONLY)",
    "os.open of a Path": "import os, pathlib; os.open(pathlib.Path(SECRET), os.O_RDONLY)",
    "pathlib": "import pathlib; pathlib.Path(SECRET).read_text()",
    "io.open_code": "import io; io.open_code(SECRET)",
    "io.FileIO": "import io; io.FileIO(SECRET)",
    "codecs": "import codecs; codecs.open(SECRET)",
    "tokenize": "import tokenize; tokenize.open(SECRET)",
    "linecache": "import linecache; linecache.getlines(SECRET)\n",
    "fileinput": "import fileinput; list(fileinput.input(SECRET))",
    "shutil": "import shutil; shutil.copy(SECRET, '/dev/null')",
    "runpy": "import runpy; runpy.run_path(SECRET)",
    "spec_from_file_location": "import importlib.util as u\n"
    "s = u.spec_from_file_location('other', SECRET)\n"
    "m = u.module_from_spec(s); s.loader.exec_module(m)",
    "SourceFileLoader": "import importlib.machinery as m\n"
    "m.SourceFileLoader('other', SECRET).load_module()",
    "sys.path": "import os, sys; sys.path.insert(0, os.path.dirname(SECRET)); import two",
    "a way round": "import os; d, n = os.path.split(SECRET); open(d + '/../stage_02_two/' + n)",
    "a change of folder": "import os; os.chdir(os.path.dirname(SECRET)); open('two.py')",
    "a symbolic link": "import os; os.symlink(os.path.dirname(SECRET), HERE + '/l'); "
    "open(HERE + '/l/two.py')",
    "a link made before": "open(HERE + '/before/two.py')",
    "a hard link": "import os; os.link(SECRET, HERE + '/hard'); open(HERE + '/hard')",
    "relative to an open folder": "import os; fd = os.open(os.path.dirname(SECRET), os.O_RDONLY)\n"
    "os.open('two.py', os.O_RDONLY, dir_fd=fd)",
    "another program": "import subprocess; subprocess.run(['cat', SECRET])",
    "another program, in its folder": "import os, subprocess\n"
    "subprocess.run(['cat', 'two.py'], cwd=os.path.dirname(SECRET) + '/')",
    "a shell": "import os; os.system('cat ' + SECRET)",
    "numpy": "import numpy; numpy.fromfile(SECRET)",
    "torch.load": "import torch; torch.load(SECRET)",
    "a gate": "open(HOME + '/gates/scenarios/scenes.py')",
    "a swallowed refusal": "try: open(SECRET)\nexcept OSError: pass",
    "in a fork": "import os\nif os.fork() == 0:\n    try: open(SECRET); os._exit(0)\n"
    "    except BaseException: os._exit(7)\n"
    "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0",
}


def with_names(workshop: Workshop, body: str) -> str:
    home = workshop.folder
    names = {"SECRET": home / "reference/stage_02_two/two.py", "HOME": home, "HERE": home / "work"}
    lines = [f"{name} = {str(path)!r}" for name, path in names.items()]
    return "\n".join([*lines, body, "def f(): return 'ran'"])


@pytest.mark.parametrize("body", IMPORTS.values(), ids=IMPORTS.keys())
def test_forbidden_modules(workshop: Workshop, body: str) -> None:
    workshop.failure(with_names(workshop, body), Code.FORBIDDEN_IMPORT)


@pytest.mark.parametrize("name", FILES)
def test_forbidden_files(workshop: Workshop, name: str) -> None:
    (workshop.folder / "work" / "before").symlink_to(workshop.folder / "reference/stage_02_two")
    # A fork is refused like its parent, but what it is refused is not reported.
    code = Code.LOAD_ERROR if name == "in a fork" else Code.FORBIDDEN_IMPORT
    workshop.failure(with_names(workshop, FILES[name]), code)


def test_when_it_is_called_and_not_only_when_it_is_loaded(workshop: Workshop) -> None:
    swallowed = """
    def f():
        try: import course.check.oracle
        except ImportError: pass
        return 1
    """
    failure = workshop.failure(swallowed, Code.FORBIDDEN_IMPORT)
    assert failure.got == "import course.check (line 3)"
    raised = "def f():\n    from course.measure import ratio"
    failure = workshop.failure(raised, Code.FORBIDDEN_IMPORT)
    assert failure.got == "import course.measure (line 2)"


def test_the_message_names_the_file(workshop: Workshop) -> None:
    failure = workshop.failure(with_names(workshop, "open(SECRET)"), Code.FORBIDDEN_IMPORT)
    assert "stage_02_two/two.py" in failure.got
    assert "course.parts" in failure.expected


def test_a_trusted_solution_is_not_watched(workshop: Workshop) -> None:
    host = workshop.start("import course.check.codes\ndef f(): return 'ran'", trusted=True)
    assert host.call("call", name="f") == "ran"


def test_clocks() -> None:
    clocks = Clocks()
    assert clocks.patched() == []


PATCHES = {
    "perf_counter": "import time; time.perf_counter = lambda: 0.0",
    "time": "import time; time.time = lambda: 0.0",
    "a wrapped clock": "import time; real = time.monotonic; time.monotonic = lambda: real() / 2",
    "a clock taken away": "import time; del time.perf_counter_ns",
    "a CUDA event": "import torch; torch.cuda.Event = object",
    "synchronize": "import torch; torch.cuda.synchronize = lambda *a: None",
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES.keys())
def test_a_patched_clock(workshop: Workshop, patch: str) -> None:
    workshop.failure(patch + "\ndef f(): return 1", Code.CLOCK_PATCHED)
    later = f"def f():\n    {patch}\n    return 1"
    failure = workshop.failure(later, Code.CLOCK_PATCHED)
    assert failure.got


# -- what is honest -------------------------------------------------------------------------------

HONEST = {
    "an optional library": """
        try:
            import flash_attn
        except ImportError:
            flash_attn = None
    """,
    "an optional part of a library": """
        try:
            from torch.nn.attention import something_new
        except ImportError:
            something_new = None
    """,
    "asking whether a library is there": """
        import importlib.util
        HAS = importlib.util.find_spec("xformers") is not None
        HAS = importlib.util.find_spec("course.model") is not None
    """,
    "its own data": """
        from pathlib import Path
        TEXT = (Path(__file__).parent / "table.txt").read_text()
        assert TEXT == "1 2 3"
    """,
    "a scratch file": """
        import tempfile
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    """,
    "its own neighbour": """
        import sys
        from pathlib import Path
        sys.path.insert(0, str(Path(__file__).parent))
        import my_helpers
        assert my_helpers.TWO == 2
    """,
    "the model's modules, late": """
        def g():
            from course.model.attention import causal_attention
            from course.model import load, catalogue
            import course.model.tokenizer as tokenizer
            assert load("nano").config.num_layers == 3
            assert catalogue()
    """,
    "types and the package": """
        import course
        import course.types
        from course.types import Request, SamplingParams
        from course import types as words
        assert words.Request is Request
    """,
    "the part of an earlier stage": """
        def g():
            from course.parts import generate
            import course.parts
            assert callable(generate)
    """,
    "dataclasses and typing": """
        from __future__ import annotations
        import dataclasses, typing, enum, functools
        @dataclasses.dataclass(frozen=True, slots=True)
        class Block:
            number: int
            owners: list[int] = dataclasses.field(default_factory=list)
        class Kind(enum.Enum):
            A = 1
        assert typing.get_type_hints(Block)["number"] is int
        assert dataclasses.replace(Block(1), number=2).number == 2
    """,
    "logging and warnings": """
        import logging, warnings
        logging.basicConfig(level=logging.DEBUG)
        def g():
            logging.getLogger(__name__).info("step %d", 1)
            logging.getLogger(__name__).info("where", stack_info=True)
            warnings.warn("careful")
            try:
                1 / 0
            except ZeroDivisionError:
                logging.exception("caught")
    """,
    "tracebacks and the stack": """
        import inspect, traceback
        def g():
            try:
                {}["nothing"]
            except KeyError:
                traceback.print_exc()
            traceback.print_stack()
            inspect.stack()
            inspect.currentframe()
            assert "def g" in inspect.getsource(g)
            assert inspect.signature(g).parameters == {}
    """,
    "copies and pickles": """
        import copy, pickle
        class State:
            pass
        def g():
            copy.deepcopy(State())
            assert isinstance(pickle.loads(pickle.dumps(State())), State)
    """,
    "threads, processes and programs": """
        import concurrent.futures, multiprocessing, subprocess, sys
        def g():
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                assert list(pool.map(abs, [-1, -2])) == [1, 2]
            assert subprocess.run(["true"]).returncode == 0
            assert multiprocessing.current_process().name
    """,
    "reading a clock": """
        import time, torch
        from time import perf_counter
        start = perf_counter()
        time.sleep(0)
        clock = time.perf_counter
    """,
    "a main guard": """
        if __name__ == "__main__":
            raise RuntimeError("nobody runs this as a program")
    """,
    "torch at large": """
        import torch, numpy
        import torch.nn.functional as F
        import torch.utils.benchmark
        def g():
            with torch.inference_mode():
                F.softmax(torch.zeros(3), -1)
            torch.manual_seed(0)
            assert numpy.zeros(2).sum() == 0
    """,
    "names that only sound forbidden": """
        gates = reference = check = 3
        PATH = "/tmp/reference.txt"
        open("/dev/null").close()
        class reference: pass
    """,
}


@pytest.mark.parametrize("body", HONEST.values(), ids=HONEST.keys())
def test_honest_solutions_are_let_alone(workshop: Workshop, body: str) -> None:
    workshop.write("1 2 3", "table.txt")
    workshop.write("TWO = 2\n", "my_helpers.py")
    source = textwrap.dedent(body) + "\ndef f():\n    globals().get('g', int)()\n    return 'ran'\n"
    assert workshop.start(source).call("call", name="f") == "ran"


def test_parts_of_earlier_stages_only(workshop: Workshop) -> None:
    source = "def f():\n    from course.parts import {}\n    return 1"
    assert workshop.call(source.format("generate")) == 1
    failure = workshop.failure("from course.parts import KVCache", Code.LOAD_ERROR)
    assert "stages before it" in failure.message


def test_the_real_references_are_closed(workshop: Workshop) -> None:
    """With the paths that a gate forbids."""
    from course.check.host import WorkerConfig, WorkerHost, forbidden_paths
    from course.syllabus import load_syllabus

    stages = load_syllabus().stages
    closed = forbidden_paths(2, [stage.folder for stage in stages])
    assert course_home() / "gates" in closed
    assert stages[1].reference.parent in closed
    assert stages[19].reference.parent in closed
    assert stages[0].reference.parent not in closed
    for path, code in (
        (stages[1].reference, "FORBIDDEN_IMPORT"), (stages[0].reference, None),
        (Path(stages[0].gate), "FORBIDDEN_IMPORT"),
    ):  # fmt: skip
        solution = workshop.write(f"TEXT = open({str(path)!r}).read()")
        config = WorkerConfig(solution, workshop.scenarios, 2, (), closed)
        host = WorkerHost(config)
        workshop.hosts.append(host)
        try:
            host.wait_loaded()
            found = None
        except Exception as failure:
            found = str(failure).split(":")[0]
        assert found == code, path
