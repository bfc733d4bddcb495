"""Solutions written by tests, in real workers, behind a scenario that calls any function."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.host import Limits, WorkerConfig, WorkerHost
from course.check.processes import adopt_orphans, end_orphans, own_children

SCENARIOS = '''
"""What gates' scenarios do, for any function."""

def call(env, name, args=()):
    return getattr(env.solution, name)(*args)

def steps(env, name, args=()):
    yield from getattr(env.solution, name)(*args)

def model(env, name):
    return getattr(env.solution, name)(env.model("nano"))
'''


class Workshop:
    """Writes solutions into a folder and starts workers on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[WorkerHost] = []
        self.bystanders = own_children()
        adopt_orphans()
        (folder / "gates" / "scenarios").mkdir(parents=True)
        self.scenarios = folder / "gates" / "scenarios" / "scenes.py"
        self.scenarios.write_text(SCENARIOS)
        (folder / "reference" / "stage_02_two").mkdir(parents=True)
        (folder / "reference" / "stage_02_two" / "two.py").write_text("ANSWER = 42\n")
        (folder / "reference" / "stage_01_one").mkdir()
        (folder / "reference" / "stage_01_one" / "one.py").write_text("EARLIER = 41\n")
        (folder / "work").mkdir()

    def write(self, source: str | bytes, name: str = "solution.py") -> Path:
        path = self.folder / "work" / name
        if isinstance(source, str):
            source = textwrap.dedent(source).encode()
        path.write_bytes(source)
        return path

    def start(self, source: str | bytes | Path, **options: Any) -> WorkerHost:
        """A worker on this solution of stage 2, with short limits."""
        path = source if isinstance(source, Path) else self.write(source)
        limits = Limits(options.pop("seconds", 20.0), options.pop("memory_mb", 2000) << 20)
        config = WorkerConfig(
            solution=path,
            scenarios=self.scenarios,
            stage=2,
            builds=options.pop("builds", ()),
            forbidden=(self.folder / "reference" / "stage_02_two", self.folder / "gates"),
            limits=limits,
            **options,
        )
        host = WorkerHost(config)
        self.hosts.append(host)
        return host

    def call(self, source: str, name: str = "f", *args: Any, **options: Any) -> Any:
        """What a function of this solution returns."""
        return self.start(source, **options).call("call", name=name, args=list(args))

    def failure(self, source: str | bytes | Path, code: Code, **options: Any) -> GateFailure:
        """How loading this solution, or calling its `f` if it loads, fails."""
        host = self.start(source, **options)
        with pytest.raises(GateFailure) as caught:
            host.call("call", name="f")
        assert caught.value.code is code, caught.value
        return caught.value

    def close(self) -> list[str]:
        """End all workers; returns what they had started and left behind."""
        for host in self.hosts:
            host.close()
        self.hosts.clear()
        return end_orphans(self.bystanders)
