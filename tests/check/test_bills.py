"""The bills under a time: counted work over measured speeds, and only under what has not failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.measure import decode_work
from course.measure.roofline import Roofline
from course.model.describe import load_config
from course.paths import course_home

GIB = 1 << 30
ROOFLINE = Roofline(
    device="cpu", threads=1, torch_version="2", array_bytes=1, cache_bytes=1,
    read_bandwidth=float(GIB), copy_bandwidth=1.0, flops={"float32": 8.0 * GIB},
    tried=("float32",), busy=False, probes=1,
)  # fmt: skip


def machine(threads: int) -> Any:
    """As much of a GateRun as bills look at."""
    options = SimpleNamespace(threads=threads)
    return SimpleNamespace(device="cpu", model="nano", options=options)


@pytest.fixture
def bills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(course_home() / "gates"))
    from bills import Bills

    found = Bills(machine(1))
    found.__dict__.update(roofline=ROOFLINE, host_s=0.002)
    return found


def test_a_split_is_counted_work_over_measured_speeds(bills: Any) -> None:
    from bills import split_words

    config = load_config("nano", "cpu")
    work = decode_work(config, [100, 50], weight_itemsize=4, kv_itemsize=4)
    split = bills.split(bills.decode([100, 50]), 0.02)
    assert split.weights == work.weight_bytes / GIB
    assert split.kv == work.kv_bytes / GIB
    assert split.arithmetic == pytest.approx(work.flops / (8 * GIB))
    assert split.predicted == 0.002 + split.floor
    gathered = bills.split(bills.decode([100, 50], kv_times=3), 0.02)
    assert gathered.kv == pytest.approx(3 * split.kv)
    assert gathered.arithmetic == split.arithmetic
    words = split_words(split, "two rows")
    assert words.startswith("two rows: host 2.0, weights ")
    assert words.endswith(f" of 20.0 ms ({split.floor / 0.02:.0%})")
    assert bills.whole_pass(50).flops > 40 * bills.decode([50]).flops / 2


def test_speeds_are_measured_with_the_workers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(course_home() / "gates"))
    import bills as module

    before, seen = torch.get_num_threads(), []

    def probe_now(*_: Any, **__: Any) -> Roofline:
        seen.append(torch.get_num_threads())
        return ROOFLINE

    monkeypatch.setattr(module, "probe_now", probe_now)
    found = module.Bills(machine(before + 1))
    assert found.roofline is found.roofline
    assert seen == [before + 1]
    assert 0 < found.host_s < 1
    assert torch.get_num_threads() == before


def test_a_number_that_fails_gets_no_notes() -> None:
    numbers: list[Any] = []
    gate: Any = SimpleNamespace(
        bar=lambda name: {"at_least": 1.5}, options=SimpleNamespace(prior={}), _add=numbers.append,
        _counted=lambda name, step: step,
    )  # fmt: skip

    def ratio(baseline_s: float) -> None:
        GateRun.ratio(
            gate, "speed", lambda: baseline_s, lambda: 1.0, text=lambda r: "", itself=True,
            notes=lambda r: [f"{r.median:.1f}"],
        )  # fmt: skip

    ratio(2.0)
    with pytest.raises(GateFailure, match="TOO_SLOW"):
        ratio(1.0)
    assert [number.notes for number in numbers] == [["2.0"], []]
