"""A record is returned as it was saved, or not at all."""

import json

import pytest

from course.measure.store import load_record, save_record

RECORD = {"figure": 12345.5, "names": ["a", "b"]}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "new" / "machine.json"
    assert save_record(file, "here", RECORD)
    return file


def test_records_lie_side_by_side(path):
    assert save_record(path, "there", {"figure": 2})
    assert load_record(path, "here") == RECORD
    assert load_record(path, "there") == {"figure": 2}
    assert load_record(path, "elsewhere") is None
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("12345.5", "92345.5"),  # valid JSON, and wrong
        lambda text: "[]",
        lambda text: '{"here": 3}',
        lambda text: '{"here": {"record": 3, "checksum": "x"}}',
        lambda text: text.replace("checksum", "czecksum"),
        lambda text: "\x00\ud800",
    ],
)
def test_damage_is_noticed_and_can_be_written_over(path, damage):
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogatepass"))
    assert load_record(path, "here") is None
    assert save_record(path, "here", RECORD)
    assert load_record(path, "here") == RECORD


def test_one_damaged_record_does_not_cost_the_others(path):
    save_record(path, "there", {"figure": 2})
    entries = json.loads(path.read_text())
    entries["here"]["record"]["figure"] = 1
    path.write_text(json.dumps(entries))
    assert load_record(path, "here") is None
    assert load_record(path, "there") == {"figure": 2}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not save_record(tmp_path / "file" / "machine.json", "here", RECORD)
    assert load_record(tmp_path / "file" / "machine.json", "here") is None
