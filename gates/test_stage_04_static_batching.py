"""Stage 04, the judge: static batching."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from bills import Bills, split_words
from leftovers import keeps_nothing
from pairing import PairedRuns
from texts import check_text

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle
from course.measure.ratio import PairedRatio

STAGE = 4
TOLERANCE = 1e-3  # float32 logits against float64 ones
LENGTHS = (5, 1, 23, 9)  # of the prompts of a ragged batch

Rows = list[list[int]]


def ragged(gate: GateRun, lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """Random prompts of several lengths."""
    return [[gate.rng.randrange(256) for _ in range(length)] for length in lengths]


def run_batch(
    gate: GateRun,
    prompts: Any,
    limits: Any,
    eos_ids: list[int],
    what: str,
    *,
    most: int = 400,
    **kinds: str,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps of `generate_batch` on nano, each {"tokens", "passes"}, and the counts."""

    def collect() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        run = gate.candidate.start(
            "batch", model="nano", prompts=prompts, max_new_tokens=limits, eos_ids=eos_ids, **kinds
        )
        opened = run.step().value
        if not opened["iterator"]:
            raise GateFailure(
                Code.NOT_AN_ITERATOR, "generate_batch must yield one list for each pass",
                "a generator", opened["type"].removeprefix("builtins."),
            )  # fmt: skip
        steps = []
        for step in run:
            steps.append(step.value)
            if len(steps) > most:
                run.stop()
                raise GateFailure(
                    Code.TOO_MANY_TOKENS, f"{what}: the batch does not end",
                    f"at most {most} steps", f"{len(steps)}",
                )  # fmt: skip
        assert run.finished is not None
        return steps, run.finished.value

    steps, counts = expect.result_of(collect, what)
    for index, (step, kept) in enumerate(zip(steps, counts["kept"], strict=True)):
        if repr(step["tokens"]) != repr(kept):
            raise GateFailure(
                Code.STALE_STATE, f"{what}: what step {index} yielded has changed since",
                repr(step["tokens"]), repr(kept), likely="One list is yielded again and again.",
            )  # fmt: skip
    return steps, counts


def rows_of(steps: list[dict[str, Any]], count: int, what: str) -> Rows:
    """The tokens of each row. A row that has ended stays ended."""
    rows: Rows = [[] for _ in range(count)]
    ended = [False] * count
    for index, step in enumerate(steps):
        tokens = step["tokens"]
        if not isinstance(tokens, (list, tuple)) or len(tokens) != count:
            raise GateFailure(
                Code.WRONG_TYPE, f"{what}: step {index} yields something else",
                f"a list of {count}: a token or None for each prompt", repr(tokens),
            )  # fmt: skip
        for row, token in enumerate(tokens):
            if token is None:
                ended[row] = True
                continue
            expect.is_int(token, f"{what}: step {index}, row {row}")
            if ended[row]:
                raise GateFailure(
                    Code.TOO_MANY_TOKENS, f"{what}: row {row} goes on after it had ended",
                    "None", str(token), where=f"step {index}",
                )  # fmt: skip
            rows[row].append(token)
    return rows


def batch_of(
    gate: GateRun, prompts: Rows, limits: Any, eos_ids: list[int], what: str, **kinds: str
) -> tuple[Rows, dict[str, Any]]:
    """Check every row of a batch against its own text, and that the batch ends with the last."""
    steps, counts = run_batch(gate, prompts, limits, eos_ids, what, **kinds)
    rows = rows_of(steps, len(prompts), what)
    news = limits if isinstance(limits, list) else [limits] * len(prompts)
    for row, (got, prompt, new) in enumerate(zip(rows, prompts, news, strict=True)):
        check_text(prompt, got, new, eos_ids, f"{what}: row {row}")
    longest = max(map(len, rows), default=0)
    if len(steps) != longest:
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: the batch ends when its last row has ended",
            f"{longest} steps", str(len(steps)),
        )  # fmt: skip
    return rows, counts


@pytest.mark.contract
class TestPadding:
    """`pad_left`."""

    @pytest.mark.parametrize("lengths", [(3, 1, 5), (4,), (2, 2)], ids=["ragged", "one", "equal"])
    def test_prompts_end_in_the_last_column(self, gate: GateRun, lengths: tuple[int, ...]) -> None:
        """ids, positions and starts of a padded batch"""
        prompts = [[gate.rng.randrange(1, 256) for _ in range(n)] for n in lengths]
        width, pad_id = max(lengths), gate.rng.randrange(256, 320)
        starts = [width - n for n in lengths]
        wanted = {
            "token_ids": [[pad_id] * s + p for s, p in zip(starts, prompts, strict=True)],
            "positions": [[max(0, column - s) for column in range(width)] for s in starts],
            "starts": starts,
        }
        what = f"pad_left of prompts of {', '.join(map(str, lengths))} tokens"
        found = expect.result_of(
            lambda: gate.candidate.call("pad", prompts=prompts, pad_id=pad_id), what
        )
        if len(found) != len(wanted):
            raise GateFailure(
                Code.WRONG_TYPE, f"{what}: what it returns", "(token_ids, positions, starts)",
                f"{len(found)} things",
            )  # fmt: skip
        for got, (name, values) in zip(found, wanted.items(), strict=True):
            expected = torch.tensor(values)
            tensor = expect.is_tensor(got, f"{what}: {name}", expected.shape)
            if tensor.dtype != torch.int64:
                raise GateFailure(
                    Code.WRONG_TYPE, f"{what}: {name} has the wrong dtype", "int64",
                    str(tensor.dtype).removeprefix("torch."),
                )  # fmt: skip
            if not torch.equal(tensor.cpu(), expected):
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: {name}", str(values), str(tensor.tolist())
                )

    def test_another_device(self, gate: GateRun) -> None:
        """everything that pad_left returns lies on the device that was asked for"""
        devices = expect.result_of(
            lambda: gate.candidate.call("pad_elsewhere", prompts=[[1, 2], [3]]),
            "pad_left(prompts, 0, device='meta')",
        )
        if devices != ["meta"] * 3:
            raise GateFailure(
                Code.WRONG_VALUE, "pad_left(prompts, 0, device='meta'): where its tensors lie",
                "meta, meta, meta", ", ".join(map(str, devices)),
            )  # fmt: skip


def marks(seen: list[bool]) -> str:
    """A row of a mask as the chapter draws it."""
    return " ".join("x" if column else "." for column in seen)


@pytest.mark.contract
class TestCache:
    """`PaddedCache`, as the attention of nano."""

    @pytest.mark.parametrize("chunk", [1, 3], ids=["decode", "chunks"])
    def test_logits_are_those_of_each_row_alone(self, gate: GateRun, chunk: int) -> None:
        """no row sees its padding, its neighbours or its future"""
        prompts = ragged(gate)
        more = [
            [[gate.rng.randrange(256) for _ in range(chunk)] for _ in prompts] for _ in range(2)
        ]
        fed = self.feed(gate, prompts, more, pad_id=0)
        texts = [list(prompt) for prompt in prompts]
        for index, logits in enumerate(fed):
            if index:
                texts = [t + c for t, c in zip(texts, more[index - 1], strict=True)]
            for row, text in enumerate(texts):
                new = len(text) if index == 0 else chunk
                got, wanted = logits[row, -new:], nano_oracle().logits(text)[-new:]
                what = f"pass {index}, row {row} ({len(prompts[row])} tokens of {max(LENGTHS)})"
                if got.isnan().any():
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{what}: logits are NaN", "finite values",
                        "NaN: from a query that sees nothing, or from memory never written",
                    )  # fmt: skip
                expect.close(got, wanted, atol=TOLERANCE, what=what, row="position")

    def test_the_padding_token_does_not_matter(self, gate: GateRun) -> None:
        """another padding token changes nothing, bit for bit"""
        prompts = ragged(gate)
        more = [[[gate.rng.randrange(256)] for _ in prompts]]
        one, other = (self.feed(gate, prompts, more, pad_id=pad_id) for pad_id in (0, 319))
        self.same(one, other, prompts, range(len(prompts)), "another padding token")

    def test_a_neighbour_does_not_matter(self, gate: GateRun) -> None:
        """another neighbour of the same length changes nothing, bit for bit"""
        prompts = ragged(gate)
        others = [prompts[0], *([[(t + 1) % 256 for t in p] for p in prompts[1:]])]
        more = [[[7] for _ in prompts]]
        one, other = (self.feed(gate, p, more, pad_id=0) for p in (prompts, others))
        self.same(one, other, prompts, [0], "other neighbours")

    @pytest.mark.parametrize(("fed", "queries"), [(0, 6), (6, 1), (4, 3)])
    def test_what_a_column_sees(self, gate: GateRun, fed: int, queries: int) -> None:
        """a column sees its own row's past and itself; padding sees itself, and nothing else"""
        starts, columns = [0, 3, 5], range(fed + queries)
        wanted = [
            [[c == q or first <= c <= q for c in columns] for q in columns[fed:]]
            for first in starts
        ]  # fmt: skip
        what = f"visible({queries}) after {fed} columns, starts = {starts}"
        found = expect.result_of(
            lambda: gate.candidate.call(
                "visible", model="nano", starts=starts, fed=fed, queries=queries
            ),
            what,
        )
        found = expect.is_tensor(found, what, (len(starts), queries, fed + queries))
        if found.dtype != torch.bool:
            raise GateFailure(Code.WRONG_TYPE, what, "torch.bool", str(found.dtype))
        for row, first in enumerate(starts):
            for at, query in enumerate(columns[fed:]):
                if found[row, at].tolist() != wanted[row][at]:
                    raise GateFailure(
                        Code.WRONG_VALUE, what, marks(wanted[row][at]),
                        marks(found[row, at].tolist()),
                        where=f"row {row}, which begins in column {first}, at column {query}",
                    )  # fmt: skip

    def feed(self, gate: GateRun, prompts: Rows, more: list[Rows], *, pad_id: int) -> list[Any]:
        """Logits of each pass."""

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "passes", model="nano", prompts=prompts, more=more, pad_id=pad_id
            )
            return [step.value for step in scenario]

        vocabulary = nano_oracle().config.vocab_size
        found = expect.result_of(run, "passes through a PaddedCache")
        chunks = [[[0] * max(map(len, prompts))], *more]
        for logits, chunk in zip(found, chunks, strict=True):
            assert logits.shape == (len(prompts), len(chunk[0]), vocabulary)
        return found

    def same(self, one: Any, other: Any, prompts: Rows, rows: Any, what: str) -> None:
        """Equal logits in the columns that belong to the rows themselves."""
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            for row in rows:
                own = len(prompts[row]) if index == 0 else a.shape[1]
                if not torch.equal(a[row, -own:], b[row, -own:]):
                    difference = (a[row, -own:] - b[row, -own:]).abs().max()
                    raise GateFailure(
                        Code.WRONG_LOGITS, f"{what}: row {row} changes", "the same bits",
                        f"off by {float(difference):.3g}", where=f"pass {index}",
                    )  # fmt: skip


@pytest.mark.contract
class TestGenerateBatch:
    """`generate_batch`, on nano."""

    def test_each_row_is_its_own_text(self, gate: GateRun) -> None:
        """each row equals the text of its prompt alone"""
        batch_of(gate, ragged(gate), 10, [], f"prompts of {LENGTHS} tokens")

    def test_each_row_has_its_own_limit(self, gate: GateRun) -> None:
        """each row ends at its own limit"""
        batch_of(gate, ragged(gate), [7, 12, 1, 3], [], "limits of 7, 12, 1 and 3")
        what = "limits of 2 and 4, in a tuple"
        batch_of(gate, ragged(gate, (3, 6)), [2, 4], [], what, limits_kind="tuple")

    @pytest.mark.parametrize("kind", ["list", "tuple", "frozenset"])
    def test_an_end_token_ends_its_row_alone(self, gate: GateRun, kind: str) -> None:
        """an end token ends its own row, and is its last token"""
        prompts = ragged(gate)
        texts = [nano_oracle().greedy(prompt, 12)[0] for prompt in prompts]
        # A token that ends row 1 early, and row 2 not at all.
        ends = [token for token in texts[1][1:6] if token not in texts[2]]
        if not ends:
            raise RuntimeError("nano says the same in two rows")
        unsaid = set(range(nano_oracle().config.vocab_size)) - set().union(*texts)
        what = f"an end token in row 1, and one that nobody says, in a {kind}"
        batch_of(gate, prompts, 12, [min(unsaid), ends[0]], what, eos_kind=kind)

    def test_an_end_token_in_the_first_step(self, gate: GateRun) -> None:
        """an end token that prefill gives ends its row, too"""
        prompts = ragged(gate)
        firsts = [nano_oracle().greedy(prompt, 1)[0][0] for prompt in prompts]
        batch_of(gate, prompts, 6, [firsts[1]], "an end token in the first step of row 1")
        _, counts = batch_of(gate, prompts, 6, firsts, "an end token in the first step of all")
        self.one_pass(counts, "an end token in the first step of all")

    def test_prompts_that_are_alike(self, gate: GateRun) -> None:
        """equal prompts are two rows, and prompts of one token are prompts"""
        one, other = ragged(gate, (6, 4))
        batch_of(gate, [one, other, one, one], 5, [], "three equal prompts of four")
        batch_of(gate, ragged(gate, (1, 1, 1)), 5, [], "three prompts of one token")

    def test_a_limit_past_the_context(self, gate: GateRun) -> None:
        """room is made for what can come, not for what a limit allows"""
        context = nano_oracle().config.max_context
        prompts = ragged(gate, (context - 6, 6))
        batch_of(gate, prompts, [10**9, 3], [], f"a limit of 10**9 at {context - 6} positions")

    def test_one_pass_for_a_step(self, gate: GateRun) -> None:
        """steps stream: a step is yielded before the next one is computed"""
        steps, _ = run_batch(gate, ragged(gate), 4, [], "four steps")
        passes = [step["passes"] for step in steps]
        if len(set(passes)) != len(passes):
            raise GateFailure(
                Code.NOT_STREAMING, "a step must be yielded before the next one is computed",
                "more passes at each step", "passes " + ", ".join(map(str, passes)),
            )  # fmt: skip

    def test_a_batch_of_one(self, gate: GateRun) -> None:
        """a batch of one is the text alone"""
        batch_of(gate, ragged(gate, (8,)), 6, [], "a batch of one")

    def test_a_model_in_another_type(self, gate: GateRun) -> None:
        """the cache has the type of the model: nano in float64"""
        prompts = ragged(gate, (4, 7))
        steps = expect.result_of(
            lambda: gate.candidate.call("in_float64", prompts=prompts, max_new_tokens=4),
            "a batch on nano in float64",
        )
        rows = rows_of([{"tokens": step} for step in steps], 2, "nano in float64")
        for row, (got, prompt) in enumerate(zip(rows, prompts, strict=True)):
            check_text(prompt, got, 4, [], f"nano in float64: row {row}")

    def test_no_prompts(self, gate: GateRun) -> None:
        """an empty batch yields and computes nothing"""
        _, counts = batch_of(gate, [], 5, [], "no prompts")
        expect.value(counts["passes"], 0, "forward passes for no prompts")

    def test_no_pass_after_the_last_row(self, gate: GateRun) -> None:
        """no pass is made once every row has ended"""
        _, counts = batch_of(gate, ragged(gate), 1, [], "limits of 1")
        self.one_pass(counts, "limits of 1")
        _, counts = batch_of(gate, ragged(gate), [5, 2, 4, 5], [], "five steps")
        if counts["passes"] not in (5, 5 + 2 + 4 + 5):  # one by one fails the number, not this
            raise GateFailure(
                Code.WRONG_COUNT, "five steps are five passes", "5", str(counts["passes"])
            )
        prompt = ragged(gate, (8,))
        text = nano_oracle().greedy(prompt[0], 12)[0]
        end = next(i for i in range(2, 12) if text[i] not in text[:i])
        _, counts = batch_of(gate, prompt, 12, [text[end]], "an end token in the only row")
        if counts["passes"] != end + 1:
            raise GateFailure(
                Code.WRONG_COUNT, "no pass is made after the last row has ended", str(end + 1),
                str(counts["passes"]),
            )  # fmt: skip

    def test_rows_without_room(self, gate: GateRun) -> None:
        """a row with a limit of 0 yields nothing, and costs nothing"""
        prompts, limits = ragged(gate), [3, 2, 0, 0]  # the longest prompt has none
        _, counts = batch_of(gate, prompts, limits, [], f"limits of {limits}")
        positions = 2 * (5 + 2)
        if counts["positions"] > positions:
            raise GateFailure(
                Code.WRONG_COUNT, "a row with a limit of 0 needs no place in the batch",
                f"{positions} positions", str(counts["positions"]),
            )  # fmt: skip
        _, counts = batch_of(gate, prompts, 0, [], "max_new_tokens = 0")
        expect.value(counts["passes"], 0, "forward passes for max_new_tokens = 0")

    def test_a_row_that_fills_the_context(self, gate: GateRun) -> None:
        """a row at the end of the context ends, and the others go on"""
        context = nano_oracle().config.max_context
        lengths = (6, context - 2, context)
        what = f"prompts of {lengths} tokens in a context of {context}"
        batch_of(gate, ragged(gate, lengths), 12, [], what)

    @pytest.mark.parametrize(
        ("argument", "prompts", "limits", "eos_ids", "kinds", "what"),
        [
            ("prompts[1]", [[1], []], 4, [], ["ValueError"], "an empty prompt"),
            ("prompts[1]", [[1], [2, 320]], 4, [], ["ValueError"], "a token past the vocabulary"),
            ("prompts[0]", [[1] * 257, [2]], 4, [], ["ValueError"], "a prompt past the context"),
            ("prompts[0]", [5, 6], 4, [], ["TypeError"], "one prompt that is no list"),
            ("max_new_tokens", [[1], [2]], [4], [], ["ValueError"], "one limit for two prompts"),
            ("max_new_tokens", [[1], [2]], [4, -1], [], ["ValueError"], "a negative limit"),
            ("max_new_tokens", [[1]], 2.5, [], ["TypeError"], "a limit of 2.5"),
            ("eos_ids", [[1]], 4, [999], ["ValueError"], "an end token past the vocabulary"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )  # fmt: skip
    def test_bad_input_is_refused(
        self,
        gate: GateRun,
        argument: str,
        prompts: Any,
        limits: Any,
        eos_ids: Any,
        kinds: Any,
        what: str,
    ) -> None:
        """bad input gets an error that names the argument, or the prompt"""

        def attempt() -> None:
            run = gate.candidate.start(
                "batch", model="nano", prompts=prompts, max_new_tokens=limits, eos_ids=eos_ids
            )
            run.step()
            run.step()
            run.stop()

        expect.rejects(attempt, argument, what, kinds=kinds)

    def test_arguments_are_left_alone(self, gate: GateRun) -> None:
        """the caller's lists are not changed"""
        prompts = ragged(gate, (4, 7))
        given = [[list(prompt) for prompt in prompts], [3, 2], [319]]
        _, counts = batch_of(gate, prompts, [3, 2], [319], "a second look")
        expect.unchanged(given, counts["arguments"], "an argument")

    def test_prompts_of_another_kind(self, gate: GateRun) -> None:
        """prompts may be tuples: any sequence of token ids"""
        batch_of(gate, ragged(gate, (3, 6)), 4, [], "prompts in tuples", prompts_kind="tuple")

    def test_two_batches_in_turn(self, gate: GateRun) -> None:
        """two batches in turn do not disturb each other"""
        batches = [ragged(gate, lengths) for lengths in ((3, 8), (8, 5))]
        found: list[list[dict[str, Any]]] = [[], []]

        def interleave() -> None:
            runs = [
                gate.candidate.start(
                    "batch", model="nano", prompts=prompts, max_new_tokens=5, eos_ids=[]
                )
                for prompts in batches
            ]
            for run in runs:
                run.step()
            for _ in range(5):
                for run, steps in zip(runs, found, strict=True):
                    steps.append(run.step().value)
            for run in runs:
                run.stop()

        expect.result_of(interleave, "two batches in turn")
        for steps, prompts in zip(found, batches, strict=True):
            for got, prompt in zip(rows_of(steps, 2, "two in turn"), prompts, strict=True):
                if len(got) != 5 or nano_oracle().first_wrong(prompt, got):
                    raise GateFailure(
                        Code.STALE_STATE, "two batches in turn disturb each other",
                        str(nano_oracle().greedy(prompt, 5)[0]), str(got),
                    )  # fmt: skip

    def one_pass(self, counts: dict[str, Any], what: str) -> None:
        """Every row ended in the first step. One by one fails the number, and not this."""
        if counts["passes"] not in (1, len(LENGTHS)):
            raise GateFailure(
                Code.WRONG_COUNT, f"{what}: one step is one pass", "1", str(counts["passes"])
            )


@pytest.mark.number
def test_positions(gate: GateRun) -> None:
    """passes, positions and padding of a ragged batch, counted"""
    lengths = tuple(gate.rng.randrange(4, 49) for _ in range(8))
    limits = [gate.rng.randrange(4, 33) for _ in range(8)]
    _, counts = batch_of(gate, ragged(gate, lengths), limits, [], "eight prompts")
    steps, width = max(limits), max(lengths)
    computed = 8 * (width + steps - 1)
    useful = sum(n + new - 1 for n, new in zip(lengths, limits, strict=True))
    gate.exact(
        "passes", counts["passes"], equals=steps,
        text=f"{counts['passes']} for {sum(limits)} tokens of 8 rows; one by one {sum(limits)}",
        message="one pass serves every row",
    )  # fmt: skip
    gate.exact(
        "positions", counts["positions"], equals=computed,
        text=f"{counts['positions']:,}, of which {useful:,} are somebody's",
        message="B rows of T columns in prefill, and B positions a step until the last row ends",
    )  # fmt: skip
    gate.exact(
        "head_rows", counts["head_rows"], equals=8 * steps,
        text=f"{counts['head_rows']:,} rows through the LM head",
        message="one row of each sequence needs the head",
    )  # fmt: skip
    share = 100 * (1 - useful / counts["positions"])
    gate.report(
        "padded", round(share, 1), unit="%",
        text=f"{share:.0f}% of the positions computed are padding or rows that have ended",
    )  # fmt: skip


@pytest.mark.number
def test_what_is_left(gate: GateRun) -> None:
    """nothing is kept of a batch that has ended"""
    likely = "Caches are kept somewhere that outlives their batch."
    keeps_nothing(gate, "a batch", 5, likely, prompts=ragged(gate, (3, 6)))


@pytest.mark.number
def test_throughput(gate: GateRun) -> None:
    """tokens per second of a batch against the same prompts one by one"""
    runs = PairedBatch(gate, gate.model, rows=gate.bar("rows"), new=10, untimed=1)

    def words(ratio: PairedRatio) -> str:
        mine, alone = (runs.rows / s for s in (ratio.candidate_s, ratio.baseline_s))
        return f"{ratio.median:.1f}x at batch {runs.rows} ({mine:.0f} tokens/s for {alone:.0f})"

    def notes(ratio: PairedRatio) -> list[str]:
        bills = Bills(gate)
        context = round(statistics.fmean(length for length, _ in runs.seconds["candidate"]))
        alone = bills.split(bills.decode([context]), ratio.baseline_s / runs.rows)
        batch = bills.split(bills.decode([context] * runs.rows), ratio.candidate_s)
        gain = runs.rows * alone.predicted / batch.predicted
        return [
            f"predicted {gain:.1f}x from the bills: the weights are read once for {runs.rows} rows",
            split_words(alone, "alone"), split_words(batch, f"a step of {runs.rows}"),
        ]  # fmt: skip

    gate.ratio(
        "throughput", *runs.sides(), text=words, notes=notes,
        slower=lambda _: "batching does not pay",
    )  # fmt: skip


class PairedBatch(PairedRuns):
    """A batch of prompts a step, against as many passes of stage 02."""

    def __init__(self, gate: GateRun, model: str, *, rows: int, new: int, untimed: int) -> None:
        super().__init__(gate, model, new=new, untimed=untimed)
        self.rows = rows

    def draw(self, index: int) -> Rows:
        """Prompts of 16 to 64 random tokens: random weights do not mind."""
        rng = self.gate.rng
        return [
            [rng.randrange(256) for _ in range(rng.randrange(16, 65))] for _ in range(self.rows)
        ]

    def arguments(self, prompts: Rows) -> dict[str, Any]:
        """As `generate_batch` is called."""
        return {"prompts": prompts}
