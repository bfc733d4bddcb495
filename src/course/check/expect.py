"""The judge's comparisons. Each raises a GateFailure that says where the two sides part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from course.check.channel import Foreign, short, type_name
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.replies import SolutionError

if TYPE_CHECKING:
    import torch


# Words of an error's message that do not say what is wrong, and what is.
KNOWN_CRASHES = {
    "active drivers": "Triton looks for a GPU, and there is none: to time variants, as "
    "`@triton.autotune` does, or to launch a kernel. Choose the number of warps by a rule.",
    "when stream is capturing": "A capture records operations and runs none, so there is no value "
    "yet that Python could look at, and nothing may be set up for the first time.",
    "was freed since": "A graph keeps the addresses that it was captured with, and nothing that "
    "lies there. What it reads must stay where it is: copy into it.",
}


def crashed(error: SolutionError, doing: str) -> GateFailure:
    """An exception where a result was due."""
    return GateFailure(
        Code.CRASHED,
        f"{doing} raised {error.type}: {error.message}",
        where=error.where,
        detail=error.traceback,
        likely=next((why for words, why in KNOWN_CRASHES.items() if words in error.message), ""),
    )


def result_of(action: Callable[[], Any], doing: str) -> Any:
    """What `action` returns; an exception of the solution becomes CRASHED.

    Args:
        doing: what was being done, in words: "prefill of 7 tokens".
    """
    try:
        return action()
    except SolutionError as error:
        raise crashed(error, doing) from None


def is_int(value: Any, what: str) -> int:
    """A plain int, or WRONG_TYPE; WRONG_VALUE if it has thousands of digits."""
    if type(value) is not int:
        got = value.repr if isinstance(value, Foreign) else short(value)
        _not_too_long(value, what)
        raise GateFailure(
            Code.WRONG_TYPE, f"{what} has the wrong type", "int", f"{type_name(value)}: {got}"
        )
    return value


def _not_too_long(value: Any, what: str) -> None:
    """WRONG_VALUE for an int of so many digits that the channel does not carry it."""
    if isinstance(value, Foreign) and value.type == "builtins.int":
        raise GateFailure(
            Code.WRONG_VALUE, f"{what} is far too large", "a number of sensible size", value.repr
        )


def is_number(value: Any, what: str) -> float:
    """A plain, finite int or float, or WRONG_TYPE / WRONG_VALUE."""
    if type(value) not in (int, float):
        got = value.repr if isinstance(value, Foreign) else short(value)
        _not_too_long(value, what)
        raise GateFailure(
            Code.WRONG_TYPE,
            f"{what} has the wrong type",
            "a plain int or float",
            f"{type_name(value)}: {got}",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # an int of hundreds of digits
    if not math.isfinite(number):
        raise GateFailure(
            Code.WRONG_VALUE, f"{what} is not finite", "a finite number", short(value, 40)
        )
    return number


def is_tensor(value: Any, what: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of real numbers, of that shape, without NaN, or WRONG_TYPE / WRONG_VALUE."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise GateFailure(
            Code.WRONG_TYPE, f"{what} has the wrong type", "torch.Tensor", type_name(value)
        )
    if value.is_complex():
        raise GateFailure(
            Code.WRONG_TYPE, f"{what} has the wrong type", "real numbers", str(value.dtype)
        )
    if list(value.shape) != list(shape):
        raise GateFailure(
            Code.WRONG_VALUE,
            f"{what} has the wrong shape",
            str(list(shape)),
            short(list(value.shape)),
        )
    wide = value if value.element_size() > 1 else value.float()  # torch cannot test 8-bit floats
    if not bool(torch.isfinite(wide).all()):
        raise GateFailure(Code.WRONG_VALUE, f"{what} holds NaN or infinity", "finite values")
    return value


def tokens(got: Sequence[Any], expected: Sequence[int], what: str, *, ended_by_eos: bool) -> None:
    """The same tokens, of the right type, and not one more or less."""
    for index, (one, other) in enumerate(zip(got, expected, strict=False)):
        is_int(one, f"{what}: token {index}")
        if one != other:
            raise GateFailure(
                Code.WRONG_TOKEN,
                f"{what}: token {index} differs from that of an independent model",
                expected=_tokens_around(expected, index),
                got=_tokens_around(got, index),
                where=f"token {index} of {len(expected)}",
                likely=wrong_token(index),
            )
    if len(got) > len(expected):
        after = "after the end token" if ended_by_eos else "after the limit"
        raise GateFailure(
            Code.TOO_MANY_TOKENS, f"{what}: tokens came {after}",
            f"{len(expected)} tokens", f"at least {len(got)}", where=f"token {len(expected)}",
        )  # fmt: skip
    if len(got) < len(expected):
        raise GateFailure(
            Code.TOO_FEW_TOKENS, f"{what}: the text stopped too early",
            f"{len(expected)} tokens", str(len(got)), where=f"token {len(got)}",
        )  # fmt: skip


def wrong_token(index: int) -> str:
    """The likely cause when this token of a text is the first that differs."""
    if index == 0:
        return "The logits of another position than the last, or a prompt that sees too much."
    return "The steps after prefill: the position of a new token, or which keys it sees."


def _tokens_around(ids: Sequence[Any], index: int) -> str:
    start = max(0, index - 3)
    shown = [
        f"[{t}]" if start + i == index else str(t) for i, t in enumerate(ids[start : index + 3])
    ]
    return ("... " if start else "") + " ".join(shown)


def close(
    got: torch.Tensor,
    expected: torch.Tensor,
    *,
    atol: float,
    what: str,
    code: Code = Code.WRONG_LOGITS,
    row: str = "row",
) -> float:
    """Equal within `atol`, everywhere; returns the largest difference.

    Both are [rows, columns]; a failure names the first row that is off.
    """
    difference = (got.double() - expected.double()).abs()
    worst = difference.amax(dim=-1).flatten()
    bad = (~(worst <= atol)).nonzero().flatten()  # NaN is never within a tolerance
    if len(bad):
        first = int(bad[0])
        raise GateFailure(
            code,
            f"{what}: {len(bad)} of {len(worst)} {row}s differ",
            expected=f"within {atol:g}",
            got=f"off by {float(worst[first]):.3g}",
            where=f"first at {row} {first}",
        )
    return float(worst.max())


def value(got: Any, expected: float, what: str, *, rel: float = 0.0, note: str = "") -> None:
    """A number equal to its closed form (within a relative `rel`)."""
    number = is_number(got, what)
    if not math.isclose(number, expected, rel_tol=max(rel, 1e-12)):
        factor = number / expected if expected else math.inf
        raise GateFailure(
            Code.WRONG_VALUE,
            what + (f" ({note})" if note else ""),
            f"{expected:,.6g}",
            f"{number:,.6g}, {factor:.4g} times that",
        )


def rejects(
    action: Callable[[], Any], argument: str, what: str, *, kinds: Sequence[str] = ("ValueError",)
) -> None:
    """Bad input raises one of `kinds`, and the message names the argument."""
    wanted = f"{' or '.join(kinds)} that names `{argument}`"
    try:
        action()
    except SolutionError as error:
        if not set(kinds) & set(error.bases):
            raise GateFailure(
                Code.WRONG_ERROR, f"{what} raises the wrong kind of error", wanted,
                f"{error.type}: {error.message}", error.where,
            ) from None  # fmt: skip
        if argument not in error.message:
            raise GateFailure(
                Code.WRONG_ERROR, f"{what} raises an error that does not name the argument",
                wanted, f"{error.type}: {error.message}", error.where,
            ) from None  # fmt: skip
        return
    raise GateFailure(Code.NO_ERROR_RAISED, f"{what} is accepted", wanted, "no error")


def unchanged(before: Any, after: Any, what: str) -> None:
    """The caller's argument is as it was."""
    if before != after:
        raise GateFailure(
            Code.MUTATED_INPUT, f"{what} was changed", short(before, 80), short(after, 80)
        )
