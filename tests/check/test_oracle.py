"""The judge's own model: whether a text is greedy, and where it stops being so."""

from __future__ import annotations

import random

import pytest
import torch

from course.check import oracle
from course.check.oracle import NEAR_TIE, nano_oracle

PROMPT = [7, 80, 3, 200]


def test_a_greedy_text_has_nothing_wrong() -> None:
    text, gap = nano_oracle().greedy(PROMPT, 8)
    assert gap > NEAR_TIE
    assert nano_oracle().first_wrong(PROMPT, text) is None
    assert nano_oracle().first_wrong(PROMPT, []) is None


@pytest.mark.parametrize("index", [0, 3, 7])
def test_the_first_wrong_token_is_found_and_what_should_stand_there(index: int) -> None:
    text, _ = nano_oracle().greedy(PROMPT, 8)
    wrong = [*text[:index], (text[index] + 1) % 256, *text[index + 1 :]]
    assert nano_oracle().first_wrong(PROMPT, wrong) == (index, text[index])


def test_each_token_is_judged_by_what_stands_before_it() -> None:
    """After a wrong token the text may go on greedily: only the first is wrong."""
    text, _ = nano_oracle().greedy(PROMPT, 3)
    other = (text[2] + 1) % 256
    tail, _ = nano_oracle().greedy([*PROMPT, *text[:2], other], 3)
    assert nano_oracle().first_wrong(PROMPT, [*text[:2], other, *tail]) == (2, text[2])
    assert nano_oracle().first_wrong([*PROMPT, *text[:2], other], tail) is None


def test_a_near_tie_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    top = nano_oracle().logits(PROMPT)[-1].topk(2)
    gap = float(top.values[0] - top.values[1])
    best, second = top.indices.tolist()
    assert nano_oracle().first_wrong(PROMPT, [second]) == (0, best)
    monkeypatch.setattr(oracle, "NEAR_TIE", 1.01 * gap)
    assert nano_oracle().first_wrong(PROMPT, [second]) is None


def test_prompts_are_clear_of_near_ties() -> None:
    prompt, text = nano_oracle().prompt(random.Random(1), 5, 6)
    assert len(prompt) == 5
    logits = nano_oracle().logits(prompt + text[:-1])[4:]
    assert torch.equal(logits.argmax(-1), torch.tensor(text))
    top = logits.topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > NEAR_TIE
