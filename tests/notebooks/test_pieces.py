"""What notebooks are made of: excerpts, guesses, lines, times, words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from course.measure.split import decode_work
from course.model.seeded import NANO
from course.notebook import Line, Prediction, Times, pass_work, take_turns
from course.notebook.prediction import grade
from course.notebook.prose import bytes_text, per_second, seconds_text, short
from course.notebook.source import excerpt

CODE = '''"""A module."""

import functools


@functools.cache
def double(x):
    """Twice x."""
    # solution: begin
    return 2 * x
    # solution: end


class Box:
    """Holds a thing."""

    def get(self):
        """The thing."""
        # why it is 1
        return 1

    def empty(self):
        """Nothing but words."""
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE, "utf-8")
    return path


class TestExcerpt:
    def test_a_function_without_docstring_and_markers(self, code: Path) -> None:
        assert excerpt(code, "double").text == "@functools.cache\ndef double(x):\n    return 2 * x"

    def test_a_docstring_can_be_kept(self, code: Path) -> None:
        assert '"""Twice x."""' in excerpt(code, "double", docstrings=True).text

    def test_a_method_is_moved_to_the_left_and_keeps_its_comments(self, code: Path) -> None:
        assert excerpt(code, "Box.get").text == ("def get(self):\n    # why it is 1\n    return 1")

    def test_a_body_of_words_only_is_kept(self, code: Path) -> None:
        assert "Nothing but words" in excerpt(code, "Box.empty").text

    def test_a_class(self, code: Path) -> None:
        compile(excerpt(code, "Box").text, "box", "exec")
        assert "Holds a thing" not in excerpt(code, "Box").text

    def test_an_unknown_name_lists_the_known_ones(self, code: Path) -> None:
        with pytest.raises(ValueError, match=r"'half' is not defined.*double, Box, Box\.get"):
            excerpt(code, "half")


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (100, "exact"),
        (105, "within a tenth (5.0% too high)"),
        (80, "close: 20% too low"),
        (250, "the right order: 2.50x too high"),
        (10, "off by a factor of 10.0, too low"),
    ],
)
def test_a_guess_is_graded(guess: float, words: str) -> None:
    assert grade(guess, 100) == words


@pytest.mark.parametrize("guess", [0, -1, float("nan")])
def test_a_guess_must_be_above_zero(guess: float) -> None:
    with pytest.raises(ValueError, match="guess must be above 0"):
        Prediction("how much?", guess)


def test_a_line_is_found_and_not_bent_by_one_bad_reading() -> None:
    points = {x: 3.0 + 0.5 * x for x in range(1, 8)}
    points[4] = 100.0
    line = Line.through(points)
    assert line.slope == pytest.approx(0.5)
    assert line.at(20) == pytest.approx(13.0)
    with pytest.raises(ValueError, match="points must be at least 2"):
        Line.through({1: 1.0})


def test_times_are_taken_in_turns_and_in_swapped_order() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    found = take_turns(steps, torch.device("cpu"), rounds=2, warmup=1)
    assert "".join(order) == "ababba"
    assert all(len(times.readings) == 2 for times in found.values())
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        take_turns(steps, torch.device("cpu"), rounds=0)


def test_times_know_their_middle() -> None:
    times = Times((1.0, 2.0, 3.0, 4.0, 100.0))
    assert times.median == 3.0
    assert times.spread == (2.0, 4.0)
    assert Times((1.0,)).spread == (1.0, 1.0)


def test_numbers_are_written_for_people() -> None:
    assert short(1234.6) == "1,235"
    assert short(0.012345) == "0.0123"
    assert short(0.0) == "0"
    assert seconds_text(0.0123) == "12.3 ms"
    assert seconds_text(2.5e-7) == "250 ns"
    assert bytes_text(46_080) == "46.1 kB"
    assert per_second(2.57e10, "B") == "25.7 GB/s"


def test_a_pass_over_one_row_is_a_decode_step_without_a_past() -> None:
    one = decode_work(NANO, [1], weight_itemsize=4, kv_itemsize=4)
    work = pass_work(NANO, 1, 4)
    assert work.flops == one.flops
    assert work.weight_bytes == one.weight_bytes


def test_the_head_is_paid_once_and_attention_for_every_pair() -> None:
    head = 2 * NANO.vocab_size * NANO.hidden_size
    pair = 4 * NANO.num_layers * NANO.num_heads * NANO.head_dim
    layers = pass_work(NANO, 1, 4).flops - head - pair
    assert pass_work(NANO, 5, 4).flops == 5 * layers + head + 15 * pair
    with pytest.raises(ValueError, match="rows must be at least 1"):
        pass_work(NANO, 0, 4)
