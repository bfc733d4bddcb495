"""Stage 02, the judge: the KV cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from bills import Bills, split_words
from generation import GenerationContract, tokens_of
from pairing import PairedText

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle
from course.measure.ratio import PairedRatio

STAGE = 2
TOLERANCE = 1e-3  # float32 logits against float64 ones
SLACK = 256  # bytes that a cache may hold besides: a length or a layer number as a tensor


class TestGenerate(GenerationContract):
    """See gates/generation.py."""


@pytest.mark.contract
class TestCache:
    """`KVCache` itself, as the attention of nano."""

    @pytest.mark.parametrize(
        "chunks", [(9, 1, 1, 1), (1, 1, 1, 1), (4, 3, 5)], ids=["decode", "from one", "chunks"]
    )
    def test_logits_equal_those_without_a_cache(
        self, gate: GateRun, chunks: tuple[int, ...]
    ) -> None:
        """logits with the cache equal those without, in prefill, decode and chunks"""
        token_ids = [gate.rng.randrange(256) for _ in range(sum(chunks))]
        feed(gate, [token_ids], chunks, "passes of " + ", ".join(map(str, chunks)))

    @pytest.mark.parametrize("chunks", [(6, 1, 1), (3, 4, 1)], ids=["decode", "chunks"])
    def test_rows_are_sequences_of_their_own(self, gate: GateRun, chunks: tuple[int, ...]) -> None:
        """two rows of a batch do not see each other"""
        rows = [[gate.rng.randrange(256) for _ in range(8)] for _ in range(2)]
        feed(gate, rows, chunks, "a batch of two")

    @pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (40, "bfloat16")])
    def test_append_returns_everything_so_far(
        self, gate: GateRun, head_dim: int, dtype: str
    ) -> None:
        """append returns all keys and values so far, in the dtype that was asked for"""
        config = nano_oracle().config
        shape = (2, 3, config.num_kv_heads, head_dim)
        whole = torch.randint(-60, 60, (2, 6, *shape[2:])).float()  # exact in bfloat16 too
        pieces = [whole[:, :3], whole[:, 3:4], whole[:, 4:]]
        what = f"append of 3, 1 and 2 positions with head_dim {head_dim} in {dtype}"

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "store", model="nano", head_dim=head_dim, dtype=dtype, pieces=pieces
            )
            return [step.value for step in scenario]

        for layer, found in enumerate(expect.result_of(run, what)):
            for name, offset in (("keys", layer), ("values", layer + 1)):
                where = f"{what}: {name} of layer {layer}"
                got = expect.is_tensor(found[name], where, whole.shape)
                if got.dtype != getattr(torch, dtype):
                    raise GateFailure(Code.WRONG_TYPE, f"{where}: dtype", dtype, str(got.dtype))
                rows = whole.shape[:2].numel()
                expect.close(
                    got.reshape(rows, -1), (whole + offset).reshape(rows, -1),
                    atol=0.5, what=where, code=Code.WRONG_VALUE, row="position",
                )  # fmt: skip

    def test_memory_is_reserved_when_the_cache_is_made(self, gate: GateRun) -> None:
        """all memory of a cache is reserved when it is made"""
        new, full = expect.result_of(
            lambda: gate.candidate.call("cache_memory", model="nano", capacity=12),
            "filling a cache of 12 positions",
        )
        if new < full:
            raise GateFailure(
                Code.WRONG_VALUE, "all memory of a cache is reserved when it is made",
                f"{full:,} bytes", f"{new:,} bytes in a new cache",
            )  # fmt: skip

    def test_generate_reserves_what_can_be_fed(self, gate: GateRun) -> None:
        """generate uses one KVCache, with room for what can be fed and no more"""
        context = nano_oracle().config.max_context
        for length, new, needed in ((5, 4, 8), (context - 2, 50, context)):
            prompt = [gate.rng.randrange(256) for _ in range(length)]
            made = expect.result_of(
                lambda p=prompt, n=new: gate.candidate.call(
                    "capacities", model="nano", prompt_ids=p, max_new_tokens=n
                ),
                f"generate with a prompt of {length} tokens",
            )
            if made != [needed]:
                raise GateFailure(
                    Code.WRONG_VALUE,
                    f"capacities of the caches made for {length} tokens and {new} new ones",
                    f"one KVCache of {needed}", f"{made}",
                )  # fmt: skip

    def test_the_length_counts_what_was_fed(self, gate: GateRun) -> None:
        """length counts the tokens fed, and moves once per pass"""

        def fill() -> list[Any]:
            run = gate.candidate.start("fill", model="nano", capacity=8, first=5, second=1)
            return [step.value for step in run]

        found = expect.result_of(fill, "writing 5 positions and then 1")
        before_last = nano_oracle().config.num_layers - 1
        expected = [[0] * before_last + [5], [5] * before_last + [6]]
        if found != expected:
            raise GateFailure(
                Code.WRONG_VALUE, "length after each layer, for 5 positions and then 1 more",
                str(expected), str(found),
            )  # fmt: skip

    @pytest.mark.parametrize(("stored", "more"), [(6, 1), (5, 2), (0, 7)])
    def test_a_full_cache_refuses_more(self, gate: GateRun, stored: int, more: int) -> None:
        """a write past the end is refused, and changes nothing"""
        what = f"{more} positions for a cache of 6 that holds {stored}"
        after = expect.result_of(
            lambda: gate.candidate.call(
                "overflow", model="nano", capacity=6, stored=stored, more=more
            ),
            what,
        )
        if after["error"] is None:
            raise GateFailure(
                Code.NO_ERROR_RAISED, f"{what}: accepted", "a ValueError that names `capacity`",
                "no error", hint=2,
            )  # fmt: skip
        if after["kind"] != "ValueError" or "capacity" not in after["error"]:
            raise GateFailure(
                Code.WRONG_ERROR, f"{what}: refused, but not in a way that helps",
                "a ValueError that names `capacity`", f"{after['kind']}: {after['error']}",
            )  # fmt: skip
        if after["length"] != stored or not after["unchanged"]:
            raise GateFailure(
                Code.STALE_STATE, f"{what}: the refused write changed the cache",
                f"length {stored}, same values",
                f"length {after['length']}, values {'same' if after['unchanged'] else 'changed'}",
            )  # fmt: skip
        if after.get("length_after", stored + 1) != stored + 1:
            raise GateFailure(
                Code.STALE_STATE, f"{what}: after the refusal, one that fits was stored",
                f"length {stored + 1}", f"length {after['length_after']}",
            )  # fmt: skip

    @pytest.mark.parametrize("size", [0, -1])
    @pytest.mark.parametrize("argument", ["capacity", "batch_size"])
    def test_sizes_below_one_are_refused(self, gate: GateRun, argument: str, size: int) -> None:
        """a capacity or batch size below 1 is refused"""
        sizes: dict[str, Any] = {"capacity": 4, "batch_size": 1, argument: size}

        def attempt() -> None:
            gate.candidate.start("passes", model="nano", chunks=[], **sizes).step()

        expect.rejects(attempt, argument, f"{argument} = {size}")


def feed(gate: GateRun, rows: list[list[int]], chunks: tuple[int, ...], what: str) -> None:
    """Feed rows of equal length in chunks, and compare every pass's logits with the oracle's."""
    starts = [sum(chunks[:i]) for i in range(len(chunks) + 1)]
    pieces = [[row[a:b] for row in rows] for a, b in pairwise(starts)]
    expected = torch.stack([nano_oracle().logits(row) for row in rows])  # [B, T, V]

    def run() -> list[Any]:
        scenario = gate.candidate.start(
            "passes", model="nano", chunks=pieces, capacity=starts[-1], batch_size=len(rows)
        )
        return [step.value for step in scenario]

    opened, *passes = expect.result_of(run, what)
    if opened["length"] != 0:
        raise GateFailure(Code.WRONG_VALUE, "length of a new cache", "0", str(opened["length"]))
    for index, (found, start, end) in enumerate(zip(passes, starts, starts[1:], strict=False)):
        kind = f"{what}: pass {index}"
        if end - start != 1 or index == 0:
            kind += f" ({end - start} positions)"
        shape = (len(rows), end - start, expected.shape[-1])
        if isinstance(found["logits"], torch.Tensor) and found["logits"].isnan().any():
            raise GateFailure(
                Code.WRONG_VALUE, f"{kind}: memory was read that nobody has written",
                "only what was appended is read", "NaN, which the judge puts into a new cache",
            )  # fmt: skip
        got = expect.is_tensor(found["logits"], f"{kind}: logits", shape)
        for row in range(len(rows)):
            where = kind + (f", row {row}" if len(rows) > 1 else "")
            expect.close(
                got[row], expected[row, start:end], atol=TOLERANCE, what=where, row="position"
            )
        if found["length"] != end:
            raise GateFailure(
                Code.WRONG_VALUE, f"{kind}: length afterwards", str(end), str(found["length"])
            )


@pytest.mark.number
def test_positions(gate: GateRun) -> None:
    """positions computed, counted"""
    prompt_len, new = 64, 128
    prompt, expected = nano_oracle().prompt(gate.rng, prompt_len, new)
    counts = tokens_of(gate, prompt, expected, new, [], "a prompt of 64 tokens")
    naive = sum(prompt_len + generated for generated in range(new))
    gate.exact(
        "positions", counts["positions"], equals=prompt_len + new - 1,
        text=f"{counts['positions']:,} against {naive:,}: "
        f"{naive / max(1, counts['positions']):.1f}x fewer",
        message="with a cache, prompt + new - 1 positions are computed",
    )  # fmt: skip
    gate.exact(
        "head_rows", counts["head_rows"], equals=new,
        text=f"{counts['head_rows']:,} rows through the LM head",
        message="only the last position of a pass needs the head",
    )  # fmt: skip


@pytest.mark.number
def test_memory(gate: GateRun) -> None:
    """bytes held by the cache, and copied by a decode step"""
    config = nano_oracle().config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    capacity = 48
    needed = capacity * per_token
    _, held = expect.result_of(
        lambda: gate.candidate.call("cache_memory", model="nano", capacity=capacity),
        f"filling a cache of {capacity} positions",
    )
    gate.exact(
        "cache_bytes", held, at_most=needed + SLACK,
        text=f"{held:,} bytes for {capacity} positions; {needed:,} are keys and values",
        unit="bytes", code=Code.TOO_MUCH_MEMORY,
        message="the cache holds more than keys and values of the KV heads",
    )  # fmt: skip
    short, long = 16, 240
    copied = expect.result_of(
        lambda: gate.candidate.call("copied_bytes", model="nano", lengths=[short, long]),
        "one decode step",
    )
    # A query may be laid out anew; the past may not be. A quarter of it is far above the one and
    # far below the other.
    growth = copied[1] - copied[0]
    gate.exact(
        "copied_bytes", growth, at_most=(long - short) * per_token // 4,
        text=f"{copied[0]:,} bytes copied in a step at {short} positions, {copied[1]:,} at {long}",
        unit="bytes", code=Code.TOO_MUCH_TRAFFIC,
        message="what a decode step copies grows with the past",
    )  # fmt: skip


@pytest.mark.number
@pytest.mark.parametrize(("index", "name"), [(0, "short"), (1, "middle"), (2, "long")])
def test_step_time(gate: GateRun, index: int, name: str) -> None:
    """a decode step against a step of the naive loop"""
    length = gate.bar("lengths")[index]
    text = PairedText(gate, [length - 1], new=10, untimed=1)

    def words(ratio: PairedRatio) -> str:
        a, b = ratio.candidate_s * 1e3, ratio.baseline_s * 1e3
        return f"{ratio.median:.1f}x at {length} tokens ({a:.1f} ms for {b:.1f})"

    def notes(ratio: PairedRatio) -> list[str]:
        bills = Bills(gate)
        naive = bills.split(bills.whole_pass(length), ratio.baseline_s)
        cached = bills.split(bills.decode([length]), ratio.candidate_s)
        return [
            f"predicted {naive.predicted / cached.predicted:.1f}x from the bills: one position "
            f"instead of {length}",
            split_words(naive, "naive"), split_words(cached, "cached"),
        ]  # fmt: skip

    if name == "long":
        gate.ratio(f"step_time_{name}", *text.sides(), text=words, notes=notes)
    else:
        gate.observe(f"step_time_{name}", *text.sides(), text=words, slices=9)
    if name == "long":
        must_grow(gate)


def must_grow(gate: GateRun) -> None:
    """What the cache saves grows with the text; a constant gain has another cause."""
    short, long = (
        next(n for n in gate.numbers if n.name == f"step_time_{name}") for name in ("short", "long")
    )
    if long.interval is not None and long.interval[1] < short.value:
        raise GateFailure(
            Code.TOO_SLOW, "the gain must grow with the length of the text",
            f"above {short.value:.2f}x at the longest", f"{long.value:.2f}x",
        )  # fmt: skip
