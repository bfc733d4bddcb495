"""What chapter 13 shows: operations counted, rows for nobody, and the log of its incident."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course import graphs
from course.check.edits import edited_solution
from course.check.oracle import nano_oracle
from course.model import load
from course.model.seeded import NANO, seeded_decoder
from course.parts import PagedAttention, step_batch
from course.syllabus import Stage, load_syllabus
from course.types import Request, Sequence
from loading import module_at
from test_chapters import fences, flat, section


@pytest.fixture
def stage() -> Stage:
    return load_syllabus().find(13)


class Operations(TorchDispatchMode):
    """Counts operations; views are none."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def text(tokens: list[int], computed: int, table: list[int]) -> Sequence:
    """In the middle of its life."""
    return Sequence(Request("r", (0,)), tokens, computed, table)


def eager_operations(layers: int) -> int:
    """Of a decode step of two texts through stage 08, on nano with so many layers."""
    config = replace(NANO, num_layers=layers)
    model = seeded_decoder(config, device=torch.device("cpu"), dtype=torch.float32)
    attend = PagedAttention(config, 4, 16)
    attend.keys.zero_()
    attend.values.zero_()
    batch = step_batch([text([1] * 9, 8, [table]) for table in (0, 1)], [1, 1], 16)
    with Operations() as asked:
        attend.plan(batch)
        model.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)
    return asked.count


def test_operations_of_a_step(stage: Stage) -> None:
    """149 on nano, by the formula of the chapter, and those of 16 and 32 layers."""
    paper = flat(section(stage, "On paper"))
    fixed, each = map(int, re.search(r"(\d+) \+ (\d+) × L", paper).groups())
    for layers in (1, 3, 5):
        assert eager_operations(layers) == fixed + each * layers
    assert f"{fixed + each * NANO.num_layers} operations" in stage.predict
    for layers in (16, 32):
        assert f"{fixed + each * layers:,} operations" in paper
        assert f"{5e-3 * (fixed + each * layers):.1f} ms" in paper  # at 5 us each


def test_counts_of_the_notes(stage: Stage) -> None:
    """Operations in a graph of two rows, and those that a step through it asks for."""
    notes = flat((stage.reference.parent / "NOTES.md").read_text(encoding="utf-8"))
    model = load("nano").model
    attend = module_at(stage.reference).GraphDecodeAttention(model.config, 4, 16)
    attend.keys.zero_()
    attend.values.zero_()
    runner = module_at(stage.reference).GraphRunner(model, attend, [2], 2, graphs)
    batch = step_batch([text([1] * 9, 8, [table]) for table in (0, 1)], [1, 1], 16)
    with Operations() as host:
        runner(batch)
    asked, eager = host.count + 1, eager_operations(NANO.num_layers)  # the replay is one
    assert f"stands at {eager / asked:.1f}, with {asked} operations for {eager}." in notes
    recorded = runner.captured[2].graph.num_operations
    assert f"operations in a graph of 2 rows, nano | | {recorded} |" in notes


def test_floors(stage: Stage) -> None:
    """Weights over the bandwidth of an H100, and what a graph can be worth."""
    paper = flat(section(stage, "On paper"))
    for gigabytes, layers in ((2.47, 16), (15.0, 32)):
        floor = gigabytes / 3.35
        host = 5e-3 * (32 + 39 * layers)
        assert f"{floor:.1f} ms" in paper
        assert f"{host / floor:.1f}" in paper


def test_rows_for_nobody(stage: Stage) -> None:
    """Powers of two: the share of rows that stand for nobody, sizes 1 to 64 log-uniform."""
    paper = flat(section(stage, "On paper"))
    weights = {n: 1 / n for n in range(1, 65)}
    real = sum(w * n for n, w in weights.items())
    padded = sum(w * (1 << (n - 1).bit_length()) for n, w in weights.items())
    assert f"{1 - real / padded:.0%}" in paper


def test_the_log_of_the_incident(stage: Stage, tmp_path: Path) -> None:
    """What is fed, which bucket is replayed, and how far each text is off."""
    diff = next(p for p in stage.wrong if p.stem == "padding_keeps_an_old_step")
    solution = module_at(edited_solution(stage.reference, diff, tmp_path))
    shown = [line.split() for line in fences(section(stage, "Incident"), "")[0].splitlines()[1:]]
    assert shown == list(log(solution))
    right = list(log(module_at(stage.reference)))
    assert {word for line in right for word in line[7:]} == {"-"}


STEPS = ("a6", "b6", "c6", "d6", "abcd", "abcd", "ab", "ab", "e7", "abe", "abe", "ab", "abe")


def log(solution: ModuleType) -> Iterator[list[str]]:
    """A line for each step: fed a to e, the bucket, and how far off the logits are."""
    model, oracle, rng = load("nano").model, nano_oracle(), random.Random(13)
    attend = solution.GraphDecodeAttention(model.config, 8, 16)
    runner = solution.GraphRunner(model, attend, [1, 2, 4], 2, graphs)
    # e gets the block that d had.
    tables = {"a": [3], "b": [6], "c": [1], "d": [4], "e": [4]}
    texts = {name: text([], 0, table) for name, table in tables.items()}
    for index, step in enumerate(STEPS):
        prefill = step[1:].isdigit()
        counts = {step[0]: int(step[1:])} if prefill else dict.fromkeys(step, 1)
        for name, count in counts.items():
            texts[name].tokens += [rng.randrange(256) for _ in range(count)]
        members = [texts[name] for name in counts]
        logits = runner(step_batch(members, list(counts.values()), 16))
        bucket = "eager" if prefill else str(min(b for b in (1, 2, 4) if b >= len(counts)))
        line = [str(index + 1), *(str(counts.get(name, 0)) for name in texts), bucket]
        for (name, count), got in zip(counts.items(), logits, strict=True):
            off = float((got - oracle.logits(texts[name].tokens)[-1]).abs().max())
            line.append("-" if off < 1e-3 else f"{off:.1f}")
            texts[name].num_computed += count
        yield line
