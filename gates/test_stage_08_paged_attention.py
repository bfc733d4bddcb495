"""Stage 08, the judge: paged attention in PyTorch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from bills import Bills, split_words
from decode_race import DecodeRace
from pages import TOLERANCE, Pages, compare

from course.check import expect
from course.check.channel import Foreign, short, type_name
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle
from course.measure.ratio import PairedRatio

STAGE = 8
DOUBLE = 1e-10  # all of it in float64
MOST_HELD = 1.5  # times keys and values: room for a plan, and for what one layer gathers
MOST_OPERATIONS = 1.5  # for 8 sequences over those for 2; one by one it is nearly 4
MOST_PLANNED = 3  # operations on integers in a layer after the first; a whole plan takes 19
LOGITS = 1e-3  # float32 logits against float64 ones


def attend(
    gate: GateRun, pages: Pages, todo: list[Any], outputs: list[Any], what: str, *,
    dtype: str = "float32", atol: float = TOLERANCE, unwritten: float = math.nan,
) -> float:  # fmt: skip
    """Run steps through the solution's attention, and compare; returns the largest error.

    unwritten: what a new pool holds.
    """

    def run() -> list[Any]:
        scenario = gate.candidate.start(
            "attention", model="nano", heads=list(pages.heads), num_blocks=pages.num_blocks,
            block_size=pages.block_size, todo=todo, dtype=dtype, unwritten=unwritten,
        )  # fmt: skip
        return [step.value for step in scenario]

    return compare(expect.result_of(run, what), outputs, what, atol=atol)


def are_slots(got: Any, what: str) -> list[int]:
    """A list of plain ints, or WRONG_TYPE. A tensor of ints in one dimension will do."""
    if isinstance(got, torch.Tensor) and got.dim() == 1:
        got = got.tolist()
    if not isinstance(got, (list, tuple)):
        raise GateFailure(
            Code.WRONG_TYPE, f"{what} returns no list", "a list of int", type_name(got),
            likely="Slots are plain numbers: `tolist()` makes them of an array.",
        )  # fmt: skip
    for slot in got:
        if type(slot) is not int:
            raise GateFailure(
                Code.WRONG_TYPE, f"{what} returns a list of something else", "a list of int",
                f"{type_name(slot)}: {slot.repr if isinstance(slot, Foreign) else short(slot, 40)}",
                likely="Slots are plain numbers: `tolist()` makes them of an array.",
            )  # fmt: skip
    return list(got)


@pytest.mark.contract
class TestSlots:
    """`slot_mapping`."""

    def test_slots_follow_the_table(self, gate: GateRun) -> None:
        """slot = table[p // size] * size + p % size"""
        for block_size in (1, 4, 16):
            table = [gate.rng.randrange(1000) for _ in range(6)]
            for start, count in ((0, 6 * block_size), (block_size - 1, 2), (block_size, 1), (3, 0)):
                wanted = [
                    table[p // block_size] * block_size + p % block_size
                    for p in range(start, start + count)
                ]
                what = f"slot_mapping({start}, {count}) in blocks of {block_size}"
                got = expect.result_of(
                    lambda t=table, s=start, c=count, b=block_size: gate.candidate.call(
                        "mapping", table=t, start=s, count=c, block_size=b
                    ),
                    what,
                )
                got = are_slots(got, what)
                if got != wanted:
                    first = next(
                        (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
                        min(len(got), len(wanted)),
                    )
                    raise GateFailure(
                        Code.WRONG_VALUE, what, str(wanted[first : first + 4]),
                        str(got[first : first + 4]), where=f"from position {start + first} on",
                        likely="Slot = table[p // size] * size + p % size: the block of the "
                        "table, times its size, and the place in it.",
                    )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "start", "count", "what"),
        [
            ("block_table", 6, 3, "a position past the table"),
            ("start", -1, 2, "a negative start"),
            ("count", 0, -1, "a negative count"),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, start: int, count: int, what: str
    ) -> None:
        """positions that the table does not hold are refused"""

        def attempt() -> None:
            gate.candidate.call("mapping", table=[5, 2], start=start, count=count, block_size=4)

        expect.rejects(attempt, argument, what)


@pytest.mark.contract
class TestBatch:
    """`step_batch`."""

    def test_sequences_lie_end_to_end(self, gate: GateRun) -> None:
        """a ragged step of prefill, decode, a chunk and a draft"""
        block_size = 4
        shapes = [(9, 0, 9), (6, 5, 1), (14, 3, 7), (1, 0, 1), (8, 4, 4), (13, 0, 6)]
        ids = list(range(40))
        gate.rng.shuffle(ids)
        sequences, counts = [], []
        for length, computed, count in shapes:
            table = [ids.pop() for _ in range(-(-length // block_size) + gate.rng.randrange(2))]
            tokens = [gate.rng.randrange(256) for _ in range(length)]
            sequences.append([tokens, computed, table])
            counts.append(count)
        found = expect.result_of(
            lambda: gate.candidate.call(
                "batch", sequences=sequences, counts=counts, block_size=block_size
            ),
            "step_batch of six sequences",
        )
        expect.unchanged(counts, found["counts"], "step_batch: `counts`")
        for before, after in zip(sequences, found["sequences"], strict=True):
            names = ("tokens", "num_computed", "block_table")
            for name, one, other in zip(names, before, after, strict=True):
                expect.unchanged(one, other, f"step_batch: `{name}` of a sequence")
        for name, (values, dtype) in expected_batch(sequences, counts, block_size).items():
            wanted = torch.tensor(values)
            got = expect.is_tensor(found["batch"][name], f"step_batch: {name}", wanted.shape)
            if got.dtype != dtype:
                raise GateFailure(
                    Code.WRONG_TYPE, f"step_batch: {name} has the wrong dtype",
                    str(dtype), str(got.dtype),
                    likely="The types stand in `StepBatch`: int32 for what a kernel reads.",
                )  # fmt: skip
            if not torch.equal(got.long(), wanted):
                raise GateFailure(
                    Code.WRONG_VALUE, f"step_batch: {name}", str(values)[:200],
                    str(got.tolist())[:200],
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "lengths", "counts", "what"),
        [
            ("counts", [], [], "no sequences"),
            ("counts", [3, 3], [1], "one count for two sequences"),
            ("counts", [3], [0], "a count of 0"),
            ("counts", [3], [4], "more tokens than there are"),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, lengths: list[int], counts: list[int], what: str
    ) -> None:
        """counts that make no step are refused"""
        sequences = [[[7] * length, 0, [0, 1]] for length in lengths]

        def attempt() -> None:
            gate.candidate.call("batch", sequences=sequences, counts=counts, block_size=4)

        expect.rejects(attempt, argument, what)

    def test_the_device_is_the_one_that_is_asked_for(self, gate: GateRun) -> None:
        """all seven tensors lie on the given device"""
        for device in ("cpu", "meta"):  # neither is the default: that of a GPU is tried elsewhere
            what = f'step_batch(device="{device}")'
            found = expect.result_of(
                lambda device=device: gate.candidate.call("devices", device=device), what
            )
            for name, got in (found or {}).items():
                if got != device:
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{what}: {name} lies on another device", device, got,
                        likely="`device` is an argument of step_batch, and the CPU its default "
                        "only.",
                    )  # fmt: skip


def expected_batch(
    sequences: list[Any], counts: list[int], block_size: int
) -> dict[str, tuple[list[Any], torch.dtype]]:
    """The fields of a StepBatch, by their definitions in course.types."""
    width = max(len(table) for _, _, table in sequences)
    fed = [
        (tokens[p], p, table[p // block_size] * block_size + p % block_size)
        for (tokens, computed, table), count in zip(sequences, counts, strict=True)
        for p in range(computed, computed + count)
    ]
    starts = list(itertools.accumulate(counts, initial=0))
    return {
        "token_ids": ([token for token, _, _ in fed], torch.int64),
        "positions": ([position for _, position, _ in fed], torch.int64),
        "slot_mapping": ([slot for _, _, slot in fed], torch.int64),
        "query_start_loc": (starts, torch.int32),
        "context_lens": (
            [c + n for (_, c, _), n in zip(sequences, counts, strict=True)], torch.int32
        ),
        "block_tables": ([t + [-1] * (width - len(t)) for _, _, t in sequences], torch.int32),
        "logit_rows": ([start - 1 for start in starts[1:]], torch.int64),
    }  # fmt: skip


def keeps_nan(found: list[Any], outputs: list[Any], what: str) -> None:
    """Attention gives NaN where it must, and numbers where it must, in every layer of each step."""
    for index, (layers, expected) in enumerate(zip(found, outputs, strict=True)):
        for layer, (got, wanted) in enumerate(zip(layers, expected, strict=True)):
            where = f"step {index}, layer {layer}"
            if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
                expect.is_tensor(got, f"{what}: {where}", wanted.shape)
            lost, strange = wanted.isnan() & ~got.isnan(), got.isnan() & ~wanted.isnan()
            if lost.any():
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: it is hidden", "NaN, as dense attention gives",
                    f"{float(got[lost][0]):.3g}", where,
                    likely="What was gathered is washed with nan_to_num or the like. Slots that "
                    "nobody has written must not be read; those that were must be read as they "
                    "are, or a model that overflows would answer without a sign of it.",
                )  # fmt: skip
            if strange.any():
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: others see it", "numbers", "NaN", where,
                    likely="Its table, its mask or its rows reach into the neighbour's.",
                )  # fmt: skip


HEADS = [(4, 4, 16), (6, 2, 16), (3, 1, 32), (8, 2, 64)]


@pytest.mark.contract
class TestAttention:
    """`PagedAttention` alone, against dense attention in float64."""

    @pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}x{h[1]}x{h[2]}")
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_decode(self, gate: GateRun, heads: tuple[int, int, int], block_size: int) -> None:
        """one query a sequence, at lengths around the block size"""
        lengths = [1, block_size, block_size + 1, 3 * block_size, 2 * block_size + 3]
        if block_size > 1:
            lengths.append(block_size - 1)
        pages = Pages(gate, heads, block_size, [n + 3 for n in lengths])
        steps = [pages.step(dict(enumerate(lengths)))]
        steps += [pages.step(dict.fromkeys(range(len(lengths)), 1)) for _ in range(3)]
        todo, outputs = map(list, zip(*steps, strict=True))
        attend(gate, pages, todo, outputs, f"blocks of {block_size}")

    def test_several_queries(self, gate: GateRun) -> None:
        """chunks of several queries are aligned bottom-right"""
        pages = Pages(gate, (6, 2, 16), 4, [40, 40, 40])
        counts = [{0: 5, 1: 5, 2: 9}, {0: 3, 1: 3, 2: 3}, {0: 1, 1: 6, 2: 2}, {2: 4, 0: 4}]
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        attend(gate, pages, todo, outputs, "chunks")

    def test_a_mixed_step(self, gate: GateRun) -> None:
        """prefill, decode and chunks in one step, in any order"""
        pages = Pages(gate, (4, 2, 16), 4, [30] * 5)
        counts = [{0: 7, 1: 2}, {1: 1, 2: 11, 0: 1}, {3: 3, 0: 1, 2: 5, 1: 1, 4: 1}]
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        attend(gate, pages, todo, outputs, "a mixed step")

    @pytest.mark.parametrize("unwritten", [math.nan, 1e4, 1e30], ids=str)
    def test_a_table_longer_than_the_context(self, gate: GateRun, unwritten: float) -> None:
        """blocks that are reserved and not written yet are not read, whatever they hold"""
        pages = Pages(gate, (4, 2, 16), 4, [64, 20, 9])
        counts = [{0: 3, 1: 6, 2: 8}, {0: 1, 1: 1, 2: 1}]
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        what = f"tables with room to spare, in a pool full of {unwritten:g}"
        try:
            attend(gate, pages, todo, outputs, what, unwritten=unwritten)
        except GateFailure as failure:
            if not math.isnan(unwritten):  # who reads NaN is told so already
                failure.likely = "What nobody has written is read, and its weight is not 0."
            raise

    def test_what_a_sequence_wrote_is_read_as_it_is(self, gate: GateRun) -> None:
        """NaN that a sequence has written itself comes out, and nobody else sees it"""
        pages = Pages(gate, (4, 2, 16), 4, [12, 30])
        first, _ = pages.step({0: 5, 1: 9}, values={0: math.nan})
        steps = [pages.step({1: 1, 0: 1}), pages.step({0: 2, 1: 2}), pages.step({1: 1, 0: 1})]
        todo, outputs = map(list, zip(*steps, strict=True))
        scenario = gate.candidate.start(
            "attention", model="nano", heads=[4, 2, 16], num_blocks=pages.num_blocks, block_size=4,
            todo=[first, *todo],
        )  # fmt: skip
        what = "a sequence with NaN among its values"
        found = expect.result_of(lambda: [step.value for step in scenario][1:], what)
        keeps_nan(found, outputs, what)

    def test_a_batch_stays_as_it_is(self, gate: GateRun) -> None:
        """neither plan nor a call writes into the batch"""
        pages = Pages(gate, (4, 2, 16), 4, [30] * 3)
        todo = [pages.step(counts)[0] for counts in ({0: 7, 1: 2}, {1: 1, 2: 11, 0: 1})]
        todo.append(pages.step({0: 1, 1: 1}, padded=2)[0])

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "planned", heads=[4, 2, 16], num_blocks=pages.num_blocks, block_size=4, todo=todo
            )
            return [step.value for step in scenario]

        for step in expect.result_of(run, "three steps"):
            for name, (before, after) in step.items():
                if before != after:
                    raise GateFailure(
                        Code.MUTATED_INPUT, f"`{name}` of the batch was changed by plan or a call",
                        short(before, 80), short(after, 80),
                        likely="The batch is the caller's. What is to be written is cloned first.",
                    )  # fmt: skip

    def test_a_neighbour_does_not_matter(self, gate: GateRun) -> None:
        """another neighbour of the same length changes nothing, bit for bit"""
        pages = Pages(gate, (4, 2, 16), 4, [20, 20])
        steps = [pages.step({0: 6, 1: 9})[0], pages.step({0: 1, 1: 1})[0]]
        others = [
            [kind, batch, [[t.clone() for t in layer] for layer in layers]]
            for kind, batch, layers in steps
        ]
        for (_, _, layers), start in zip(others, (6, 1), strict=True):
            for layer in layers:
                for tensor in layer:
                    tensor[start:] += 1.0
        found = []
        for todo in (steps, others):
            run = gate.candidate.start(
                "attention", model="nano", heads=[4, 2, 16], num_blocks=pages.num_blocks,
                block_size=4, todo=todo,
            )  # fmt: skip
            found.append(expect.result_of(lambda r=run: [s.value for s in r], "two sequences"))
        for layer, (one, other) in enumerate(zip(found[0][1], found[1][1], strict=True)):
            if not torch.equal(one[0], other[0]):
                raise GateFailure(
                    Code.WRONG_VALUE, "another neighbour changes a sequence", "the same bits",
                    f"off by {float((one[0] - other[0]).abs().max()):.3g}", where=f"layer {layer}",
                    likely="Its table, its mask or its rows reach into the neighbour's.",
                )  # fmt: skip

    def test_rows_that_write_nowhere(self, gate: GateRun) -> None:
        """slot -1 writes into no block of the pool"""
        pages = Pages(gate, (4, 2, 16), 4, [12, 12])
        first, wanted = pages.step({0: 5, 1: 3})
        before = len(self.pool(gate, pages, [first]))
        second, more = pages.step({0: 1, 1: 1}, padded=2)
        attend(gate, pages, [first, second], [wanted, more], "a step with rows for nobody")
        pools = self.pool(gate, pages, [first, second])
        assert before == len(pools)
        for name, pool, side in zip(("keys", "values"), pools, (0, 1), strict=True):
            for layer in range(2):
                written = (~pool[layer].isnan().flatten(2).any(-1)).flatten()  # [slots]
                mine = {
                    self.slot(pages, index, position)
                    for index, length in enumerate(pages.lengths)
                    for position in range(length)
                }
                extra = sorted(set(written.nonzero().flatten().tolist()) - mine)
                if extra:
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{name} were written where no sequence has a position",
                        "slot -1 writes nowhere", f"slot {extra[0]} of layer {layer}",
                    )  # fmt: skip
                for index, length in enumerate(pages.lengths):
                    flat = pool[layer].flatten(0, 1)
                    got = flat[[self.slot(pages, index, p) for p in range(length)]]
                    if not torch.equal(got, pages.past[layer][index][side]):
                        raise GateFailure(
                            Code.WRONG_VALUE, f"{name} of sequence {index} lie elsewhere",
                            "slot = table[p // size] * size + p % size", "other values there",
                            where=f"layer {layer}",
                        )  # fmt: skip

    def test_blocks_are_copied(self, gate: GateRun) -> None:
        """copy_blocks copies from source to destination, in every layer"""
        pages = Pages(gate, (4, 2, 16), 4, [12, 12], spare=8)
        first, wanted = pages.step({0: 7, 1: 6})
        forked = (0, 1, 0)  # twice from one: a source with two destinations
        twins = [pages.fork(index, 1) for index in forked]
        pairs = [
            [old, new]
            for index, twin in zip(forked, twins, strict=True)
            for old, new in zip(pages.tables[index][1:], pages.tables[twin][1:], strict=True)
        ]
        second, more = pages.step({0: 1, twins[0]: 1, twins[1]: 2, 1: 1})
        third, last = pages.step({twins[1]: 1, 0: 1, twins[0]: 3, twins[2]: 2})
        todo = [first, ["copy", pairs], second, ["copy", []], third]
        attend(gate, pages, todo, [wanted, more, last], "three forks")

    def test_a_table_is_used_again(self, gate: GateRun) -> None:
        """a step reads what lies in the blocks now: another text, or one that was copied there"""
        pages = Pages(gate, (4, 2, 16), 4, [20, 20])
        todo, outputs = [], []

        def feed(*steps: dict[int, int]) -> None:
            for counts in steps:
                step, wanted = pages.step(counts)
                todo.append(step)
                outputs.append(wanted)

        feed({0: 9, 1: 8}, {0: 1, 1: 1})
        todo.append(["copy", [pages.overwrite(0, 1, 1)]])
        feed({0: 1, 1: 1}, {1: 1, 0: 2})
        pages.begin_anew(1)
        feed({1: 6, 0: 1}, {0: 1, 1: 1})
        try:
            attend(gate, pages, todo, outputs, "a table that is used again")
        except GateFailure as failure:
            failure.likely = failure.likely or "A copy of a context is kept beside the pool."
            raise

    @pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
    def test_a_pool_has_the_dtype_that_is_asked_for(self, gate: GateRun, dtype: str) -> None:
        """keys, values and what comes out have the given dtype"""
        what = f"a pool of {dtype}"
        found = expect.result_of(
            lambda: gate.candidate.call("dtypes", model="nano", dtype=dtype), what
        )
        for name, got in zip(("keys", "values", "attention"), found, strict=True):
            if got != f"torch.{dtype}":
                raise GateFailure(
                    Code.WRONG_TYPE, f"{what}: {name} have another dtype", f"torch.{dtype}", got,
                    likely="`dtype` is an argument of the pool, and float32 its default only.",
                )  # fmt: skip

    def test_double_precision(self, gate: GateRun) -> None:
        """a pool of float64 keeps and attends float64"""
        pages = Pages(gate, (4, 2, 16), 4, [20, 20])
        counts = [{0: 9, 1: 4}, {0: 1, 1: 1}]
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        attend(gate, pages, todo, outputs, "a pool of float64", dtype="float64", atol=DOUBLE)

    def pool(self, gate: GateRun, pages: Pages, todo: list[Any]) -> list[torch.Tensor]:
        """Keys and values [L, N, block_size, Hkv, D] after some steps."""

        def run() -> Any:
            scenario = gate.candidate.start(
                "attention", model="nano", heads=list(pages.heads), num_blocks=pages.num_blocks,
                block_size=pages.block_size, todo=[*todo, ["pool"]],
            )  # fmt: skip
            return [step.value for step in scenario][-1]

        shape = (2, pages.num_blocks, pages.block_size, *pages.heads[1:])
        found = expect.result_of(run, "the pool after some steps")
        for name, tensor in zip(("keys", "values"), found, strict=True):
            if tensor.shape != shape:
                raise GateFailure(
                    Code.WRONG_VALUE, f"the shape of {name}, its last block left out",
                    f"[L, num_blocks, block_size, Hkv, D] = {list(shape)}", str(list(tensor.shape)),
                )  # fmt: skip
        return list(found)

    def slot(self, pages: Pages, index: int, position: int) -> int:
        """Where a position of a sequence lies."""
        block = pages.tables[index][position // pages.block_size]
        return block * pages.block_size + position % pages.block_size

    @pytest.mark.parametrize("size", [0, -1])
    @pytest.mark.parametrize("argument", ["num_blocks", "block_size"])
    def test_sizes_below_one_are_refused(self, gate: GateRun, argument: str, size: int) -> None:
        """a pool without blocks, or blocks without room, are refused"""
        sizes = {"num_blocks": 4, "block_size": 4, argument: size}

        def attempt() -> None:
            gate.candidate.call("made", model="nano", **sizes)

        expect.rejects(attempt, argument, f"{argument} = {size}")


@pytest.mark.contract
def test_logits_of_ragged_steps(gate: GateRun) -> None:
    """logits of ragged steps on nano equal those of each text alone"""
    block_size, room = 4, 8
    ids = list(range(3 * room + 2))
    gate.rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(room)] for _ in range(3)]

    def tokens(count: int) -> list[int]:
        return [gate.rng.randrange(256) for _ in range(count)]

    todo = [
        [[0, tokens(9)]],
        [[1, tokens(4)], [0, tokens(1)]],
        [[0, tokens(1)], [2, tokens(13)], [1, tokens(3)]],
        [[2, tokens(1)], [1, tokens(1)], [0, tokens(1)]],
    ]

    def run() -> list[Any]:
        scenario = gate.candidate.start(
            "steps", model="nano", num_blocks=3 * room + 2, block_size=block_size, tables=tables,
            todo=todo,
        )  # fmt: skip
        return [step.value for step in scenario]

    found = expect.result_of(run, "four ragged steps")
    texts: list[list[int]] = [[], [], []]
    for index, (step, logits) in enumerate(zip(todo, found, strict=True)):
        got = expect.is_tensor(
            logits, f"logits of step {index}", (len(step), nano_oracle().config.vocab_size)
        )
        for row, (which, new) in enumerate(step):
            texts[which] += new
            expect.close(
                got[row : row + 1], nano_oracle().logits(texts[which])[-1:], atol=LOGITS,
                what=f"step {index}: logits of sequence {which} at length {len(texts[which])}",
            )  # fmt: skip


@pytest.mark.number
def test_error(gate: GateRun) -> None:
    """attention against dense attention in float64, at a length of some hundred"""
    worst = 0.0
    for heads in HEADS:
        lengths = [gate.rng.randrange(100, 400) for _ in range(4)]
        pages = Pages(gate, heads, 16, [n + 2 for n in lengths])
        steps = [pages.step(dict(enumerate(lengths))), pages.step(dict.fromkeys(range(4), 1))]
        todo, outputs = map(list, zip(*steps, strict=True))
        worst = max(worst, attend(gate, pages, todo, outputs, "sequences of some hundred"))
    gate.exact(
        "error", worst, at_most=TOLERANCE, counted=False, code=Code.WRONG_VALUE,
        text=f"{worst:.1e}: the largest difference from dense attention in float64",
    )  # fmt: skip


SPARE = 7  # blocks of a pool for each that a context uses: what copies the pool shows


def too_much_gathered(share: float, heads: int) -> str:
    """The likely cause, by how many times the past is copied.

    heads: query heads of each KV head.
    """
    if share >= SPARE:  # the pool is one more than that
        return "The whole pool is copied, or a context is gathered at the length of the pool."
    if share >= heads + 0.9:  # once from the blocks, and then wider
        return "KV heads are repeated for their query heads."
    if share >= 1.9:
        return (
            "What was gathered is copied once more (torch.where, nan_to_num, clone, a change of "
            "type), or a table is gathered to its end: here it is twice as long as the context."
        )
    return (
        "Something beside the keys and values grows with the context and is copied: slots or "
        "masks that are worked out in every layer, or scores."
    )


@pytest.mark.number
def test_gathered(gate: GateRun) -> None:
    """bytes that attention copies in a step, and how they grow with the context"""
    config = nano_oracle().config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    short_bytes, long_bytes = (
        expect.result_of(
            lambda n=n: gate.candidate.call(
                "gathered_bytes", model="nano", length=n, block_size=16, spare=SPARE
            ),
            f"a decode step at {n} positions",
        )
        for n in (16, 240)
    )
    share = (long_bytes - short_bytes) / ((240 - 16) * per_token)
    least, most = gate.bar("gathered")
    few = share < least
    heads = config.num_heads // config.num_kv_heads
    gate.exact(
        "gathered", round(share, 2), at_least=least, at_most=most, unit="x",
        code=Code.WRONG_COUNT if few else Code.TOO_MUCH_TRAFFIC,
        text=f"{share:.2f} times the past is copied in every step ({long_bytes - short_bytes:,} "
        "bytes more at 240 positions than at 16)",
        message="a decode step does not read its past out of the blocks" if few
        else "a decode step copies more than the keys and values of the past",
        likely="A copy of the contexts is kept beside the pool." if few
        else too_much_gathered(share, heads),
        note="gathering before attending: stage 09 pays that bill",
    )  # fmt: skip


@pytest.mark.number
def test_copying(gate: GateRun) -> None:
    """copy_blocks moves the blocks of its pairs, and not the pool"""
    config = nano_oracle().config
    block = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * 16
    pairs = [[3, 40], [3, 41], [17, 5]]
    copied = expect.result_of(
        lambda: gate.candidate.call(
            "copied_by_pairs", model="nano", num_blocks=64, block_size=16, pairs=pairs
        ),
        "copying three blocks",
    )
    most = 3 * len(pairs) * block  # read into a new tensor, and written from there
    if expect.is_int(copied, "bytes") > most:
        raise GateFailure(
            Code.TOO_MUCH_TRAFFIC, "copy_blocks copies more than the blocks of its pairs",
            f"at most {most:,} bytes for three blocks of {block:,}", f"{copied:,}",
            likely="The whole pool is copied, of which all but three blocks stay as they are.",
        )  # fmt: skip


@pytest.mark.number
def test_what_is_held(gate: GateRun) -> None:
    """no contexts are kept beside the pool"""
    held, pool = expect.result_of(
        lambda: gate.candidate.call(
            "held_bytes", model="nano", lengths=[255, 255, 127, 127], block_size=16
        ),
        "a prefill and a decode step",
    )
    if held > MOST_HELD * pool:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, "a pool in use holds more than its keys and values, and a plan",
            f"at most {MOST_HELD} times {pool:,} bytes", f"{held:,}, {held / pool:.2f} times that",
            likely="A copy of the contexts is kept beside the pool.",
        )  # fmt: skip


@pytest.mark.number
def test_grouping(gate: GateRun) -> None:
    """a step takes as many operations for eight sequences as for two, if their counts are equal"""
    for kind, past, queries in (("decode", 33, 1), ("chunks", 33, 5), ("prefill", 0, 20)):
        few, many = (
            expect.result_of(
                lambda n=n, past=past, queries=queries: gate.candidate.call(
                    "operations", model="nano", lengths=[past + i if past else 0 for i in range(n)],
                    block_size=16, queries=queries,
                ),
                f"a step of {n} sequences, {queries} queries each",
            )
            for n in (2, 8)
        )  # fmt: skip
        if many > MOST_OPERATIONS * few:
            raise GateFailure(
                Code.WRONG_COUNT, f"the operations of a step ({kind}, {queries} queries for each "
                "sequence) grow with its sequences",
                f"as many for 8 sequences as for 2, which is {few}", str(many),
                likely="Sequences with equally many queries are attended one by one, not in one "
                "call.",
            )  # fmt: skip


@pytest.mark.number
def test_the_plan_is_made_once(gate: GateRun) -> None:
    """slots and rows are worked out by plan, and not again in every layer"""
    found = expect.result_of(
        lambda: gate.candidate.call(
            "planned_in_layers", model="nano", lengths=[33, 40, 47, 50], block_size=16
        ),
        "a decode step of four sequences",
    )
    if max(found) > MOST_PLANNED:
        raise GateFailure(
            Code.WRONG_COUNT, "a step is planned in every layer",
            f"at most {MOST_PLANNED} operations that give integers (slots, rows, positions) in a "
            "layer after the first", " and ".join(map(str, found)),
            likely="Slots, rows and masks are the same in all layers: `plan` works them out once.",
        )  # fmt: skip


GATHERING = 3  # a context is read, written and read again


@pytest.fixture(scope="module")
def bills(gate: GateRun) -> Bills:
    """One measurement of the machine for both times."""
    return Bills(gate)


@pytest.mark.number
def test_step_time(gate: GateRun, bills: Bills) -> None:
    """a decode step against contiguous slots, at equal batch"""
    rows, shortest, longest = gate.bar("equal_batch")
    lengths = [gate.rng.randrange(shortest, longest) for _ in range(rows)]
    race = DecodeRace(gate, {"lengths": lengths, "capacity": longest + DecodeRace.STEPS}, lengths)

    def words(ratio: PairedRatio) -> str:
        a, b = rows * 1e3 * ratio.candidate_s, rows * 1e3 * ratio.baseline_s
        return f"{ratio.median:.2f}x the speed of contiguous slots ({a:.1f} ms for {b:.1f})"

    def notes(ratio: PairedRatio) -> list[str]:
        at = [n + DecodeRace.STEPS // 2 for n in lengths]
        slots = bills.split(bills.decode(at), rows * ratio.baseline_s)
        pages = bills.split(bills.decode(at, kv_times=GATHERING), rows * ratio.candidate_s)
        return [
            f"predicted {slots.predicted / pages.predicted:.2f}x from the bills: a context is "
            "read, written and read again",
            split_words(slots, "slots"), split_words(pages, "pages"),
        ]  # fmt: skip

    gate.ratio("step_time", race.baseline, race.candidate, text=words, notes=notes)


@pytest.mark.number
def test_throughput(gate: GateRun, bills: Bills) -> None:
    """tokens per second out of the same bytes of KV cache"""
    slots, capacity, shortest, longest = gate.bar("equal_memory")
    budget = slots * capacity  # positions
    block_size = DecodeRace.BLOCK
    lengths: list[int] = []
    used = 0
    while True:
        length = gate.rng.randrange(shortest, longest)
        used += -(-(length + DecodeRace.STEPS + 1) // block_size) * block_size
        if used > budget:
            break
        lengths.append(length)
    race = DecodeRace(gate, {"lengths": lengths[:slots], "capacity": capacity}, lengths)
    race.must_fit("pool_bytes", budget)

    def words(ratio: PairedRatio) -> str:
        mine, other = 1 / ratio.candidate_s, 1 / ratio.baseline_s
        return (
            f"{ratio.median:.1f}x: {len(lengths)} sequences instead of {slots} "
            f"({mine:.0f} tokens/s for {other:.0f})"
        )

    def notes(ratio: PairedRatio) -> list[str]:
        at = [n + DecodeRace.STEPS // 2 for n in lengths]
        few = bills.split(bills.decode(at[:slots]), slots * ratio.baseline_s)
        many = bills.split(
            bills.decode(at, kv_times=GATHERING), len(lengths) * ratio.candidate_s
        )  # fmt: skip
        gain = len(lengths) / slots * few.predicted / many.predicted
        return [
            f"predicted {gain:.1f}x from the bills",
            split_words(few, f"a step of {slots}"), split_words(many, f"a step of {len(lengths)}"),
        ]  # fmt: skip

    gate.ratio("throughput", race.baseline, race.candidate, text=words, notes=notes)
