"""Stage 01, the judge: the naive loop."""

from __future__ import annotations

import numpy
import pytest
from bills import Bills, split_words
from generation import GenerationContract, tokens_of
from pairing import PairedText

from course.check.codes import Code
from course.check.gate import GateRun
from course.check.oracle import nano_oracle
from course.measure.ratio import PairedRatio

STAGE = 1


class TestContract(GenerationContract):
    """See gates/generation.py."""


@pytest.mark.number
def test_positions(gate: GateRun) -> None:
    """positions computed and rows through the head, counted"""
    prompt_len, new = 64, 128  # the chapter's example, on nano: a count is the same on any model
    prompt, expected = nano_oracle().prompt(gate.rng, prompt_len, new)
    counts = tokens_of(gate, prompt, expected, new, [], "a prompt of 64 tokens")
    predicted = sum(prompt_len + generated for generated in range(new))
    gate.exact(
        "positions", counts["positions"], equals=predicted,
        text=f"{counts['positions']:,} computed for {new} tokens after {prompt_len}",
        message="the naive loop computes prompt + generated so far in each step",
    )  # fmt: skip
    gate.exact(
        "head_rows", counts["head_rows"], equals=new,
        text=f"{counts['head_rows']:,} rows through the LM head",
        code=Code.WRONG_COUNT,
        message="only the last position of a pass needs the head: logit_rows=[-1]",
    )  # fmt: skip


@pytest.mark.number
def test_step_time(gate: GateRun) -> None:
    """step time against transformers without a cache"""
    # A length a step: neighbours would hang together, and many be worth few.
    text = PairedText(gate, gate.bar("lengths"), new=1)

    def words(ratio: PairedRatio) -> str:
        a, b = ratio.candidate_s * 1e3, ratio.baseline_s * 1e3
        return f"{ratio.median:.2f}x transformers' speed without a cache ({a:.0f} ms for {b:.0f})"

    def notes(ratio: PairedRatio) -> list[str]:
        bills = Bills(gate)
        middle = sorted(text.lengths)[len(text.lengths) // 2]
        split = bills.split(bills.whole_pass(middle), ratio.candidate_s)
        return [
            "predicted 1x: both sides compute the same positions",
            split_words(split, f"a pass over {middle} positions"),
        ]

    gate.ratio("step_time", *text.sides(), text=words, notes=notes)
    lengths, seconds = zip(*text.seconds["candidate"], strict=True)
    per_position, at_zero = numpy.polyfit(lengths, seconds, 1)
    low, high = min(lengths), max(lengths)
    gate.report(
        "ms_per_token", per_position * 1e3,
        f"{1e3 * (at_zero + per_position * low):.0f} ms at a length of {low}, "
        f"{1e3 * (at_zero + per_position * high):.0f} ms at {high}: "
        f"{per_position * 1e6:.0f} us more for each position",
        unit="ms",
    )  # fmt: skip
