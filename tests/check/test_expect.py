"""The judge's comparisons: what passes, what fails with which code, and what the message says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from course.check import expect
from course.check.channel import Foreign
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.replies import SolutionError


def code_of(action: Callable[[], Any]) -> Code | None:
    try:
        action()
    except GateFailure as failure:
        return failure.code if failure.message else None
    return None


def an_error(kind: str = "ValueError", message: str = "no", *bases: str) -> SolutionError:
    return SolutionError(
        {
            "type": kind, "bases": [kind, *bases, "Exception", "object"], "message": message,
            "where": "line 3: raise", "traceback": "Traceback ...",
        }
    )  # fmt: skip


def raises(error: Exception) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def test_results_come_through_and_errors_become_crashes() -> None:
    assert expect.result_of(lambda: 5, "f()") == 5
    with pytest.raises(GateFailure) as caught:
        expect.result_of(raises(an_error("KeyError", "'x'")), "prefill of 7 tokens")
    assert caught.value.code is Code.CRASHED
    assert caught.value.message == "prefill of 7 tokens raised KeyError: 'x'"
    assert caught.value.where == "line 3: raise"
    assert caught.value.detail
    with pytest.raises(GateFailure) as caught:  # a failure is not a crash
        expect.result_of(raises(GateFailure(Code.TIMEOUT, "late")), "f()")
    assert caught.value.code is Code.TIMEOUT


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1], Foreign("numpy.int64", "3")])
def test_what_is_no_int(value: Any) -> None:
    with pytest.raises(GateFailure) as caught:
        expect.is_int(value, "token 0")
    assert caught.value.code is Code.WRONG_TYPE
    assert "token 0" in caught.value.message
    assert expect.is_int(5, "x") == 5


def test_a_number_of_thousands_of_digits() -> None:
    for check in (expect.is_int, expect.is_number):
        with pytest.raises(GateFailure) as caught:
            check(Foreign("builtins.int", "10**6000 or so"), "ref_count(0)")
        assert caught.value.code is Code.WRONG_VALUE
        assert caught.value.got == "10**6000 or so"


def test_foreign_values_are_named() -> None:
    with pytest.raises(GateFailure) as caught:
        expect.is_int(Foreign("numpy.int64", "np.int64(3)"), "token 0")
    assert caught.value.got == "numpy.int64: np.int64(3)"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (3, None), (2.5, None), (-0.0, None), (10**300, None),
        (True, Code.WRONG_TYPE), ("3", Code.WRONG_TYPE), (None, Code.WRONG_TYPE),
        (Foreign("numpy.float64", "3.0"), Code.WRONG_TYPE),
        (math.nan, Code.WRONG_VALUE), (math.inf, Code.WRONG_VALUE), (-math.inf, Code.WRONG_VALUE),
        (10**400, Code.WRONG_VALUE), (-(10**4000), Code.WRONG_VALUE),
    ],
)  # fmt: skip
def test_numbers(value: Any, code: Code | None) -> None:
    assert code_of(lambda: expect.is_number(value, "x")) is code


TENSORS: dict[str, tuple[Any, Code | None]] = {
    "right": (torch.zeros(2, 3), None),
    "half": (torch.zeros(2, 3, dtype=torch.float16), None),
    "8 bits": (torch.zeros(2, 3).to(torch.float8_e4m3fn), None),
    "ints": (torch.zeros(2, 3, dtype=torch.int64), None),
    "bools": (torch.zeros(2, 3, dtype=torch.bool), None),
    "another shape": (torch.zeros(3, 2), Code.WRONG_VALUE),
    "one dimension more": (torch.zeros(1, 2, 3), Code.WRONG_VALUE),
    "hundreds of dimensions": (torch.zeros([1] * 60), Code.WRONG_VALUE),
    "NaN": (torch.full((2, 3), math.nan), Code.WRONG_VALUE),
    "one infinity": (torch.tensor([[1.0, 2, 3], [4, math.inf, 6]]), Code.WRONG_VALUE),
    "NaN in 8 bits": (torch.full((2, 3), math.nan).to(torch.float8_e5m2), Code.WRONG_VALUE),
    "complex": (torch.zeros(2, 3, dtype=torch.complex64), Code.WRONG_TYPE),
    "a list": ([[0.0] * 3] * 2, Code.WRONG_TYPE),
    "an array": (Foreign("numpy.ndarray", "array"), Code.WRONG_TYPE),
}


@pytest.mark.parametrize(("value", "code"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors(value: Any, code: Code | None) -> None:
    assert code_of(lambda: expect.is_tensor(value, "logits", (2, 3))) is code


GOT: dict[str, tuple[list[Any], Code | None, str]] = {
    "the same": ([5, 6, 7], None, ""),
    "another first": ([4, 6, 7], Code.WRONG_TOKEN, "token 0 of 3"),
    "another last": ([5, 6, 8], Code.WRONG_TOKEN, "token 2 of 3"),
    "another and too few": ([5, 9], Code.WRONG_TOKEN, "token 1 of 3"),
    "too few": ([5, 6], Code.TOO_FEW_TOKENS, "token 2"),
    "none": ([], Code.TOO_FEW_TOKENS, "token 0"),
    "too many": ([5, 6, 7, 7], Code.TOO_MANY_TOKENS, "token 3"),
    "a bool": ([5, 6, True], Code.WRONG_TYPE, ""),
    "a foreign int": ([5, Foreign("numpy.int64", "6"), 7], Code.WRONG_TYPE, ""),
}


@pytest.mark.parametrize(("got", "code", "where"), GOT.values(), ids=GOT.keys())
def test_tokens(got: list[Any], code: Code | None, where: str) -> None:
    def action() -> None:
        expect.tokens(got, [5, 6, 7], "a prompt", ended_by_eos=False)

    assert code_of(action) is code
    if code is not None:
        with pytest.raises(GateFailure) as caught:
            action()
        assert caught.value.where == where


def test_tokens_show_their_neighbours() -> None:
    with pytest.raises(GateFailure) as caught:
        expect.tokens([*range(6), 99, 7, 8, 9], list(range(10)), "a prompt", ended_by_eos=False)
    assert caught.value.expected == "... 3 4 5 [6] 7 8"
    assert caught.value.got == "... 3 4 5 [99] 7 8"
    with pytest.raises(GateFailure, match="after the end token"):
        expect.tokens([1, 2], [1], "a prompt", ended_by_eos=True)
    with pytest.raises(GateFailure, match="after the limit"):
        expect.tokens([1, 2], [1], "a prompt", ended_by_eos=False)


def test_close() -> None:
    expected = torch.arange(6.0).reshape(3, 2)
    assert expect.close(expected.float(), expected.double(), atol=1e-6, what="x") == 0.0
    near = expected + 1e-4
    assert expect.close(near, expected, atol=1e-3, what="x") == pytest.approx(1e-4, rel=0.1)
    off = expected.clone()
    off[1, 1] += 1
    off[2, 0] = math.nan
    with pytest.raises(GateFailure) as caught:
        expect.close(off, expected, atol=1e-3, what="logits", row="position")
    assert caught.value.code is Code.WRONG_LOGITS
    assert caught.value.message == "logits: 2 of 3 positions differ"
    assert caught.value.where == "first at position 1"
    assert caught.value.got == "off by 1"


def test_nan_is_never_close() -> None:
    with pytest.raises(GateFailure):
        expect.close(torch.full((1, 2), math.nan), torch.zeros(1, 2), atol=1e9, what="x")


@pytest.mark.parametrize(
    ("got", "expected", "rel", "code"),
    [
        (10, 10, 0.0, None), (10.0, 10, 0.0, None), (10 + 1e-10, 10, 0.0, Code.WRONG_VALUE),
        (10.1, 10, 0.02, None), (11, 10, 0.02, Code.WRONG_VALUE), (0, 0, 0.0, None),
        (0.1, 0, 0.5, Code.WRONG_VALUE), ("10", 10, 0.0, Code.WRONG_TYPE),
        (math.nan, 10, 0.5, Code.WRONG_VALUE), (10**400, 10, 0.5, Code.WRONG_VALUE),
    ],
)  # fmt: skip
def test_values(got: Any, expected: float, rel: float, code: Code | None) -> None:
    assert code_of(lambda: expect.value(got, expected, "bytes", rel=rel, note="of K")) is code


def test_a_value_says_by_which_factor_it_is_off() -> None:
    with pytest.raises(GateFailure) as caught:
        expect.value(16, 32, "kv_bytes(llama)", note="heads")
    assert caught.value.message == "kv_bytes(llama) (heads)"
    assert caught.value.expected == "32"
    assert caught.value.got == "16, 0.5 times that"
    assert code_of(lambda: expect.value(5, 0, "x")) is Code.WRONG_VALUE


def test_rejects() -> None:
    def check(action: Callable[[], Any], **options: Any) -> Code | None:
        return code_of(lambda: expect.rejects(action, "capacity", "capacity = 0", **options))

    assert check(raises(an_error("ValueError", "capacity must be above 0"))) is None
    assert check(raises(an_error("MyError", "capacity!", "ValueError"))) is None
    assert check(lambda: None) is Code.NO_ERROR_RAISED
    assert check(raises(an_error("ValueError", "bad size"))) is Code.WRONG_ERROR
    assert check(raises(an_error("KeyError", "capacity"))) is Code.WRONG_ERROR
    assert check(raises(an_error("TypeError", "capacity"))) is Code.WRONG_ERROR
    both = {"kinds": ["TypeError", "ValueError"]}
    assert check(raises(an_error("TypeError", "capacity")), **both) is None
    assert check(raises(GateFailure(Code.EXITED, "gone"))) is Code.EXITED


def test_unchanged() -> None:
    expect.unchanged([1, 2], [1, 2], "prompt_ids")
    with pytest.raises(GateFailure) as caught:
        expect.unchanged([1, 2], [1, 2, 3], "prompt_ids")
    assert caught.value.code is Code.MUTATED_INPUT
    assert (caught.value.expected, caught.value.got) == ("[1, 2]", "[1, 2, 3]")
