"""Stage 09, the judge: paged attention in Triton."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from decode_race import DecodeRace
from offline_builds import judge_builds
from pages import Pages, compare, dense

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import WorkerHost
from course.measure.ratio import PairedRatio
from course.measure.roofline import probe
from course.model.describe import load_config

STAGE = 9
FLOAT32, FLOAT16 = 1e-5, 4e-3  # attention in that type against float64

# Heads, KV heads, width, block size, queries of each sequence, context lengths, splits. Block sizes
# 16 and 32, widths 64 and 128, 1, 3, 4 and 8 heads to a KV head, 1 to 16 queries, and contexts
# around the block size meet in pairs; every shape takes the interpreter about a second.
SHAPES = [
    (3, 3, 64, 16, [1, 1, 1, 1], [1, 15, 16, 17], 1),
    (3, 1, 64, 32, [1, 1, 1], [31, 33, 150], 2),
    (8, 2, 128, 16, [1, 1], [130, 64], 4),
    (8, 1, 64, 32, [2, 2], [32, 65], 1),
    (4, 1, 128, 32, [5, 5], [5, 96], 2),
    (3, 1, 128, 16, [16], [40], 1),
    (4, 4, 64, 16, [4, 4], [4, 129], 4),
    (8, 1, 128, 16, [3], [17], 8),
    (4, 1, 64, 16, [16, 16], [16, 63], 2),
    (1, 1, 128, 32, [8, 8], [31, 64], 1),
    (6, 2, 64, 32, [1, 5, 2, 16], [200, 33, 2, 47], 4),
]


def interpreted(gate: GateRun) -> WorkerHost:
    """The solution in triton's interpreter, on the CPU."""
    return gate.candidate_in("cpu", TRITON_INTERPRET="1")


class Case:
    """Sequences in a pool full of NaN, for one call of `paged_attention`."""

    def __init__(
        self, gate: GateRun, heads: tuple[int, int, int], block_size: int, queries: list[int],
        lengths: list[int], *, dtype: torch.dtype = torch.float32, scale: float = 1.0,
        shift: float = 0.0,
    ) -> None:  # fmt: skip
        """
        Args:
            heads: query heads, KV heads, width.
            queries, lengths: of each sequence; the queries are its last positions.
            scale: of the queries: large ones make the scores large.
            shift: added to every value: large ones make sums over them large.
        """
        query_heads, kv_heads, width = heads
        generator = torch.Generator().manual_seed(gate.rng.randrange(1 << 30))
        blocks = [-(-length // block_size) for length in lengths]
        num_blocks = sum(blocks) + 3
        ids = list(range(num_blocks))
        gate.rng.shuffle(ids)
        shape = (num_blocks, block_size, kv_heads, width)
        keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        tables = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
        q, outputs = [], []
        for row, (count, length) in enumerate(zip(queries, lengths, strict=True)):
            table = [ids.pop() for _ in range(blocks[row])]
            tables[row, : len(table)] = torch.tensor(table)
            k, v = (
                (torch.randn(length, kv_heads, width, generator=generator) + more).to(dtype)
                for more in (0.0, shift)
            )
            for pool, new in ((keys, k), (values, v)):
                for index, block in enumerate(table):
                    part = new[index * block_size : (index + 1) * block_size]
                    pool[block, : len(part)] = part
            new_q = torch.randn(count, query_heads, width, generator=generator) * scale
            q.append(new_q.to(dtype))
            outputs.append(dense(q[-1].double(), k.double(), v.double()))
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        context_lens = torch.tensor(lengths, dtype=torch.int32)
        self.arguments = [torch.cat(q), keys, values, tables, context_lens, starts]
        self.expected = torch.cat(outputs)
        self.max_queries = max(queries)
        # Keys and values of every context, once.
        self.kv_bytes = 2 * sum(lengths) * kv_heads * width * keys.element_size()

    def check(self, out: Any, what: str, atol: float) -> float:
        """The result against dense attention in float64."""
        shape = self.expected.shape
        if not isinstance(out, torch.Tensor) or out.shape != shape:
            out = expect.is_tensor(out, what, shape)
        if out.isnan().any():
            row = int(out.isnan().flatten(1).any(dim=1).nonzero()[0])
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: the result is NaN", "finite values",
                "NaN: from a slot that nobody has written, from softmax over nothing, or from exp "
                "of a large score", where=f"first in row {row}",
            )  # fmt: skip
        return expect.close(
            out.flatten(1), self.expected.flatten(1), atol=atol, what=what, code=Code.WRONG_VALUE
        )


def call(gate: GateRun, case: Case, splits: int, what: str) -> Any:
    """What the kernel says, in the interpreter."""
    return expect.result_of(
        lambda: interpreted(gate).call(
            "kernel", arguments=case.arguments, max_queries=case.max_queries, num_splits=splits
        ),
        what,
    )


@pytest.mark.contract
class TestKernel:
    """`paged_attention`, in the interpreter."""

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}x{s[2]} of {s[3]}")
    def test_equals_dense_attention(self, gate: GateRun, shape: Any) -> None:
        """the kernel equals dense attention in float64"""
        heads, kv_heads, width, block_size, queries, lengths, splits = shape
        case = Case(gate, (heads, kv_heads, width), block_size, queries, lengths)
        what = (
            f"{heads} heads on {kv_heads}, width {width}, blocks of {block_size}, "
            f"contexts of {', '.join(map(str, lengths))}, {splits} splits"
        )
        case.check(call(gate, case, splits, what), what, FLOAT32)

    def test_any_number_of_splits(self, gate: GateRun) -> None:
        """the result does not depend on the number of splits, empty ones included"""
        case = Case(gate, (4, 2, 64), 16, [1, 2, 1], [3, 70, 130])
        for splits in (1, 2, 8):
            what = f"{splits} splits"
            case.check(call(gate, case, splits, what), what, FLOAT32)

    @pytest.mark.parametrize("splits", [1, 2])
    def test_long_sequences_are_left_alone(self, gate: GateRun, splits: int) -> None:
        """rows of a sequence with more than max_queries queries stay as they are in `out`"""
        queries = [1, 5, 2, 3]
        case = Case(gate, (4, 2, 64), 16, queries, [40, 70, 17, 33])
        what = f"max_queries = 2 beside sequences of 5 and 3 queries, {splits} splits"
        out = torch.full(case.expected.shape, 7.0)
        found = expect.result_of(
            lambda: interpreted(gate).call(
                "kernel", arguments=case.arguments, max_queries=2, num_splits=splits, out=out
            ),
            what,
        )
        left = [count > 2 for count in queries for _ in range(count)]
        case.expected[left] = 7.0
        case.check(found, what, FLOAT32)

    def test_splits_are_programs(self, gate: GateRun) -> None:
        """a context that is split is read by several programs, each with its own queries"""
        case = Case(gate, (4, 2, 64), 16, [1], [300])
        once, split = (
            expect.result_of(
                lambda n=n: interpreted(gate).call(
                    "loaded", arguments=case.arguments, max_queries=1, num_splits=n
                )["q"],
                f"{n} splits",
            )
            for n in (1, 4)
        )
        if split < 2 * once:
            raise GateFailure(
                Code.WRONG_COUNT, "4 splits are 4 programs, and each loads the queries",
                f"at least twice the {once:,} bytes of one", f"{split:,}",
                likely="num_splits is not looked at."
                if once < 2 * case.arguments[0].nbytes
                else "Every tile of keys loads the queries anew.",
            )  # fmt: skip

    def test_a_long_context(self, gate: GateRun) -> None:
        """a context of some thousand positions is read to its end"""
        case = Case(gate, (2, 1, 64), 32, [1], [gate.rng.randrange(2500, 2600)])
        for splits in (1, 8):
            what = f"a context of {case.arguments[4].item():,} positions, {splits} splits"
            case.check(call(gate, case, splits, what), what, FLOAT32)

    def test_large_scores(self, gate: GateRun) -> None:
        """scores of some hundred do not overflow"""
        case = Case(gate, (2, 1, 64), 16, [1, 3], [40, 90], scale=40.0)
        for splits in (1, 4):
            what = f"scores of some hundred, {splits} splits"
            case.check(call(gate, case, splits, what), what, 1e-4)

    def test_half_precision(self, gate: GateRun) -> None:
        """keys in float16 are summed in float32"""
        case = Case(gate, (4, 1, 64), 16, [1, 2], [150, 31], dtype=torch.float16)
        out = call(gate, case, 2, "float16")
        if isinstance(out, torch.Tensor) and out.dtype != torch.float16:
            raise GateFailure(
                Code.WRONG_TYPE, "the result has the dtype of q", "float16", str(out.dtype)
            )
        case.check(out, "float16", FLOAT16)
        # The weights of 350 positions, each about 1, times 400: more than a float16 can hold.
        case = Case(
            gate, (2, 1, 64), 16, [1], [700], dtype=torch.float16, scale=1e-3, shift=400.0
        )  # fmt: skip
        what = "values of about 400 in float16, 700 of them in 2 splits"
        case.check(call(gate, case, 2, what), what, 400 * FLOAT16)

    def test_a_pool_of_billions(self, gate: GateRun) -> None:
        """blocks past 2**31 elements are found"""
        length, heads = 40, (2, 1, 64)
        found = expect.result_of(
            lambda: interpreted(gate).call(
                "big_pool", length=length, heads=list(heads), block_size=16
            ),
            "a sequence at the end of a pool of 2**31 elements",
        )
        past = found["past"].double()
        wanted = dense(found["q"].double(), past, past)
        expect.close(
            found["out"].flatten(1), wanted.flatten(1), atol=FLOAT16, code=Code.WRONG_VALUE,
            what="a sequence at the end of a pool of 2**31 elements",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "more", "what"),
        [
            ("max_queries", {"max_queries": 0}, "no queries"),
            ("max_queries", {"max_queries": 17}, "more queries than the kernel takes"),
            ("num_splits", {"num_splits": 0}, "no splits"),
            ("num_splits", {"num_splits": 3}, "three splits"),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, argument: str, more: dict[str, int], what: str
    ) -> None:
        """numbers out of range are refused, by name"""
        case = Case(gate, (2, 1, 64), 16, [1], [5])

        def attempt() -> None:
            interpreted(gate).call(
                "kernel", arguments=case.arguments, **{"max_queries": 1, "num_splits": 1, **more}
            )

        expect.rejects(attempt, argument, what)


@pytest.mark.contract
class TestAttention:
    """`TritonPagedAttention`, in the interpreter."""

    @pytest.mark.parametrize("splits", [None, 2])
    def test_steps(self, gate: GateRun, splits: int | None) -> None:
        """prefill, decode and chunks, short and long, in one step and another"""
        pages = Pages(gate, (4, 2, 16), 4, [160, 40, 40, 30])
        most = 4 if splits else 16  # in the interpreter, each query of a split step takes its time
        counts = [
            {0: 120, 1: 3}, {1: 1, 2: 17, 0: 1}, {2: most, 3: 2}, {3: 1, 0: 1, 1: 1, 2: 1},
            {0: 1, 1: 1, 2: 1, 3: 17},
        ]  # fmt: skip
        todo, outputs = map(list, zip(*(pages.step(c) for c in counts), strict=True))
        what = f"steps of 1 to 120 queries, num_splits = {splits}"

        def run() -> list[Any]:
            scenario = interpreted(gate).start(
                "attention", model="nano", heads=[4, 2, 16], num_blocks=pages.num_blocks,
                block_size=4, todo=todo, num_splits=splits,
            )  # fmt: skip
            return [step.value for step in scenario]

        found = expect.result_of(run, what)
        compare([step["outputs"] for step in found], outputs, what)
        lengths = [0, 0, 0, 0]
        for index, (step, count) in enumerate(zip(found, counts, strict=True)):
            for sequence, new in count.items():
                lengths[sequence] += new
            few = [s for s, new in count.items() if new <= 16]
            read = sum(lengths[s] for s in few)
            gathered = sum(lengths[s] for s in count if s not in few)
            used_the_kernel(step, read, sum(count.values()), gathered, index)
            called_the_kernel(step["calls"], max(count[s] for s in few), splits, index)

    def test_splits_are_a_power_of_two(self, gate: GateRun) -> None:
        """splits_for gives powers of two, and leaves short contexts whole"""
        asked = [[p, n] for p in (1, 2, 3, 7, 24, 1000) for n in (1, 64, 800, 1300, 100_000)]
        found = expect.result_of(
            lambda: interpreted(gate).call("splits", asked=asked), "splits_for"
        )
        for (programs, longest), splits in zip(asked, found, strict=True):
            what = f"splits_for({programs} programs, {longest} positions)"
            expect.is_int(splits, what)
            if splits < 1 or splits & (splits - 1) or (longest <= 64 and splits > 1):
                wanted = "1" if longest <= 64 else "a power of two"
                raise GateFailure(Code.WRONG_VALUE, what, wanted, str(splits))
        most = dict(zip(map(tuple, asked), found, strict=True))[(1, 100_000)]
        if most == 1:
            raise GateFailure(
                Code.WRONG_VALUE, "splits_for(1 program, 100,000 positions)", "more than 1", "1",
                likely="One program reads it all, and every other processor waits.",
            )  # fmt: skip


def called_the_kernel(
    calls: list[dict[str, int]], queries: int, splits: int | None, index: int
) -> None:
    """What `paged_attention` was asked for in a step; nothing is said where it was not called.

    Args:
        calls: the numbers of each call.
        queries: the most that a sequence of few queries has.
        splits: that the attention was made with.
    """
    most = max((call["max_queries"] for call in calls), default=0)
    if most > queries:
        raise GateFailure(
            Code.WRONG_COUNT, f"step {index}: max_queries, where no short chunk has more queries",
            f"{queries}", f"{most}",
            likely="Every sequence is padded to the most queries that the kernel can take.",
        )  # fmt: skip
    wrong = {call["num_splits"] for call in calls} - {splits}
    if splits is not None and wrong:
        raise GateFailure(
            Code.WRONG_VALUE, f"step {index}: splits of an attention made with num_splits={splits}",
            f"{splits}", f"{min(wrong)}",
        )  # fmt: skip


def used_the_kernel(
    step: dict[str, Any], positions: int, written: int, gathered: int, index: int
) -> None:
    """The kernel itself has read the contexts of the sequences with few queries.

    Args:
        step: what the scenario found.
        positions: of those contexts, all together.
        written: positions that the step stores.
        gathered: positions of the contexts with more queries, which go stage 08's way.
    """
    per_position = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, width, float32
    kv_bytes = positions * per_position
    what = f"step {index}: contexts of {positions} positions, few queries each"
    if step["loaded"] < kv_bytes:
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: not read by the kernel",
            f"{kv_bytes:,} bytes of the pool, loaded by a kernel", f"{step['loaded']:,}",
            likely="The step goes through stage 08, which gathers.",
        )  # fmt: skip
    moved = (written + gathered) * per_position
    queries = 2 * 4 * 16 * 4 * written  # those of both layers: to bring them in order is allowed
    small = gathered <= 32  # the mask of a longer chunk is more than all contexts
    if small and step["copied"] > moved + 4 * queries + kv_bytes // 4:
        raise GateFailure(
            Code.TOO_MUCH_TRAFFIC, f"{what}: copied as well",
            f"{moved:,} bytes, to store what is new and to gather for the long chunks",
            f"{step['copied']:,}", likely="Contexts are gathered beside the kernel.",
        )  # fmt: skip


def loaded(gate: GateRun, case: Case, splits: int, what: str) -> int:
    """Bytes of the pool that the kernels load for a case, in the interpreter.

    Raises:
        GateFailure: WRONG_COUNT when it is less than keys and values have: somebody else read them.
    """
    found = expect.result_of(
        lambda: interpreted(gate).call(
            "loaded", arguments=case.arguments, max_queries=case.max_queries, num_splits=splits
        ),
        what,
    )
    case.check(found["out"], what, FLOAT16)
    if found["pool"] < case.kv_bytes:
        raise GateFailure(
            Code.WRONG_COUNT, "the kernel itself must read the keys and values",
            f"{case.kv_bytes:,} bytes of the pool", f"{found['pool']:,}",
        )  # fmt: skip
    return int(found["pool"])


@pytest.mark.number
def test_kv_bytes(gate: GateRun) -> None:
    """bytes of the pool that the kernel loads, over those of the contexts"""
    worst = 0.0
    for heads, splits in (((8, 2, 64), 1), ((6, 2, 128), 4)):
        # Just past a tile, so that what is read past a context shows.
        lengths = [64 * gate.rng.randrange(2, 6) + gate.rng.randrange(1, 16) for _ in range(2)]
        case = Case(gate, heads, 16, [1, 2], lengths, dtype=torch.float16)
        pool = loaded(gate, case, splits, "two sequences of some hundred positions")
        worst = max(worst, pool / case.kv_bytes)
    gate.exact(
        "kv_bytes", round(worst, 3), at_most=gate.bar("kv_bytes"), unit="x",
        code=Code.TOO_MUCH_TRAFFIC,
        text=f"{worst:.3f} times the keys and values of the contexts are loaded",
        message="keys and values are loaded more than once",
    )  # fmt: skip


@pytest.mark.number
def test_traffic(gate: GateRun) -> None:
    """bytes that stage 08 moves for a decode step, over those that the kernel loads"""
    lengths, heads = gate.bar("texts"), (8, 2, 64)
    case = Case(gate, heads, 16, [1] * len(lengths), lengths)
    pool = loaded(gate, case, 1, "a decode step of texts of unequal lengths")
    copied = gate.baseline.call(
        "copied_by_gathering", model="nano", heads=list(heads), lengths=lengths, block_size=16
    )
    ratio = 3 * copied / pool
    gate.report(
        "traffic", ratio,
        f"{ratio:.1f} times as many bytes are moved by gathering ({3 * copied:,} for {pool:,})",
        unit="x", note="gathering reads, writes, and reads again what it has written",
    )  # fmt: skip


BUILDS = [
    {"heads": 32, "kv_heads": 8, "width": 64, "block_size": 16, "queries": 1, "splits": 4},
    {"heads": 32, "kv_heads": 8, "width": 128, "block_size": 16, "queries": 5, "splits": 1},
    {"heads": 9, "kv_heads": 3, "width": 64, "block_size": 32, "queries": 1, "splits": 1},
    {"heads": 32, "kv_heads": 4, "width": 128, "block_size": 32, "queries": 16, "splits": 1},
]


@pytest.mark.number
def test_builds(gate: GateRun) -> None:
    """registers, spills and load widths of the kernels, built for sm_80 and sm_90"""
    shapes = [{**shape, "sequences": 4} for shape in BUILDS]
    judge_builds(gate, shapes, reads="reads_pool", what="keys and values", handed="the pool")


def on_gpu(gate: GateRun) -> bool:
    """Whether times of the kernel can be taken."""
    return gate.tier == "cuda"


@pytest.mark.number
def test_bandwidth(gate: GateRun) -> None:
    """KV bytes read in a second, over the measured read bandwidth (on a GPU)"""
    if not on_gpu(gate):
        return
    bandwidth = probe(gate.device).read_bandwidth
    shares = {}
    pairs = zip(("bandwidth", "batch_one"), (64, 1), gate.bar("contexts"), strict=True)
    for name, sequences, length in pairs:
        seconds = alone(gate, [length] * sequences)
        config = load_config(gate.model, gate.device)
        moved = 2 * sequences * length * config.num_kv_heads * config.head_dim * 2
        shares[name] = moved / seconds / bandwidth
    share = shares["bandwidth"]
    gate.exact(
        "bandwidth", round(share, 3), at_least=gate.bar("bandwidth"), counted=False,
        code=Code.TOO_SLOW, text=f"{share:.0%} of the read bandwidth, 64 sequences",
    )  # fmt: skip
    ratio = shares["batch_one"] / share
    gate.exact(
        "batch_one", round(ratio, 3), at_least=gate.bar("batch_one"), counted=False,
        code=Code.TOO_SLOW,
        text=f"one long sequence reaches {ratio:.2f} times the bandwidth of 64",
    )  # fmt: skip


def alone(gate: GateRun, lengths: list[int]) -> float:
    """Median seconds of one layer's attention of a decode step."""
    run = gate.candidate.start(
        "attention_alone", model=gate.model, lengths=lengths, block_size=16, repeats=30
    )
    return statistics.median(expect.is_number(step.value, "seconds of a repeat") for step in run)


@pytest.mark.number
def test_over_gather(gate: GateRun) -> None:
    """a decode step against stage 08, which gathers (on a GPU)"""
    if not on_gpu(gate):
        return
    sequences, length = gate.bar("gather")
    race = DecodeRace(gate, {}, [length] * sequences, scenarios=("gathered", "triton_paged"))

    def words(ratio: PairedRatio) -> str:
        a, b = ratio.candidate_s * 1e3 * sequences, ratio.baseline_s * 1e3 * sequences
        return f"{ratio.median:.1f}x faster than gathering ({a:.2f} ms for {b:.2f})"

    gate.ratio("over_gather", race.baseline, race.candidate, text=words)
