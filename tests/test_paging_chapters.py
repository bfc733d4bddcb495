"""What chapters 08, 09 and 11 show: a batch laid out, logs of real wrong solutions, a table."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import course
from course.check.edits import edited_solution
from course.check.oracle import nano_oracle
from course.model import load
from course.paths import course_home
from course.syllabus import Stage, load_syllabus
from course.types import Request, Sequence, StepBatch
from loading import module_at
from test_chapters import fences, section, tables


def wrong(stage: Stage, name: str, scratch: Path) -> Path:
    """A wrong solution, as a file."""
    diff = next(path for path in stage.wrong if path.stem == name)
    return edited_solution(stage.reference, diff, scratch)


def sequence(tokens: list[int], computed: int, table: list[int]) -> Sequence:
    """In the middle of its life."""
    return Sequence(Request("r", (0,)), tokens, computed, table)


def environment(**more: str) -> dict[str, str]:
    """For a process that finds this very course."""
    source = str(Path(course.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "COURSE_HOME": str(course_home()), **more}


def test_the_ragged_batch_of_stage_08() -> None:
    """The three texts of the chapter, laid out by the reference."""
    stage = load_syllabus().find(8)
    block = next(b for b in fences(section(stage, "On paper"), "") if "query_start_loc" in b)
    shown = {
        line.split()[0]: [int(n) for n in re.findall(r"-?\d+", line.replace(" - ", " -1 "))]
        for line in block.splitlines()
        if "_" in line.split()[0] or line.startswith("positions")
    }
    for name in ("token_ids", "block_tables"):
        del shown[name][-1]  # of a remark: T = 5, padded with -1
    batch = module_at(stage.reference).step_batch(
        [
            sequence([0] * 5 + [71], 5, [5, 2]),
            sequence([0, 0, 12, 40, 9], 2, [7, 0]),
            sequence([0] * 8 + [33], 8, [3, 6, 1]),
        ],
        [1, 3, 1],
        4,
    )
    names = StepBatch.__dataclass_fields__
    assert shown == {name: getattr(batch, name).flatten().tolist() for name in names}


def test_the_log_of_stage_08(tmp_path: Path) -> None:
    """Eight steps on nano: what is fed, and how far the logits of each text are off."""
    stage = load_syllabus().find(8)
    solution = module_at(wrong(stage, "neighbours_table", tmp_path))
    model, oracle, rng = load("nano").model, nano_oracle(), random.Random(8)
    ids = list(range(24))
    rng.shuffle(ids)
    texts = [sequence([], 0, [ids.pop() for _ in range(3)]) for _ in range(3)]
    attend = solution.PagedAttention(model.config, 24, 16)
    log = []
    steps = [[9, 0, 0], [0, 9, 0], *[[1, 1, 0]] * 2, [1, 1, 11], *[[1, 1, 1]] * 3]
    for index, counts in enumerate(steps):
        members = [(text, n) for text, n in zip(texts, counts, strict=True) if n]
        for text, n in members:
            text.tokens += [rng.randrange(256) for _ in range(n)]
        batch = solution.step_batch(*map(list, zip(*members, strict=True)), 16)
        attend.plan(batch)
        logits = model.forward(
            batch.token_ids[None], batch.positions[None], attend, batch.logit_rows
        )
        line = [str(index + 1), *map(str, counts)]
        for (text, n), got in zip(members, logits, strict=True):
            off = float((got - oracle.logits(text.tokens)[-1]).abs().max())
            line.append("-" if off < 1e-3 else f"{off:.1f}")
            text.num_computed += n
        log.append(line)
    shown = fences(section(stage, "Incident"), "")[0].splitlines()[1:]
    assert [line.split() for line in shown] == log


KERNEL_LOG = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("wrong", sys.argv[1])
solution = importlib.util.module_from_spec(spec)
spec.loader.exec_module(solution)
generator = torch.Generator().manual_seed(9)
found = []
for length in json.loads(sys.argv[2]):
    for splits in (1, 2, 4, 8):
        k, v = (torch.randn(20, 16, 1, 64, generator=generator) for _ in range(2))
        q = torch.randn(1, 1, 64, generator=generator)
        table, lengths, starts = (
            torch.tensor(x, dtype=torch.int32) for x in ([list(range(20))], [length], [0, 1])
        )
        out = solution.paged_attention(
            q, k, v, table, lengths, starts, max_queries=1, num_splits=splits
        )
        keys, values = (pool.flatten(0, 1)[:length, 0] for pool in (k, v))
        wanted = torch.softmax(q[0] @ keys.T / 8, -1) @ values
        found.append(float((out[0] - wanted).abs().max()))
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not here")
def test_the_log_of_stage_09(tmp_path: Path) -> None:
    """Lengths and splits, in the interpreter: where a split is empty, the result is NaN."""
    stage = load_syllabus().find(9)
    shown = [line.split() for line in fences(section(stage, "Incident"), "")[0].splitlines()[1:]]
    path = wrong(stage, "empty_split_divides_by_zero", tmp_path)
    lengths = json.dumps([int(row[0]) for row in shown])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL_LOG, str(path), lengths],
        env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    errors = torch.tensor(json.loads(done.stdout)).unflatten(0, (len(shown), 4))
    for row, found in zip(shown, errors, strict=True):
        assert row[1:] == ["nan" if e.isnan() else "ok" if e < 1e-5 else "off" for e in found]


def test_the_watermarks_of_stage_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the chapter, by the simulation that its gate judges with."""
    stage = load_syllabus().find(11)
    monkeypatch.syspath_prepend(str(stage.gate.parent))
    gate, traces = (importlib.import_module(name) for name in (stage.gate.stem, "traces"))
    lengths = traces.log_uniform(random.Random(11), *stage.bars["cpu"]["trace"], hand=32)
    arrivals = [
        (i // 32 * 160, {"prompt": [0] * length, "new": new})
        for i, (length, new) in enumerate(lengths)
    ]
    useful = sum(length + new - 1 for length, new in lengths)
    found = []
    for watermark in (0, 2, 4, 6, 8, 16):
        run = gate.simulate(arrivals, 71, 8, max_running=96, watermark=watermark)
        again = f"{1 - useful / run.computed:.1%}"
        found.append([str(n) for n in (watermark, run.steps, run.preempted)] + [again])
    assert tables(section(stage, "On paper"))["watermark"] == found
