"""The fingerprint, and the cache size as Linux tells it."""

import json
import subprocess
import sys

import pytest

from course.measure import fingerprint, last_level_cache_bytes, machine


@pytest.fixture(autouse=True)
def fresh():
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


def test_the_key_is_the_same_in_every_process():
    code = "from course.measure import fingerprint; print(fingerprint().key)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == fingerprint().key
    assert len(fingerprint().key) == 12


def test_what_it_says_agrees_with_torch():
    import torch

    described = fingerprint()
    assert described.torch == torch.__version__
    assert described.cuda == torch.version.cuda
    assert described.cores >= 1
    assert described.memory_bytes > 1 << 28
    assert described.cpu
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        assert list(described.gpus) == names
    assert json.loads(json.dumps(described.as_dict()))["key"] == described.key


def test_other_hardware_has_another_key_and_more_memory_has_not(monkeypatch):
    key = fingerprint().key
    for name, value, same in [
        ("_memory_bytes", 1, True),
        ("_cpu_model", "another", False),
        ("_usable_cores", 999, False),
        ("_gpus", ("NVIDIA H200",), False),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, lambda value=value: value)
            fingerprint.cache_clear()
            assert (fingerprint().key == key) == same, name


GPUS = "GPU-aa11, NVIDIA H200\nGPU-bb22, NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("NVIDIA H200", "NVIDIA GeForce RTX 4090")),
        ("1", ("NVIDIA GeForce RTX 4090",)),
        ("1,0", ("NVIDIA GeForce RTX 4090", "NVIDIA H200")),
        ("GPU-bb", ("NVIDIA GeForce RTX 4090",)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("NVIDIA H200",)),
    ],
)
def test_only_the_visible_gpus_count(monkeypatch, visible, expected):
    monkeypatch.setattr(machine, "_output", lambda *command: GPUS)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._gpus() == expected


def test_a_program_that_is_absent_or_fails_says_nothing():
    assert machine._output("no-such-program-anywhere") == ""
    assert machine._output(sys.executable, "-c", "print('half'); raise SystemExit(1)") == ""
    assert machine._output(sys.executable, "-c", "print('all')") == "all"


@pytest.mark.parametrize(
    ("version", "cuda"), [("2.11.0+cu128", "12.8"), ("2.13.0+cu130", "13.0"), (None, None)]
)
def test_cuda_version_from_torchs_own(version, cuda):
    assert machine._cuda_of(version) == cuda


def make_cache(folder, cpu, index, level, kind, size, shared):
    path = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    path.mkdir(parents=True)
    for name, text in [
        ("level", level),
        ("type", kind),
        ("size", size),
        ("shared_cpu_list", shared),
    ]:
        (path / name).write_text(f"{text}\n")


def test_the_last_level_is_counted_once_for_each_group_that_shares_it(tmp_path):
    for cpu in range(4):
        make_cache(tmp_path, cpu, 0, 1, "Data", "32K", cpu)
        make_cache(tmp_path, cpu, 1, 1, "Instruction", "32K", cpu)
        make_cache(tmp_path, cpu, 2, 2, "Unified", "1M", cpu)
        make_cache(tmp_path, cpu, 3, 3, "Unified", "16384K", "0-1" if cpu < 2 else "2-3")
    assert machine._linux_cache_bytes(tmp_path, None) == 32 << 20
    assert machine._linux_cache_bytes(tmp_path, {0, 1}) == 16 << 20
    assert machine._linux_cache_bytes(tmp_path, {9}) == 0


def test_a_machine_that_tells_nothing_or_nonsense(tmp_path, monkeypatch):
    make_cache(tmp_path, 0, 3, 3, "Unified", "many", "0")
    (tmp_path / "cpu1" / "cache" / "index0").mkdir(parents=True)
    assert machine._linux_cache_bytes(tmp_path, None) == 0
    monkeypatch.setattr(machine, "_linux_cache_bytes", lambda *_: 0)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert last_level_cache_bytes() == machine.DEFAULT_CACHE_BYTES


def test_this_machines_cache_is_plausible():
    assert 1 << 18 <= last_level_cache_bytes() <= 1 << 34
