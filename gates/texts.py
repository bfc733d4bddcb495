"""A greedy text on nano, held against an independent model, and where and why it must end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from course.check.codes import Code
from course.check.expect import wrong_token
from course.check.failure import GateFailure
from course.check.oracle import nano_oracle


def check_text(
    prompt: list[int], got: Sequence[int], new: int, eos_ids: Collection[int], what: str
) -> str:
    """Every token is what float64 says, near-ties aside, and the last one is the last.

    Args:
        got: tokens, whole numbers all of them.
        new: `max_new_tokens`; the context may end the text before.
        eos_ids: tokens that end it.

    Returns:
        Why it ended: "stop" or "length".
    """
    oracle = nano_oracle()
    limit = min(new, oracle.config.max_context - len(prompt) + 1)
    ended = next((i for i, token in enumerate(got) if token in eos_ids), None)
    wanted = limit if ended is None else ended + 1
    wrong = oracle.first_wrong(prompt, list(got[: min(wanted, limit)]))
    if wrong is not None:
        index, token = wrong
        raise GateFailure(
            Code.WRONG_TOKEN, f"{what}: token {index} differs from that of an independent model",
            str(token), str(got[index]), where=f"token {index} of {limit}",
            likely=wrong_token(index),
        )  # fmt: skip
    if len(got) != wanted:
        raise GateFailure(
            Code.TOO_MANY_TOKENS if len(got) > wanted else Code.TOO_FEW_TOKENS,
            f"{what}: the text ends in the wrong place",
            f"{wanted} tokens", str(len(got)), where=f"token {min(wanted, len(got))}",
        )  # fmt: skip
    return "length" if ended is None else "stop"
