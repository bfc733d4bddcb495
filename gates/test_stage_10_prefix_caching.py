"""Stage 10, the judge: prefix caching."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from bills import Bills, split_words
from block_pool import BlockPool, play
from prefix_model import Line, Space
from prefix_pool import PrefixPool, live
from two_sizes import TwoSizes

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.host import Run
from course.check.oracle import nano_oracle, near_tie
from course.measure.ratio import PairedRatio
from course.model.describe import load_config

STAGE = 10

MOST_KEPT = 64 << 10  # bytes
MOST_COLLIDING = 0.001  # of some thousand blocks; Python's own hash has none
LONG_BLOCK = 16  # tokens
MOST_READ = 64  # items, however long a text; one or two are needed
MOST_COMPARED = 24  # steps for each block of a text that is met four times
MAX_SPREAD = 50.0  # see stage 07: a wide interval below the bar is no less below it

SPACES: list[Space] = [("", ""), ("", "a"), ("a", ""), ("ab", "c"), ("a", "bc")]


def draw(gate: GateRun, count: int) -> list[int]:
    """Random tokens."""
    return [gate.rng.randrange(256) for _ in range(count)]


def serve(pool: PrefixPool, name: str, tokens: list[int], space: Space = ("", "")) -> int | None:
    """A text is admitted, computed, published and ends; tokens that it found computed."""
    found = pool.admit(name, tokens, space)
    if found is not None:
        pool.run(name)
        pool.free(name)
    return found


@pytest.mark.contract
class TestHash:
    """`hash_block`."""

    def test_what_goes_into_it(self, gate: GateRun) -> None:
        """a hash depends on the tokens, their order, and all that came before"""
        a, b, c = ([*draw(gate, 4), i] for i in range(3))
        calls: list[Any] = [
            [11, a], [11, a], [12, a], [11, b], [11, a[::-1]],  # 0 to 4
            [["result", 0], a], [["result", 5], a],  # a a, a a a
            [["result", 0], b], [["result", 3], a],  # a b, b a
            [["result", 7], c], [["result", 8], c],  # a b c, b a c
        ]  # fmt: skip
        got = self.ask(gate, calls)
        if got[0] != got[1]:
            raise GateFailure(
                Code.WRONG_VALUE, "hash_block, asked twice", str(got[0]), str(got[1]),
                likely="Equal arguments must give equal hashes.",
            )  # fmt: skip
        names = ["a", "", "a behind something else", "b", "a backwards", "a a", "a a a", "a b",
                 "b a", "a b c", "b a c"]  # fmt: skip
        for (i, one), (j, other) in itertools.combinations(enumerate(got), 2):
            if one == other and 1 not in (i, j):
                raise GateFailure(
                    Code.WRONG_VALUE, f"hash_block: {names[i]} and {names[j]} have one hash",
                    "two hashes", str(one),
                    likely="The parent and all tokens, in their order, go into it. With XOR or a "
                    "sum the order is lost, and what comes twice cancels out.",
                )  # fmt: skip

    def test_every_place_counts(self, gate: GateRun) -> None:
        """a token at any place of a block, or a bit of it or of the parent, makes another hash"""
        block = [gate.rng.randrange(256) for _ in range(LONG_BLOCK)]
        calls: list[Any] = [[11, block]]
        for place in range(LONG_BLOCK):
            for more in (1, 256, 65536):  # vocabularies have some hundred thousand
                calls.append([11, [*block[:place], block[place] + more, *block[place + 1 :]]])
        calls += [[11 + (1 << bit), block] for bit in range(4, 60)]
        got = self.ask(gate, calls)
        first: dict[int, int] = {}
        for index, value in enumerate(got):
            if first.setdefault(value, index) != index:
                raise GateFailure(
                    Code.WRONG_VALUE, f"hash_block of blocks of {LONG_BLOCK} tokens", "two hashes",
                    f"{calls[first[value]]} and {calls[index]} have one",
                    likely="The whole parent and all tokens go into it, none of them cut.",
                )  # fmt: skip

    def test_what_it_is_asked(self, gate: GateRun) -> None:
        """an allocator asks for a block's own tokens, behind the hash of the block before"""
        size, salts = 4, ["", "a"]
        text = [4 * i + j for i in range(3) for j in draw(gate, size)]
        what = "what the hash that an allocator is given is asked"
        asked = expect.result_of(
            lambda: gate.candidate.call("asks", tokens=[*text, 0], salts=salts, block_size=size),
            what,
        )
        blocks = [tuple(text[i : i + size]) for i in range(0, len(text), size)]
        begins: list[int] = []  # of each salt: the parent of its first block
        for calls in asked:
            known: dict[int, int] = {}  # by place: the hash of the block before
            for parent, tokens, value in calls:
                if not isinstance(tokens, tuple) or tokens not in blocks:
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{what}: tokens", "a tuple of those of one block",
                        repr(tokens)[:80], likely="The parent stands for all that came before.",
                    )  # fmt: skip
                place = blocks.index(tokens)
                if not known:  # the first call of this salt
                    known[0] = expect.is_int(parent, f"{what}: the parent of a first block")
                    if parent in begins:
                        raise GateFailure(
                            Code.WRONG_VALUE, f"{what}: the parent of a first block",
                            "another one for each salt", str(parent),
                            likely="Before the first block stands a hash of model and salt.",
                        )  # fmt: skip
                    begins.append(parent)
                if parent != known.get(place):
                    raise GateFailure(
                        Code.WRONG_VALUE, f"{what}: the parent of block {place}",
                        f"{known.get(place)}, the hash of the block before", str(parent),
                        likely="The hash of a block goes into that of the next.",
                    )  # fmt: skip
                known[place + 1] = value

    def test_how_it_spreads(self, gate: GateRun) -> None:
        """some thousand blocks of small numbers hardly collide, and no hash grows with the text"""
        parents = [gate.rng.getrandbits(60) for _ in range(8)] + [*range(8)]
        calls: list[Any] = [
            [parent, [x, y]] for parent in parents for x in range(16) for y in range(16)
        ]
        got = self.ask(gate, calls)
        same = len(got) - len(set(got))
        if same > MOST_COLLIDING * len(got):
            raise GateFailure(
                Code.WRONG_VALUE, f"hash_block of {len(got)} different blocks",
                "different hashes, nearly always", f"{same} are the same as another",
                likely="Each of those costs a hit. Python's `hash` of a tuple spreads well.",
            )  # fmt: skip
        chain: list[Any] = [[5, draw(gate, 2)]]
        chain += [[["result", i], draw(gate, 2)] for i in range(300)]
        widest = max(value.bit_length() for value in self.ask(gate, chain))
        if widest > 256:
            raise GateFailure(
                Code.WRONG_VALUE, "hash_block along a text of 300 blocks", "at most 256 bits",
                f"{widest} bits", likely="It grows with the text: take what `hash` gives.",
            )  # fmt: skip

    def ask(self, gate: GateRun, calls: list[Any]) -> list[int]:
        """Hashes of (parent, tokens)."""
        got = expect.result_of(lambda: gate.candidate.call("hashes", calls=calls), "hash_block")
        return [expect.is_int(value, "a hash") for value in got]


@pytest.mark.contract
class TestTwo:
    """Nothing is shared. This is asked before all else: the tests below use one pool after another.

    If the class remembered the texts of the pools before, one that draws a text a second time would
    fail there, with the code of another mistake.
    """

    def test_two_allocators(self, gate: GateRun) -> None:
        """two allocators do not know each other"""
        text, other = draw(gate, 7), draw(gate, 9)

        def life(pool: PrefixPool) -> Iterator[None]:
            for name, tokens in (("a", text), ("b", other), ("c", text)):
                pool.found(text)
                serve(pool, name, tokens)
                yield

        list(life(PrefixPool(gate, 6, 2, "alone")))  # its mistakes have codes of their own
        pools = [PrefixPool(gate, 6, 2, "one of two", name=name) for name in ("x", "y")]
        try:
            list(zip(*map(life, pools), strict=True))
        except GateFailure as failure:
            if failure.code in (Code.WRONG_VALUE, Code.CRASHED):
                failure.code = Code.STALE_STATE
            raise


@pytest.mark.contract
class TestFinding:
    """What a sequence is given, in a pool with room."""

    @pytest.mark.parametrize("block_size", [1, 2, 4, 16])
    def test_a_text_finds_an_earlier_one(self, gate: GateRun, block_size: int) -> None:
        """full blocks are found, and at least one token is left to compute"""
        pool = PrefixPool(gate, 64, block_size, "texts of all lengths")
        text = draw(gate, 4 * block_size + 1)
        pool.found(text)
        serve(pool, "a", text)
        for length in sorted({1, block_size, 2 * block_size, 2 * block_size + 1, *range(1, 9)}):
            serve(pool, f"b{length}", text[:length])
            pool.found(text[:length] + draw(gate, 3))
        pool.found(text + draw(gate, 2 * block_size))
        pool.check()

    def test_blocks_that_somebody_holds(self, gate: GateRun) -> None:
        """what is found may be in use, and then has one table more"""
        pool = PrefixPool(gate, 12, 2, "sharing what is in use")
        text = draw(gate, 6)
        pool.admit("a", text)
        pool.run("a")
        pool.admit("b", [*text, 1])
        pool.admit("c", text[:5])
        pool.free("a")
        pool.run("b", "c")
        pool.admit("d", [*text, 1, 2, 3])
        for name in "bcd":
            pool.free(name)
        pool.check()

    def test_the_first_gap_ends_it(self, gate: GateRun) -> None:
        """equal blocks behind another beginning are not found"""
        pool = PrefixPool(gate, 20, 2, "texts with equal parts")
        x, y, z = [1, 2], [3, 4], [5, 6]
        serve(pool, "a", [*x, *y, *x, *y, *z, 0])
        for parts in ((y, x, y), (x, x, y), (x, y, y, z), (x, y, x, x), (z, x), (x, y, x, y, y)):
            pool.found([token for part in parts for token in part] + [0])
        serve(pool, "b", [*x, *x, *x, *x, 0])
        pool.found([*x, *x, *x, *x, *x, 0])
        pool.found([*x, *y, *x, *x, 0])

    def test_only_what_is_computed(self, gate: GateRun) -> None:
        """a block is published when it is full and computed, and not before"""
        pool = PrefixPool(gate, 40, 4, "publishing")
        text = draw(gate, 14)
        pool.admit("a", text)
        pool.found(text)
        pool.publish("a")
        pool.found(text)
        for most in (3, 2, 2, 1):
            pool.compute("a", most=most)
            pool.found(text)
            pool.publish("a")
            pool.publish("a")
            pool.found(text)
        pool.admit("b", text)
        pool.run("a")
        pool.run("b")
        pool.append("a", draw(gate, 9))
        pool.publish("a")
        pool.found(pool.model.lines["a"].tokens)
        pool.compute("a", most=3)
        pool.publish("a")
        pool.found(pool.model.lines["a"].tokens)

    def test_outputs_are_text_too(self, gate: GateRun) -> None:
        """the next turn of a conversation finds the answers"""
        pool = PrefixPool(gate, 30, 4, "a conversation")
        said: list[int] = []
        for turn in range(3):
            said += draw(gate, 5)
            pool.admit(f"turn {turn}", said)
            pool.run(f"turn {turn}")
            for _ in range(6):
                said += draw(gate, 1)
                pool.append(f"turn {turn}", said[-1:])
                pool.run(f"turn {turn}")
            pool.free(f"turn {turn}")

    def test_models_and_salts(self, gate: GateRun) -> None:
        """neither another model nor another salt shares; other settings do"""
        pool = PrefixPool(gate, 40, 2, "models and salts")
        text = draw(gate, 7)
        for index, space in enumerate(SPACES):
            for other in SPACES[index:]:
                pool.found(text, other)
            serve(pool, str(index), text, space)
        for space in SPACES:
            pool.found(text, space)
            pool.found([*text[:4], 0, 0, 0], space)

    def test_its_own_hash_collides(self, gate: GateRun) -> None:
        """the default hash, if it gives one value to all, is trusted no more than another"""
        size = 2
        text = draw(gate, 3 * size + 1)
        others = [[*text[:i], text[i] ^ 1, *text[i + 1 :]] for i in (0, size, 2 * size)]
        shared = [3, 0, 1, 2, 0]  # blocks
        texts: list[Any] = [[tokens, ""] for tokens in (text, *others)] + [[text, "a"]]
        what = "cached_blocks, where `hash_block` gives one hash for all"
        table, found = expect.result_of(
            lambda: gate.candidate.call("mistaken", texts=texts, block_size=size), what
        )
        for blocks, most in zip(found, shared, strict=True):
            if blocks not in [table[:count] for count in range(most + 1)]:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: blocks of a text that begins with {most} of those "
                    "cached", f"{table[:most]}, or fewer", str(blocks),
                    likely="Equal hashes prove nothing, whoever made them: compare the texts.",
                )  # fmt: skip

    def test_no_tokens(self, gate: GateRun) -> None:
        """a sequence without tokens finds no block and gets none, and can grow"""
        pool = PrefixPool(gate, 4, 2, "a sequence without tokens")
        serve(pool, "a", draw(gate, 5))
        pool.found([])
        pool.admit("b", [])
        pool.publish("b")
        pool.append("b", draw(gate, 3))
        pool.run("b")
        pool.admit("c", [], reserve=3)  # and two are free
        pool.admit("c", [], reserve=2)
        pool.free("b")
        pool.free("c")
        pool.check()

    def test_a_sequence_finds_its_own_blocks(self, gate: GateRun) -> None:
        """one that has lost its blocks is admitted again, and finds them"""
        pool = PrefixPool(gate, 8, 2, "losing blocks")
        pool.admit("a", draw(gate, 5))
        pool.run("a")
        for count in (1, 2, 3):
            pool.append("a", draw(gate, count))
            pool.run("a")
            pool.free("a", forget=False)
            pool.publish("a")
            pool.admit("a")
            pool.run("a")
        pool.free("a", forget=False)
        serve(pool, "b", draw(gate, 11))
        pool.admit("a")
        pool.run("a")


@pytest.mark.contract
class TestTwins:
    """Equal texts that did not know of each other."""

    @pytest.mark.parametrize("first", ["ab", "ba"])
    def test_twins_in_one_step(self, gate: GateRun, first: str) -> None:
        """of two that are admitted in one step, neither finds the other, and one is cached"""
        for ends in ("ab", "ba"):
            pool = PrefixPool(gate, 14, 2, f"twins, {first[0]} published first")
            text = draw(gate, 6)
            pool.admit("a", text)
            pool.admit("b", text)
            pool.run(first[0])
            pool.found(text)
            pool.run(first[1])
            pool.found([*text, 0])
            for name in first[::-1]:
                pool.append(name, [1, 2, 3] if name == "a" else [4, 5, 6])
                pool.run(name)
            pool.found([*text, 1, 2, 3, 0])
            pool.found([*text, 4, 5, 6, 0])
            pool.free(ends[0])
            pool.found([*text, 1, 2, 3, 0])
            pool.admit("c", [*text, 4, 5, 6, 0])
            pool.free(ends[1])
            pool.run("c")
            pool.admit("d", draw(gate, 11))
            pool.check()

    def test_a_twin_whose_first_is_gone(self, gate: GateRun) -> None:
        """when the first is taken nobody finds the twin, and what hangs on it is found again"""
        pool = PrefixPool(gate, 9, 2, "a twin that is left")
        text, more = draw(gate, 4), draw(gate, 3)
        pool.admit("a", text)
        pool.admit("b", text)
        pool.run("a", "b")
        pool.append("b", more)
        pool.run("b")
        pool.free("a")  # its blocks are cached
        pool.admit("c", draw(gate, 6))
        pool.admit("d", draw(gate, 4))  # and now they are taken
        pool.run("c", "d")
        pool.found([*text, *more])
        pool.free("c")
        pool.admit("e", [*text, 0])  # published anew: the block of `more` is behind it again
        pool.run("e")
        pool.found([*text, *more])
        pool.free("b")
        pool.free("e")
        pool.found([*text, *more])
        serve(pool, "f", [*text, *more])

    def test_a_long_text(self, gate: GateRun) -> None:
        """the same with a text of thousands of blocks"""
        blocks = 1500
        what = f"a text of {blocks:,} blocks, whose beginning was taken and computed anew"
        got = expect.result_of(lambda: gate.candidate.call("deep", blocks=blocks), what)
        if len(got["found"]) != blocks + 2:
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: blocks found", f"{blocks + 2:,}",
                f"{len(got['found']):,}",
            )  # fmt: skip
        if got["read"] > MOST_READ:
            raise GateFailure(
                Code.WRONG_COUNT, f"{what}: items of its tokens and its table that are read to "
                "publish one more block", f"at most {MOST_READ}", f"{got['read']:,}",
                likely="What is published already is looked at again. Begin at the end.",
            )  # fmt: skip
        if got["compared"] > MOST_COMPARED * blocks:
            raise GateFailure(
                Code.WRONG_COUNT, f"{what}: steps of comparisons, in all",
                f"at most {MOST_COMPARED} for each block", f"{got['compared']:,}",
                likely="Texts are compared back to their beginning for every block. Stop where "
                "both go on from one object; and go on from the key that is kept, in a lookup and "
                "for a twin.",
            )  # fmt: skip

    def test_an_id_is_no_text(self, gate: GateRun) -> None:
        """a block that is used again for another text is not the parent of the old one's child"""
        pool = PrefixPool(gate, 6, 2, "a parent whose block is used again")
        text, more = draw(gate, 2), draw(gate, 3)
        pool.admit("a", text)
        pool.admit("b", text)
        pool.run("a", "b")
        pool.append("b", more)
        pool.run("b")
        pool.free("a")
        (gone,) = pool.model.lru
        other = [(token + 1) % 256 for token in text]
        for index in range(4):  # until that block is taken, for other tokens
            pool.admit(f"c{index}", other)
            if pool.model.lines[f"c{index}"].table == [gone]:
                break
        pool.run(f"c{index}")
        pool.found([*other, *more])
        pool.found([*text, *more])
        pool.free("c0")
        serve(pool, "d", [*other, *more[:1]])


@pytest.mark.contract
class TestRoom:
    """A pool that is short."""

    def test_what_is_found_in_the_free_list(self, gate: GateRun) -> None:
        """cached blocks that are free are needed, and counted once"""
        pool = PrefixPool(gate, 6, 2, "hits that are free")
        text = draw(gate, 9)
        serve(pool, "a", text)  # 4 cached, 1 not, 1 never used
        pool.admit("b", [*text, 0, 0, 0, 0])  # 7 are needed
        pool.admit("b", [*text, 0, 0, 0])
        pool.admit("c", text)  # shares 4, and none is left for the rest
        pool.run("b")
        pool.free("b")
        pool.admit("c", text)
        pool.admit("d", draw(gate, 2))
        pool.admit("e", [*text, 1])  # the same 4, which are not free; and no other
        pool.check()

    def test_a_reserve(self, gate: GateRun) -> None:
        """blocks that are reserved stay free"""
        pool = PrefixPool(gate, 8, 2, "a reserve")
        text = draw(gate, 6)
        pool.admit("a", text, reserve=6)
        pool.admit("a", text, reserve=5)
        pool.run("a")
        pool.admit("b", [*text, 0], reserve=5)
        pool.admit("b", [*text, 0], reserve=4)
        pool.free("a")
        pool.free("b")
        pool.admit("c", [*text, 0, 0, 0], reserve=4)
        pool.admit("c", [*text, 0, 0, 0], reserve=3)
        pool.admit("d", [7], reserve=10**6)
        pool.admit("d", [7], reserve=0)

    def test_who_goes_first(self, gate: GateRun) -> None:
        """blocks that are not cached, then those given back longest ago; of a text its end"""
        pool = PrefixPool(gate, 12, 2, "eviction")
        a, b, c = ([i, *draw(gate, 6)] for i in range(3))
        for name, text in zip("abc", (a, b, c), strict=True):
            serve(pool, name, text)  # 3 cached each, and one in which a single token lies
        for blocks in (1, 2, 3, 1):
            pool.admit("x", [9] * 2 * blocks)
            for text in (a, b, c):
                pool.found(text)
            pool.free("x")
        serve(pool, "a", a[:5])  # touched: they go to the end of the list
        pool.admit("x", [8] * 8)
        for text in (a, b, c):
            pool.found(text)
        pool.admit("y", [7] * 6)
        for text in (a, b, c):
            pool.found(text)

    def test_a_touched_block_is_the_youngest(self, gate: GateRun) -> None:
        """what was found counts from when it was given back again"""
        pool = PrefixPool(gate, 4, 2, "one that is asked for again and again")
        often = draw(gate, 3)
        serve(pool, "often", often)
        for index in range(6):
            serve(pool, f"{index}", [index, *draw(gate, 2)])
            if serve(pool, "often", often) is None:
                raise AssertionError("there is room for it")

    def test_what_was_taken_is_gone(self, gate: GateRun) -> None:
        """a block that was taken is not found for what it held"""
        pool = PrefixPool(gate, 5, 2, "a pool that turns over")
        texts = [[i, *draw(gate, 8)] for i in range(4)]
        for round_ in range(3):
            for i, text in enumerate(texts):
                serve(pool, f"{round_}.{i}", text)
                pool.found(text)
                pool.found(texts[i - 1])

    def test_nothing_is_half_done(self, gate: GateRun) -> None:
        """a refusal leaves everything as it was, what is cached included"""
        pool = PrefixPool(gate, 6, 2, "refusals")
        a, b = draw(gate, 5), draw(gate, 5)
        serve(pool, "a", a)
        pool.admit("b", b)
        pool.run("b")
        pool.admit("c", [*a, *draw(gate, 3)])
        pool.found(a)
        pool.append("b", draw(gate, 8))
        pool.found(a)
        pool.append("b", draw(gate, 7))
        pool.found(a)


@pytest.mark.contract
class TestStage07:
    """What stage 07's allocator promises, this one keeps."""

    def test_forks(self, gate: GateRun) -> None:
        """forks share what is published, and copy when they write"""
        pool = PrefixPool(gate, 16, 4, "forks")
        pool.admit("a", draw(gate, 10))
        pool.run("a")
        pool.fork("a", "b")
        pool.fork("a", "c")
        for name in "bac":
            pool.append(name, draw(gate, 3))
            pool.run(name)
        for name in "abc":
            pool.found([*pool.model.lines[name].tokens, 0])
        pool.free("b")
        pool.fork("c", "d")
        pool.append("d", draw(gate, 4))
        pool.run("d")
        for name in "cad":
            pool.free(name)
        pool.check()

    @pytest.mark.parametrize("watched", [False, True])
    def test_without_a_cache(self, gate: GateRun, watched: bool) -> None:
        """where nothing is published, it is stage 07's allocator"""
        pool = BlockPool(gate, 9, 3, "an allocator of stage 07", watched=watched)
        play(pool, gate.rng, 80)

    @pytest.mark.parametrize(
        ("argument", "sizes"), [("num_blocks", (0, 4)), ("block_size", (4, 0))]
    )
    def test_sizes_below_one_are_refused(
        self, gate: GateRun, argument: str, sizes: tuple[int, int]
    ) -> None:
        """a pool needs at least one block of at least one token"""
        expect.rejects(
            lambda: gate.candidate.call("make", num_blocks=sizes[0], block_size=sizes[1]),
            argument, f"PrefixCachingAllocator{sizes}",
        )  # fmt: skip

    def test_bad_input_is_refused(self, gate: GateRun) -> None:
        """bad input gets an error that names the argument, and changes nothing"""
        pool = PrefixPool(gate, 6, 2, "bad input")
        serve(pool, "a", draw(gate, 5))
        fresh = {"tokens": [1, 2, 3]}
        pool.refuses("admit", {**fresh, "block_table": [0]}, "sequence")
        pool.refuses("admit", fresh, "reserve", reserve=-1)
        pool.refuses("admit", fresh, "reserve", reserve=1.5, kinds=["TypeError", "ValueError"])
        pool.refuses("admit", fresh, "reserve", reserve=True, kinds=["TypeError", "ValueError"])
        pool.refuses("publish", {**fresh, "num_computed": 2}, "sequence")
        pool.refuses("publish", {**fresh, "num_computed": 4, "block_table": [0, 1]}, "sequence")


@pytest.mark.contract
class TestRandom:
    """Random lives, from alphabets so small that nearly everything begins alike."""

    @pytest.mark.parametrize("collide", ["all", "texts", "beginnings"])
    def test_hashes_that_collide(self, gate: GateRun, collide: str) -> None:
        """with a hash that collides, no block of another text is ever found"""
        for num_blocks, block_size in ((16, 2), (12, 1)):
            pool = PrefixPool(
                gate, num_blocks, block_size, f"a hash that collides ({collide})", collide=collide
            )
            live(pool, gate.rng, 150, 3, SPACES)
            if pool.seen_calls == 0:
                raise GateFailure(
                    Code.WRONG_VALUE, "the hash that an allocator is given is never asked",
                    "hash_block(parent, tokens) for every block", "no call",
                    likely="`hash_block` is an argument of the constructor: `self.hash_block`.",
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("num_blocks", "block_size", "alphabet", "collide"),
        [(3, 1, 1, None), (6, 1, 2, None), (8, 2, 2, "none"), (12, 2, 1, None), (20, 3, 2, None),
         (9, 4, 2, None), (40, 2, 2, None)],
    )  # fmt: skip
    def test_random_lives(
        self, gate: GateRun, num_blocks: int, block_size: int, alphabet: int, collide: str | None
    ) -> None:
        """random lives: the right blocks, found, taken and counted, and every text intact"""
        pool = PrefixPool(gate, num_blocks, block_size, "random lives", collide=collide)
        live(pool, gate.rng, 200, alphabet, SPACES[: gate.rng.choice([1, 1, 2])])


@pytest.mark.contract
class TestTexts:
    """With a real model, in a pool of NaN."""

    def test_cached_keys_and_values_are_right(self, gate: GateRun) -> None:
        """what is said behind cached blocks is what an independent model says"""
        pool = PrefixPool(gate, 10, 4, "texts on nano", memory=True)
        text = draw(gate, 12)
        pool.admit("a", text)
        pool.admit("b", text)
        pool.run("b")  # the second twin first
        pool.admit("c", text)
        pool.run("a", "c")
        for name in "abc":
            pool.append(name, draw(gate, 2))
        pool.run("c", "a", "b")
        pool.free("b")
        pool.free("a")
        pool.admit("d", [*text[:8], *draw(gate, 8)])
        pool.run("d", "c")
        pool.fork("c", "e")
        pool.append("e", draw(gate, 1))
        pool.run("e")
        pool.free("d", forget=False)
        serve(pool, "f", draw(gate, 20))
        pool.admit("d")
        pool.append("c", draw(gate, 1))
        pool.run("c", "d")

    def test_hashes_that_collide(self, gate: GateRun) -> None:
        """with a hash that always collides, every text is still right"""
        pool = PrefixPool(gate, 9, 4, "texts on nano, one hash for all", collide="all", memory=True)
        begin = draw(gate, 4)
        for index in range(5):
            serve(pool, f"{index}", [*begin[: 4 * (index % 2)], *draw(gate, 4), 7, 7, 7, 7, 1])


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.number
def test_memory(gate: GateRun) -> None:
    """memory does not grow with the texts that were seen"""
    num_blocks, rounds = 100, 3000
    kept = expect.result_of(
        lambda: gate.candidate.call(
            "kept_bytes", num_blocks=num_blocks, block_size=4, rounds=rounds
        ),
        f"{rounds:,} texts that come and go",
    )
    if expect.is_int(kept, "bytes kept") > MOST_KEPT:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, f"an allocator of {num_blocks} blocks grows with the texts that "
            "it has seen", f"at most {MOST_KEPT:,} bytes more", f"{kept:,} after {rounds:,} texts",
            likely="What a block held is forgotten when it is taken: its hash and its text.",
        )  # fmt: skip


@dataclass
class Tally:
    """What a trace has computed."""

    prompt: int = 0  # tokens of all prompts
    computed: int = 0  # of them, those that were not found
    turns: int = 0
    published: int = 0  # blocks
    lookups: int = 0  # calls of the planted hash while admitting
    looked: int = 0  # blocks that had to be looked up: those found, and the first that was not
    # ("admit", tokens) and ("computed", tokens), in the order in which they happened
    events: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


def chats(gate: GateRun, users: int, turns: int, low: int, high: int) -> list[Any]:
    """For each user: the tokens of each question, and how long each answer is."""
    count = gate.rng.randrange
    return [
        [(draw(gate, count(low, high + 1)), count(low, high + 1)) for _ in range(turns)]
        for _ in range(users)
    ]


def converse(
    pool: PrefixPool, system: list[int], users: list[Any], width: int, tally: Tally
) -> None:
    """Serve conversations with one system prompt, at most `width` at a time, as they come.

    A user's next turn, with all that was said before, queues behind all others when the last
    answer has ended. Somebody is admitted only if all that run can end.
    """
    queue = deque((user, 0, [*system, *turns[0][0]]) for user, turns in enumerate(users))
    running: dict[str, tuple[int, int, int]] = {}  # user, turn, length at the end
    model = pool.model
    while queue or running:
        while queue and len(running) < width:
            user, turn, tokens = queue[0]
            end = len(tokens) + users[user][turn][1]
            growth = [
                model.blocks_for(last - 1) - len(model.lines[name].table)
                for name, (_, _, last) in running.items()
            ]
            growth.append(model.blocks_for(end - 1) - model.blocks_for(len(tokens)))
            name = f"user {user}, turn {turn}"
            if not _fits(pool, tokens, sum(growth)):
                break
            found = pool.admit(name, tokens, reserve=sum(growth), look=False)
            if found is None:
                break
            queue.popleft()
            running[name] = (user, turn, end)
            tally.turns += 1
            tally.prompt += len(tokens)
            tally.computed += len(tokens) - found
            tally.lookups += pool.calls
            size = model.block_size
            tally.looked += min((len(tokens) - 1) // size, found // size + 1)
            tally.events.append(("admit", tuple(tokens)))
        said = pool.compute(*running, checked=False)
        tally.published += pool.publish(*running)
        for (name, (user, turn, end)), token in zip(list(running.items()), said, strict=True):
            line = model.lines[name]
            tally.events.append(("computed", tuple(line.tokens)))
            if len(line.tokens) + 1 < end:
                pool.append(name, [token])
                continue
            text = [*line.tokens, token]
            prompt = end - users[user][turn][1]
            _must_say(text[:prompt], text[prompt:], name)
            del running[name]
            pool.free(name)
            if turn + 1 < len(users[user]):
                queue.append((user, turn + 1, text + users[user][turn + 1][0]))
    pool.check()


def _fits(pool: PrefixPool, tokens: list[int], growth: int) -> bool:
    """Whether a prompt can be admitted, with so many blocks left."""
    model = pool.model
    hits = model.hits(Line(("", ""), tokens))
    held = sum(model.holders(block) > 0 for block in hits)
    return model.blocks_for(len(tokens)) - held + growth <= model.num_free


def _must_say(prompt: list[int], answer: list[int], name: str) -> None:
    wrong = nano_oracle().first_wrong(prompt, answer)
    if wrong is not None:
        raise GateFailure(
            Code.WRONG_TOKEN, f"{name}: a token is not that of an independent model",
            str(wrong[1]), str(answer[wrong[0]]), f"token {wrong[0]} after {len(prompt)}",
            likely="It has attended to keys and values of another text.",
        )  # fmt: skip


def trie(events: list[tuple[str, tuple[int, ...]]], block_size: int) -> int:
    """Prompt tokens that are left to compute if nothing is ever forgotten.

    A tree whose edges are full blocks. What has been computed is put in; a prompt walks down it, as
    far as it leaves a token to compute.
    """
    root: dict[tuple[int, ...], Any] = {}
    computed = 0
    for event, tokens in events:
        node, places = root, 0
        end = len(tokens) - (event == "admit")
        while places + block_size <= end:
            block = tokens[places : places + block_size]
            if event == "computed":
                node.setdefault(block, {})
            elif block not in node:
                break
            node, places = node[block], places + block_size
        computed += len(tokens) - places if event == "admit" else 0
    return computed


@pytest.mark.number
def test_conversations(gate: GateRun) -> None:
    """prompt tokens computed for conversations, in a pool with room for all of them"""
    users, turns, system, low, high = gate.bar("chat")
    size, width = gate.bar("block_size"), gate.bar("width")
    tally = Tally()
    pool = PrefixPool(gate, 40 * users, size, "conversations", collide="none", memory=True)
    text = draw(gate, system)
    converse(pool, text, chats(gate, users, turns, low, high), width, tally)
    wanted = trie(tally.events, size)
    gate.exact(
        "prefill", round(tally.prompt / tally.computed, 3),
        equals=round(tally.prompt / wanted, 3), at_least=gate.bar("prefill")["at_least"], unit="x",
        text=f"{tally.computed:,} of {tally.prompt:,} prompt tokens were computed: "
        f"{tally.prompt / tally.computed:.1f}x fewer",
        message="what was computed before is not computed again",
        note=f"as many as a tree of blocks says, for {tally.turns} turns of {users} users",
    )  # fmt: skip
    gate.exact(
        "hashes", pool.seen_calls, at_most=tally.looked + tally.published,
        text=f"{pool.seen_calls} calls of hash_block, {tally.lookups} of them while admitting, to "
        f"look up {tally.looked} blocks and publish {tally.published}",
        message="one hash is needed for each block that is looked up, and one for each that is new",
        likely="A text is hashed again in every step, which is quadratic."
        if tally.lookups <= tally.looked else
        "The lookup goes on past the first block that is not cached, or runs twice. A hash that is "
        "made early is kept until the block is published.",
    )  # fmt: skip


@pytest.mark.number
def test_a_pool_that_is_short(gate: GateRun) -> None:
    """the same in a pool that must forget: what is computed follows from the order of eviction"""
    users, turns, system, low, high = gate.bar("chat")
    size, width = gate.bar("block_size"), gate.bar("width")
    tally = Tally()
    pool = PrefixPool(
        gate, gate.bar("short_pool"), size, "conversations, short of blocks", memory=True
    )
    text = draw(gate, system)
    converse(pool, text, chats(gate, users, turns, low, high), width, tally)
    gone = tally.computed - trie(tally.events, size)
    gate.exact(
        "evicting", round(tally.prompt / tally.computed, 3),
        at_least=gate.bar("evicting")["at_least"], unit="x",
        text=f"{tally.computed:,} of {tally.prompt:,} prompt tokens with {gate.bar('short_pool')} "
        f"blocks: {tally.prompt / tally.computed:.1f}x fewer; {gone:,} had been forgotten",
        note="the judge evicts in the same order, and has found the same blocks at every admission",
    )  # fmt: skip


@pytest.mark.number
def test_time_and_the_pool(gate: GateRun) -> None:
    """finding, evicting and publishing take as long in a large pool as in a small one"""
    small, large = gate.bar("pools")
    pools = TwoSizes(gate, "recycle", [small, large], "a pool", block_size=4)

    def words(ratio: PairedRatio) -> str:
        return f"{ratio.median:.2f}x as fast with {large:,} blocks as with {small:,}"

    gate.ratio(
        "pool_time",
        lambda: pools.step(small, pools.batch * 8), lambda: pools.step(large, pools.batch * 8),
        text=words, itself=True, max_spread=MAX_SPREAD,
        slower=lambda ratio: f"{words(ratio)}: something walks through the pool, to find the "
        "oldest block or to take one out of the free list",
    )  # fmt: skip


class FirstTokens:
    """Texts that begin alike, in turn in both workers: seconds until the first token of each."""

    def __init__(self, gate: GateRun, shared: int, own: int, block_size: int) -> None:
        self.gate = gate
        vocab = load_config(gate.model, gate.device).vocab_size
        self.begin = [gate.rng.randrange(vocab) for _ in range(shared)]
        self.texts = [[gate.rng.randrange(vocab) for _ in range(own)] for _ in range(120)]
        self.cached = (shared + own - 1) // block_size * block_size
        self.cached = min(self.cached, shared // block_size * block_size)
        blocks = 2 * -(-(shared + own) // block_size)
        self.arguments = {
            "model": gate.model, "shared": self.begin, "own": self.texts, "num_blocks": blocks,
            "block_size": block_size,
        }  # fmt: skip
        self.found: dict[str, list[int]] = {"baseline": [], "candidate": []}
        self.runs: dict[str, Run] = {}

    def baseline(self) -> float:
        """The next text without a cache, in seconds."""
        return self._step("baseline")

    def candidate(self) -> float:
        """The next text, in seconds."""
        return self._step("candidate")

    def _step(self, side: str) -> float:
        if side not in self.runs:
            worker = self.gate.baseline if side == "baseline" else self.gate.candidate
            self.runs[side] = worker.start("first_tokens", **self.arguments)
            self._advance(side, 0)  # the first text computes the beginning, and is not timed
        return self._advance(side, self.cached if side == "candidate" else 0)

    def _advance(self, side: str, cached: int) -> float:
        reply = expect.result_of(self.runs[side].step, f"a first token on {self.gate.model}")
        token, found = reply.value
        at = len(self.found[side])
        expect.is_int(found, "num_computed after admission")
        if found != cached:
            raise GateFailure(
                Code.WRONG_VALUE, f"tokens found in the cache, text {at} on {self.gate.model}",
                str(cached), str(found),
            )  # fmt: skip
        self.found[side].append(token)
        if all(len(found) > at for found in self.found.values()):
            one, other = (self.found[s][at] for s in ("baseline", "candidate"))
            prefix = self.begin + self.texts[at]
            if one != other and not near_tie(self.gate.model, self.gate.device, prefix, other, one):
                raise GateFailure(
                    Code.WRONG_TOKEN, f"a timed first token on {self.gate.model}", str(one),
                    str(other), f"text {at}",
                )  # fmt: skip
        return reply.seconds


@pytest.mark.number
def test_first_tokens(gate: GateRun) -> None:
    """time to the first token behind a cached beginning, against computing it"""
    shared, own = gate.bar("begin")
    race = FirstTokens(gate, shared, own, gate.bar("block_size"))

    def words(ratio: PairedRatio) -> str:
        a, b = 1e3 * ratio.candidate_s, 1e3 * ratio.baseline_s
        return (
            f"{ratio.median:.1f}x sooner with {race.cached} of {shared + own} tokens cached "
            f"({a:.0f} ms for {b:.0f})"
        )

    bills = Bills(gate)

    def notes(ratio: PairedRatio) -> list[str]:
        whole = bills.split(bills.whole_pass(shared + own), ratio.baseline_s)
        rest = bills.split(bills.whole_pass(shared + own - race.cached), ratio.candidate_s)
        return [
            f"predicted {whole.predicted / rest.predicted:.1f}x from the bills of two passes",
            split_words(whole, "all of it"), split_words(rest, "what is left"),
        ]  # fmt: skip

    gate.ratio("ttft", race.baseline, race.candidate, text=words, notes=notes)
