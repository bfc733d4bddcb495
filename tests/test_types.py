"""The words that every stage shares, and the arguments that every `generate` checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course.types import (
    FinishReason,
    OutOfBlocks,
    Output,
    Request,
    SamplingParams,
    Sequence,
    Timeline,
    check_generation,
    require_int,
    require_range,
)


def test_a_timeline_is_finished_when_the_whole_answer_came() -> None:
    timeline = Timeline(intended=1.0, sent=1.5)
    assert not timeline.finished
    timeline.ended = 2.0
    assert timeline.finished
    timeline.error = "HTTP 429"
    assert not timeline.finished
    assert Timeline(0.0, 0.0).chunks is not timeline.chunks


@dataclass
class Config:
    vocab_size: int = 10
    max_context: int = 6


CONFIG = Config()

BAD_PARAMS: list[tuple[str, Any, type[Exception]]] = [
    ("max_new_tokens", -1, ValueError), ("max_new_tokens", 2.5, TypeError),
    ("max_new_tokens", "5", TypeError), ("max_new_tokens", None, TypeError),
    ("max_new_tokens", True, TypeError),
    ("temperature", -0.1, ValueError), ("temperature", math.nan, ValueError),
    ("temperature", math.inf, ValueError), ("temperature", "hot", TypeError),
    ("top_k", -1, ValueError), ("top_k", 1.5, TypeError),
    ("top_p", 0.0, ValueError), ("top_p", 1.01, ValueError), ("top_p", -1, ValueError),
    ("top_p", math.nan, ValueError), ("top_p", None, TypeError),
    ("min_p", -0.1, ValueError), ("min_p", 1.1, ValueError), ("min_p", math.nan, ValueError),
    ("repetition_penalty", 0.0, ValueError), ("repetition_penalty", -1.0, ValueError),
    ("repetition_penalty", math.nan, ValueError), ("repetition_penalty", math.inf, ValueError),
    ("presence_penalty", math.nan, ValueError), ("frequency_penalty", -math.inf, ValueError),
    ("presence_penalty", "1", TypeError),
    ("logprobs", -1, ValueError), ("logprobs", 0.5, TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "kind"), BAD_PARAMS)
def test_bad_sampling_parameters_name_their_field(
    field: str, value: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=field):
        SamplingParams(**{field: value})


def test_good_sampling_parameters() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.7).greedy
    SamplingParams(
        max_new_tokens=0, temperature=2, top_k=1, top_p=1e-9, min_p=1, repetition_penalty=0.1,
        presence_penalty=-2, frequency_penalty=2, logprobs=20, seed=-3, stop=("a",),
    )  # fmt: skip
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 3  # type: ignore[misc]


def test_a_sequence_owns_its_tokens() -> None:
    request = Request("r1", (1, 2, 3), eos_ids=(9,))
    sequence = Sequence.of(request)
    sequence.tokens += [4, 5]
    assert request.prompt_ids == (1, 2, 3)
    assert sequence.num_prompt == 3
    assert sequence.output_ids == [4, 5]
    assert sequence.num_computed == 0
    assert not sequence.finished
    sequence.finish_reason = FinishReason.STOP
    assert sequence.finished
    other = Sequence.of(request)
    other.block_table.append(1)
    assert sequence.block_table == []
    assert other.tokens == [1, 2, 3]


def test_a_pool_that_is_too_small_says_by_how_much() -> None:
    error = OutOfBlocks(5, 4)
    assert str(error) == "5 blocks are needed, and 4 are free"
    assert (error.needed, error.free) == (5, 4)
    assert not isinstance(error, ValueError)  # nobody's argument was wrong


def test_reasons_are_the_words_of_the_api() -> None:
    assert f"{FinishReason.LENGTH}" == "length"
    assert Output("r1").finish_reason is None


# -- check_generation -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 100))
def test_how_many_tokens_may_come(prompt: list[int], wanted: int) -> None:
    """A prompt of n tokens can be continued by `max_context - n + 1`: the last is never fed."""
    allowed = check_generation(CONFIG, prompt, wanted, [9])
    assert allowed == min(wanted, 6 - len(prompt) + 1)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3)])
@pytest.mark.parametrize("eos_ids", [(), [9], {9}, frozenset({1, 2}), range(3)])
def test_any_sequence_and_any_collection(prompt: Any, eos_ids: Any) -> None:
    assert check_generation(CONFIG, prompt, 3, eos_ids) == 3


BAD_ARGUMENTS: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    ("prompt_ids", ([], 1), ValueError),
    ("prompt_ids", ([0] * 7, 1), ValueError),
    (r"prompt_ids\[1\]", ([0, 10], 1), ValueError),
    (r"prompt_ids\[0\]", ([-1], 1), ValueError),
    (r"prompt_ids\[0\]", ([1.0], 1), TypeError),
    (r"prompt_ids\[0\]", ([True], 1), TypeError),
    (r"prompt_ids\[0\]", ([None], 1), TypeError),
    (r"prompt_ids\[0\]", ("abc", 1), TypeError),
    (r"prompt_ids\[0\]", ([numpy.int64(1)], 1), TypeError),
    (r"prompt_ids\[0\]", ([torch.tensor(1)], 1), TypeError),
    (r"prompt_ids\[0\]", ([[1, 2]], 1), TypeError),
    ("prompt_ids", (torch.tensor([1, 2]), 1), TypeError),
    ("prompt_ids", ({1, 2}, 1), TypeError),
    ("prompt_ids", (iter([1]), 1), TypeError),
    ("prompt_ids", (None, 1), TypeError),
    ("max_new_tokens", ([1], -1), ValueError),
    ("max_new_tokens", ([1], 2.5), TypeError),
    ("max_new_tokens", ([1], "3"), TypeError),
    ("max_new_tokens", ([1], None), TypeError),
    ("max_new_tokens", ([1], True), TypeError),
    ("eos_ids", ([1], 1, [10]), ValueError),
    ("eos_ids", ([1], 1, [-1]), ValueError),
    ("eos_ids", ([1], 1, ["</s>"]), TypeError),
    ("eos_ids", ([1], 1, 5), TypeError),
    ("eos_ids", ([1], 1, None), TypeError),
]


@pytest.mark.parametrize(("names", "arguments", "kind"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(
    names: str, arguments: tuple[Any, ...], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^{names}"):
        check_generation(CONFIG, *arguments)


@pytest.mark.parametrize(
    ("prompt", "kind"), [([], ValueError), ([0] * 7, ValueError), (None, TypeError)]
)
def test_a_prompt_can_have_a_name_of_its_own(prompt: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^prompts\[3\] must"):
        check_generation(CONFIG, prompt, 1, name="prompts[3]")
    with pytest.raises(ValueError, match=r"^prompts\[3\]\[1\] must lie in 0\.\.9, got 10"):
        check_generation(CONFIG, [0, 10], 1, name="prompts[3]")
    with pytest.raises(ValueError, match=r"^eos_ids\[0\]"):
        check_generation(CONFIG, [0], 1, [10], name="prompts[3]")


def test_ranges_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="x must be at least 1, got 0"):
        require_range("x", 0, low=1)
    with pytest.raises(ValueError, match="x must be at most 1, got 2"):
        require_range("x", 2, high=1)
    with pytest.raises(ValueError, match="x must be between 1 and 2, got nan"):
        require_range("x", math.nan, low=1, high=2)
    with pytest.raises(TypeError, match="x must be a number, got str"):
        require_range("x", "1", low=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x must be an int, got float"):
        require_int("x", 1.0)
    require_range("x", 1, low=1, high=1)
    require_range("x", math.inf)
    require_int("x", -5)
