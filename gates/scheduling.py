"""A solution's scheduler, driven one call at a time and judged after each.

The judge is the model: it keeps the contents of the pool, and says the next token of each sequence.
What lies in a place of the pool stands for the keys and values of a token *and of all before it*,
so that whoever reads a block of somebody else, or one that was never written, is found out. The
next token depends on the whole text and on a secret.

Judged are the outputs, the queues, the steps and the block tables; never how a solution decides.
What a step must do is worked out from the state before it: whom it preempts, whom it may admit, and
that the oldest request gets on.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from history import History

from course.check import expect
from course.check.codes import Code
from course.check.gate import GateRun
from course.check.replies import SolutionError

Json = dict[str, Any]

OUTPUT = ["tuple", "str", "FinishReason", "str"]  # token_ids, text, finish_reason, reason
VOCAB, CONTEXT = 256, 256


@dataclass
class Asked:
    """A request that is being served, as the judge knows it."""

    request: Json
    limit: int
    said: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # what stands for each token and all before it

    @property
    def tokens(self) -> list[int]:
        """The text so far."""
        return [*self.request["prompt"], *self.said]

    @property
    def left(self) -> int:
        """Tokens still to come, if no end token comes first."""
        return self.limit - len(self.said)


@dataclass
class Tally:
    """What has happened, so that a test can ask for it."""

    steps: int = 0
    preempted: int = 0
    admitted: int = 0
    cached: int = 0  # tokens that admissions have found
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A sequence that runs, as it is before a step."""

    name: str
    computed: int
    tokens: int
    table: list[int]


def who_gives_way(
    rows: list[Row], free: int, block_size: int, *, budget: int | None = None,
    strangers: Iterable[list[int]] = (),
) -> tuple[list[str], dict[str, int]]:  # fmt: skip
    """Who must be preempted, the newest first, and what those that stay feed.

    Args:
        rows: those that run, in the order of arrival.
        free: blocks that no table holds.
        budget: most tokens of a step, if it has a budget.
        strangers: tables of others.
    """
    held = Counter(block for row in rows for block in row.table)
    held.update(block for table in strangers for block in table)
    alive = {row.name: row for row in rows}
    victims: list[str] = []
    feed: dict[str, int] = {}
    left = budget
    for row in rows:
        count = row.tokens - row.computed
        if left is not None:
            count = min(count, left)
        while count and row.name in alive:
            end = -(-(row.computed + count) // block_size)
            shared = [b for b in row.table[row.computed // block_size : end] if held[b] > 1]
            needed = max(0, end - len(row.table)) + len(shared)
            if needed <= free:
                free -= needed
                held.subtract(shared)
                feed[row.name] = count
                left = None if left is None else left - count
                break
            victim = alive.popitem()[1]
            victims.append(victim.name)
            for block in victim.table:
                held[block] -= 1
                free += held[block] == 0
    return victims, feed


class Desk(History):
    """A scheduler in the candidate's worker, and everything that is known about it.

    Args:
        what: names it in failures.
        budget: tokens of a step, if the scheduler is one of a subclass that has a budget.
        roomy: the pool has room for all, however they are admitted: then as many as may run do.
    """

    def __init__(
        self, gate: GateRun, num_blocks: int, block_size: int, what: str, *, max_running: Any = 8,
        watermark: Any = 0, budget: int | None = None, context: int = CONTEXT, roomy: bool = False,
        name: str = "desk",
    ) -> None:  # fmt: skip
        self.gate, self.name = gate, name
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_running, self.watermark, self.budget = max_running, watermark, budget
        self.context, self.roomy = context, roomy
        self.what = f"{what} ({num_blocks} blocks of {block_size})"
        self.secret = gate.rng.getrandbits(60)
        self.live: dict[str, Asked] = {}  # in the order of arrival
        self.contents: dict[tuple[int, int], int] = {}  # (block, offset) -> what lies there
        self.strangers: list[list[int]] = []  # tables of others
        self.history: list[str] = []
        self.tally = Tally()
        self.finishes: dict[str, str | None] = {}  # of all that were served before the last call
        self.names = (f"r{i}" for i in itertools.count())
        settings = f"max_running={max_running!r}, watermark={watermark!r}"
        self.state = expect.result_of(
            lambda: gate.candidate.call(
                "new", desk=name, num_blocks=num_blocks, block_size=block_size,
                max_running=max_running, watermark=watermark, vocab_size=VOCAB,
                max_context=context, budget=budget,
            ),
            f"Scheduler(..., {settings})",
        )  # fmt: skip
        self._judge_state()

    # -- texts -------------------------------------------------------------------------------

    def request(self, length: int, new: int, **more: Any) -> Json:
        """A new request with a random prompt."""
        prompt = [self.gate.rng.randrange(VOCAB) for _ in range(length)]
        return {"id": next(self.names), "prompt": prompt, "new": new, **more}

    def text(self, request: Json, new: int) -> list[int]:
        """What is said to a prompt, by whoever is alone."""
        asked = Asked(request, new)
        while asked.left:
            asked.said.append(self._say(asked))
        return asked.said

    def ends_after(self, length: int, new: int, limit: int, **more: Any) -> Json:
        """A request that says `new` tokens, the last one an end token, and may say `limit`."""
        while True:
            request = self.request(length, limit, **more)
            said = self.text(request, new)
            if said[-1] not in said[:-1]:
                return {**request, "eos": [said[-1]]}

    def _say(self, asked: Asked) -> int:
        so_far = self._chain(asked)[len(asked.tokens) - 1]
        return (so_far ^ self.secret) * 0x9E3779B1 % 65521 % VOCAB

    def _chain(self, asked: Asked) -> list[int]:
        """What stands for each token of a text, in a pool."""
        tokens = asked.tokens
        request = asked.request
        for index in range(len(asked.chain), len(tokens)):
            space = (request.get("model", ""), request.get("salt", ""))
            before = asked.chain[-1] if asked.chain else zlib.crc32(repr(space).encode())
            asked.chain.append(hash((before, tokens[index])))
        return asked.chain

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    # -- operations --------------------------------------------------------------------------

    def add(self, request: Json) -> str:
        """Queue a request that can be served; its id."""
        limit = min(request["new"], self.context - len(request["prompt"]) + 1)
        doing = f"add {request['id']} ({len(request['prompt'])} + {request['new']})"
        result = self._call(doing, "add", [request])
        if result is not None:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: what add returns for a request that can be served",
                "None", str(result),
                likely="It needs room for its prompt and for all it generates but the last token: "
                f"{len(request['prompt']) + limit - 1} tokens, "
                f"{self.blocks_for(len(request['prompt']) + limit - 1)} blocks.",
            )  # fmt: skip
        self.live[request["id"]] = Asked(request, limit)
        self._judge_state()
        return str(request["id"])

    def ends_at_once(self, request: Json, finish: str) -> str:
        """Add a request that is over at once; the reason given."""
        doing = f"add {request['id']} ({len(request['prompt'])} + {request['new']})"
        result = self._call(doing, "add", [request])
        self._judge_output(result, doing, request["id"], [], finish)
        self._judge_state()
        return str(result["why"])

    def abort(self, request_id: str) -> None:
        """A client goes away: one that is served, or any other."""
        known = request_id in self.live
        doing = f"abort {request_id}"
        result = self._call(doing, "abort", [request_id])
        if known:
            self._judge_output(result, doing, request_id, [], "abort")
            self._judge_finish(doing, request_id, "abort")
            del self.live[request_id]
        elif result is not None:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}, which is not being served", "None", str(result)
            )
        self._judge_state()

    def fork(self, request_id: str) -> None:
        """Somebody else holds the blocks of one that runs from now on, as another answer does."""
        self.strangers.append(self._call(f"fork the table of {request_id}", "fork", [request_id]))
        self._judge_state()

    def step(self) -> list[str]:
        """Schedule, compute, update; the ids of what was in the step."""
        before = self.state
        oldest = next(iter(self.live), None)
        progress = self._progress(before, oldest)
        step = self._schedule(before)
        tokens = self._compute(step)
        self._update(step, tokens)
        if oldest in self.live and self._progress(self.state, oldest) <= progress:
            raise self._failure(
                Code.STARVED, f"{oldest} is the oldest, and the step brought it nothing",
                "more of it computed than before", "as much as before, or less",
            )  # fmt: skip
        self.tally.steps += 1
        return [one["id"] for one in step["sequences"]]

    def finish(self) -> None:
        """Serve what there is to the end. Each step brings the oldest on, so there is one."""
        while self.live:
            self.step()
        if self.state["has_work"] is not False:
            raise self._failure(
                Code.WRONG_VALUE, "has_work, when all have ended", "False",
                str(self.state["has_work"]),
            )  # fmt: skip

    def _progress(self, state: Json, request_id: str | None) -> tuple[int, int]:
        asked = self.live.get(request_id or "")
        found = [s for s in state["running"] if s["id"] == request_id]
        computed = found[0]["num_computed"] if found else 0
        return (len(asked.said) if asked else 0, computed)

    # -- a step ------------------------------------------------------------------------------

    def _schedule(self, before: Json) -> Json:
        step = self._call("schedule", "schedule", [])
        if not isinstance(step, dict) or set(step) != {"sequences", "counts", "copies"}:
            raise self._failure(Code.WRONG_TYPE, "what schedule returns", "a Step", repr(step)[:80])
        if len(step["counts"]) != len(step["sequences"]):
            raise self._failure(
                Code.WRONG_VALUE, "the counts of a step", f"{len(step['sequences'])}, one for each "
                "of its sequences", str(step["counts"]),
            )  # fmt: skip
        ids = [s["id"] for s in step["sequences"]]
        running = [s["id"] for s in self.state["running"]]
        was = [s["id"] for s in before["running"]]
        for index, name in enumerate(ids):
            if name not in running:
                raise self._failure(
                    Code.WRONG_VALUE, f"{name} is in the step, and does not run",
                    f"of those that run: {running}", str(ids),
                    likely="It was preempted after it had been put into the step. Those that are "
                    "older come first, so that whoever is preempted has not been scheduled yet.",
                )  # fmt: skip
            if name in ids[:index]:
                raise self._failure(
                    Code.WRONG_VALUE, f"{name} is in the step twice", "once", str(ids)
                )
        self._judge_state(scheduled=True)
        if self.live and not ids:
            raise self._failure(
                Code.STARVED, "a step is empty, and there is work",
                f"{next(iter(self.live))}, at least", "no sequence",
                likely="Nothing runs, and the watermark keeps the first one out; or what has no "
                "room is waited for, and nobody gives any back.",
            )  # fmt: skip
        self._judge_victims(before, was, running)
        self._judge_tables(before, step)
        self._judge_counts(before, step)
        admitted = [name for name in running if name not in was]
        self._judge_admission(before, admitted)
        self.tally.admitted += len(admitted)
        self.tally.cached += sum(
            s["num_cached"] for s in self.state["running"] if s["id"] in admitted
        )
        return step

    def _expected(self, before: Json) -> tuple[list[str], dict[str, int]]:
        """Who must be preempted, the newest first, and what those that stay feed."""
        rows = [
            Row(s["id"], s["num_computed"], len(s["tokens"]), s["table"]) for s in before["running"]
        ]
        return who_gives_way(
            rows, before["num_free"], self.block_size, budget=self.budget, strangers=self.strangers
        )

    def _judge_victims(self, before: Json, was: list[str], running: list[str]) -> None:
        expected, _ = self._expected(before)
        victims = [name for name in was if name not in running]
        if set(victims) != set(expected):
            few = len(expected) > len(victims)
            raise self._failure(
                Code.WRONG_VALUE, "who is preempted", str(expected[::-1] or "nobody"),
                str(victims or "nobody"), f"{before['num_free']} blocks were free before the step",
                likely="Somebody gets no block, and keeps those it has." if few else
                "One after the other, the newest first, until the block that is needed is free; "
                "and nobody while there is one.",
            )  # fmt: skip
        self.tally.preempted += len(victims)

    def _judge_tables(self, before: Json, step: Json) -> None:
        """What ran and still runs has kept its blocks, those that are copied aside."""
        tables = {s["id"]: s["table"] for s in before["running"]}
        copied = {}
        for pair in step["copies"]:
            if not isinstance(pair, tuple) or [type(i) for i in pair] != [int, int]:
                raise self._failure(
                    Code.WRONG_TYPE, "the copies of a step", "pairs (source, destination)",
                    repr(pair)[:80],
                )  # fmt: skip
            copied[pair[1]] = pair[0]
        for sequence in self.state["running"]:
            table = tables.get(sequence["id"], [])
            now = [copied.get(block, block) for block in sequence["table"][: len(table)]]
            if now != table:
                raise self._failure(
                    Code.WRONG_VALUE, f"{sequence['id']} runs on, with other blocks than before",
                    f"{table}, and more of them if need be", str(sequence["table"]),
                    likely="It was preempted and admitted again in the same step, and has lost "
                    "what was computed; or a block was copied, and the step does not say so.",
                )  # fmt: skip

    def _judge_counts(self, before: Json, step: Json) -> None:
        """Everybody who runs feeds what it has not fed, and has room for it."""
        _, feed = self._expected(before)
        left = None if self.budget is None else self.budget - sum(feed.values())
        for sequence in self.state["running"]:
            if sequence["id"] not in [s["id"] for s in before["running"]]:
                count = len(sequence["tokens"]) - sequence["num_computed"]
                if left is not None:
                    count = min(count, left)
                    left -= count
                feed[sequence["id"]] = count
        nothing = [s["id"] for s, n in zip(step["sequences"], step["counts"], strict=True) if not n]
        nothing += [name for name, count in feed.items() if not count]
        if nothing:
            raise self._failure(
                Code.WRONG_VALUE, f"{nothing[0]} is in the step, or admitted to it, for 0 tokens",
                "it waits, or is left out", "it holds blocks for nothing",
            )  # fmt: skip
        got = {s["id"]: n for s, n in zip(step["sequences"], step["counts"], strict=True)}
        for name in [*feed, *got]:
            if feed.get(name, 0) != got.get(name, 0):
                raise self._failure(
                    Code.WRONG_VALUE, f"what {name} feeds in this step", str(feed.get(name, 0)),
                    str(got.get(name, 0)),
                    likely="Whoever runs is in the step, with all it has not fed: a prefill stops "
                    "nobody's decode. `share` says how many tokens, and `num_computed` where they "
                    "begin.",
                )  # fmt: skip
        if list(feed) != list(got):
            raise self._failure(
                Code.WRONG_VALUE, "the order of the sequences in a step", str(list(feed)),
                str(list(got)),
            )  # fmt: skip
        for sequence, count in zip(step["sequences"], step["counts"], strict=True):
            end, room = sequence["num_computed"] + count, len(sequence["table"]) * self.block_size
            if room < end:
                raise self._failure(
                    Code.WRONG_VALUE, f"the block table of {sequence['id']} is too short",
                    f"room for {end} tokens", f"{sequence['table']}, room for {room}",
                )  # fmt: skip

    def _judge_admission(self, before: Json, admitted: list[str]) -> None:
        was = [s["id"] for s in before["running"]]
        running = [s["id"] for s in self.state["running"]]
        free = self.state["num_free"]
        if admitted and not set(was) <= set(running):
            raise self._failure(
                Code.WRONG_VALUE, "somebody is admitted in a step that preempts", "nobody",
                str(admitted),
                likely="The blocks that were taken from one are given to another, who will lose "
                "them in turn.",
            )  # fmt: skip
        if admitted and len(running) > 1 and free < self.watermark:
            raise self._failure(
                Code.WRONG_VALUE, "an admission leaves too few blocks free for those that run",
                f"at least {self.watermark}, the watermark", str(free),
                f"{admitted} came to {was}",
            )  # fmt: skip
        if not was and not admitted and self.live:
            raise self._failure(
                Code.STARVED, "nothing runs, and nobody is admitted", next(iter(self.live)),
                "nobody", likely="The watermark is kept for those that run. Nobody does.",
            )  # fmt: skip
        if self.roomy and self.budget is None:
            most = min(self.max_running, len(self.live))
            if len(running) != most:
                raise self._failure(
                    Code.WRONG_VALUE, "how many run, where there is room for all",
                    f"{most}, with max_running = {self.max_running}", str(len(running)),
                    likely="As many are admitted in a step as there is room for.",
                )  # fmt: skip

    def _compute(self, step: Json) -> list[int]:
        """Copy, look at what each counts as computed, write, read everything back, and speak."""
        size = self.block_size
        for source, destination in step["copies"]:
            for offset in range(size):
                self.contents.pop((destination, offset), None)
                if (source, offset) in self.contents:
                    self.contents[destination, offset] = self.contents[source, offset]
        for sequence in step["sequences"]:
            self._read(sequence, sequence["num_computed"], "counts as computed what is not there")
        tokens = []
        for sequence, count in zip(step["sequences"], step["counts"], strict=True):
            chain = self._chain(self.live[sequence["id"]])
            for place in range(sequence["num_computed"], sequence["num_computed"] + count):
                self.contents[sequence["table"][place // size], place % size] = chain[place]
        for sequence, count in zip(step["sequences"], step["counts"], strict=True):
            end = sequence["num_computed"] + count
            self._read(sequence, end, "reads what it has not written")
            asked = self.live[sequence["id"]]
            # In the middle of its tokens a sequence says something that nobody may listen to.
            tokens.append(self._say(asked) if end == len(asked.tokens) else self.secret % VOCAB)
        return tokens

    def _read(self, sequence: Json, end: int, wrong: str) -> None:
        """A sequence reads, through its table, its own text."""
        chain = self._chain(self.live[sequence["id"]])
        for place in range(end):
            block = sequence["table"][place // self.block_size]
            if self.contents.get((block, place % self.block_size)) != chain[place]:
                raise self._failure(
                    Code.WRONG_TOKEN, f"{sequence['id']} {wrong}",
                    f"its token {place} in block {block}", "another one, or nothing",
                    f"num_computed is {sequence['num_computed']}, its table {sequence['table']}",
                    likely="A block that is not its own was written, a copy was not made, or what "
                    "somebody will compute in this very step was published before it.",
                )  # fmt: skip

    def _update(self, step: Json, tokens: list[int]) -> None:
        outputs = self._call(f"update with {len(tokens)} tokens", "update", [tokens])
        speaking = [
            (s["id"], token)
            for s, n, token in zip(step["sequences"], step["counts"], tokens, strict=True)
            if s["num_computed"] + n == len(s["tokens"])
        ]
        if not isinstance(outputs, list) or len(outputs) != len(speaking):
            raise self._failure(
                Code.WRONG_VALUE, "what update returns", f"{len(speaking)} Outputs, one for each "
                "sequence of the step", repr(outputs)[:120],
            )  # fmt: skip
        for output, (name, token) in zip(outputs, speaking, strict=True):
            asked = self.live[name]
            asked.said.append(token)
            finish = self._finish(asked)
            self._judge_output(output, "update", name, [token], finish)
            self._judge_finish("update", name, finish)
            if finish is not None:
                del self.live[name]
                self.tally.ended.append(name)
        self._judge_state()

    def _finish(self, asked: Asked) -> str | None:
        request = asked.request
        if asked.said[-1] in request.get("eos", ()) and not request.get("ignore_eos"):
            return "stop"
        return "length" if asked.left == 0 else None

    # -- judging -----------------------------------------------------------------------------

    def _judge_output(
        self, output: Any, doing: str, name: str, tokens: list[int], finish: str | None
    ) -> None:
        if output is None:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: nothing is returned for {name}",
                f"an Output that says {finish}", "None",
            )  # fmt: skip
        if not isinstance(output, dict) or output.get("types") != OUTPUT:
            raise self._failure(
                Code.WRONG_TYPE, f"{doing}: what is returned for {name}",
                "an Output with a tuple of tokens", repr(output)[:120],
            )  # fmt: skip
        if output["id"] != name:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: whose Output it is", name, repr(output["id"]),
                likely="One Output for each sequence of the step, in its order.",
            )  # fmt: skip
        if output["tokens"] != tokens:
            raise self._failure(
                Code.WRONG_TOKEN, f"{doing}: the tokens of an Output of {name}", str(tokens),
                str(output["tokens"]),
            )  # fmt: skip
        if output["finish"] != finish:
            code, likely = Code.WRONG_VALUE, ""
            if finish is None and output["finish"] == "stop":
                asked = self.live[name].request
                likely = "With `ignore_eos` an end token is a token like any other."
                likely = likely if asked.get("ignore_eos") else "That token is no end token."
            if finish is not None and output["finish"] is None:
                code = Code.TOO_MANY_TOKENS
            elif finish is None and output["finish"] in ("stop", "length"):
                code = Code.TOO_FEW_TOKENS
            raise self._failure(
                code, f"{doing}: why {name} has ended", f"{finish or 'it has not'}",
                f"{output['finish'] or 'it goes on'}", likely=likely,
            )  # fmt: skip

    def _judge_finish(self, doing: str, name: str, finish: str | None) -> None:
        """A Sequence says of itself why it has ended."""
        if self.finishes.get(name) != finish:
            raise self._failure(
                Code.WRONG_VALUE, f"{doing}: finish_reason of the Sequence of {name}",
                f"{finish}, as in its Output", str(self.finishes.get(name)),
                likely="Whoever holds a Sequence asks it whether it has ended.",
            )  # fmt: skip

    def _judge_state(self, *, scheduled: bool = False) -> None:
        """The queues, the tables and the pool agree with what was done."""
        state = self.state
        running = [s["id"] for s in state["running"]]
        waiting = [s["id"] for s in state["waiting"]]
        for name, count in Counter(running + waiting).items():
            if count > 1 or name not in self.live:
                raise self._failure(
                    Code.WRONG_VALUE, f"{name} stands in the queues",
                    "once" if name in self.live else "nowhere: it has ended", f"{count} times",
                    f"running {running}, waiting {waiting}",
                )  # fmt: skip
        lost = [name for name in self.live if name not in running + waiting]
        if lost:
            raise self._failure(
                Code.STARVED, f"{lost[0]} neither runs nor waits", "one of the two", "it is lost",
                f"running {running}, waiting {waiting}",
            )  # fmt: skip
        if running + waiting != list(self.live):
            raise self._failure(
                Code.OUT_OF_TURN, "who runs, and behind them who waits",
                f"in the order of arrival: {list(self.live)}", f"{running} and {waiting}",
                likely="A preempted one waits in front; the newest is preempted first; and who "
                "does not fit is not passed over.",
            )  # fmt: skip
        if len(running) > self.max_running:
            raise self._failure(
                Code.WRONG_VALUE, "how many run", f"at most {self.max_running}", str(len(running))
            )
        for sequence in (*state["running"], *state["waiting"]):
            tokens = self.live[sequence["id"]].tokens
            if sequence["tokens"] != tokens:
                raise self._failure(
                    Code.WRONG_TOKEN, f"the tokens of {sequence['id']}",
                    f"its prompt and what it has said: {tokens}", str(sequence["tokens"]),
                    likely="A preempted sequence keeps its tokens: they were sent already.",
                )  # fmt: skip
        self._judge_blocks()
        for sequence in state["waiting"]:
            if (sequence["num_computed"], sequence["num_cached"]) != (0, 0):
                raise self._failure(
                    Code.STALE_STATE, f"num_computed and num_cached of {sequence['id']}, which "
                    "waits and has no blocks", "0 and 0",
                    f"{sequence['num_computed']} and {sequence['num_cached']}",
                )  # fmt: skip
        if self.budget is None and not scheduled:
            for sequence in state["running"]:
                if sequence["num_computed"] != len(sequence["tokens"]) - 1:
                    raise self._failure(
                        Code.WRONG_VALUE, f"num_computed of {sequence['id']}",
                        f"{len(sequence['tokens']) - 1}: all but the newest token",
                        str(sequence["num_computed"]),
                    )  # fmt: skip
        if state["has_work"] is not bool(self.live):
            raise self._failure(
                Code.WRONG_VALUE, "has_work", str(bool(self.live)), str(state["has_work"])
            )

    def _judge_blocks(self) -> None:
        """free + used = total, and each block is held by as many tables as its count says."""
        for sequence in self.state["waiting"]:
            if sequence["table"]:
                raise self._failure(
                    Code.LEAKED_BLOCKS, f"{sequence['id']} waits, and holds blocks", "none",
                    str(sequence["table"]),
                )  # fmt: skip
        tables = [s["table"] for s in self.state["running"]] + self.strangers
        held = Counter(block for table in tables for block in table)
        counts = self.state["ref_counts"]
        wrong = [b for b in range(self.num_blocks) if counts[b] != held[b]]
        if wrong:
            block = wrong[0]
            raise self._failure(
                Code.LEAKED_BLOCKS, f"block {block} has a count of {counts[block]}",
                f"{held[block]}, the tables of those that run", str(counts[block]),
                f"{len(wrong)} blocks in all",
                likely="Whoever ends, is aborted or is preempted frees its table, once.",
            )  # fmt: skip
        if self.state["num_free"] != self.num_blocks - len(held):
            raise self._failure(
                Code.LEAKED_BLOCKS, "free blocks", str(self.num_blocks - len(held)),
                str(self.state["num_free"]),
            )  # fmt: skip

    # -- the worker --------------------------------------------------------------------------

    def _call(self, doing: str, op: str, args: list[Any]) -> Any:
        self.history.append(doing)
        try:
            reply = self.gate.candidate.call("call", desk=self.name, op=op, args=args)
        except SolutionError as error:
            failure = expect.crashed(error, f"{self.what}: {doing}")
            failure.notes += self._notes()
            raise failure from None
        expect.unchanged(args, reply["args"], f"{self.what}: an argument of {op}")
        self.state = {name: reply[name] for name in self.state}
        self.finishes = reply["finishes"]
        return reply["result"]

    def refuses(self, request: Json, argument: str, what: str, kinds: list[str]) -> None:
        """A request that is bad is refused by name, and nothing has changed."""
        self.history.append(f"add {what}, to be refused")
        expect.rejects(
            lambda: self.gate.candidate.call("call", desk=self.name, op="add", args=[request]),
            argument, f"{self.what}: {what}", kinds=kinds,
        )  # fmt: skip
        self._as_before(what)

    def refuses_tokens(self, tokens: list[int]) -> None:
        """A pass that is taken note of with another number of tokens than the step has sequences.

        It leaves everything as it was, and the right number of tokens is taken afterwards.
        """
        before = self.state
        step = self._schedule(before)
        self.history.append(f"update with {len(tokens)} tokens, to be refused")
        expect.rejects(
            lambda: self.gate.candidate.call("call", desk=self.name, op="update", args=[tokens]),
            "token_ids", f"{self.what}: update with {len(tokens)} tokens for {len(step['counts'])}",
        )  # fmt: skip
        self._as_before("an update with another number of tokens")
        self._update(step, self._compute(step))

    def _as_before(self, what: str) -> None:
        state = self.gate.candidate.call("look", desk=self.name)
        if state != self.state:
            raise self._failure(
                Code.STALE_STATE, f"{what} was refused, and has changed something",
                str(self.state), str(state),
            )  # fmt: skip
