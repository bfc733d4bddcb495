"""`from course.parts import KVCache`: where a part comes from, and what may not be taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from course import parts
from course.parts import Binding, bind, load_part
from course.syllabus import load_syllabus
from toy_course import ToyCourse


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = set(sys.modules)
    yield
    bind(Binding())
    for name in set(sys.modules) - before:
        if name.startswith("course_parts."):
            del sys.modules[name]


def test_a_part_comes_from_the_reference(toy: ToyCourse) -> None:
    toy.solve(double="0")
    from course.parts import double

    assert double(21) == 42
    assert parts.double is double  # loaded once
    assert sys.modules["course_parts.stage_01_toy"].__file__ == str(toy.reference)


def test_a_part_of_ones_own(toy: ToyCourse) -> None:
    toy.solve(double="1000 * number")
    bind(Binding(mine=frozenset({1})))
    assert parts.double(2) == 2000
    assert sys.modules["course_parts.stage_01_toy"].__file__ == str(toy.mine)


def test_parts_of_the_stages_before_only(toy: ToyCourse) -> None:
    stage = load_syllabus().find(1)
    bind(Binding(before=1))
    with pytest.raises(ImportError, match="stage 01 only the stages before it"):
        load_part(stage)
    with pytest.raises(ImportError):
        _ = parts.double
    bind(Binding(before=2))
    assert load_part(stage).double(2) == 4
    bind(Binding(before=1))
    with pytest.raises(ImportError):  # though it is loaded by now
        load_part(stage)


def test_what_nobody_builds(toy: ToyCourse) -> None:
    with pytest.raises(AttributeError, match="no stage builds 'Nonsense'"):
        _ = parts.Nonsense
    with pytest.raises(ImportError):
        exec("from course.parts import Nonsense")
    with pytest.raises(AttributeError):
        _ = parts._private
    assert not hasattr(parts, "__path__")


def test_what_can_be_taken_is_listed(toy: ToyCourse) -> None:
    assert dir(parts) == ["double"]


def test_a_part_that_does_not_load_leaves_nothing_behind(toy: ToyCourse) -> None:
    good = toy.reference.read_text()
    toy.reference.write_text("raise KeyError('half way')\n")
    for _ in range(2):
        with pytest.raises(KeyError, match="half way"):
            _ = parts.double
    toy.reference.write_text(good)
    assert parts.double(1) == 2


def test_a_part_that_is_not_there(toy: ToyCourse) -> None:
    toy.mine.unlink()
    bind(Binding(mine=frozenset({1})))
    with pytest.raises(ImportError, match="does not exist"):
        _ = parts.double


def test_a_name_that_is_built_twice() -> None:
    """The newest stage gives it, of those that this process may use."""
    for before, folder in ((2, "stage_01_naive_loop"), (3, "stage_02_kv_cache")):
        bind(Binding(before=before))
        assert parts.generate.__module__ == f"course_parts.{folder}"
    bind(Binding(before=1))
    with pytest.raises(ImportError, match="only the stages before it"):
        _ = parts.generate


def test_the_real_parts() -> None:
    from course.parts import KVCache, generate

    assert KVCache.__module__ == "course_parts.stage_02_kv_cache"
    assert generate.__module__ == "course_parts.stage_02_kv_cache"


def test_looking_costs_nothing() -> None:
    """`import course.parts` loads no part, and neither torch."""
    code = "import sys, course.parts; assert 'torch' not in sys.modules; dir(course.parts); "
    code += "assert not [n for n in sys.modules if n.startswith('course_parts')]"
    subprocess.run([sys.executable, "-c", code], check=True)
