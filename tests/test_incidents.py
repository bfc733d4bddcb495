"""The logs that chapters 04, 05 and 11 show: real ones, of wrong solutions that the gate knows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from course.check.edits import edited_solution
from course.check.oracle import nano_oracle
from course.model import load
from course.parts import PrefixCachingAllocator
from course.syllabus import load_syllabus
from course.types import Request, SamplingParams
from loading import module_at
from test_chapters import fences, flat, section


@pytest.mark.parametrize(
    ("number", "wrong"),
    [(4, "sees_padding"), (5, "sees_the_last_owner"), (11, "victim_at_the_back")],
)
def test_the_logs_of_incidents_are_real(number: int, wrong: str, tmp_path: Path) -> None:
    """What the incident shows is what this wrong solution does, on nano."""
    stage = load_syllabus().find(number)
    diff = next(path for path in stage.wrong if path.stem == wrong)
    solution = module_at(edited_solution(stage.reference, diff, tmp_path))
    shown = fences(section(stage, "Incident"), "")[0].splitlines()[1:]
    assert [line.split() for line in shown] == list(LOGS[number](solution))


def padding_log(solution: ModuleType) -> Iterator[list[str]]:
    """A prompt of 9 beside one of another length: how far off, and from which token on."""
    model, oracle, rng = load("nano").model, nano_oracle(), random.Random(4)
    prompt = [rng.randrange(256) for _ in range(9)]
    text = oracle.greedy(prompt, 12)[0]
    for length in (4, 9, 10, 12, 20, 60):
        rows = [prompt, [rng.randrange(256) for _ in range(length)]]
        token_ids, positions, starts = solution.pad_left(rows)
        width = token_ids.shape[1]
        cache = solution.PaddedCache(model.config, width, starts)
        logits = model.forward(token_ids, positions, cache, [width - 1])[0]
        off = float((logits - oracle.logits(prompt)[-1]).abs().max())
        got = [step[0] for step in solution.generate_batch(model, rows, 12)]
        yield [str(length), f"{off:.1f}", first_difference(got, text)]


def owner_log(solution: ModuleType) -> Iterator[list[str]]:
    """Nine requests in three slots: whose slot it was, and from which token on they are wrong."""
    rng = random.Random(4)
    lengths, news = (40, 6, 12, 9, 21, 4, 30, 7, 15), (8, 14, 6, 10, 12, 9, 6, 16, 5)
    batcher = solution.ContinuousBatcher(load("nano").model, 3)
    requests = [
        Request(f"r{i}", tuple(rng.randrange(256) for _ in range(n)), SamplingParams(new))
        for i, (n, new) in enumerate(zip(lengths, news, strict=True))
    ]
    for request in requests:
        batcher.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    slots: dict[str, int] = {}
    while batcher.has_work:
        for output in batcher.step():
            tokens[output.request_id] += output.token_ids
        slots |= {s.request.request_id: slot for slot, s in batcher.running.items()}
    filled = [0, 0, 0]
    for request, n, new in zip(requests, lengths, news, strict=True):
        name, slot, fed = request.request_id, slots[request.request_id], n + new - 1
        text = nano_oracle().greedy(list(request.prompt_ids), new)[0]
        numbers = [slot, n, fed, filled[slot]]
        yield [name, *map(str, numbers), first_difference(tokens[name], text)]
        filled[slot] = max(filled[slot], fed)


def first_difference(got: list[int], wanted: list[int]) -> str:
    """The index, as text."""
    assert len(got) == len(wanted)
    pairs = enumerate(zip(got, wanted, strict=True))
    return next((str(i) for i, (a, b) in pairs if a != b), "none")


def queue_log(solution: ModuleType) -> Iterator[list[str]]:
    """Twelve requests in 14 blocks: when they came, spoke first and last, and their pauses."""
    for name, (arrived, spoken) in served(solution).items():
        pauses = [later - earlier for earlier, later in pairwise(spoken)]
        numbers = [arrived, spoken[0], spoken[-1], len(spoken), max(pauses)]
        yield [name, *map(str, numbers)]


def served(solution: ModuleType) -> dict[str, tuple[int, list[int]]]:
    """Of each request the step in which it came, and those of its tokens."""
    rng = random.Random(5)
    allocator = PrefixCachingAllocator(14, 4)
    scheduler = solution.Scheduler(allocator, nano_oracle().config, max_running=8, watermark=1)
    found: dict[str, tuple[int, list[int]]] = {}
    step = 0
    while len(found) < 12 or scheduler.has_work:
        if len(found) < 12 and step % 2 == 0:
            name = "abcdefghijkl"[len(found)]
            params = SamplingParams(rng.randrange(6, 20))
            scheduler.add(Request(name, tuple(rng.randrange(256) for _ in range(9)), params))
            found[name] = (step, [])
        decided = scheduler.schedule()
        for output in scheduler.update(decided, [7] * len(decided.sequences)):
            found[output.request_id][1].append(step)
        step += 1
    return found


def test_the_means_of_stage_11(tmp_path: Path) -> None:
    """Its mean time to first token is better for the mistake, as the incident says."""
    stage = load_syllabus().find(11)
    diff = next(path for path in stage.wrong if path.stem == "victim_at_the_back")
    wrong = module_at(edited_solution(stage.reference, diff, tmp_path))
    means = [
        statistics.fmean(spoken[0] - arrived for arrived, spoken in served(solution).values())
        for solution in (module_at(stage.reference), wrong)
    ]
    words = f"has fallen from {means[0]:.1f} steps to {means[1]:.1f}"
    assert words in flat(section(stage, "Incident"))


LOGS = {4: padding_log, 5: owner_log, 11: queue_log}
