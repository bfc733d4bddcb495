"""A solution's block allocator, driven one operation at a time and judged after each.

The judge keeps two things that the solution does not see: a model of who holds which block
(`block_model`), and the contents of the pool. Copies that an allocator asks for are carried out in
these contents, then the new tokens are written where its tables say, and then every sequence is
read back through its table. A block that two write into, a copy that is missing or goes the wrong
way: all of it shows as a sequence that reads what it never wrote.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from block_model import Block, BlockModel, Change, Full
from history import History

from course.check import expect
from course.check.codes import Code
from course.check.gate import GateRun
from course.check.replies import SolutionError

Table = list[int]


class BlockPool(History):
    """An allocator in the candidate's worker, and everything that is known about it.

    Args:
        what: names it in failures.
        watched: it is an object of a subclass that records what is taken and given back.
        name: tells it from another pool of the same worker.
    """

    def __init__(
        self, gate: GateRun, num_blocks: int, block_size: int, what: str, *,
        watched: bool = False, name: str = "pool",
    ) -> None:  # fmt: skip
        self.gate = gate
        self.what = f"{what} ({num_blocks} blocks of {block_size})"
        self.watched = watched
        self.name = name
        self.model = BlockModel(num_blocks, block_size)
        self.ids: dict[Block, int] = {}  # learnt from the replies
        self.tokens: dict[str, list[int]] = {}  # what each sequence has written
        self.contents: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self.writers: dict[int, str] = {}  # token -> who wrote it
        self.fresh = itertools.count(1)
        self.history: list[str] = []
        self.seen = {"taken": 0, "given": 0}  # calls that a subclass has recorded so far
        expect.result_of(
            lambda: self._ask("new", num_blocks=num_blocks, block_size=block_size, watched=watched),
            f"BlockAllocator({num_blocks}, {block_size})",
        )
        self._compare_state(self._ask("look"))

    # -- operations --------------------------------------------------------------------------

    def allocate(self, name: str, num_tokens: int) -> Table | None:
        """A new sequence of this many tokens; its table, or None if it had to be refused."""

        def predict() -> Change:
            change = self.model.allocate(name, num_tokens)
            self.tokens[name] = []
            return change

        doing = f"{name} = allocate({num_tokens})"
        return self._perform(doing, predict, name, num_tokens, "allocate", [num_tokens])

    def append(self, name: str, new_tokens: int) -> Table | None:
        """More tokens for a sequence."""
        stored = len(self.tokens[name])
        return self._perform(
            f"append({name}, {stored}, {new_tokens})",
            lambda: self.model.append(name, stored, new_tokens),
            name, new_tokens, "append", [name, stored, new_tokens],
        )  # fmt: skip

    def fork(self, name: str, other: str) -> Table | None:
        """A second sequence that begins like the first."""

        def predict() -> Change:
            self.tokens[other] = list(self.tokens[name])
            return self.model.fork(name, other)

        return self._perform(f"{other} = fork({name})", predict, other, 0, "fork", [name])

    def free(self, name: str) -> None:
        """The end of a sequence."""

        def predict() -> Change:
            self.tokens[name] = []
            return self.model.free(name)

        self._perform(f"free({name})", predict, name, 0, "free", [name])

    def rewind(self, name: str, count: int) -> None:
        """A sequence forgets its newest tokens; its table keeps its room."""
        self.history.append(f"{name} forgets {count}")
        del self.tokens[name][len(self.tokens[name]) - count :]

    def check(self) -> None:
        """`check` has nothing to say against the tables in use, as a list or one by one."""
        self._do("check(all tables)", "check", [[*self.model.tables]])
        self._do("check(all tables, one by one)", "check", [{"one by one": [*self.model.tables]}])

    # -- what must be refused ----------------------------------------------------------------

    def free_again(self, name: str) -> None:
        """Free a sequence, and then a copy of its table; unless others hold all of its blocks."""
        blocks = list(self.model.tables[name])
        stale = self.table(name)
        self.free(name)
        gone = [i for i, block in zip(stale, blocks, strict=True) if not self.model.holders(block)]
        if gone:
            self.refuses("free", [stale], f"free({stale}), for the second time", names=gone)

    def broken_sum(self, op: str, args: list[Any]) -> None:
        """The free list is used behind the allocator's back: `check` must see free + used change.

        It is the last thing that is done to this pool. A solution that does not let it happen, or
        in which nothing is lost by it, has nothing to see.
        """
        doing = f"{op}({', '.join(map(str, args))}), for no table"
        self.history.append(doing)
        try:
            self._ask("do", op=op, args=args)
        except SolutionError:
            return
        state = self._ask("look")
        free = expect.is_int(state["num_free"], f"{self.what}: num_free")
        used = sum(count != 0 for count in state["ref_counts"])
        if free + used != self.model.num_blocks:
            wanted = f"RuntimeError: {free} free + {used} used is not {self.model.num_blocks}"
            tables = [[*self.model.tables]]
            what = f"check(all tables) after {doing}"
            self._refusal("check", tables, what, wanted, ("RuntimeError",), (free, used, *args))

    def refuses(
        self, op: str, args: list[Any], doing: str, *, names: Sequence[object],
        kinds: Sequence[str] = ("ValueError",),
    ) -> None:  # fmt: skip
        """An operation that must raise one of `kinds`, name one of `names`, and change nothing."""
        wanted = f"{' or '.join(kinds)} that names {' or '.join(map(str, names))}"
        self._refusal(op, args, doing, wanted, kinds, names)
        self._unchanged(doing)

    def table(self, name: str) -> Table:
        """The table of a sequence, in the allocator's own ids."""
        return [self.ids[block] for block in self.model.tables[name]]

    # -- judging -----------------------------------------------------------------------------

    def _perform(
        self, doing: str, predict: Callable[[], Change], name: str, written: int, op: str,
        args: list[Any],
    ) -> Table | None:  # fmt: skip
        """One operation, held against what the model does."""
        holders = {block: self.model.holders(block) for block in self.ids}
        try:
            change = predict()
        except Full as full:
            self._out_of_blocks(op, args, doing, full)
            return None
        into = "" if op in ("append", "free") else name
        reply = self._do(doing, op, args, into)
        tables = self._tables(reply)
        self._others_are_unchanged(tables, name)
        table = tables[name]
        room = len(table) * self.model.block_size
        if room < len(self.tokens[name]) + written:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: the table is too short",
                f"room for {len(self.tokens[name]) + written} tokens",
                f"{len(table)} blocks, room for {room}",
                likely="The first token of a block needs that block; and append changes the "
                "caller's table, not a copy of it.",
            )  # fmt: skip
        pairs = self._pairs(reply["result"], doing) if op == "append" else []
        self._carry_out(pairs, name, table, written)
        self._read_back(tables, doing)
        if len(pairs) > len(change.copied):  # too few have shown as contents
            raise self._failure(
                Code.WRONG_COUNT, f"{doing}: blocks that are copied",
                str(len(change.copied)), f"{len(pairs)}: {pairs}",
                likely="A copy is made of a shared block that holds tokens and will be written, "
                "and of no other.",
            )  # fmt: skip
        self._same_structure(name, table, doing)
        self._compare_state(reply)
        if self.watched:
            self._seen_by_a_subclass(reply, change, holders, doing)
        return table

    def _out_of_blocks(self, op: str, args: list[Any], doing: str, full: Full) -> None:
        wanted = f"OutOfBlocks: {full.needed} needed, {full.free} free"
        self._refusal(op, args, doing, wanted, ("OutOfBlocks",), ())
        said = self._unchanged(doing)["refusal"]
        if (said.get("needed"), said.get("free")) != (full.needed, full.free):
            raise self._failure(
                Code.WRONG_ERROR, f"{doing}: OutOfBlocks says the wrong numbers", wanted,
                f"needed = {said.get('needed')}, free = {said.get('free')}",
                likely="It counts all blocks that the operation would take, copies included.",
            )  # fmt: skip

    def _refusal(
        self, op: str, args: list[Any], doing: str, wanted: str, kinds: Sequence[str],
        names: Sequence[object],
    ) -> None:  # fmt: skip
        """The operation raises one of `kinds`, and the message holds one of `names`, if any."""
        self.history.append(f"{doing}, to be refused")
        try:
            self._ask("do", op=op, args=args)
        except SolutionError as error:
            named = [n for n in names if re.search(rf"(?<![\w-]){n}(?!\w)", error.message)]
            if set(kinds) & set(error.bases) and (named or not names):
                return
            raise self._failure(
                Code.WRONG_ERROR, f"{doing} is refused, but not in a way that helps", wanted,
                f"{error.type}: {error.message}", error.where,
                likely="It was not looked at beforehand, and something broke on the way.",
            ) from None  # fmt: skip
        raise self._failure(Code.NO_ERROR_RAISED, f"{doing} is accepted", wanted, "no error")

    def _unchanged(self, doing: str) -> Any:
        """The state after a refusal is that before it."""
        state = self._ask("look")
        tables = self._tables(state)
        expected = {name: self.table(name) for name in self.model.tables}
        self._differs("tables", expected, {n: tables[n] for n in expected if n in tables}, doing)
        self._differs("free blocks", self.model.num_free, state["num_free"], doing)
        self._differs("reference counts", self._counts(), state["ref_counts"], doing)
        return state

    def _differs(self, what: str, expected: Any, got: Any, doing: str) -> None:
        if expected != got:
            raise self._failure(
                Code.STALE_STATE, f"{doing} was refused, and has changed something: {what}",
                str(expected), str(got),
                likely="Find out whether everything can be done before anything is done.",
            )  # fmt: skip

    def _tables(self, state: Any) -> dict[str, Table]:
        """The tables of a reply, found to be lists of ids."""
        size = self.model.num_blocks
        for name, table in state["tables"].items():
            if not isinstance(table, list):
                raise self._failure(
                    Code.WRONG_TYPE, f"the table of {name}", "a list", f"{type(table).__name__}"
                )
            for block in table:
                expect.is_int(block, f"{self.what}: a block in the table of {name}")
                if not 0 <= block < size:
                    raise self._failure(
                        Code.WRONG_VALUE, f"the table of {name} holds no block of this pool",
                        f"ids from 0 to {size - 1}", str(block),
                    )  # fmt: skip
        return dict(state["tables"])

    def _others_are_unchanged(self, tables: dict[str, Table], name: str) -> None:
        for other in self.model.tables:
            if other != name and tables[other] != self.table(other):
                raise self._failure(
                    Code.MUTATED_INPUT, f"the table of {other} has changed, and it was the turn of "
                    f"{name}", str(self.table(other)), str(tables[other]),
                    likely="Two sequences hold one and the same list.",
                )  # fmt: skip

    def _pairs(self, result: Any, doing: str) -> list[tuple[int, int]]:
        wanted = "a list of pairs (source, destination)"
        if not isinstance(result, list):
            raise self._failure(
                Code.WRONG_TYPE,
                f"what {doing} returns",
                wanted,
                repr(result)[:80],
                likely="Nothing to copy is an empty list.",
            )
        for pair in result:
            ids = isinstance(pair, tuple) and [type(i) is int for i in pair] == [True, True]
            if not ids or not all(0 <= i < self.model.num_blocks for i in pair):
                raise self._failure(
                    Code.WRONG_TYPE, f"a pair of {doing}", wanted, repr(pair)[:80],
                    likely="A pair is a tuple of two ids.",
                )  # fmt: skip
        return result

    def _carry_out(
        self, pairs: list[tuple[int, int]], name: str, table: Table, written: int
    ) -> None:
        """Copy whole blocks, one after the other; then write the new tokens through the table."""
        size = self.model.block_size
        for source, destination in pairs:
            for offset in range(size):
                self.contents.pop((destination, offset), None)
                if (source, offset) in self.contents:
                    self.contents[destination, offset] = self.contents[source, offset]
        for _ in range(written):
            place, token = len(self.tokens[name]), next(self.fresh)
            self.contents[table[place // size], place % size] = token
            self.tokens[name].append(token)
            self.writers[token] = name

    def _read_back(self, tables: dict[str, Table], doing: str) -> None:
        """Every sequence reads through its table what it, or the one it was forked from, wrote."""
        size = self.model.block_size
        for name, tokens in self.tokens.items():
            table = tables[name]
            for place, token in enumerate(tokens):
                block = table[place // size] if place // size < len(table) else None
                got = self.contents.get((block, place % size)) if block is not None else None
                if got != token:
                    read = "nothing" if got is None else f"a token that {self.writers[got]} wrote"
                    raise self._failure(
                        Code.WRONG_VALUE, f"{doing}: {name} reads what it has not written",
                        f"the token that {self.writers[token]} wrote there", read,
                        f"position {place} of {name}: block {block}, offset {place % size}",
                        likely="A block that is not its own was written: it was handed out twice, "
                        "or shared and written without a copy, or copied the wrong way.",
                    )  # fmt: skip

    def _same_structure(self, name: str, table: Table, doing: str) -> None:
        """The table is that of the model, block for block; ids of new blocks are learnt."""
        expected = self.model.tables[name]
        if len(table) != len(expected):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks in the table of {name}",
                f"{len(expected)} for {len(self.tokens[name])} tokens", str(len(table)),
                likely="A block is added with the first token that needs it; room to spare is used "
                "first; a table that was freed is empty.",
            )  # fmt: skip
        live = {block for held in self.model.tables.values() for block in held}
        self.ids = {block: i for block, i in self.ids.items() if block in live}
        holders = {i: block for block, i in self.ids.items()}
        for index, (block, i) in enumerate(zip(expected, table, strict=True)):
            if holders.setdefault(i, block) is block and self.ids.setdefault(block, i) == i:
                continue
            wanted = f"block {self.ids[block]}" if block in self.ids else "a free block"
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: the table of {name}", wanted,
                f"block {i}", f"entry {index} of {table}",
                likely="Blocks of its own stay where they are; a shared one that will be written "
                "is replaced by a free one.",
            )  # fmt: skip

    def _counts(self) -> list[int]:
        counts = [0] * self.model.num_blocks
        for block, i in self.ids.items():
            counts[i] = self.model.holders(block)
        return counts

    def _compare_state(self, state: Any) -> None:
        """free + used = total, and every block is counted."""
        counts = state["ref_counts"]
        for block, (expected, got) in enumerate(zip(self._counts(), counts, strict=True)):
            if expect.is_int(got, f"{self.what}: ref_count({block})") != expected:
                raise self._failure(
                    Code.WRONG_VALUE, f"ref_count({block})", f"{expected}, the tables that hold it",
                    str(got),
                    likely="A fork adds one to every count; a copy takes one off the source; "
                    "freeing takes one off, and not all.",
                )  # fmt: skip
        free = expect.is_int(state["num_free"], f"{self.what}: num_free")
        if free != self.model.num_free:
            used = self.model.num_blocks - self.model.num_free
            raise self._failure(
                Code.WRONG_VALUE, "num_free: free + used is not the total",
                f"{self.model.num_blocks} - {used} used = {self.model.num_free}", str(free),
                likely="A block has been lost, or given back while somebody holds it.",
            )  # fmt: skip

    def _seen_by_a_subclass(
        self, reply: Any, change: Change, before: dict[Block, int], doing: str
    ) -> None:
        """`take` and `give_back` were called for what was taken and given back, no more."""
        for op in ("taken", "given"):
            for block in reply[op][self.seen[op] :]:
                expect.is_int(block, f"{self.what}: {doing}: a block that was {op}")
        taken = sorted(self.ids[block] for block in change.taken)
        ended = sum(1 for block, count in before.items() if count and not self.model.holders(block))
        seen = sorted(reply["taken"][self.seen["taken"] :])
        if seen != taken:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks that went through take", str(taken), str(seen),
                likely="The free list is used directly; a subclass could not replace it.",
            )  # fmt: skip
        given = reply["given"][self.seen["given"] :]
        counts = dict(enumerate(reply["ref_counts"]))
        if len(given) != ended or any(counts.get(block) != 0 for block in given):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks that went through give_back", f"{ended}",
                str(given),
                likely="The free list is used directly; a subclass could not replace it.",
            )  # fmt: skip
        self.seen = {name: len(reply[name]) for name in self.seen}

    # -- the worker --------------------------------------------------------------------------

    def _do(self, doing: str, op: str, args: list[Any], into: str = "") -> Any:
        self.history.append(doing)
        try:
            return self._ask("do", op=op, args=args, into=into)
        except SolutionError as error:
            if error.type == "OutOfBlocks":
                raise self._failure(
                    Code.WRONG_VALUE, f"{doing} is refused, and there is room",
                    f"{self.model.num_free} blocks are free when it is done", error.message,
                    error.where,
                    likely="More blocks are asked for than are needed, or the last one is kept.",
                ) from None  # fmt: skip
            failure = expect.crashed(error, f"{self.what}: {doing}")
            failure.notes += self._notes()
            raise failure from None

    def _ask(self, scenario: str, **args: Any) -> Any:
        return self.gate.candidate.call(scenario, pool=self.name, **args)


def play(pool: BlockPool, rng: random.Random, steps: int) -> None:
    """Sequences begin, grow, fork, forget, end and are freed twice, until the pool runs out."""
    size, most = pool.model.block_size, pool.model.num_blocks * pool.model.block_size
    for step in range(steps):
        live = [name for name, tokens in pool.tokens.items() if tokens]
        kinds = ["allocate"] * 3
        if live:
            kinds += ["append"] * 8 + ["fork", "fork", "free", "free", "free_again", "rewind"]
        kind, name = rng.choice(kinds), f"s{step}"
        chosen = rng.choice(live) if live else ""
        if kind == "allocate":
            pool.allocate(name, rng.randrange(most // 2 + 2))
        elif kind == "append":
            pool.append(chosen, rng.choice([0, 1, 1, 1, 1, size, rng.randrange(2 * size + 2)]))
        elif kind == "fork":
            pool.fork(chosen, name)
        elif kind == "free":
            pool.free(chosen)
        elif kind == "free_again":
            pool.free_again(chosen)
        else:
            pool.rewind(chosen, rng.randrange(min(len(pool.tokens[chosen]), 2 * size) + 1))
        if step % 20 == 19:
            pool.check()
