"""A solution's prefix-caching allocator, driven one operation at a time and judged after each.

The judge keeps what the solution does not see: a model of who holds which block and what is cached
(`prefix_model`), and the contents of the pool. What a model would store for a token depends on all
tokens before it, and on the model and salt of the request. So that is what is written for it here;
and after every operation each sequence is read back through its table. A block that holds another
text, was not written yet, or was taken by somebody else, shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from block_model import Full
from history import History
from prefix_model import Line, PrefixModel, Space

from course.check import expect
from course.check.codes import Code
from course.check.gate import GateRun
from course.check.oracle import nano_oracle
from course.check.replies import SolutionError

HERE: Space = ("", "")


class PrefixPool(History):
    """An allocator in the candidate's worker, and everything that is known about it.

    Args:
        what: names it in failures.
        collide: the planted hash that it is given, see PLANTED in the scenario; None: its own.
            Where hashes collide, a text that is cached need not be found, and the order in which
            blocks are taken is not known. What is found must still be right.
        memory: whether keys and values are stored, and nano computes them.
        name: tells it from another pool of the same worker.
    """

    def __init__(
        self, gate: GateRun, num_blocks: int, block_size: int, what: str, *,
        collide: str | None = None, memory: bool = False, name: str = "pool",
    ) -> None:  # fmt: skip
        self.gate = gate
        self.what = f"{what} ({num_blocks} blocks of {block_size})"
        self.exact = collide in (None, "none")
        self.memory = memory
        self.name = name
        self.model = PrefixModel(num_blocks, block_size)
        self.nodes: dict[tuple[Any, int], int] = {}  # (what comes before, token) -> its number
        self.contents: dict[tuple[int, int], int] = {}  # (block, offset) -> node
        self.history: list[str] = []
        self.ids = 0
        self.calls = 0  # of the planted hash, in the last operation
        self.seen_calls = 0
        reply = expect.result_of(
            lambda: self._ask(
                "open_pool", num_blocks=num_blocks, block_size=block_size, collide=collide,
                model="nano" if memory else None,
            ),
            f"PrefixCachingAllocator({num_blocks}, {block_size})",
        )  # fmt: skip
        self._compare(reply, "a new pool")

    # -- operations --------------------------------------------------------------------------

    def admit(
        self, name: str, tokens: Sequence[int] | None = None, space: Space = HERE, *,
        reserve: int | None = None, look: bool = True,
    ) -> int | None:  # fmt: skip
        """A new sequence, or one whose blocks were taken away: tokens that it finds computed.

        None if it had to be refused. look: `cached_blocks` is asked before.
        """
        again = tokens is None
        line = self.model.lines[name] if tokens is None else Line(space, list(tokens))
        request = self._request(line)
        shown = f"{name}: {_shown(line)}" + (f", reserve={reserve}" if reserve else "")
        doing = f"admit({shown})"
        hits = self.model.hits(line)
        if look or not self.exact:
            hits = self.lookup(line, f"cached_blocks({shown})")
        args = {"name": name, "request": None if again else request, "reserve": reserve}
        before = dict(self.model.lines)
        try:
            taken = self.model.admit(name, line, hits, reserve or 0)
        except Full as full:
            self.model.lines = before
            state = self._out_of_blocks("admit", args, doing, full)
            self._unchanged(line, state, Code.STALE_STATE, f"{doing}, which was refused")
            return None
        reply = self._do(doing, "admit", **args)
        table = self._table(reply, name, doing)
        if table[: len(hits)] != hits:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: the table begins with the blocks that are cached",
                str(hits), str(table),
                likely="What `cached_blocks` finds comes first, in order.",
            )  # fmt: skip
        self._learn(name, table, len(hits), taken, doing)
        self._compare(reply, doing)
        return line.found

    def append(self, name: str, tokens: Sequence[int]) -> None:
        """More tokens, and room for them."""
        doing = f"append({name}, {len(tokens)} more)"
        args = {"name": name, "tokens": list(tokens)}
        old = list(self.model.lines[name].table)
        try:
            taken, replaced, copied = self.model.append(name, len(tokens))
        except Full as full:
            self._out_of_blocks("append", args, doing, full)
            return
        reply = self._do(doing, "append", **args)
        line = self.model.lines[name]
        line.tokens += tokens
        table = self._table(reply, name, doing)
        fresh = [*replaced, *range(len(old), len(line.table))]
        kept = [i for i in range(len(line.table)) if i not in fresh]
        if len(table) != len(line.table) or any(table[i] != old[i] for i in kept):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: the table", str(line.table), str(table),
                likely="`append` is stage 07's, and takes its blocks by `take`.",
            )  # fmt: skip
        self._taken([table[i] for i in fresh], taken, doing)
        line.table = table
        pairs = sorted((old[i], table[i]) for i in copied)
        if sorted(map(tuple, reply["result"])) != pairs:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks to be copied", str(pairs),
                str(reply["result"]),
            )  # fmt: skip
        for source, destination in pairs:
            for offset in range(self.model.block_size):
                if (source, offset) in self.contents:
                    self.contents[destination, offset] = self.contents[source, offset]
        self._compare(reply, doing)

    def compute(self, *names: str, most: int | None = None, checked: bool = True) -> list[int]:
        """Feed all tokens of some sequences that are not computed yet, or at most so many of each.

        Returns the tokens that come next, where there is memory. They are checked, if `checked`.
        """
        lines = {name: self.model.lines[name] for name in names}
        counts = {name: len(line.tokens) - line.computed for name, line in lines.items()}
        counts = {name: min(left, most or left) for name, left in counts.items() if left}
        doing = f"compute({counts})"
        reply = self._do(doing, "compute", counts=counts)
        for name, count in counts.items():
            line = self.model.lines[name]
            nodes = self._nodes(line, line.computed + count)
            for place in range(line.computed, line.computed + count):
                self.contents[self._slot(line, place)] = nodes[place]
            line.computed += count
        self._compare(reply, doing)
        if self.memory and checked:
            for name, token in zip(counts, reply["result"], strict=True):
                self._must_follow(lines[name], token, f"{doing}: the token of {name}")
        return list(reply["result"])

    def publish(self, *names: str) -> int:
        """Publish, in this order; returns how many blocks are new."""
        new = sum(self.model.publish(name) for name in names)
        doing = f"publish({', '.join(names)})"
        self._compare(self._do(doing, "publish", names=list(names)), doing)
        return new

    def run(self, *names: str) -> list[int]:
        """Compute all that is left of some sequences, then publish, in that order."""
        tokens = self.compute(*names)
        self.publish(*names)
        return tokens

    def fork(self, name: str, other: str) -> None:
        """A second sequence that goes on from the same blocks."""
        self.model.fork(name, other)
        doing = f"{other} = fork({name})"
        self._compare(self._do(doing, "fork", name=name, other=other), doing)

    def free(self, name: str, *, forget: bool = True) -> None:
        """The end of a sequence, or only of its blocks."""
        self.model.free(name)
        line = self.model.lines[name]
        line.computed = 0
        if forget:
            del self.model.lines[name]
        doing = f"free({name})"
        self._compare(self._do(doing, "free", name=name, forget=forget), doing)

    def check(self) -> None:
        """`check` has nothing to say against the tables in use."""
        self._compare(self._do("check(all tables)", "check"), "check")

    def lookup(self, line: Line, doing: str = "") -> list[int]:
        """What `cached_blocks` finds for a sequence. It must be right, and change nothing."""
        doing = doing or f"cached_blocks({_shown(line)})"
        reply = self._do(doing, "lookup", request=self._request(line), tokens=line.tokens)
        found = reply["result"]
        if not isinstance(found, list):
            raise self._failure(Code.WRONG_TYPE, doing, "a list of blocks", repr(found)[:80])
        self._are_blocks(found, doing)
        self._compare(reply, doing)
        self._unchanged(Line(line.space, line.tokens), reply, Code.MUTATED_INPUT, doing)
        self._must_be_its_text(line, found, doing)
        wanted = self.model.hits(line)
        if self.exact and found != wanted:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks found", str(wanted), str(found),
                likely=self._why_not(line, wanted, found),
            )  # fmt: skip
        return found

    def found(self, tokens: Sequence[int], space: Space = HERE) -> int:
        """How many blocks of a text are found."""
        return len(self.lookup(Line(space, list(tokens))))

    # -- what must be refused ----------------------------------------------------------------

    def refuses(self, op: str, given: dict[str, Any], argument: str, **more: Any) -> None:
        """A call that must raise an error that names the argument, and change nothing."""
        kinds = more.pop("kinds", ["ValueError"])
        doing = f"{op}({', '.join(f'{k}={v}' for k, v in {**given, **more}.items())})"
        self.history.append(f"{doing}, to be refused")
        expect.rejects(
            lambda: self._ask("touch", op=op, given=given, **more), argument,
            f"{self.what}: {doing}", kinds=kinds,
        )  # fmt: skip
        self._compare(self._ask("state"), f"{doing}, which was refused", refused=True)

    def _out_of_blocks(self, op: str, args: dict[str, Any], doing: str, full: Full) -> Any:
        """A call that must be refused, with the right numbers; returns the state after it."""
        wanted = f"OutOfBlocks: {full.needed} needed, {full.free} free"
        self.history.append(f"{doing}, to be refused")
        try:
            self._ask(op, **args)
        except SolutionError as error:
            if error.type != "OutOfBlocks":
                raise self._failure(
                    Code.WRONG_ERROR, f"{doing} is refused, but not in a way that helps", wanted,
                    f"{error.type}: {error.message}", error.where,
                    likely="It was not counted beforehand, and something broke on the way.",
                ) from None  # fmt: skip
        else:
            raise self._failure(
                Code.NO_ERROR_RAISED, f"{doing} is accepted", wanted, "no error",
                likely="A cached block that is free leaves the free list as well, and `reserve` "
                "must be left.",
            )  # fmt: skip
        state = self._ask("state")
        self._compare(state, f"{doing}, which was refused", refused=True)
        said = state["refusal"]
        if (said.get("needed"), said.get("free")) != (full.needed, full.free):
            raise self._failure(
                Code.WRONG_ERROR, f"{doing}: OutOfBlocks says the wrong numbers", wanted,
                f"needed = {said.get('needed')}, free = {said.get('free')}",
                likely="New blocks, cached ones that are free, and what is reserved; of those that "
                "are free, all, cached ones too.",
            )  # fmt: skip
        return state

    def _unchanged(self, line: Line, reply: Any, code: Code, doing: str) -> None:
        """The sequence that was handed over, which is perhaps served nowhere, is as it was."""
        wanted = [line.table, line.computed, line.found, line.tokens]
        if reply["last"] != wanted:
            raise self._failure(
                code, f"{doing}: block_table, num_computed, num_cached and tokens of the sequence",
                str(wanted), str(reply["last"]),
                likely="Whoever only asks, or is refused, is left as it was.",
            )  # fmt: skip

    # -- judging -----------------------------------------------------------------------------

    def _must_be_its_text(self, line: Line, found: list[int], doing: str) -> None:
        """The blocks hold what this sequence would store there, and leave it a token."""
        size = self.model.block_size
        if len(found) * size >= max(1, len(line.tokens)):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: nothing is left to compute",
                f"at most {(len(line.tokens) - 1) // size} blocks", str(len(found)),
                likely="The logits of the last token are needed, and only a pass gives them.",
            )  # fmt: skip
        nodes = self._nodes(line, len(found) * size)
        for place, node in enumerate(nodes):
            block = found[place // size]
            if self.contents.get((block, place % size)) != node:
                raise self._failure(
                    Code.WRONG_VALUE, f"{doing}: a block that holds something else is found",
                    "the keys and values of this text, model and salt",
                    "another's, or none", f"block {block}, offset {place % size}",
                    likely="Equal hashes prove nothing: compare the tokens, and everything before "
                    "them, and model and salt. A block that was taken holds nothing; one that is "
                    "not computed neither.",
                )  # fmt: skip

    def _why_not(self, line: Line, wanted: list[int], found: list[int]) -> str:
        """The likely cause when other blocks are found than those that are cached."""
        if len(found) < len(wanted):
            return (
                "A block is cached from when it was published until it is taken, whoever holds it "
                "and whatever else happens; outputs are text too. It is known by what it holds, "
                "and by all before it: not by the block or the object that held this."
            )
        if len(found) > len(wanted):
            return "The first block that is not cached ends the prefix; what was taken is gone."
        return (
            "Of blocks with the same text, the one that was published first is the one to find, "
            "until it is taken."
        )

    def _learn(self, name: str, table: list[int], known: int, taken: list[int], doing: str) -> None:
        """The order of new blocks in a table."""
        line = self.model.lines[name]
        if len(table) != len(line.table):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: blocks in the table",
                f"{len(line.table)} for {len(line.tokens)} tokens", str(len(table)),
                likely="Room for all of its tokens, and no more.",
            )  # fmt: skip
        self._taken(table[known:], taken, doing)
        line.table = table

    def _taken(self, got: list[int], taken: list[int], doing: str) -> None:
        """The right blocks were taken; what they held is gone."""
        model = self.model
        if not self.exact:  # adopt them: what is cached is not known
            if len(set(got)) != len(got) or not set(got) <= {*model.plain, *model.lru, *taken}:
                raise self._failure(
                    Code.WRONG_VALUE, f"{doing}: the blocks that are taken", "free ones", str(got)
                )
            free = [b for b in (*taken, *model.plain, *model.lru) if b not in got]
            model.lru, model.plain = [b for b in model.lru if b in free], []
            model.plain = [b for b in free if b not in model.lru]
            for block in got:
                text = model.published.pop(block, None)
                if text is not None and model.cached.get(text) == block:
                    del model.cached[text]
        elif sorted(got) != sorted(taken):
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: the blocks that are taken", f"{sorted(taken)}",
                f"{sorted(got)}",
                likely="Free blocks that are not cached come first, then the cached one that was "
                "given back longest ago; a block that is found has left that list, and comes back "
                "at its end. `free` gives the last block back first.",
            )  # fmt: skip
        for block in got:
            for offset in range(model.block_size):
                self.contents.pop((block, offset), None)

    def _compare(self, reply: Any, doing: str, *, refused: bool = False) -> None:
        """The state is that of the model."""
        self.calls, self.seen_calls = reply["calls"] - self.seen_calls, reply["calls"]
        code = Code.STALE_STATE if refused else Code.WRONG_VALUE
        why = "Find out whether there is room before anything is done." if refused else ""
        sequences = reply["sequences"]
        for name, line in self.model.lines.items():
            table, computed, cached, tokens = sequences[name]
            expect.unchanged(line.tokens, tokens, f"{self.what}: {doing}: the tokens of {name}")
            for what, got, wanted in (
                ("num_computed", computed, line.computed), ("num_cached", cached, line.found),
                ("block_table", table, line.table),
            ):  # fmt: skip
                if got != wanted or (what != "block_table" and type(got) is not int):
                    raise self._failure(
                        code, f"{doing}: {what} of {name}", str(wanted), str(got), likely=why or
                        ("Cached blocks times the block size: their tokens are computed."
                         if what != "block_table" else "Its table is its own, and nobody else's."),
                    )  # fmt: skip
        counts = [self.model.holders(block) for block in range(self.model.num_blocks)]
        if reply["ref_counts"] != counts:
            raise self._failure(
                code, f"{doing}: reference counts", str(counts), str(reply["ref_counts"]),
                likely=why or "A block that is found has one table more that holds it.",
            )  # fmt: skip
        if expect.is_int(reply["num_free"], f"{self.what}: num_free") != self.model.num_free:
            raise self._failure(
                code, f"{doing}: num_free", str(self.model.num_free), str(reply["num_free"]),
                likely=why or "Cached blocks that no table holds are free; one that is found is "
                "free no longer.",
            )  # fmt: skip
        self._read_back(doing)

    def _read_back(self, doing: str) -> None:
        """Every sequence reads through its table what it would have stored itself."""
        for name, line in self.model.lines.items():
            for place, node in enumerate(self._nodes(line, line.computed)):
                if self.contents.get(self._slot(line, place)) != node:
                    block, offset = self._slot(line, place)
                    raise self._failure(
                        Code.WRONG_VALUE, f"{doing}: {name} reads what is not its text",
                        f"its position {place}", "another's, or nothing",
                        f"block {block}, offset {offset}",
                        likely="A block was shared that holds another text, or is not computed; or "
                        "one was taken while somebody held it.",
                    )  # fmt: skip

    def _must_follow(self, line: Line, token: Any, what: str) -> None:
        wrong = nano_oracle().first_wrong(line.tokens[: line.computed], [token])
        if wrong is not None:
            raise self._failure(
                Code.WRONG_TOKEN, f"{what} is not that of an independent model", str(wrong[1]),
                str(token), f"at length {line.computed}",
                likely="It has attended to keys and values of another text.",
            )  # fmt: skip

    def _nodes(self, line: Line, end: int) -> list[int]:
        """What would be stored for its first `end` tokens: a number for each beginning."""
        found: list[int] = []
        node: Any = line.space
        for token in line.tokens[:end]:
            node = self.nodes.setdefault((node, token), len(self.nodes))
            found.append(node)
        return found

    def _slot(self, line: Line, place: int) -> tuple[int, int]:
        block, offset = divmod(place, self.model.block_size)
        return line.table[block], offset

    def _table(self, reply: Any, name: str, doing: str) -> list[int]:
        table = reply["sequences"][name][0]
        if not isinstance(table, list):
            raise self._failure(
                Code.WRONG_TYPE, f"{doing}: block_table", "a list", repr(table)[:80]
            )
        self._are_blocks(table, doing)
        return list(table)

    def _are_blocks(self, ids: list[Any], doing: str) -> None:
        for block in ids:
            if expect.is_int(block, f"{self.what}: {doing}: a block") not in range(
                self.model.num_blocks
            ):
                raise self._failure(Code.WRONG_VALUE, doing, "blocks of this pool", str(ids))

    def _request(self, line: Line) -> dict[str, Any]:
        """Its request: what must not matter is drawn at random."""
        rng: random.Random = self.gate.rng
        self.ids += 1
        model, salt = line.space
        return {
            "request_id": f"request {self.ids}", "prompt_ids": line.tokens, "model": model,
            "cache_salt": salt, "arrival": rng.random(), "eos_ids": [rng.randrange(256)],
            "params": {
                "max_new_tokens": rng.randrange(1, 99), "seed": rng.randrange(99),
                # No two alike, so that every pair shows a mistake; and greedy ones among them.
                "temperature": 0.0 if self.ids % 5 == 0 else rng.random(),
                "top_k": rng.randrange(9),
                "ignore_eos": rng.random() < 0.5,
            },
        }  # fmt: skip

    # -- the worker --------------------------------------------------------------------------

    def _do(self, doing: str, scenario: str, **args: Any) -> Any:
        self.history.append(doing)
        try:
            return self._ask(scenario, **args)
        except SolutionError as error:
            if error.type == "OutOfBlocks":
                raise self._failure(
                    Code.WRONG_VALUE, f"{doing} is refused, and there is room",
                    f"{self.model.num_free} blocks are free when it is done", error.message,
                    error.where,
                    likely="More is asked for than is needed: what is found is not new, and a "
                    "cached block that is free counts once.",
                ) from None  # fmt: skip
            failure = expect.crashed(error, f"{self.what}: {doing}")
            failure.notes += self._notes()
            raise failure from None

    def _ask(self, scenario: str, **args: Any) -> Any:
        return self.gate.candidate.call(scenario, pool=self.name, **args)


def _shown(line: Line) -> str:
    """A sequence in short."""
    tokens = str(line.tokens) if len(line.tokens) <= 16 else f"{len(line.tokens)} tokens"
    return tokens + (f" of {line.space}" if line.space != HERE else "")


def live(
    pool: PrefixPool, rng: random.Random, steps: int, alphabet: int, spaces: list[Space]
) -> None:
    """Sequences begin alike, compute, grow, fork, lose their blocks and end, until the pool runs
    out, and on.
    """
    model = pool.model
    size, most = model.block_size, model.num_blocks * model.block_size
    texts: list[list[int]] = [[]]
    for step in range(steps):
        running = [name for name, line in model.lines.items() if line.table]
        waiting = [name for name, line in model.lines.items() if not line.table]
        ready = [n for n in running if model.lines[n].computed == len(model.lines[n].tokens)]
        kinds = ["admit"] * 3 + ["again"] * 2 * bool(waiting)
        if running:
            kinds += ["run"] * 5 + ["compute", "publish", "free", "free", "lose"]
        if ready:
            kinds += ["append"] * 5 + ["fork"]
        kind = rng.choice(kinds)
        name = rng.choice(running) if running else ""
        if kind == "admit":
            begin = rng.choice(texts)
            begin = begin[: rng.choice([len(begin), len(begin), rng.randrange(len(begin) + 1)])]
            rest = rng.randrange(1 if not begin else 0, 2 * size + 2)
            tokens = (begin + [rng.randrange(alphabet) for _ in range(rest)])[: most + size]
            reserve = rng.choice([None, 0, 0, 1, 2])
            pool.admit(
                f"s{step}", tokens, rng.choice(spaces), reserve=reserve, look=rng.random() < 0.5
            )
            texts = [*texts[-8:], tokens]
        elif kind == "again":
            name = rng.choice(waiting)
            if pool.admit(name, look=rng.random() < 0.5) is None and rng.random() < 0.5:
                pool.free(name)
        elif kind == "run":
            several = rng.sample(running, rng.randrange(1, len(running) + 1))
            pool.run(*[n for n in several if n not in ready] or several)
        elif kind == "compute":
            pool.compute(name, most=rng.randrange(1, 2 * size + 1))
        elif kind == "publish":
            pool.publish(name)
        elif kind in ("free", "lose"):
            texts = [*texts[-8:], list(model.lines[name].tokens)]
            pool.free(name, forget=kind == "free")
        elif kind == "append":
            count = rng.choice([1, 1, 1, size, rng.randrange(2 * size + 1)])
            pool.append(rng.choice(ready), [rng.randrange(alphabet) for _ in range(count)])
        else:
            pool.fork(rng.choice(ready), f"s{step}")
        if step % 20 == 19:
            pool.check()
