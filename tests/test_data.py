"""The prompts that the course ships."""

from __future__ import annotations

import pytest

from course.data import WORKLOADS, passage, prompts


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts(workload: str) -> None:
    found = prompts(workload)
    assert len(found) >= 3
    assert len(set(found)) == len(found)
    for text in found:
        assert text == text.strip()
        assert 20 <= len(text) <= 4000
        assert text.isprintable() or set("\n\t") & set(text)
        assert not any(ord(c) > 0x2FFF for c in text)
    assert prompts(workload) is found


def test_a_revision_holds_code_to_copy_from() -> None:
    assert all("\ndef " in text for text in prompts("revision"))


def test_another_workload() -> None:
    with pytest.raises(ValueError, match="workload must be one of chat, code, revision, got 'x'"):
        prompts("x")


def test_the_passage_is_long_enough_to_be_judged_by() -> None:
    found = passage()
    assert len(found.encode()) >= 5000
    assert all(character.isprintable() or character == "\n" for character in found)
    assert found is passage()
