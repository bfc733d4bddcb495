"""Stage 13, the judge: CUDA graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_race import DecodeRace
from graph_steps import Rows, Texts
from leftovers import keeps_nothing
from pages import Pages, compare

from course.check import expect
from course.check.channel import short
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.measure.ratio import PairedRatio

STAGE = 13
MOST_OPERATIONS = 1.2  # in the graph of the most rows, over that of the fewest
MOST_PLANNED = 4  # operations on integers in a layer after the first; slots anew take 6
MOST_KEPT = 1_000  # bytes of Python objects, after KEPT_STEPS replayed steps
KEPT_STEPS = 60
LOGITS = 1e-3  # float32 logits against float64 ones
BLOCK = 4
WIDTH = 6  # columns of the tables in graphs: texts of up to 24 tokens

HEADS = [(4, 4, 16), (6, 2, 16), (3, 1, 32)]


@pytest.mark.contract
class TestAttention:
    """`GraphDecodeAttention`, against dense attention in float64."""

    @pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}x{h[1]}x{h[2]}")
    @pytest.mark.parametrize("block_size", [1, 4])
    def test_any_step(self, gate: GateRun, heads: tuple[int, int, int], block_size: int) -> None:
        """prefill, chunks, mixed steps and decode, run eagerly"""
        pages = Pages(gate, heads, block_size, [40] * 3)
        counts = [{0: 7, 1: 1, 2: 4}, {2: 1, 0: 3}, {1: 1, 0: 1, 2: 1}, {2: 5}, {2: 1, 1: 1}]
        steps = [pages.step(c) for c in counts] + [pages.step({0: 1, 2: 1}, padded=2)]
        todo, outputs = map(list, zip(*steps, strict=True))
        self.attend(gate, pages, todo, outputs, f"eager steps, blocks of {block_size}")

    @pytest.mark.parametrize("unwritten", [math.nan, 1e30], ids=str)
    def test_nothing_unwritten_is_read(self, gate: GateRun, unwritten: float) -> None:
        """tables longer than the context are masked, and what lies there does not matter"""
        pages = Pages(gate, (4, 2, 16), 4, [60, 20, 9])
        counts = [{0: 3, 1: 6, 2: 8}, {0: 1, 1: 1, 2: 1}, {2: 1, 1: 1}]
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        what = f"tables with room to spare, in a pool full of {unwritten:g}"
        self.attend(gate, pages, todo, outputs, what, unwritten=unwritten)

    def test_in_a_graph(self, gate: GateRun) -> None:
        """a captured call is right for what the batch holds later"""
        pages = Pages(gate, (4, 2, 16), 4, [24, 24, 24, 24])
        todo, outputs = [], []

        def feed(*steps: dict[int, int]) -> None:
            for counts in steps:
                step, wanted = pages.step(counts)
                todo.append(step)
                outputs.append(wanted)

        feed({0: 1, 1: 9, 2: 3}, {2: 1, 0: 1, 1: 1}, {0: 1, 1: 1, 2: 1})
        for _ in range(6):
            feed({1: 1, 2: 1, 0: 1})
        pages.begin_anew(1)  # another text in the same blocks
        feed({1: 2}, {1: 1, 0: 1, 2: 1}, {3: 14}, {3: 1, 2: 1, 1: 1})
        width = max(map(len, pages.tables)) + 2

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "captured_attention", model="nano", heads=list(pages.heads),
                num_blocks=pages.num_blocks, block_size=4, width=width, todo=todo,
            )  # fmt: skip
            return [step.value for step in scenario]

        what = "decode steps of three rows, captured before any of them"
        try:
            compare(expect.result_of(run, what), outputs, what)
        except GateFailure as failure:
            failure.likely = failure.likely or (
                "Something that depends on the batch is worked out in `plan`, or in Python, and "
                "no replay does it again."
            )
            raise

    def attend(
        self, gate: GateRun, pages: Pages, todo: list[Any], outputs: list[Any], what: str,
        unwritten: float = math.nan,
    ) -> None:  # fmt: skip
        """Run steps eagerly, and compare."""

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "attention", model="nano", heads=list(pages.heads), num_blocks=pages.num_blocks,
                block_size=pages.block_size, todo=todo, unwritten=unwritten,
            )  # fmt: skip
            return [step.value for step in scenario]

        compare(expect.result_of(run, what), outputs, what)


def random_decodes(gate: GateRun, texts: Texts, sizes: list[int]) -> list[tuple[Any, Rows]]:
    """Decode steps of those sizes; texts join, leave and make room as that takes."""
    steps = []
    for size in sizes:
        for text in list(texts.running):
            full = len(texts.tokens[text]) >= texts.block_size * texts.width - 1
            if full or (len(texts.running) > size and gate.rng.random() < 0.3):
                texts.leave(text)
        while len(texts.running) < size:
            text = texts.join(reserve=gate.rng.randrange(3))
            steps.append(texts.step({text: gate.rng.randrange(1, 7)}))
        # A table as wide as the graphs', or as the longest of the step.
        exact = gate.rng.random() < 0.5
        steps.append(texts.step(dict.fromkeys(texts.shuffled(size), 1), exact=exact))
    return steps


@pytest.mark.contract
class TestWhatGraphsRead:
    """`GraphRunner`, with a model that writes down what a pass reads."""

    def test_every_field(self, gate: GateRun) -> None:
        """a replay reads this step, and rows for nobody where it has none"""
        texts = Texts(gate, 90, BLOCK, WIDTH)
        sizes = [3, 4, 1, 2, 4, 3, 1, 7, 5, 2, 6, 12, 5, 11, 6, 3, 3, 3, 3, 3, 2, 1]
        steps = random_decodes(gate, texts, sizes)

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "read_by_graphs", model="nano", buckets=[4, 1, 12, 2], width=WIDTH,
                todo=[fields for fields, _ in steps],
            )  # fmt: skip
            return [step.value for step in scenario]

        found = expect.result_of(run, "decode steps with a model that writes down what it reads")
        for index, ((fields, _), read) in enumerate(zip(steps, found, strict=True)):
            rows = len(fields["context_lens"])
            what = f"step {index}, {rows} rows"
            if read is None:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: no pass was made for it",
                    "a replay, or an eager pass", "neither",
                )  # fmt: skip
            self.reads(fields, read, what)
            if len(read["token_ids"]) > rows and len(fields["token_ids"]) == rows:
                self.nobody(read, rows, texts.num_blocks, what)

    def reads(self, fields: dict[str, Any], read: dict[str, Any], what: str) -> None:
        """The rows that stand for somebody."""
        needed = [-(-length // BLOCK) for length in fields["context_lens"]]
        for name in ("token_ids", "positions", "context_lens", "slot_mapping", "query_start_loc"):
            wanted = fields[name]
            got = read[name][: len(wanted)]
            if got != wanted:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: the pass read another {name}",
                    short(wanted, 80), short(got, 80),
                    likely="A graph reads the memory it was captured with: copy every field of "
                    "the step into it, each time.",
                )  # fmt: skip
        tables = zip(fields["block_tables"], read["block_tables"], needed, strict=False)
        for row, (wanted, got, blocks) in enumerate(tables):
            if got[:blocks] != wanted[:blocks]:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: the pass read another table",
                    short(wanted[:blocks], 80), short(got[:blocks], 80), where=f"row {row}",
                    likely="Tables grow and change hands: they are copied in every step.",
                )  # fmt: skip

    def nobody(self, read: dict[str, Any], rows: int, num_blocks: int, what: str) -> None:
        """The rows that are left over in a bucket."""
        for row in range(rows, len(read["token_ids"])):
            slot, length = read["slot_mapping"][row], read["context_lens"][row]
            block, position = read["block_tables"][row][0], read["positions"][row]
            where = f"row {row} of {len(read['token_ids'])}"
            if slot != -1:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: a row that stands for nobody writes", "slot -1",
                    f"slot {slot}", where,
                    likely="Rows beyond the step keep what an earlier step left in them, or 0, "
                    "which is somebody's slot.",
                )  # fmt: skip
            if length != 1 or not 0 <= block < num_blocks or position != 0:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: a row that stands for nobody",
                    "position 0, a context of 1, and a table that begins with a block of the pool",
                    f"position {position}, a context of {length}, block {block}", where,
                    likely="Rows beyond the step keep what an earlier step left in them.",
                )  # fmt: skip


class Served:
    """What a runner said of some steps on nano, checked against the oracle."""

    def __init__(
        self, gate: GateRun, texts: Texts, steps: list[tuple[Any, Rows]], what: str,
        *, buckets: list[int], before: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "steps", model="nano", buckets=buckets, width=texts.width,
                num_blocks=texts.num_blocks, block_size=BLOCK,
                todo=[fields for fields, _ in steps], before=before, **options,
            )  # fmt: skip
            return [step.value for step in scenario]

        self.gate, self.texts, self.what = gate, texts, what
        self.early, self.made, *self.replies = expect.result_of(run, what)
        self.before, self.steps = steps[:before], steps[before:]

    def check(self) -> Served:
        """Compare all logits with the oracle's, and the batches with what they were."""
        replied = zip(self.steps, (r["logits"] for r in self.replies), strict=True)
        early = zip(self.before, self.early["logits"], strict=True)
        previous: torch.Tensor | None = None
        for index, ((fields, rows), logits) in enumerate((*early, *replied)):
            wanted = self.texts.due(rows)
            where = f"{self.what}: step {index}, {len(fields['context_lens'])} rows"
            same_logits(logits, wanted, where, previous)
            previous = wanted
        for index, reply in enumerate(self.replies):
            for name, (one, other) in reply["batch"].items():
                expect.unchanged(one, other, f"step {index}: `{name}` of the batch")
        return self


def same_logits(got: Any, wanted: torch.Tensor, what: str, previous: torch.Tensor | None) -> None:
    """The logits of a step, or WRONG_LOGITS with the likely cause."""
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape or got.is_complex():
        expect.is_tensor(got, what, wanted.shape)
    if got.isnan().any():
        row = int(got.isnan().any(dim=1).nonzero()[0])
        raise GateFailure(
            Code.WRONG_LOGITS, f"{what}: a row of logits is NaN", "logits", "NaN",
            where=f"row {row}",
            likely="A slot was read that nobody has written, or an output that no replay has "
            "written: a capture computes nothing.",
        )  # fmt: skip
    try:
        expect.close(got, wanted, atol=LOGITS, what=what)
    except GateFailure as failure:
        off = ((got[:, None] - wanted).abs().amax(-1) <= LOGITS).any(dim=1)
        if bool(off.all()):
            failure.likely = "The rows are those of this step, in another order."
        elif previous is not None and near(got, previous):
            failure.likely = (
                "These are the logits of the step before: the graph reads memory that was not "
                "filled, or was not replayed."
            )
        raise


def near(got: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the first row is the first row of something else."""
    return bool(((got[0] - other[0]).abs() <= LOGITS).all())


@pytest.mark.contract
class TestRunner:
    """`GraphRunner` on nano, against every text alone."""

    def test_a_long_run(self, gate: GateRun) -> None:
        """logits of steps of every size, while texts come, grow and go"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        sizes = [gate.rng.choice((1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(24)]
        steps = random_decodes(gate, texts, [8, 1, 3, 8, 5, 2, *sizes, 4, 4, 4, 1])
        Served(gate, texts, steps, "a run of decodes and prefills", buckets=[2, 8, 1, 4]).check()

    def test_gaps_between_buckets(self, gate: GateRun) -> None:
        """a step takes the next larger bucket, however far it is"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        steps = random_decodes(gate, texts, [2, 6, 1, 5, 4, 3, 6, 2])
        Served(gate, texts, steps, "buckets of 1 and 6", buckets=[6, 1, 6]).check()

    def test_without_a_graph(self, gate: GateRun) -> None:
        """what no graph was captured for is right too, and so is the replay after it"""
        texts = Texts(gate, 80, BLOCK, WIDTH)
        steps = random_decodes(gate, texts, [3, 4])
        wide = texts.join(reserve=WIDTH + 1)
        few = texts.running[:3]
        steps.append(texts.step({wide: WIDTH * BLOCK}))
        steps.append(texts.step(dict.fromkeys([few[0], wide], 1)))  # a table wider than the graphs'
        steps.append(texts.step(dict.fromkeys(few, 1)))
        texts.leave(wide)
        steps += random_decodes(gate, texts, [4, 5])
        few = texts.running[:3]
        steps.append(texts.step({few[0]: 1, few[1]: 3}))
        steps.append(texts.step(dict.fromkeys(few, 1)))
        steps.append(texts.step({few[2]: 2, few[0]: 1}))
        steps.append(texts.step(dict.fromkeys(few, 1), exact=True))
        steps += random_decodes(gate, texts, [6, 3])
        Served(
            gate, texts, steps, "more rows than the largest bucket of 4, chunks, and wide tables",
            buckets=[1, 2, 4],
        ).check()  # fmt: skip

    def test_rows_that_need_logits(self, gate: GateRun) -> None:
        """logits come for the rows that the step names, in that order"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        steps = random_decodes(gate, texts, [4, 3])
        for wanted in ([2, 0], [1], [0, 1, 2], [2, 1, 0], [1, 1], [1, 0, 2, 0, 1]):
            fields, rows = texts.step(dict.fromkeys(texts.shuffled(3), 1))
            fields["logit_rows"] = wanted
            steps.append((fields, [rows[row] for row in wanted]))
        steps += random_decodes(gate, texts, [3])
        Served(gate, texts, steps, "steps that want some rows only", buckets=[4]).check()

    def test_equal_tokens(self, gate: GateRun) -> None:
        """the same token at the same position says another thing in another text"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        pair = [texts.join(), texts.join()]
        steps = [texts.step({text: 5}) for text in pair]
        steps += [texts.step({text: 1}, token=7) for _ in range(3) for text in pair]
        Served(gate, texts, steps, "two texts that are fed the same tokens", buckets=[1, 2]).check()

    def test_two_runners(self, gate: GateRun) -> None:
        """a second runner beside the first changes nothing"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        steps = random_decodes(gate, texts, [2, 3, 1, 4, 2])
        Served(gate, texts, steps, "two runners in turn", buckets=[1, 4], twin=True).check()

    def test_blocks_of_others(self, gate: GateRun) -> None:
        """neither a capture nor a replay writes into a block of somebody else"""
        texts = Texts(gate, 60, BLOCK, WIDTH)
        early = random_decodes(gate, texts, [5])
        steps = early + random_decodes(gate, texts, [3, 1, 7, 5, 2, 3])
        served = Served(
            gate, texts, steps, "steps in a pool that is in use", buckets=[1, 2, 4, 8],
            before=len(early), pools=True,
        )  # fmt: skip
        before = served.early["pools"]
        replies = [("making the runner", [], served.made)]
        replies += [
            (f"step {index}", fields["slot_mapping"], reply)
            for index, ((fields, _), reply) in enumerate(
                zip(served.steps, served.replies, strict=True)
            )
        ]
        for what, slots, reply in replies:
            after = reply["pools"]
            for name, old, new in zip(("keys", "values"), before, after, strict=True):
                changed = (old.flatten(1, 2) != new.flatten(1, 2)) & ~(
                    old.flatten(1, 2).isnan() & new.flatten(1, 2).isnan()
                )
                touched = set(changed.flatten(2).any(-1).any(0).nonzero().flatten().tolist())
                extra = sorted(touched - set(slots))
                if extra:
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{what} wrote {name} where it has nothing to write",
                        f"slots {short(slots, 40)} only" if slots else "no slot at all",
                        f"slot {extra[0]}, in block {extra[0] // BLOCK}",
                        likely="Rows that stand for nobody write to slot -1, in a warm-up too.",
                    )  # fmt: skip
            before = after
        served.check()

    def test_where_buffers_lie(self, gate: GateRun) -> None:
        """on the model's device, wherever torch puts tensors by default"""
        try:
            expect.result_of(
                lambda: gate.candidate.call(
                    "made_elsewhere", model="nano", buckets=[4, 2], width=WIDTH
                ),
                'a runner, while new tensors lie on "meta" by default',
            )
        except GateFailure as failure:
            failure.likely = (
                "A new tensor needs `device=`. Without it, it lies on the host, where no kernel of "
                "a GPU finds it."
            )
            raise

    @pytest.mark.parametrize(
        ("argument", "buckets", "width", "kinds"),
        [
            ("buckets", [], 4, ("ValueError",)),
            ("buckets", [4, 0], 4, ("ValueError",)),
            ("buckets", [2, -1], 4, ("ValueError",)),
            ("buckets", [2, 1.5], 4, ("TypeError", "ValueError")),
            ("width", [2], 0, ("ValueError",)),
            ("width", [2], 2.5, ("TypeError", "ValueError")),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, buckets: Any, width: Any, kinds: tuple[str, ...]
    ) -> None:
        """buckets and widths that make no graph are refused"""

        def attempt() -> None:
            gate.candidate.call("made", model="nano", buckets=buckets, width=width)

        expect.rejects(attempt, argument, f"buckets {buckets}, width {width}", kinds=kinds)


@pytest.fixture(scope="module")
def run(gate: GateRun) -> Served:
    """One run of decodes for all counts; batch sizes are log-uniform, as a server's are."""
    low, high = gate.bar("sizes")
    texts = Texts(gate, 120, BLOCK, WIDTH)
    sizes = [round(low * (high / low) ** gate.rng.random()) for _ in range(30)]
    steps = random_decodes(gate, texts, [2, *sizes, 1, 3, max(gate.bar("buckets"))])
    fields, rows = texts.step(dict.fromkeys(texts.shuffled(3), 1))
    fields["logit_rows"] = [2, 0]  # a replay has these as well
    steps.append((fields, [rows[2], rows[0]]))
    return Served(gate, texts, steps, "a run of decodes", buckets=gate.bar("buckets")).check()


def fitting(gate: GateRun, run: Served) -> list[tuple[int, dict[str, Any]]]:
    """The decode steps that a bucket has room for: their rows, and the replies."""
    most = max(gate.bar("buckets"))
    found = []
    for (fields, _), reply in zip(run.steps, run.replies, strict=True):
        rows = len(fields["context_lens"])
        if len(fields["token_ids"]) == rows <= most:
            found.append((rows, reply))
    return found


@pytest.mark.number
def test_captures(gate: GateRun, run: Served) -> None:
    """one capture for each bucket, before the first step"""
    buckets = gate.bar("buckets")
    first, last = run.made["captured"], run.replies[-1]["captures"]
    gate.exact(
        "captures", last, equals=len(buckets), code=Code.WRONG_COUNT,
        text=f"{last} captures for buckets of {', '.join(map(str, buckets))}",
        message="captures are not one for each bucket",
        likely="A graph is captured for each size that comes up, or anew in every step."
        if last > len(buckets) else "",
    )  # fmt: skip
    if sorted(first) != sorted(buckets):
        raise GateFailure(
            Code.WRONG_COUNT, "the graphs captured when the runner was made",
            f"one of {', '.join(map(str, buckets))} rows each", short(first, 60),
            likely="More than one pass over its rows is recorded in a capture."
            if len(first) == len(buckets)
            else "A capture in the middle of serving makes somebody wait for it.",
        )  # fmt: skip


@pytest.mark.number
def test_forwards(gate: GateRun, run: Served) -> None:
    """no forward pass runs in Python in a step that a bucket has room for"""
    fit = fitting(gate, run)
    passes = sum(reply["forwards"] for _, reply in fit)
    gate.exact(
        "forwards", passes, equals=0, code=Code.WRONG_COUNT,
        text=f"{passes} forward passes by Python in {len(fit)} decode steps",
        message="forward passes run in Python where a graph should be replayed",
    )  # fmt: skip
    for rows, reply in fit:
        if len(reply["replayed"]) != 1:
            raise GateFailure(
                Code.WRONG_COUNT, f"replays in a decode step of {rows} rows", "1",
                str(len(reply["replayed"])),
            )  # fmt: skip


@pytest.mark.number
def test_padded(gate: GateRun, run: Served) -> None:
    """rows computed for nobody: those that the smallest bucket with room leaves over"""
    buckets = gate.bar("buckets")
    fit = fitting(gate, run)
    wanted = sum(min(b for b in buckets if b >= rows) - rows for rows, _ in fit)
    got = sum(sum(reply["replayed"]) - rows for rows, reply in fit)
    share = got / (got + sum(rows for rows, _ in fit))
    gate.exact(
        "padded", got, equals=wanted, code=Code.WRONG_COUNT,
        text=f"{got} rows for nobody in {len(fit)} steps, {share:.0%} of all",
        message="a step does not take the smallest bucket that has room for it",
    )  # fmt: skip


@pytest.mark.number
def test_launches(gate: GateRun, run: Served) -> None:
    """operations that the host asks for in a decode step, eagerly and with a graph"""
    most = max(reply["operations"] for _, reply in fitting(gate, run))
    asked = gate.baseline.call("eager_operations", model="nano", rows=2, block_size=BLOCK)
    recorded = run.made["recorded"].get(2, 0)  # torch.cuda does not tell
    gate.exact(
        "launches", round(asked / most, 1), at_least=gate.bar("launches")["at_least"], unit="x",
        code=Code.WRONG_COUNT,
        text=f"{asked / most:.1f} times fewer: {most} operations for {asked}",
        message=f"{most} operations are asked for in a step that replays a graph, and {asked} in "
        "an eager one",
        likely="Buffers are made anew, or filled element by element.",
        note=f"the graph of 2 rows has {recorded} operations" if recorded else "",
    )  # fmt: skip


@pytest.mark.number
def test_rows_share_their_operations(gate: GateRun, run: Served) -> None:
    """a graph of many rows takes as many operations as one of few, and works out slots once"""
    recorded = run.made["recorded"]
    few, many = recorded[min(recorded)], recorded[max(recorded)]
    if many > MOST_OPERATIONS * few:
        raise GateFailure(
            Code.WRONG_COUNT, "the operations in a graph grow with its rows",
            f"as many for {max(recorded)} rows as for {min(recorded)}, which is {few}", str(many),
            likely="Rows are attended to one by one, not in one call.",
        )  # fmt: skip
    planned = expect.result_of(
        lambda: gate.candidate.call("planned_in_layers", model="nano", rows=3, block_size=BLOCK),
        "a decode step of three rows",
    )
    if max(planned) > MOST_PLANNED:
        raise GateFailure(
            Code.WRONG_COUNT, "slots are worked out in every layer",
            f"at most {MOST_PLANNED} operations that give integers (slots, positions) in a layer "
            "after the first", " and ".join(map(str, planned)),
            likely="Slots and masks are the same in all layers: the first one works them out.",
        )  # fmt: skip


@pytest.mark.number
def test_nothing_is_waited_for(gate: GateRun, run: Served) -> None:
    """a step that a bucket has room for brings no value to the host"""
    waited = sum(reply["waited"] for _, reply in fitting(gate, run))
    if waited:
        raise GateFailure(
            Code.WRONG_COUNT, "values that decode steps bring to the host, all together", "0",
            str(waited),
            likely="Shapes are known on the host. A value has to be waited for, until all that "
            "the device was asked for is done.",
        )  # fmt: skip


@pytest.mark.number
def test_pool_bytes(gate: GateRun) -> None:
    """all graphs share the memory that the largest needs"""
    if gate.device != "cpu":  # torch.cuda tells bytes of the process, not of a pool
        gate.report("pool_bytes", 0.0, "counted by the recorder, on a CPU only", unit="x")
        return
    buckets = gate.bar("buckets")
    held = []
    for some in (buckets, [max(buckets)]):
        texts = Texts(gate, 40, BLOCK, 16)
        step = texts.step({texts.join(): 1})
        served = Served(gate, texts, [step], f"buckets {some}", buckets=some)
        held.append(served.made["pool_bytes"])
    every, one = held
    gate.exact(
        "pool_bytes", round(every / max(one, 1), 2), at_most=gate.bar("pool_bytes"), unit="x",
        code=Code.TOO_MUCH_MEMORY,
        text=f"{every / max(one, 1):.2f} times the memory of the largest graph alone "
        f"({every:,} bytes for {one:,})",
        message="the graphs together hold far more than the largest of them",
        likely="Each graph has a pool of its own, small ones are captured first, or something "
        "holds on to what a capture has made.",
    )  # fmt: skip


@pytest.mark.number
def test_one_pool(gate: GateRun, run: Served) -> None:
    """all graphs lie in one pool"""
    pools = run.made["graph_pools"]
    if pools != 1:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, f"pools of the graphs of {len(gate.bar('buckets'))} buckets", "1",
            str(pools), likely="A capture that is handed no pool makes one of its own.",
        )  # fmt: skip


@pytest.mark.number
def test_what_is_left_behind(gate: GateRun) -> None:
    """steps leave nothing in memory"""
    keeps_nothing(
        gate, "a decode step", 12, "Every output, or every batch, is kept.", buckets=[4],
        width=WIDTH, rows=3,
    )  # fmt: skip
    kept = expect.result_of(
        lambda: gate.candidate.call(
            "kept_bytes", model="nano", buckets=[4], width=WIDTH, rows=3, times=KEPT_STEPS
        ),
        "replayed steps",
    )
    if kept > MOST_KEPT:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, "Python objects pile up from step to step",
            f"at most {MOST_KEPT:,} bytes more", f"{kept:,} after {KEPT_STEPS} replays",
            likely="A note of every step is kept: its rows, its bucket, or what it returned.",
        )  # fmt: skip


@pytest.mark.number
def test_allocations(gate: GateRun) -> None:
    """memory asked for in a replayed step (on a GPU)"""
    if gate.tier != "cuda":
        return
    found = expect.result_of(
        lambda: gate.candidate.call(
            "allocations", model=gate.model, buckets=[1, 2, 4], width=16, block_size=16, rows=3,
            times=20,
        ),
        f"replayed steps on {gate.model}",
    )  # fmt: skip
    gate.exact(
        "allocations", found["allocations"], equals=0, code=Code.TOO_MUCH_MEMORY,
        text=f"{found['allocations']} allocations in 20 replayed steps; a step launches "
        f"{found['launches']} kernels and {found['replays']} graph",
        message="a replayed step asks for memory",
    )  # fmt: skip


@pytest.mark.number
def test_step_time(gate: GateRun) -> None:
    """a decode step of one text against stage 08, eagerly (on a GPU)"""
    if gate.tier != "cuda":
        return
    race = DecodeRace(gate, {}, [gate.bar("past")], scenarios=("eager", "graphed"))

    def words(ratio: PairedRatio) -> str:
        a, b = ratio.candidate_s * 1e3, ratio.baseline_s * 1e3
        return f"{ratio.median:.1f}x faster than eager ({a:.2f} ms for {b:.2f})"

    gate.ratio("step_time", race.baseline, race.candidate, text=words)
