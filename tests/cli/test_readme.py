"""The generated parts of README.md: when they are stale, and how they are made anew."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from course.dev import readme
from toy_course import ToyCourse

README = """# Toy

Before.

<!-- run: ./course next -->
<!-- end -->

Between. <!-- a comment -->

<!-- table: stages -->
<!-- end -->

After.
"""


def test_parts_are_made_and_the_rest_is_let_alone(toy: ToyCourse) -> None:
    toy.write("README.md", README)
    assert readme.refresh(write=False) == [
        "README.md: run './course next' was stale", "README.md: table 'stages' was stale",
    ]  # fmt: skip
    assert (toy.home / "README.md").read_text() == README
    readme.refresh(write=True)
    text = (toy.home / "README.md").read_text()
    assert "```console\n$ ./course next\nstage-01  The toy\n" in text
    assert "stages/stage_01_toy/toy.py" in text
    assert str(toy.home) not in text
    assert "| 01 | [The toy](stages/stage_01_toy/README.md) |" in text
    for kept in ("Before.", "Between. <!-- a comment -->", "After.", "# Toy"):
        assert kept in text
    assert "\x1b" not in text


def transcript(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every command prints this."""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=text, stderr="")

    monkeypatch.setattr(subprocess, "run", run)


def test_a_transcript_is_stale_when_its_words_differ(
    toy: ToyCourse, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write("README.md", "<!-- run: ./course check 1 -->\n<!-- end -->\n")
    first = "  time  1.46x faster  [1.38, 1.52] over 50 slices  pass  (31 s)\n"
    transcript(first, monkeypatch)
    assert readme.refresh(write=True)
    assert readme.refresh(write=False) == []
    transcript("  time  1.50x faster [1.31, 1.62]\n over 25 slices  inconclusive", monkeypatch)
    assert readme.refresh(write=False) == []  # other figures, other lines
    transcript(first.replace("faster", "slower"), monkeypatch)
    assert readme.refresh(write=False)
    transcript(first + "a new line\n", monkeypatch)
    assert readme.refresh(write=False)


def test_only_the_course_is_run(toy: ToyCourse) -> None:
    toy.write("README.md", "<!-- run: rm -rf / -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"a transcript must be of \./course, got 'rm'"):
        readme.refresh(write=True)
    toy.write("README.md", "<!-- run: ./course 'next -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="No closing quotation"):
        readme.refresh(write=True)


def test_a_readme_without_parts(toy: ToyCourse) -> None:
    toy.write("README.md", "# Nothing\n")
    assert readme.refresh(write=True) == []
    assert (toy.home / "README.md").read_text() == "# Nothing\n"
