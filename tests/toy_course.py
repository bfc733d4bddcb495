"""A whole course with one published stage that doubles numbers, so that its gate takes no time.

Everything that a stage has is there: reference, stub, gate in two halves, baseline, wrong
solutions, chapter, hints. Its times are told by the solution instead of measured, so that a test
decides how fast a solution is.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from course.check.stubs import make_stub

FILES = {
    "course.toml": """
        [[stage]]
        number = 1
        slug = "toy"
        title = "The toy"
        published = true
        because = "Numbers are too small."
        builds = ["double"]
        measures = "work done"
        numbers = ["work", "time"]
        predict = "How much work [in steps] is done?"
        predicts = "work"
        seconds = 20.0
        memory_mb = 2000

        [stage.bars.cpu]
        time = { at_least = 1.5 }

        [[stage]]
        number = 2
        slug = "second_toy"
        title = "The second toy"
        because = "One toy is not enough."
        needs = [1]
        """,
    "glossary.toml": """
        [[term]]
        name = "double"
        stage = 1
        aliases = ["twice"]
        text = "Two of [them]."

        [[term]]
        name = "work"
        stage = 1
        text = "What is done."
        """,
    "constraints.txt": "pytest>=1  # any\nno-such-package==1.0\n",
    "README.md": "# Toy\n\n<!-- table: stages -->\nstale\n<!-- end -->\n",
    "gates/conftest.py": """
        from course.check.plugin import pytest_addoption, pytest_configure  # noqa: F401
        """,
    "gates/test_stage_01_toy.py": '''
        """The judge."""
        import pytest
        from course.check import expect

        STAGE = 1


        def call(gate, name, *args):
            return expect.result_of(
                lambda: gate.candidate.call("call", name=name, args=list(args)), f"{name}{args}"
            )


        @pytest.mark.contract
        @pytest.mark.parametrize("size", [10, 1000])
        def test_doubles(gate, size):
            """double gives twice its argument"""
            x = gate.rng.randrange(1, size)
            expect.value(expect.is_int(call(gate, "double", x), "double"), 2 * x, f"double({x})")


        @pytest.mark.contract
        def test_bad_input(gate):
            """bad input gets an error that names the argument"""
            expect.rejects(lambda: gate.candidate.call("call", name="double", args=["x"]),
                           "number", "double('x')", kinds=["TypeError"])


        @pytest.mark.number
        def test_work(gate):
            """work, counted"""
            work = call(gate, "work")
            gate.exact("work", work, at_most=10, text=f"{work} of 10", unit=" steps")


        @pytest.mark.number
        def test_time(gate):
            """time against the baseline"""
            told = iter(call(gate, "seconds") * 200)
            gate.ratio("time", lambda: 1.0, lambda: next(told), text=lambda r: f"{r.median:.2f}x")
            gate.report("share", 0.5, "half of it")
        ''',
    "gates/scenarios/stage_01_toy.py": '''
        """The scenarios."""


        def call(env, name, args=()):
            return getattr(env.solution, name)(*args)
        ''',
    "gates/baseline/stage_01_toy.py": '''
        """A peer, with a contract of its own."""
        ''',
    "gates/wrong/stage_01_toy/too_much.py": """
        # WRONG_COUNT (control): right, but with more work
        def double(number):
            if type(number) is not int:
                raise TypeError("number must be an int")
            return 2 * number
        def work(): return 11
        def seconds(): return [0.5]
        """,
    "gates/wrong/stage_01_toy/slow.py": """
        # TOO_SLOW: right, and slow
        def double(number):
            if type(number) is not int:
                raise TypeError("number must be an int")
            return 2 * number
        def work(): return 5
        def seconds(): return [1.0]
        """,
    "gates/wrong/stage_01_toy/triples.py": """
        # WRONG_VALUE: three times instead of two
        def double(number): return 3 * number
        """,
    "gates/wrong/stage_01_toy/leaves.py": """
        # EXITED: leaves in the middle
        import os
        def double(number): os._exit(0)
        """,
    "reference/stage_01_toy/toy.py": '''
        """The toy."""

        import math


        def double(number: int) -> int:
            """Twice the number.

            Raises:
                TypeError: `number` is no int.
            """
            if type(number) is not int:
                raise TypeError("number must be an int")
            # solution: begin
            return 2 * number
            # solution: end


        # solution: begin
        def work():
            return 5


        def seconds():
            return [0.5]
        # solution: end
        ''',
    "stages/stage_01_toy/README.md": """
        # Stage 01: The toy

        Read `this` [1]. <details><summary>An answer</summary>It is 42.</details>
        """,
    "stages/stage_01_toy/hints.md": """
        # Hints

        ## Level 1: where to look

        Look at [the] number.

        ## Level 2: what to do

        Add it to itself.

        ## Level 3

        Write `2 * number`.
        """,
}


class ToyCourse:
    """The folder, and the solutions that a test puts into it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name, text in FILES.items():
            self.write(name, text)
        self.mine = home / "stages" / "stage_01_toy" / "toy.py"
        self.mine.write_text(make_stub(self.reference.read_text()))

    @property
    def reference(self) -> Path:
        return self.home / "reference" / "stage_01_toy" / "toy.py"

    @property
    def progress(self) -> Path:
        return self.home / ".course" / "progress.sqlite"

    def write(self, name: str, text: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    def solve(self, *, double: str = "2 * number", work: str = "5", seconds: str = "[0.5]") -> None:
        """Write a solution of the student's own."""
        self.mine.write_text(
            "def double(number):\n"
            "    if type(number) is not int:\n"
            "        raise TypeError('number must be an int')\n"
            f"    return {double}\n"
            f"def work(): return {work}\n"
            f"def seconds(): return {seconds}\n"
        )
