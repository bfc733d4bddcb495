"""The syllabus: every way to name a stage, and the course's own file, linted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.check.gate import bar_of
from course.syllabus import Stage, Syllabus, UnknownStage, load_syllabus

SYLLABUS = load_syllabus()
each_stage = pytest.mark.parametrize("stage", SYLLABUS.stages, ids=lambda stage: stage.id)
each_published = pytest.mark.parametrize("stage", SYLLABUS.published, ids=lambda stage: stage.id)

NAMES = [
    "7", 7, "07", "007", "stage-7", "stage-07", "stage7", "stage_07", "STAGE-07", " 7 ",
    "block-allocator", "block_allocator", "Block-Allocator", "stage-07-block-allocator",
    "stage_07_block_allocator", "stage_07_block_allocator/", "block_allocator.py",
    "stages/stage_07_block_allocator", "stages/stage_07_block_allocator/block_allocator.py",
    "/home/me/course/stages/stage_07_block_allocator/block_allocator.py",
    "./stage_07_block_allocator/",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_stage(name: str | int) -> None:
    assert SYLLABUS.find(name).number == 7


@each_stage
def test_every_stage_is_found_by_all_its_names(stage: Stage) -> None:
    for name in (stage.number, stage.id, stage.folder, stage.slug, str(stage.file), stage.home):
        assert SYLLABUS.find(str(name)) is stage


@pytest.mark.parametrize(
    "name",
    ["", " ", "0", "21", "-1", "1.5", "stage", "stage-", "stage-x", "allocator", "7b", "stage-21",
     "seven", "1 2", "stages/", "."],
)  # fmt: skip
def test_what_no_stage_answers_to(name: str) -> None:
    with pytest.raises(UnknownStage, match="use 1 to 20"):
        SYLLABUS.find(name)


def test_near_names_are_proposed() -> None:
    with pytest.raises(UnknownStage, match=r"Did you mean block-allocator"):
        SYLLABUS.find("block-alocator")
    with pytest.raises(UnknownStage, match=r"there is no stage 'kv-cash'.*kv-cache"):
        SYLLABUS.find("kv-cash")


def test_a_number_with_another_stages_name_is_no_name() -> None:
    with pytest.raises(UnknownStage, match="stage-07 is block-allocator"):
        SYLLABUS.find("stage-07-naive-loop")


@given(st.one_of(st.text(max_size=20), st.integers()))
@settings(max_examples=200, deadline=None)
def test_any_name_is_found_or_refused(name: str | int) -> None:
    try:
        stage = SYLLABUS.find(name)
    except UnknownStage:
        return
    assert stage in SYLLABUS.stages


# -- the course's own file ------------------------------------------------------------------------


def test_twenty_stages_in_order() -> None:
    assert [stage.number for stage in SYLLABUS.stages] == list(range(1, 21))
    assert len({stage.slug for stage in SYLLABUS.stages}) == 20
    assert [stage.number for stage in SYLLABUS.published] == list(
        range(1, len(SYLLABUS.published) + 1)
    )


@each_stage
def test_what_every_stage_says(stage: Stage) -> None:
    assert stage.slug.isidentifier()
    assert stage.slug == stage.slug.lower()
    assert stage.title
    assert stage.because.endswith((".", "?"))
    assert all(0 < needed < stage.number for needed in stage.needs)
    assert all(name.isidentifier() for name in stage.builds)
    assert stage.seconds > 0
    assert stage.memory_mb >= 1000
    assert stage.file.parent == stage.home
    assert stage.home.name == stage.folder


@each_published
def test_what_a_published_stage_has(stage: Stage) -> None:
    assert stage.given
    assert stage.builds
    assert stage.measures
    assert stage.numbers
    assert stage.terms
    assert not set(stage.gpu_numbers) & set(stage.numbers)
    assert all(name.isidentifier() for name in stage.modules)
    assert stage.predict.endswith(("?", "."))
    assert stage.predicts in stage.numbers
    for path in (
        stage.file, stage.chapter, stage.hints, stage.reference, stage.gate, stage.scenarios,
        stage.baseline, stage.reference.parent / "NOTES.md",
    ):  # fmt: skip
        assert path.is_file(), path
    assert stage.wrong
    for needed in stage.needs:
        assert SYLLABUS.find(needed).published


@each_published
def test_bars_are_bars(stage: Stage) -> None:
    """Every bar is of a number that the stage has, and can be read as one."""
    for tier, bars in stage.bars.items():
        assert tier in ("cpu", "cuda")
        for name, bar in bars.items():
            if not isinstance(bar, dict):
                assert isinstance(bar, (list, int, float)), name  # a setting
                continue
            assert name in (*stage.numbers, *stage.gpu_numbers), name
            assert set(bar) <= {"at_least", "at_most", "no_worse_than"}
            assert "at_most" not in bar or "at_least" in bar, "a band has two ends"
            bar_of(bar)
            assert stage.bar(tier, name) is bar


@each_published
def test_a_gate_brings_every_number_that_is_listed(stage: Stage) -> None:
    builds = stage.gate.with_name("offline_builds.py")  # what two stages count in a kernel's code
    text = "".join(path.read_text(encoding="utf-8") for path in (stage.gate, builds))
    for name in (*stage.numbers, *stage.gpu_numbers):
        stem = name.rpartition("_")[0]
        assert f'"{name}"' in text or f'f"{stem}_{{' in text, name


def test_every_part_is_built_by_one_stage_first() -> None:
    providers = SYLLABUS.providers()
    assert providers["KVCache"].number == 2
    assert providers["generate"].number == 1  # stage 02 builds one, too
    for name, stage in providers.items():
        assert name in stage.builds
        assert SYLLABUS.builders(name)[0] == stage
    assert [stage.number for stage in SYLLABUS.builders("generate")] == [1, 2]
    assert SYLLABUS.builders("nonsense") == []


def test_no_folder_is_left_over() -> None:
    home = SYLLABUS.stages[0].home.parents[1]
    folders = {stage.folder for stage in SYLLABUS.published}
    for place in ("stages", "reference"):
        found = {p.name for p in (home / place).iterdir() if p.name.startswith("stage_")}
        assert found == folders, place


# -- other files ----------------------------------------------------------------------------------

ENTRY = '[[stage]]\nnumber = {}\nslug = "{}"\ntitle = "T"\nbecause = "B."\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "course.toml"
    path.write_text(text)
    return path


def test_a_file_of_its_own(tmp_path: Path) -> None:
    text = ENTRY.format(1, "a") + 'needs = []\nbuilds = ["F"]\n' + ENTRY.format(2, "b")
    text += 'gpu_numbers = ["g"]\nmodules = ["m"]\n'
    found = load_syllabus(written(tmp_path, text))
    assert [stage.slug for stage in found.stages] == ["a", "b"]
    assert found.stages[0].builds == ("F",)
    assert found.stages[0].gpu_numbers == found.stages[0].modules == ()
    assert found.stages[1].gpu_numbers == ("g",)
    assert found.stages[1].modules == ("m",)
    assert found.published == ()
    assert isinstance(found, Syllabus)


BAD = {
    "a gap": ENTRY.format(1, "a") + ENTRY.format(3, "c"),
    "the wrong order": ENTRY.format(2, "b") + ENTRY.format(1, "a"),
    "twice the same": ENTRY.format(1, "a") + ENTRY.format(1, "b"),
    "from zero": ENTRY.format(0, "a"),
    "an unknown key": ENTRY.format(1, "a") + "colour = 3\n",
    "a missing key": '[[stage]]\nnumber = 1\nslug = "a"\n',
    "no TOML": "[[stage\n",
    "a number for a name": ENTRY.format(1, "a").replace('"a"', "5", 1),
    "a word for a list": ENTRY.format(1, "a") + 'numbers = "time"\n',
    "a word for a bar": ENTRY.format(1, "a") + '[stage.bars.cpu]\ntime = "lots"\n',
    "an end that no bar has": ENTRY.format(1, "a") + "[stage.bars.cpu]\ntime = { leest = 3.0 }\n",
    "a bar below nothing": ENTRY.format(1, "a") + "[stage.bars.cpu]\ntime = { at_least = -3.0 }\n",
    "a prediction of no number": ENTRY.format(1, "a") + 'published = true\npredicts = "lunches"\n',
    "no stages": "x = 1\n",
    "an empty list": "stage = []\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError):
        load_syllabus(written(tmp_path, text))


def test_bars_of_tiers() -> None:
    stage = Stage(1, "a", "A", "", bars={"cpu": {"x": 1, "y": 2}, "cuda": {"x": 3}})
    assert stage.bar("cpu", "x") == 1
    assert stage.bar("cuda", "x") == 3
    assert stage.bar("cuda", "y") == 2  # the CPU's
    assert stage.bar("another", "y") == 2
    with pytest.raises(KeyError, match="no bar 'z' for stage-01 at tier cuda"):
        stage.bar("cuda", "z")
