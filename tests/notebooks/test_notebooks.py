"""The committed notebooks: how a chapter must be built, without running it."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest

from course.dev.notebooks import MAX_BYTES, notebook_stages, source_file, stale
from course.paths import course_home
from course.syllabus import Stage, load_syllabus

STAGES = load_syllabus().published
each = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)

# Calls that measure time or score a guess.
MEASURES = re.compile(
    r"\b(take_turns|measure_pair|time_by_kind|timed|score|host_overhead|read_probe|measure_\w+)\("
)
MEASURED_FIGURE = re.compile(r"\d ?(ms|µs|[GT]B/s|[GT]FLOP/s|tokens/s|tokens per second)\b")
PLACE = re.compile(r"(?<![\w./])(/(home|root|tmp|usr|opt|Users|private|work)/\w|[A-Z]:\\\w)")
SECTIONS = ["Predict first", "On a GPU", "What this stage leaves unpaid", "Questions"]


def read(stage: Stage) -> Any:
    return nbformat.read(stage.notebook, as_version=4)


def shown(notebook: Any) -> list[str]:
    """Every text that an output shows."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts += [str(value) for value in output.get("data", {}).values()]
    return texts


def test_every_published_stage_has_a_notebook_and_no_other() -> None:
    assert [stage.id for stage in notebook_stages()] == [stage.id for stage in STAGES]
    folder = course_home() / "notebooks"
    assert sorted(folder.glob("*.ipynb")) == sorted(stage.notebook for stage in STAGES)


@each
def test_it_is_what_its_source_makes(stage: Stage) -> None:
    assert stale([stage.number]) == []


@each
def test_it_is_a_valid_notebook_that_ran_from_top_to_bottom(stage: Stage) -> None:
    notebook = read(stage)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


@each
def test_no_cell_failed_or_complained(stage: Stage) -> None:
    for cell in read(stage).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text


@each
def test_it_opens_with_a_claim(stage: Stage) -> None:
    first = read(stage).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {stage.number:02d} · {stage.title}\n")
    assert "\n**Claim.** " in first.source


@each
def test_the_reader_predicts_before_anything_is_measured(stage: Stage) -> None:
    code = [cell.source for cell in read(stage).cells if cell.cell_type == "code"]
    predicts = next(i for i, source in enumerate(code) if "lesson.predict(" in source)
    measures = [i for i, source in enumerate(code) if MEASURES.search(source)]
    assert re.search(r"^guess = [\d.]+$", code[predicts], re.MULTILINE), "one line to edit"
    assert predicts < min(measures)
    assert any("prediction.score(" in source for source in code[predicts + 1 :])


@each
def test_it_asks_the_question_of_the_syllabus(stage: Stage) -> None:
    assert sum(stage.predict in text for text in shown(read(stage))) >= 2  # asked, and scored


@each
def test_it_names_machine_tier_and_model_first(stage: Stage) -> None:
    first = next(cell for cell in read(stage).cells if cell.cell_type == "code")
    banner = first.outputs[0]["data"]["text/markdown"]
    for row in ("machine", "software", "tier", "model", "weights"):
        assert re.search(rf"^\| {row} \| \S", banner, re.MULTILINE), row


@each
def test_it_has_every_section(stage: Stage) -> None:
    prose = "\n".join(c.source for c in read(stage).cells if c.cell_type == "markdown")
    headings = re.findall(r"^## (.+)$", prose, re.MULTILINE)
    positions = [headings.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert headings[-1] == "Sources"
    assert f"`./course check {stage.number}`" in prose


@each
def test_prose_types_in_no_measured_figure(stage: Stage) -> None:
    """A time or a rate in fixed prose is another machine's."""
    for cell in read(stage).cells:
        if cell.cell_type == "markdown":
            assert not MEASURED_FIGURE.search(cell.source), cell.source


@each
def test_a_gpu_result_is_published_or_said_to_be_missing(stage: Stage) -> None:
    texts = shown(read(stage))
    assert any("**On a GPU:** not measured" in t or "published, on a GPU" in t for t in texts)


@each
def test_every_figure_is_svg_with_a_caption(stage: Stage) -> None:
    figures = 0
    for cell in read(stage).cells:
        kinds = [set(o.get("data", {})) for o in cell.get("outputs", [])]
        for index, kind in enumerate(kinds):
            assert "image/png" not in kind
            if "image/svg+xml" in kind:
                figures += 1
                caption = cell.outputs[index + 1]["data"]["text/markdown"]
                assert re.fullmatch(r"\*[^*]{20,}\*", caption)
    assert figures >= 2


@each
def test_nothing_in_it_leads_to_this_machines_disk(stage: Stage) -> None:
    for text in [*shown(read(stage)), source_file(stage).read_text("utf-8")]:
        assert not PLACE.search(text)
        assert str(course_home()) not in text


@each
def test_it_is_small(stage: Stage) -> None:
    assert stage.notebook.stat().st_size <= MAX_BYTES
