"""Stage 07, the judge: the block allocator."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from block_pool import BlockPool, play
from traces import log_uniform
from two_sizes import TwoSizes

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.measure.ratio import PairedRatio

STAGE = 7

# Bytes of keys and values per token: nano in fp32, the shape of Llama-3.2-1B in bf16.
TOKEN_BYTES = {"cpu": 2 * 3 * 2 * 16 * 4, "cuda": 2 * 16 * 8 * 64 * 2}
MOST_BYTES = 64 << 30  # of a GPU: more would prove nothing more

MOST_KEPT = 64 << 10  # bytes; a list of the ids that 10,000 sequences took and left: 160,000

# What walks through a pool takes longer or shorter by the state that the pool is in. An interval
# that is wide for this reason, and below the bar, is no less below it.
MAX_SPREAD = 50.0


@pytest.mark.contract
class TestSizes:
    """Numbers of blocks, and what is refused."""

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_blocks_for(self, gate: GateRun, block_size: int) -> None:
        """tokens are rounded up to whole blocks"""
        BlockPool(gate, 3, block_size, "a new pool")
        for num_tokens in (*range(2 * block_size + 2), 1000, 10**15, 10**17 + 1):
            what = f"blocks_for({num_tokens}) with blocks of {block_size}"
            got = expect.result_of(lambda n=num_tokens: ask(gate, "blocks_for", n), what)
            full, rest = divmod(num_tokens, block_size)
            if expect.is_int(got, what) != full + bool(rest):
                raise GateFailure(
                    Code.WRONG_VALUE, what, str(full + bool(rest)), str(got),
                    likely="Rounded down, or one too many where it divides evenly; 10**17 + 1 is "
                    "not among the floats.",
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "sizes", "kinds"),
        [
            ("num_blocks", (0, 4), ["ValueError"]),
            ("num_blocks", (-1, 4), ["ValueError"]),
            ("num_blocks", (2.0, 4), ["TypeError", "ValueError"]),
            ("block_size", (4, 0), ["ValueError"]),
            ("block_size", (4, "4"), ["TypeError", "ValueError"]),
        ],
    )
    def test_sizes_below_one_are_refused(
        self, gate: GateRun, argument: str, sizes: tuple[Any, Any], kinds: list[str]
    ) -> None:
        """a pool needs at least one block of at least one token"""
        num_blocks, block_size = sizes
        expect.rejects(
            lambda: gate.candidate.call(
                "new", pool="pool", num_blocks=num_blocks, block_size=block_size
            ),
            argument, f"BlockAllocator({num_blocks!r}, {block_size!r})", kinds=kinds,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("op", "args", "argument", "kinds"),
        [
            ("blocks_for", [-1], "num_tokens", ["ValueError"]),
            ("allocate", [-1], "num_tokens", ["ValueError"]),
            ("allocate", [2.5], "num_tokens", ["TypeError", "ValueError"]),
            ("append", ["a", -1, 1], "num_tokens", ["ValueError"]),
            ("append", ["a", 5, -1], "new_tokens", ["ValueError"]),
            ("append", ["a", 5, 1.0], "new_tokens", ["TypeError", "ValueError"]),
            ("append", ["a", 9, 1], "num_tokens", ["ValueError"]),
            ("append", [[], 1, 1], "num_tokens", ["ValueError"]),
            ("append", [None, 5, 1], "table", ["TypeError", "ValueError"]),
            ("free", [7], "table", ["TypeError", "ValueError"]),
            ("fork", [None], "table", ["TypeError", "ValueError"]),
            ("ref_count", [4], "block", ["ValueError"]),
            ("ref_count", [-1], "block", ["ValueError"]),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, op: str, args: list[Any], argument: str, kinds: list[str]
    ) -> None:
        """bad input gets an error that names the argument, and changes nothing"""
        pool = BlockPool(gate, 4, 4, "bad input")
        pool.allocate("a", 5)
        shown = ", ".join(map(str, args))
        pool.refuses(op, args, f"{op}({shown})", names=[argument], kinds=kinds)


def comes_next(got: list[int], expected: list[int], what: str) -> None:
    """These blocks come off the free list."""
    if got != expected:
        raise GateFailure(
            Code.WRONG_VALUE, f"the free list: {what}", str(expected), str(got),
            likely="The free list is a queue: take at the front, give back at the end, the last "
            "block of a table first, whatever its id.",
        )  # fmt: skip


def only(table: list[int] | None) -> int:
    """The block of a table of one; -1 if there is none."""
    return (table or [-1])[0]


def ask(gate: GateRun, op: str, *args: Any) -> Any:
    """What a method of the newest pool returns."""
    return gate.candidate.call("do", pool="pool", op=op, args=list(args))["result"]


@pytest.mark.contract
class TestBlocks:
    """Allocate, append and free, without sharing."""

    def test_a_pool_can_be_used_to_the_last_block(self, gate: GateRun) -> None:
        """a pool can be filled to its last block, and refuses one more"""
        pool = BlockPool(gate, 6, 4, "filling a pool")
        pool.allocate("none", 0)
        for name, num_tokens in (("a", 9), ("b", 4), ("c", 1)):
            pool.allocate(name, num_tokens)
        pool.allocate("d", 5)  # one block too many
        pool.allocate("d", 10**12)
        pool.allocate("d", 4)
        pool.allocate("e", 1)
        pool.allocate("e", 0)
        pool.free("b")
        pool.allocate("e", 5)
        pool.allocate("e", 4)
        pool.check()

    @pytest.mark.parametrize("block_size", [1, 4])
    def test_a_sequence_grows_token_by_token(self, gate: GateRun, block_size: int) -> None:
        """a block is added with the first token that needs it, and not before"""
        pool = BlockPool(gate, 4, block_size, "growing by single tokens")
        pool.allocate("a", 1)
        while len(pool.tokens["a"]) < 4 * block_size:
            pool.append("a", 1)
        pool.append("a", 1)
        pool.append("a", 0)

    def test_a_sequence_grows_by_many(self, gate: GateRun) -> None:
        """several blocks may be added at once"""
        pool = BlockPool(gate, 9, 4, "growing by many tokens")
        pool.allocate("a", 3)
        for new_tokens in (1, 4, 9, 3, 13, 12):
            pool.append("a", new_tokens)
        pool.allocate("b", 0)
        pool.append("b", 5)
        pool.append("b", 4)

    def test_a_table_with_room_to_spare(self, gate: GateRun) -> None:
        """room that a table has already is used first"""
        pool = BlockPool(gate, 8, 4, "a sequence that forgets tokens")
        pool.allocate("a", 11)
        pool.rewind("a", 8)
        pool.append("a", 1)
        pool.append("a", 3)
        pool.append("a", 6)
        pool.rewind("a", 13)
        pool.append("a", 16)
        pool.check()

    def test_what_is_freed_can_be_used_again(self, gate: GateRun) -> None:
        """freed blocks come back, and the freed table is empty"""
        pool = BlockPool(gate, 5, 2, "freeing")
        for _ in range(4):
            pool.allocate("a", 6)
            pool.allocate("b", 4)
            pool.free("a")
            pool.append("b", 5)
            pool.free("b")
            pool.free("b")  # an empty table holds nothing: no harm
        pool.check()

    def test_the_order_of_the_free_list(self, gate: GateRun) -> None:
        """the block that has been free longest comes first"""
        pool = BlockPool(gate, 7, 2, "the free list")
        for index, name in enumerate("abc"):
            got = pool.allocate(name, 4)
            comes_next(sorted(got or []), [2 * index, 2 * index + 1], "two blocks of a new pool")
        held = [*reversed(pool.table("c"))]
        freed = [*reversed(pool.table("b")), *reversed(pool.table("a"))]
        pool.free("b")
        pool.free("a")
        got = [only(pool.allocate(f"d{i}", 2)) for i in range(5)]
        comes_next(got, [6, *freed], "one by one, after [2, 3] was freed and then [0, 1]")
        for i in range(5):
            pool.free(f"d{i}")
        for _ in range(5):
            pool.append("c", 2)
        pool.free("c")
        got = [only(pool.allocate(f"e{i}", 2)) for i in range(7)]
        comes_next(
            got, [*reversed(freed), 6, *held], "one by one, after one table of all was freed"
        )

    def test_two_pools(self, gate: GateRun) -> None:
        """two pools do not know each other"""
        pools = [BlockPool(gate, 4, 2, "one of two pools", name=name) for name in ("x", "y")]
        try:
            for num_tokens in (3, 2):
                for pool in pools:
                    pool.allocate(f"a{num_tokens}", num_tokens)
            for pool in pools:
                pool.free("a3")
                pool.allocate("b", 6)
        except GateFailure as failure:
            if failure.code in (Code.WRONG_VALUE, Code.CRASHED):
                failure.code = Code.STALE_STATE
            raise


@pytest.mark.contract
class TestSharing:
    """Fork, reference counts and copy-on-write."""

    def test_forks_share_until_they_write(self, gate: GateRun) -> None:
        """a fork costs nothing, until one of the two writes into the last block"""
        pool = BlockPool(gate, 8, 4, "a fork")
        pool.allocate("a", 6)
        pool.fork("a", "b")
        pool.append("a", 0)  # nobody writes
        pool.append("a", 1)  # into a copy
        pool.append("b", 1)  # alone by now: in place
        pool.append("b", 2)
        pool.append("a", 5)
        pool.check()

    def test_a_full_block_is_never_copied(self, gate: GateRun) -> None:
        """a shared block that is full stays shared"""
        pool = BlockPool(gate, 8, 4, "a fork at the end of a block")
        pool.allocate("a", 8)
        pool.fork("a", "b")
        pool.append("a", 1)
        pool.append("b", 3)
        pool.fork("b", "c")
        pool.append("c", 6)
        pool.append("b", 1)

    def test_many_forks(self, gate: GateRun) -> None:
        """forks of forks: all but the last one to write copy"""
        pool = BlockPool(gate, 12, 4, "four continuations of one prompt")
        pool.allocate("a", 7)
        for name, other in (("a", "b"), ("b", "c"), ("a", "d")):
            pool.fork(name, other)
        pool.allocate("none", 0)
        pool.fork("none", "nothing")
        for name in "cadb":
            pool.append(name, 1)
        for name in "abcd":
            pool.append(name, 2)
        pool.check()
        for name in "bdac":
            pool.free(name)
        pool.check()

    def test_a_shared_block_outlives_its_first_owner(self, gate: GateRun) -> None:
        """a block is free when the last table that holds it is"""
        pool = BlockPool(gate, 4, 4, "freeing one of two")
        pool.allocate("a", 10)
        pool.fork("a", "b")
        pool.free("a")
        pool.allocate("c", 4)
        pool.append("b", 1)
        pool.append("b", 2)
        pool.free("b")
        pool.allocate("d", 12)
        pool.check()

    def test_a_copy_needs_a_block(self, gate: GateRun) -> None:
        """when no block is free for a copy, nothing changes"""
        pool = BlockPool(gate, 4, 4, "copying in a pool that is nearly full")
        pool.allocate("a", 6)
        pool.fork("a", "b")
        pool.allocate("c", 4)
        pool.append("a", 3)  # a copy and one more: one block too many
        pool.append("a", 1)
        pool.append("b", 3)
        pool.fork("a", "d")
        pool.append("d", 1)  # no block is left for a copy
        pool.append("d", 0)
        pool.free("c")
        pool.append("d", 1)
        pool.check()

    def test_shared_room_to_spare(self, gate: GateRun) -> None:
        """a shared block in which nothing lies yet is replaced without a copy"""
        pool = BlockPool(gate, 9, 4, "a fork of a table with room to spare")
        pool.allocate("a", 14)
        pool.rewind("a", 9)
        pool.fork("a", "b")
        pool.append("b", 8)  # a copy of one block; the next one is new
        pool.append("a", 2)
        pool.append("a", 7)
        pool.check()


@pytest.mark.contract
class TestIntegrity:
    """What must not happen in silence."""

    def test_a_double_free(self, gate: GateRun) -> None:
        """freeing a block twice is refused, and gives nothing back"""
        pool = BlockPool(gate, 6, 2, "a double free")
        pool.allocate("a", 6)
        pool.fork("a", "b")
        pool.append("b", 1)
        pool.free_again("b")
        pool.free_again("a")
        pool.check()

    def test_a_table_that_is_half_stale(self, gate: GateRun) -> None:
        """a table with one free block in it is refused as a whole"""
        pool = BlockPool(gate, 6, 2, "a stale table")
        pool.allocate("a", 4)
        pool.allocate("b", 4)
        held, stale = pool.table("a"), pool.table("b")
        pool.free("b")
        for table in (held + stale[:1], stale[:1] + held):
            for op in ("free", "fork"):
                pool.refuses(op, [table], f"{op}({table})", names=stale[:1])
        for num_tokens, new_tokens in itertools.product((3, 4), (1, 0)):
            args = [stale, num_tokens, new_tokens]
            doing = f"append({stale}, {num_tokens}, {new_tokens}), a table that was freed"
            pool.refuses("append", args, doing, names=stale)

    @pytest.mark.parametrize("op", ["free", "fork", "append"])
    def test_blocks_of_no_pool(self, gate: GateRun, op: str) -> None:
        """ids that are no block of this pool are refused"""
        pool = BlockPool(gate, 5, 2, "ids from elsewhere")
        pool.allocate("a", 9)
        held = pool.table("a")
        for strange in (-1, 5, 10**9):
            table = [*held[:2], strange]
            args = [table, 5, 1] if op == "append" else [table]
            pool.refuses(op, args, f"{op}({table})", names=[strange])
        if op != "append":
            table = [held[0], held[1], held[0]]
            pool.refuses(op, [table], f"{op}({table})", names=[held[0]])
            return
        for table, num_tokens in (([held[0], held[0]], 1), ([held[0], held[1], held[1]], 3)):
            doing = f"append({table}, {num_tokens}, 2), into a block that stands there twice"
            pool.refuses(op, [table, num_tokens, 2], doing, names=table[-1:])

    def test_check_finds_what_is_wrong(self, gate: GateRun) -> None:
        """check finds a table that is missing, one too many, and a freed block in a table"""
        pool = BlockPool(gate, 8, 2, "check")
        for name, num_tokens in (("a", 3), ("b", 2), ("c", 4)):
            pool.allocate(name, num_tokens)
        pool.fork("c", "d")
        a, b, c, d = (pool.table(name) for name in "abcd")
        pool.check()
        wrong = {
            "a table is missing": ([a, c, d], b),
            "one of two that share is missing": ([a, b, d], c),
            "a table too many": ([a, b, b, c, d], b),
            "a block in the place of another": ([a, a[:1], c, d], a[:1] + b),
            "a block of no pool": ([a, b, c, d, [8]], [8]),
            "a negative block": ([a, b, c, d, [-1]], [-1]),
            "no tables at all": ([], a + b + c),
        }
        for what, (tables, names) in wrong.items():
            for given, how in ((tables, what), ({"one by one": tables}, f"{what}, one by one")):
                doing = f"check({tables}), {how}"
                pool.refuses("check", [given], doing, names=names, kinds=["RuntimeError"])
        pool.free("b")
        tables = [a, b, c, d]
        doing = f"check({tables}), a freed block in a table"
        pool.refuses("check", [tables], doing, names=b, kinds=["RuntimeError"])
        pool.check()

    def test_check_finds_a_wrong_sum(self, gate: GateRun) -> None:
        """check finds a block that is neither free nor used, and one that is free twice"""
        for op in ("take", "give_back"):
            pool = BlockPool(gate, 6, 2, "a free list that is used by a stranger")
            pool.allocate("a", 5)
            pool.allocate("b", 6)
            free = pool.table("b")[1]
            pool.free("b")
            pool.broken_sum(op, [free] if op == "give_back" else [])

    def test_a_subclass_sees_the_free_list(self, gate: GateRun) -> None:
        """every block is taken by take and given back by give_back"""
        pool = BlockPool(gate, 6, 2, "a subclass", watched=True)
        pool.allocate("a", 3)
        pool.fork("a", "b")
        pool.append("b", 2)
        pool.append("a", 6)
        pool.free("b")
        pool.free("a")
        pool.allocate("a", 12)

    @pytest.mark.parametrize(
        ("num_blocks", "block_size"), [(1, 1), (5, 1), (9, 3), (12, 4), (30, 2), (48, 16)]
    )
    def test_random_operations(self, gate: GateRun, num_blocks: int, block_size: int) -> None:
        """random operations: free + used = total, every block counted, every text intact"""
        pool = BlockPool(gate, num_blocks, block_size, "random operations")
        play(pool, gate.rng, 120)


@pytest.mark.number
def test_fits(gate: GateRun) -> None:
    """sequences that fit in the same bytes, over a slot of the longest context for each"""
    context, block_size, slots = (gate.bar(name) for name in ("context", "block_size", "slots"))
    token_bytes = TOKEN_BYTES[gate.tier]
    if gate.tier == "cuda":
        budget = min(MOST_BYTES, gate.baseline.call("free_bytes") // 2)
        slots = budget // (context * token_bytes)
    num_blocks = slots * context // block_size
    requests = log_uniform(gate.rng, *gate.bar("trace"))
    reserved = gate.baseline.call(
        "fill", num_blocks=slots, block_size=context, requests=requests, token_bytes=token_bytes
    )
    filled = expect.result_of(
        lambda: gate.candidate.call(
            "fill", num_blocks=num_blocks, block_size=block_size, requests=requests,
            token_bytes=token_bytes,
        ),
        f"filling a pool of {num_blocks} blocks",
    )  # fmt: skip
    tables, stored = filled["tables"], [prompt + new - 1 for prompt, new in requests]
    must_own_its_blocks(filled)
    fit = sequences_that_fit(stored, num_blocks, block_size)
    ratio, needed = (round(count / len(reserved["tables"]), 2) for count in (len(tables), fit))
    known = num_blocks * block_size // max(stored)
    gate.exact(
        "fits", ratio, equals=needed, at_least=gate.bar("fits")["at_least"], unit="x",
        text=f"{len(tables)} sequences where {slots} slots of {context} positions take the same "
        f"{slots * context * token_bytes / 1e6:,.0f} MB: {ratio:.2f}x as many",
        message="a sequence takes the blocks that its tokens need, until none is left",
        likely="Blocks are held back, for a sequence or for everybody.",
        note=f"even slots of {max(stored)}, for who knows the longest request beforehand, would "
        f"be {known}: {len(tables) / known:.2f}x",
    )  # fmt: skip
    wasted = [len(t) * block_size - n for t, n in zip(tables, stored, strict=False)]
    gate.exact(
        "wasted", max(wasted), at_most=block_size - 1, code=Code.TOO_MUCH_MEMORY,
        text=f"{max(wasted)} positions at most, {statistics.fmean(wasted):.1f} per sequence on "
        f"average; predicted ({block_size} - 1) / 2 = {(block_size - 1) / 2:g}",
        message="only the last block of a sequence may be partly empty",
        likely="Blocks are taken before a token needs them.",
    )  # fmt: skip


def must_own_its_blocks(filled: Any) -> None:
    """Every block belongs to one sequence, and the memory says so too."""
    shape = filled["owners"].shape
    owners = expect.is_tensor(filled["owners"], "the pool", shape).tolist()  # [blocks, 2]
    for index, table in enumerate(filled["tables"]):
        for block in table:
            if owners[block] != [index, index]:
                raise GateFailure(
                    Code.WRONG_VALUE, f"block {block} of sequence {index} was written by another",
                    str(index), str(owners[block]),
                    likely="A block was handed out twice.",
                )  # fmt: skip


def sequences_that_fit(stored: list[int], num_blocks: int, block_size: int) -> int:
    """How many of these lengths fit, one after the other, in whole blocks."""
    for index, tokens in enumerate(stored):
        num_blocks -= -(-tokens // block_size)
        if num_blocks < 0:
            return index
    return len(stored)


@pytest.mark.number
def test_sharing(gate: GateRun) -> None:
    """copies and blocks of several continuations of each prompt, counted"""
    block_size, rng = gate.bar("block_size"), gate.rng
    prompts = [block_size * k for k in (1, 2, 3)] + [rng.randrange(20, 90) for _ in range(9)]
    rng.shuffle(prompts)
    groups = [[prompt, [rng.randrange(8, 60) for _ in range(4)]] for prompt in prompts]
    found = expect.result_of(
        lambda: gate.candidate.call(
            "sample", num_blocks=1000, block_size=block_size, groups=groups
        ),
        "four continuations of each of twelve prompts",
    )
    copies = sum(3 for prompt in prompts if prompt % block_size)
    gate.exact(
        "copies", found["copies"], equals=copies,
        text=f"{found['copies']} blocks copied for 36 forks: one for each that writes into a "
        "shared block",
        message="a block is copied when it is shared, holds tokens, and will be written",
        likely="Full blocks are copied too, or the last one to write copies as well.",
    )  # fmt: skip
    alone = shared = 0
    for prompt, lengths in groups:
        blocks = [-(-(prompt + length) // block_size) for length in lengths]
        alone += sum(blocks)
        shared += sum(blocks) - 3 * (prompt // block_size)
    gate.exact(
        "shared", found["used"], equals=shared,
        text=f"{found['used']} blocks; without sharing {alone}",
        message="full blocks of the prompt are held once, all others by one sequence each",
        likely="Blocks that were shared are copied before anybody writes.",
    )  # fmt: skip


@pytest.mark.number
def test_memory(gate: GateRun) -> None:
    """many operations leave no more behind than a few"""
    num_blocks, rounds = 1000, 10_000
    kept = expect.result_of(
        lambda: gate.candidate.call("kept_bytes", num_blocks=num_blocks, rounds=rounds),
        f"{rounds:,} sequences that come and go",
    )
    if expect.is_int(kept, "bytes kept") > MOST_KEPT:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, f"an allocator of {num_blocks:,} blocks grows while sequences "
            "come and go", f"at most {MOST_KEPT:,} bytes more",
            f"{kept:,} after {rounds:,} of them, each of which was forked once",
            likely="What was taken off the free list, or what was done, is kept for ever: a log "
            "of operations, or of tables.",
        )  # fmt: skip


@pytest.mark.number
def test_time_and_the_pool(gate: GateRun) -> None:
    """operations on a large pool take as long as on a small one"""
    small, large = gate.bar("pools")
    pools = TwoSizes(
        gate, "churn", [small, large], "a pool", block_size=16, seed=gate.rng.getrandbits(32)
    )

    def words(ratio: PairedRatio) -> str:
        return f"{ratio.median:.2f}x as fast with {large:,} blocks as with {small:,}"

    gate.ratio(
        "pool_time",
        lambda: pools.step(small, small - 4 * (small // 40)),
        lambda: pools.step(large, large - 4 * (large // 40)),
        text=words, itself=True, max_spread=MAX_SPREAD,
        slower=lambda ratio: f"{words(ratio)}: something walks through the pool, when a block is "
        "taken or given back, or when num_free is read",
    )  # fmt: skip


@pytest.mark.number
def test_time_and_the_table(gate: GateRun) -> None:
    """a token is appended to a long table as quickly as to a short one"""
    short, long = gate.bar("tables")
    # Blocks of one token: every append takes a block, and what is done for a new one shows.
    tables = TwoSizes(gate, "grow", [short, long], "a table", block_size=1)
    added = tables.batch

    def words(ratio: PairedRatio) -> str:
        return f"append is {ratio.median:.2f}x as fast on {long:,} blocks as on {short:,}"

    gate.ratio(
        "table_time",
        lambda: tables.step(short, short + added),
        lambda: tables.step(long, long + added),
        text=words, itself=True, max_spread=MAX_SPREAD,
        slower=lambda ratio: f"{words(ratio)}: something walks through the table",
    )  # fmt: skip


@pytest.mark.number
def test_time_and_whole_tables(gate: GateRun) -> None:
    """a block of a long table is forked and freed as quickly as one of a short table"""
    short, long = gate.bar("whole_tables")
    tables = TwoSizes(
        gate, "whole", [short, long], "whole tables", block_size=1, shortest=1, num_blocks=long
    )

    def words(ratio: PairedRatio) -> str:
        return (
            f"a block is allocated, forked and freed {ratio.median:.2f}x as fast in tables of "
            f"{long:,} as in tables of {short:,}"
        )

    gate.ratio(
        "fork_time",
        lambda: tables.step(short, long),
        lambda: tables.step(long, long),
        text=words, itself=True, max_spread=MAX_SPREAD,
        slower=lambda ratio: f"{words(ratio)}: for each block something walks through its table",
    )  # fmt: skip
