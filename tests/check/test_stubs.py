"""Stubs: what is taken out, what stays, and that the committed ones are current."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from course.check.stubs import BadRegions, make_stub, without_markers
from course.dev import stubs as dev_stubs
from course.study.workspace import stub_source
from course.syllabus import Stage, load_syllabus
from course.types import Request, Sequence
from toy_course import ToyCourse

STAGES = load_syllabus().published
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)
RAISE = 'raise NotImplementedError("your code goes here")'

REFERENCE = '''
"""A part."""

import math

# solution: begin
_TABLE = [1, 2, 3]


def _helper():
    return _TABLE
# solution: end


class Part:
    """A class."""

    def __init__(self, size: int) -> None:
        """With a size."""
        self.size = size
        # solution: begin
        self.rest = _helper()
        # solution: end

    # solution: begin
    def _own(self):
        return self.rest

    # solution: end
    def get(self) -> int:
        """Something.

        Raises:
            ValueError: never.
        """
        if self.size:
            # solution: begin
            return self._own()[0]
            # solution: end
        return 0
'''

STUB = f'''
"""A part."""

import math


class Part:
    """A class."""

    def __init__(self, size: int) -> None:
        """With a size."""
        self.size = size
        {RAISE}

    def get(self) -> int:
        """Something.

        Raises:
            ValueError: never.
        """
        if self.size:
            {RAISE}
        return 0
'''


def test_regions() -> None:
    assert make_stub(REFERENCE).split() == STUB.split()
    assert "\n\n\n\n" not in make_stub(REFERENCE)
    assert make_stub(REFERENCE).endswith("return 0\n")
    compile(make_stub(REFERENCE), "stub.py", "exec")


def test_markers_go_and_the_solution_stays() -> None:
    text = without_markers(REFERENCE)
    assert "solution:" not in text
    assert "return self._own()[0]" in text
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(REFERENCE))


BEGIN, END = "# solution: begin", "# solution: end"
BAD = {
    "none": "def f():\n    return 1\n",
    "no end": f"def f():\n    {BEGIN}\n    return 1\n",
    "no begin": f"def f():\n    return 1\n    {END}\n",
    "nested": f"def f():\n    {BEGIN}\n    x = 1\n    {BEGIN}\n    return x\n    {END}\n",
    "end first": f"def f():\n    {END}\n    return 1\n    {BEGIN}\n",
    "two ends": f"def f():\n    {BEGIN}\n    return 1\n    {END}\n    {END}\n",
    "no space": f"def f():\n    #solution: begin\n    return 1\n    {END}\n",
    "no colon": f"def f():\n    # solution begin\n    return 1\n    {END}\n",
    "capitals": f"def f():\n    # Solution: Begin\n    return 1\n    {END}\n",
    "behind code": f"def f():  {BEGIN}\n    return 1\n    {END}\n",
    "with more behind": f"def f():\n    {BEGIN} here\n    return 1\n    {END}\n",
    "no Python": f"def f(:\n    {BEGIN}\n    return 1\n    {END}\n",
    "nothing left of a class": f"class A:\n    {BEGIN}\n    x = 1\n    {END}\n",
    "only half a statement": f"def f():\n    x = [\n    {BEGIN}\n    1]\n    {END}\n    return x\n",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_bad_regions(source: str) -> None:
    with pytest.raises(BadRegions):
        make_stub(source)


def test_a_solution_that_only_mentions_it_is_no_marker() -> None:
    source = f"def f():\n    {BEGIN}\n    return 1  # the solution begins here\n    {END}\n"
    assert make_stub(source) == f"def f():\n    {RAISE}\n"


# -- the committed ones ---------------------------------------------------------------------------


def committed(stage: Stage) -> str:
    """The stub in git: the file itself may be worked in."""
    name = stage.file.relative_to(stage.file.parents[2]).as_posix()
    home = stage.file.parents[2]
    done = subprocess.run(["git", "-C", str(home), "show", f"HEAD:{name}"], capture_output=True)
    if done.returncode:
        return stage.file.read_text(encoding="utf-8")
    return done.stdout.decode()


@each_stage
def test_the_committed_stub_is_the_one_that_the_reference_makes(stage: Stage) -> None:
    assert committed(stage) == stub_source(stage)


DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_of(source: str, path: Path) -> ModuleType:
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        del sys.modules[path.stem]
    return module


def functions(module: ModuleType) -> dict[str, Any]:
    """Functions and methods that the module itself defines."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            found[name] = value
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            for inner, method in vars(value).items():
                if isinstance(method, property):
                    method = method.fget
                if isinstance(method, FunctionType) and method.__globals__ is vars(module):
                    found[f"{name}.{inner}"] = method
    return found


def signature(function: Any) -> str:
    """As it is written: a default that is a function of the module is another object in each."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))


@each_stage
def test_stub_and_reference_have_the_same_surface(stage: Stage) -> None:
    """The same signatures and docstrings: they are the contract."""
    stub = functions(module_of(stub_source(stage), stage.file))
    reference = functions(module_of(stage.reference.read_text("utf-8"), stage.reference))
    for name, function in stub.items():
        other = reference[name]
        assert signature(function) == signature(other), name
        assert function.__doc__ == other.__doc__, name
        if not name.split(".")[-1].startswith("_"):
            assert function.__doc__, name
    public = {name for name in reference if not name.split(".")[-1].startswith("_")}
    assert public <= set(stub)
    for name in stage.builds:
        assert any(found.split(".")[0] == name for found in stub), name


@each_stage
def test_every_region_becomes_one_raise_and_nothing_is_given_away(stage: Stage) -> None:
    source = stage.reference.read_text("utf-8")
    stub = stub_source(stage)
    assert "solution:" not in stub
    tree = ast.parse(stub)
    raising = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, DEFS)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Raise) and "NotImplementedError" in ast.unparse(inner)
    }
    assert raising
    for name in stage.builds:
        found = next(n for n in tree.body if getattr(n, "name", None) == name)
        assert raising & {n.name for n in ast.walk(found) if isinstance(n, DEFS)}, name
    inside = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DEFS)
    ]  # a region between the methods of a class leaves no trace
    assert stub.count("raise NotImplementedError(") == sum(
        line.strip() == BEGIN and any(number in function for function in inside)
        for number, line in enumerate(source.splitlines(), start=1)
    )


@each_stage
def test_what_a_stub_builds_raises_when_it_is_used(stage: Stage) -> None:
    """Not at import, and not silently: with arguments that are right."""
    import torch

    from course.model import load

    module = module_of(stub_source(stage), stage.file)
    model = load("nano").model
    arguments: dict[str, Any] = {
        "model": model, "config": model.config, "prompt_ids": [1, 2], "max_new_tokens": 2,
        "capacity": 4, "device": torch.device("cpu"), "dtype": torch.float32,
        "cache_bytes": 1 << 20, "bytes_per_value": 2, "batch_size": 1, "context_len": 1,
        "bandwidth": 1e9, "flops": 1e9, "memory_bytes": 1e9, "weight_bytes": 1e6,
        "prompts": [[1, 2]], "starts": torch.zeros(1, dtype=torch.int64), "counts": [1],
        "sequences": [Sequence(Request("r", (1,)), [1])], "block_table": [0, 1], "pairs": [],
        "q": torch.zeros(1, 1, 16), "keys": torch.zeros(1, 1, 1, 16),
        "values": torch.zeros(1, 1, 1, 16), "context_lens": torch.ones(1, dtype=torch.int32),
        "arrivals": [0.0], "requests": [], "timelines": [], "buckets": [1],
        "weight": torch.zeros(2, 32), "group_size": 32, "request": Request("r", (1,)),
    }  # fmt: skip
    if stage.slug == "load_harness":  # percentile's are numbers
        arguments |= {"q": 50.0, "values": [1.0]}
    if stage.slug == "weight_quantization":
        arguments |= {"x": torch.zeros(1, 32), "values": torch.zeros(2, 32, dtype=torch.int8)}

    def called(function: Any) -> Any:
        """With an argument for each parameter that has no default."""
        parameters = inspect.signature(function).parameters.values()
        needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        return function(**{name: arguments.get(name, 1) for name in needed})

    def use(built: Any) -> None:
        """Step through what a function gives; call what an object does: making it may be given."""
        made = called(built)
        if inspect.iscoroutine(made):
            asyncio.run(made)
        elif not inspect.isclass(built):
            list(made)
        for method in vars(built):
            found = None if method.startswith("_") else getattr(made, method)
            if callable(found):  # what is given as a property is a value
                called(found)

    for name in stage.builds:
        with pytest.raises(NotImplementedError, match="your code goes here"):
            use(getattr(module, name))


# -- course dev stubs -----------------------------------------------------------------------------


def git(toy: ToyCourse, *arguments: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", "-C", str(toy.home), *who, *arguments], check=True, capture_output=True)


def change(toy: ToyCourse) -> None:
    toy.reference.write_text(toy.reference.read_text().replace('"""The toy."""', '"""A toy."""'))


def test_current_stubs_are_let_alone(toy: ToyCourse) -> None:
    assert dev_stubs.refresh(write=True) == []
    assert dev_stubs.refresh(write=False) == []


def test_stale_stubs_are_named_and_made(toy: ToyCourse) -> None:
    git(toy, "init")
    git(toy, "add", "-A")
    git(toy, "commit", "-m", "all")
    change(toy)
    [line] = dev_stubs.refresh(write=False)
    assert line.startswith("stages/stage_01_toy/toy.py is not")
    assert '"""The toy."""' in toy.mine.read_text()
    assert dev_stubs.refresh(write=True) == ["stages/stage_01_toy/toy.py made"]
    assert '"""A toy."""' in toy.mine.read_text()
    assert dev_stubs.refresh(write=False) == []
    assert not list(toy.mine.parent.glob("*.bak"))


@pytest.mark.parametrize("with_git", [True, False])
def test_work_is_never_lost(toy: ToyCourse, with_git: bool) -> None:
    """Even work that left the `raise` in its place."""
    if with_git:
        git(toy, "init")
        git(toy, "add", "-A")
        git(toy, "commit", "-m", "all")
    mine = toy.mine.read_text().replace("    raise Not", "    twice = number * 2\n    raise Not")
    toy.mine.write_text(mine)
    change(toy)
    [line] = dev_stubs.refresh(write=True)
    [backup] = toy.mine.parent.glob("*.bak")
    assert backup.read_text() == mine
    assert str(backup) in line
    assert '"""A toy."""' in toy.mine.read_text()


def test_a_missing_stub_is_made(toy: ToyCourse) -> None:
    toy.mine.unlink()
    assert dev_stubs.refresh(write=True) == ["stages/stage_01_toy/toy.py made"]
    assert toy.mine.read_text() == make_stub(toy.reference.read_text())
