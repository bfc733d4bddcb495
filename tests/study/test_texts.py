"""Hints, words, chapters and notebooks, as they are shown."""

from __future__ import annotations

import json

import pytest

from course.study.glossary import glossary, look_up
from course.study.hints import LEVELS, hint
from course.study.reading import chapter_text, notebook_text
from course.syllabus import Stage, load_syllabus
from toy_course import ToyCourse

STAGES = load_syllabus().published


@pytest.fixture
def stage(toy: ToyCourse) -> Stage:
    return load_syllabus().find(1)


def test_hints_have_three_levels(stage: Stage) -> None:
    assert [hint(stage, level) for level in LEVELS] == [
        "Look at [the] number.", "Add it to itself.", "Write `2 * number`.",
    ]  # fmt: skip


def test_bad_levels_and_missing_hints(stage: Stage) -> None:
    for level in (0, 4, -1):
        with pytest.raises(ValueError, match="level must be 1, 2 or 3"):
            hint(stage, level)
    stage.hints.write_text("## Level 1\n\nOnly one.\n")
    assert hint(stage, 1) == "Only one."
    with pytest.raises(ValueError, match="no level 2"):
        hint(stage, 2)
    stage.hints.unlink()
    with pytest.raises(ValueError, match=r"hints\.md"):
        hint(stage, 1)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)
def test_the_real_hints(stage: Stage) -> None:
    texts = [hint(stage, level) for level in LEVELS]
    assert all(texts)
    assert len(set(texts)) == 3


def test_words(toy: ToyCourse) -> None:
    assert [term.name for term in glossary()] == ["double", "work"]
    assert look_up("double").text == "Two of [them]."
    for name in ("Double", " DOUBLE ", "twice", "Twice"):
        assert look_up(name).name == "double"


def test_unknown_words_propose_near_ones(toy: ToyCourse) -> None:
    with pytest.raises(ValueError, match=r"no term 'doubel'. Did you mean double\?"):
        look_up("doubel")
    with pytest.raises(ValueError, match=r"Did you mean .*work"):
        look_up("wor")
    with pytest.raises(ValueError, match=r"no term 'zzz'\.$"):
        look_up("zzz")


def test_a_chapter_is_unfolded(stage: Stage) -> None:
    text = chapter_text(stage)
    assert text.startswith("# Stage 01: The toy")
    assert "An answerIt is 42." in text
    assert "<details>" not in text
    stage.chapter.unlink()
    with pytest.raises(ValueError, match=r"README\.md"):
        chapter_text(stage)


def test_a_notebook_as_text(toy: ToyCourse, stage: Stage) -> None:
    with pytest.raises(ValueError, match=r"01_toy\.ipynb"):
        notebook_text(stage)
    outputs = [
        {"output_type": "stream", "text": ["one\n", "two\n"]},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
        {"output_type": "execute_result", "data": {"text/plain": ["42"]}},
        {"output_type": "display_data", "data": {"text/markdown": ["**bold**"], "text/plain": "x"}},
        {"output_type": "display_data", "data": {}},
        {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "prose"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": outputs},
        {"cell_type": "code", "source": [], "outputs": []},
        {"cell_type": "raw", "source": ["hidden"]},
    ]
    stage.notebook.parent.mkdir()
    stage.notebook.write_text(json.dumps({"cells": cells}))
    text = notebook_text(stage)
    assert text.startswith("# Title\nprose\n\n```python\n1 + 1\n```\n\n```\none\ntwo\n```")
    assert "open the notebook with `course read STAGE --jupyter`" in text
    assert "```\n42\n```" in text
    assert "**bold**" in text
    assert "AAAA" not in text
    assert "hidden" not in text
    stage.notebook.write_text("{")
    with pytest.raises(ValueError):
        notebook_text(stage)
