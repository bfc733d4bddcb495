"""Making, running and checking notebooks, on a course of one stage in a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from course.dev import notebooks
from course.syllabus import load_syllabus

SYLLABUS = """
[[stage]]
number = 1
slug = "one"
title = "One"
because = "of a test"
"""
SOURCE = """# %% [markdown]
# # Adding
#
# Two numbers.

# %%
from pathlib import Path

print(1 + 1, sorted(Path.cwd().iterdir()))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of the one notebook."""
    (tmp_path / "course.toml").write_text(SYLLABUS, "utf-8")
    path = tmp_path / "notebooks" / "source" / "01_one.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE, "utf-8")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    load_syllabus.cache_clear()
    yield path
    monkeypatch.undo()
    load_syllabus.cache_clear()


def words(problems: list[notebooks.Problem]) -> str:
    return "\n".join(map(str, problems))


def test_without_running_it_has_the_cells_and_no_outputs(source: Path) -> None:
    [made] = notebooks.build([1], execute=False)
    prose, code = nbformat.read(made, as_version=4).cells
    assert prose.source == "# Adding\n\nTwo numbers."
    assert code.source.startswith("from pathlib")
    assert code.outputs == []
    assert words(notebooks.stale()) == "01_one.ipynb: not all of its cells were executed"


def test_the_same_source_makes_the_same_file(source: Path) -> None:
    [made] = notebooks.build(execute=False)
    once = made.read_bytes()
    notebooks.build(execute=False)
    assert made.read_bytes() == once


def test_a_missing_notebook_is_stale(source: Path) -> None:
    assert "is missing" in words(notebooks.stale())


def test_a_changed_source_is_stale(source: Path) -> None:
    notebooks.build(execute=False)
    source.write_text(SOURCE.replace("1 + 1", "1 + 2"), "utf-8")
    assert "its source changed" in words(notebooks.stale())
    assert "cell 1 is not what its source says" in words(notebooks.stale())


def test_a_cell_edited_in_the_notebook_is_stale(source: Path) -> None:
    [made] = notebooks.build(execute=False)
    made.write_text(made.read_text("utf-8").replace("Two numbers", "Three numbers"), "utf-8")
    assert "cell 0 is not what its source says" in words(notebooks.stale())


def test_an_added_cell_is_stale(source: Path) -> None:
    [made] = notebooks.build(execute=False)
    notebook = nbformat.read(made, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("More."))
    nbformat.write(notebook, made)
    assert "cell 2 is not what its source says" in words(notebooks.stale())


def test_shown_code_that_its_file_no_longer_has_is_stale(source: Path, tmp_path: Path) -> None:
    solution = tmp_path / "reference" / "stage_01_one" / "one.py"
    solution.parent.mkdir(parents=True)
    solution.write_text("def one():\n    return 1\n", "utf-8")
    [made] = notebooks.build(execute=False)
    notebook = nbformat.read(made, as_version=4)
    shown = "`one` in `reference/stage_01_one/one.py`:\n\n```python\ndef one():\n    return 1\n```"
    notebook.cells[1].outputs = [
        nbformat.v4.new_output("display_data", data={"text/markdown": shown})
    ]
    nbformat.write(notebook, made)
    assert "shows one" not in words(notebooks.stale())

    solution.write_text("def one():\n    return 1.0\n", "utf-8")
    assert "shows one as it was" in words(notebooks.stale())
    solution.write_text("def two():\n    return 2\n", "utf-8")
    assert "shows one, which is gone" in words(notebooks.stale())


@pytest.mark.parametrize("number", [0, 2])
def test_a_stage_without_a_source_is_refused(source: Path, number: int) -> None:
    with pytest.raises(ValueError, match=f"number {number} has no notebook source"):
        notebooks.build([number])


@pytest.mark.slow
def test_running_keeps_outputs_and_verifies(source: Path) -> None:
    lines: list[str] = []
    [made] = notebooks.build(tell=lines.append)
    notebook = nbformat.read(made, as_version=4)
    assert notebook.cells[1].outputs[0].text.startswith("2 []")  # it ran in an empty folder
    assert notebook.cells[1].execution_count == 1
    assert "ran in" in lines[-1]
    before = made.read_bytes()
    assert notebooks.verify() == []
    assert made.read_bytes() == before  # verifying changes nothing


@pytest.mark.slow
def test_a_failing_cell_makes_no_notebook_and_is_a_problem(source: Path) -> None:
    source.write_text(SOURCE + '\n# %%\nraise RuntimeError("no luck")\n', "utf-8")
    with pytest.raises(Exception, match="no luck"):
        notebooks.build()
    assert not list(source.parent.parent.glob("*.ipynb*"))
    assert "fails when it runs" in words(notebooks.verify())
    assert "no luck" in words(notebooks.verify())


@pytest.mark.slow
def test_a_notebook_that_is_too_large_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "MAX_BYTES", 500)
    with pytest.raises(ValueError, match="too large"):
        notebooks.build()
    assert not list(source.parent.parent.glob("*.ipynb*"))
