"""Stage 12, the judge: chunked prefill."""

from __future__ import annotations

import statistics
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
from bills import Bills
from scheduling import Row, who_gives_way
from texts import check_text

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun, bar_of
from course.check.host import Run
from course.check.oracle import nano_oracle, near_tie
from course.measure import StepWork
from course.measure.ratio import PairedRatio, Verdict, look

STAGE = 12

Json = dict[str, Any]


def request(gate: GateRun, name: str, length: int, new: int, **more: Any) -> Json:
    """A request as the scenarios take it, with a random prompt of bytes."""
    prompt = [gate.rng.randrange(256) for _ in range(length)]
    return {"id": name, "prompt": prompt, "new": new, **more}


@dataclass
class Life:
    """One scheduler's life as it went: what each step fed, and what came of each request."""

    steps: list[dict[str, tuple[int, int]]] = field(default_factory=list)  # id -> (from, tokens)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    preempted: list[tuple[int, str, int, int]] = field(default_factory=list)  # step, id, fed, of
    found: list[dict[str, int]] = field(default_factory=list)  # published blocks, after each step
    raw: list[Any] = field(default_factory=list)
    kept: int = 0  # elements that the scheduler holds on to when all is done

    def chunks(self, name: str) -> list[int]:
        """Tokens that a request fed in each step in which it was."""
        return [fed[name][1] for fed in self.steps if name in fed]

    def sizes(self) -> list[int]:
        """Tokens of each step."""
        return [sum(count for _, count in fed.values()) for fed in self.steps]


class Judge:
    """Looks at every step of one scheduler, by the rules of the chapter and nobody's code."""

    def __init__(
        self, requests: list[Json], what: str, *, max_running: int, max_tokens: int,
        block_size: int, **_: Any,
    ) -> None:  # fmt: skip
        self.requests = {r["id"]: r for r in requests}
        self.what = what
        self.max_running, self.budget, self.block_size = max_running, max_tokens, block_size
        self.life = Life()
        self.computed: dict[str, int] = {}  # tokens of each running sequence that were fed
        self.length: dict[str, int] = {}  # its tokens
        self.order = [r["id"] for r in requests]  # of arrival
        self.index = -1

    def fail(
        self, code: Code, message: str, expected: str, got: str, likely: str = ""
    ) -> GateFailure:
        """A failure in the step that is looked at."""
        where = f"step {self.index}"
        return GateFailure(code, f"{self.what}: {message}", expected, got, where, likely=likely)

    def step(self, seen: Json) -> None:
        """One step."""
        life = self.life
        self.index += 1
        life.raw.append(seen)
        for output in seen["at_once"]:
            life.reasons[output["id"]] = output["reason"]
        before = {name: (fed, of) for name, fed, of in seen["before"]["running"]}
        running = {name: (fed, of) for name, fed, of in seen["scheduled"]["running"]}
        fed = self.fed(seen["fed"])
        life.steps.append(fed)
        left = (name for name, _, _ in seen["after"]["running"])
        life.found.append(dict(zip(left, seen["found"], strict=True)))
        self.started_where_it_stopped(seen, fed, running)
        self.within_the_budget(fed, running)
        gone = [name for name in before if name not in running]
        life.preempted += [(self.index, name, *before[name]) for name in gone]
        if seen["short"]:
            raise self.fail(
                Code.WRONG_VALUE, f"{seen['short'][0]!r} runs without room for all its tokens",
                "blocks for the whole prompt, at admission", shown(fed),
                likely="Whoever is admitted by its first chunk alone gives all of it back when the "
                "pool is full.",
            )  # fmt: skip
        self.no_more_give_way_than_must(seen["before"], gone)
        self.decodes_first(fed, before, running)
        self.oldest_first(seen, fed, running)
        self.used_up(seen, fed, running, preempted=bool(gone))
        if seen["refused"]:
            raise self.fail(
                Code.WRONG_VALUE, "a step that cannot be computed", "tokens, and room for them",
                seen["refused"],
            )  # fmt: skip
        self.noted(seen, fed, running)
        if seen["mutated"]:
            raise self.fail(
                Code.MUTATED_INPUT, f"`update` has changed its argument {seen['mutated']}",
                "as it was", "changed",
                likely="Both belong to the caller, who may still look at them: build lists of your "
                "own.",
            )  # fmt: skip
        if seen["books"]:
            raise self.fail(
                Code.STALE_STATE, "the pool and the tables disagree", "no block lost or held twice",
                seen["books"],
            )  # fmt: skip

    def fed(self, given: Any) -> dict[str, tuple[int, int]]:
        """What a step feeds, by id; each sequence once, and at least one token of it."""
        found: dict[str, tuple[int, int]] = {}
        for name, start, count in given:
            if expect.is_int(count, f"{self.what}: tokens of {name!r}") < 1:
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} is in the step, and feeds nothing",
                    "at least 1 token of each sequence in a step", str(count),
                    likely="Whoever is given nothing is left out: `schedule` takes a share of 0 "
                    "for that, and nothing else.",
                )  # fmt: skip
            if name in found:
                raise self.fail(Code.WRONG_VALUE, f"{name!r} is in the step twice", "once", "twice")
            found[name] = (start, count)
        return found

    def started_where_it_stopped(
        self, seen: Json, fed: dict[str, tuple[int, int]], running: Json
    ) -> None:
        """A chunk begins behind the one before, and ends within the tokens."""
        admitted = set(running) - {name for name, _, _ in seen["before"]["running"]}
        for name in admitted - set(fed):
            raise self.fail(
                Code.WRONG_VALUE, f"{name!r} was admitted, and feeds nothing",
                "whoever is admitted is in the step", shown(fed),
                likely="Where nothing of the budget is left, nobody is admitted.",
            )  # fmt: skip
        for name, (start, count) in fed.items():
            if name not in running:
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} is in the step, and does not run",
                    f"one of {sorted(running)}", name,
                )  # fmt: skip
            length = running[name][1]
            if name not in admitted and start != self.computed.get(name, 0):
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} does not go on where it stopped",
                    f"from position {self.computed.get(name, 0)}", f"from position {start}",
                    likely="`num_computed` moves in `update`, by what the step has fed, once.",
                )  # fmt: skip
            if start + count > length:
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} is fed past its tokens",
                    f"at most {length - start} tokens from position {start}", str(count),
                )  # fmt: skip

    def within_the_budget(self, fed: dict[str, tuple[int, int]], running: Json) -> None:
        """No step feeds more than it may, and no more run than may run."""
        size = sum(count for _, count in fed.values())
        if size > self.budget:
            raise self.fail(
                Code.WRONG_COUNT, "a step is over its budget", f"at most {self.budget} tokens",
                f"{size}: {shown(fed)}",
                likely="The budget is one of tokens, for all of a step: those that decode, and "
                "prompts that are admitted in it, count as well.",
            )  # fmt: skip
        if len(running) > self.max_running:
            raise self.fail(
                Code.WRONG_COUNT, "too many run", f"at most {self.max_running}", str(len(running))
            )

    def no_more_give_way_than_must(self, before: Json, gone: list[str]) -> None:
        """Who is preempted is whom stage 11 would have preempted in this step."""
        rows = [
            Row(*row, table) for row, table in zip(before["running"], before["tables"], strict=True)
        ]
        expected, _ = who_gives_way(rows, before["free"], self.block_size, budget=self.budget)
        if set(gone) != set(expected):
            raise self.fail(
                Code.WRONG_VALUE, "who is preempted", str(expected[::-1] or "nobody"),
                f"{gone or 'nobody'}, where {before['free']} blocks were free",
                likely="As in stage 11: the newest, until the block that is needed is free, and no "
                "more of them.",
            )  # fmt: skip

    def decodes_first(self, fed: dict[str, tuple[int, int]], before: Json, running: Json) -> None:
        """Whoever has one token left to feed, and is not preempted, is in the step."""
        for name, (done, length) in before.items():
            if name in running and length - done == 1 and name not in fed:
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} decodes, and is not in the step",
                    f"{name!r} with 1 token", shown(fed),
                    likely="Those that decode come before any prompt, in every step.",
                )  # fmt: skip

    def oldest_first(self, seen: Json, fed: dict[str, tuple[int, int]], running: Json) -> None:
        """Who waits is newer than who runs, and of those that run an older prompt comes first."""
        waits = seen["scheduled"]["waiting"]
        overtaken = [
            (old, new) for old in waits for new in running
            if self.order.index(old) < self.order.index(new)
        ]  # fmt: skip
        if overtaken:
            old, new = overtaken[0]
            raise self.fail(
                Code.WRONG_VALUE, f"{new!r} runs, and {old!r}, which came before it, waits",
                "requests are admitted in the order of their arrival", shown(fed),
            )  # fmt: skip
        cut: str | None = None
        for name in sorted(running, key=self.order.index):
            start = fed[name][0] if name in fed else running[name][0]
            left, share = running[name][1] - start, fed.get(name, (0, 0))[1]
            if left == 1:
                continue
            if cut is not None and share:
                raise self.fail(
                    Code.WRONG_VALUE, f"{name!r} was served before {cut!r}, which is older",
                    f"all that the budget leaves for {cut!r}", shown(fed),
                    likely="Prompts take what is left in the order of their arrival, each as much "
                    "as it can.",
                )  # fmt: skip
            if share < left and cut is None:
                cut = name

    def used_up(
        self, seen: Json, fed: dict[str, tuple[int, int]], running: Json, *, preempted: bool
    ) -> None:
        """Nothing of the budget is left over while there is something to compute."""
        left = self.budget - sum(count for _, count in fed.values())
        if left <= 0:
            return
        for name, (done, length) in running.items():
            start, count = fed.get(name, (done, 0))
            if count < length - start:
                raise self.fail(
                    Code.WRONG_COUNT, f"{left} tokens of the budget are left over",
                    f"{name!r} takes them: it has {length - start} to feed", shown(fed),
                    likely="What the budget leaves is given out to the last token, whatever the "
                    "size of a block.",
                )  # fmt: skip
        waits = seen["scheduled"]["waiting"]
        a_seat = len(running) < self.max_running and seen["scheduled"]["fits"]
        if waits and a_seat and not preempted:
            raise self.fail(
                Code.WRONG_COUNT, f"{left} tokens of the budget are left over",
                f"{waits[0]!r}, which waits, is admitted with them", shown(fed),
                likely="Several prompts fit into one step; the next one gets what is left.",
            )  # fmt: skip

    def noted(self, seen: Json, fed: dict[str, tuple[int, int]], running: Json) -> None:
        """Tokens for those that fed their last one, and for nobody else; all is counted once."""
        outputs = seen["outputs"]
        if not isinstance(outputs, list) or any("types" not in o for o in outputs):
            raise self.fail(
                Code.WRONG_TYPE, "what `update` returns", "a list of Output", repr(outputs)[:80]
            )
        whole = [name for name, (start, count) in fed.items() if start + count == running[name][1]]
        came = [output["id"] for output in outputs]
        for output in outputs:
            self.one_token(output, whole, fed)
        for name in whole:
            if name not in came:
                raise self.fail(
                    Code.TOO_FEW_TOKENS, f"{name!r} has fed its last token, and got none",
                    f"an Output for each of {whole}", str(came),
                )  # fmt: skip
        if came != whole:
            raise self.fail(
                Code.WRONG_VALUE, "the outputs are not in the order of the step", str(whole),
                str(came),
            )  # fmt: skip
        for (name, (start, count)), (done, length) in zip(
            fed.items(), seen["fed_after"], strict=True
        ):
            if (done, length) != (start + count, running[name][1] + (name in whole)):
                raise self.fail(
                    Code.WRONG_VALUE if done != start + count else Code.TOO_MANY_TOKENS,
                    f"{name!r} after the step: num_computed and len(tokens)",
                    f"{start + count} and {running[name][1] + (name in whole)}",
                    f"{done} and {length}",
                    likely="A chunk is counted once, where it is noted; the tokens grow by one "
                    "when all of them have been fed.",
                )  # fmt: skip
        self.computed = {name: done for name, done, _ in seen["after"]["running"]}

    def one_token(self, output: Json, whole: list[str], fed: Any) -> None:
        """An Output: of a request whose tokens were all fed, with one token."""
        life, name = self.life, output["id"]
        if name not in whole:
            raise self.fail(
                Code.TOO_MANY_TOKENS, f"an Output for {name!r}, which is in the middle of its "
                "prompt", f"Outputs for {whole}", f"{output['tokens']} for {name!r}",
                likely="The logits of a chunk's last token say what might follow there, and the "
                "prompt says it already: no token, and no Output.",
            )  # fmt: skip
        if len(output["tokens"]) != 1:
            raise self.fail(
                Code.WRONG_VALUE, f"tokens of an Output for {name!r}", "one",
                str(output["tokens"]),
            )  # fmt: skip
        token = expect.is_int(output["tokens"][0], f"{self.what}: a token of {name!r}")
        life.tokens.setdefault(name, []).append(token)
        life.last_step[name] = self.index
        if output["reason"] is not None:
            life.reasons[name] = output["reason"]

    def end(self, aborted: set[str], too_large: Container[str] = ()) -> None:
        """Every request that was served says what an independent model says; others are refused."""
        for name, one in self.requests.items():
            where = f"{self.what}: request {name!r} ({len(one['prompt'])} tokens)"
            got = self.life.tokens.get(name, [])
            reason = self.life.reasons.get(name)
            if (reason == "refused") != (name in too_large):
                raise GateFailure(
                    Code.WRONG_VALUE, f"{where}: why it ended",
                    "FinishReason.REFUSED" if name in too_large else "served, since it fits",
                    str(reason),
                )  # fmt: skip
            if reason == "refused" and not got:
                continue
            if name in aborted and reason == "abort":
                got_wrong = nano_oracle().first_wrong(one["prompt"], got)
                if got_wrong is None:
                    continue
            eos_ids = () if one.get("ignore_eos") else one.get("eos", ())
            wanted = check_text(one["prompt"], got, one["new"], eos_ids, where)
            if reason != wanted:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{where}: why it ended", f"FinishReason.{wanted.upper()}",
                    str(reason),
                )  # fmt: skip


def shown(fed: dict[str, tuple[int, int]]) -> str:
    """A step in one line: who feeds how many tokens."""
    return ", ".join(f"{name}: {count}" for name, (_, count) in fed.items()) or "nobody"


def serve(
    gate: GateRun, requests: list[Json], what: str, *, max_tokens: int, max_running: int = 4,
    block_size: int = 4, num_blocks: int | None = None, at: list[int] | None = None,
    aborts: list[Any] | None = None, watermark: int = 0, stage_11: bool = False,
    too_large: Container[str] = (),
) -> Life:  # fmt: skip
    """Requests through a scheduler on nano, the i-th added before step at[i] (all at once, if not
    said); each step looked at, and every text held against an independent model.

    num_blocks: room for all requests, if not said.
    too_large: ids of those that are refused.
    """
    settings = {"max_running": max_running, "max_tokens": max_tokens, "watermark": watermark}
    if num_blocks is None:
        num_blocks = sum(-(-(len(r["prompt"]) + r["new"]) // block_size) for r in requests) + 1
    times = at or [0] * len(requests)
    judge = Judge(requests, what, block_size=block_size, **settings)
    most = 40 + max(times, default=0) + sum(len(r["prompt"]) + 2 * r["new"] for r in requests)

    def run() -> Json:
        scenario = gate.candidate.start(
            "serve", arrivals=list(map(list, zip(times, requests, strict=True))),
            aborts=aborts or [], num_blocks=num_blocks, block_size=block_size, stage_11=stage_11,
            **settings,
        )  # fmt: skip
        for step in scenario:
            if stage_11:
                judge.life.raw.append(step.value)
                continue
            judge.step(step.value)
            if len(judge.life.steps) > most:
                scenario.stop()
                raise GateFailure(
                    Code.WRONG_COUNT, f"{what}: there is still work, and it does not get on",
                    f"at most {most} steps", f"{len(judge.life.steps)}",
                )  # fmt: skip
        assert scenario.finished is not None
        return scenario.finished.value

    ended = expect.result_of(run, what)
    if ended["idle"]:
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a step without work", "empty", str(ended["idle"])
        )
    if ended["free"] != num_blocks:
        raise GateFailure(
            Code.STALE_STATE, f"{what}: blocks that are free when all is done", str(num_blocks),
            str(ended["free"]),
        )  # fmt: skip
    if not stage_11:
        judge.end({name for _, name in aborts or []}, too_large)
        judge.life.kept = ended["kept"]
    return judge.life


def has_chunks(life: Life, name: str, wanted: list[int], what: str) -> None:
    """The steps of a request fed as many tokens as on paper."""
    got = life.chunks(name)
    if got != wanted:
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: tokens of {name!r} in each of its steps", str(wanted),
            str(got),
        )  # fmt: skip


@pytest.mark.contract
class TestBadInput:
    """What is refused."""

    @pytest.mark.parametrize(
        ("argument", "settings", "kinds"),
        [
            ("max_tokens", {"max_running": 4, "max_tokens": 3}, ["ValueError"]),
            ("max_tokens", {"max_running": 1, "max_tokens": 0}, ["ValueError"]),
            ("max_tokens", {"max_running": 1, "max_tokens": -5}, ["ValueError"]),
            ("max_tokens", {"max_running": 1, "max_tokens": 8.0}, ["TypeError", "ValueError"]),
            ("max_tokens", {"max_running": 1, "max_tokens": None}, ["TypeError", "ValueError"]),
            ("max_tokens", {"max_running": 1, "max_tokens": True}, ["TypeError", "ValueError"]),
            ("max_running", {"max_running": 0, "max_tokens": 8}, ["ValueError"]),
            ("watermark", {"max_running": 1, "max_tokens": 8, "watermark": -1}, ["ValueError"]),
        ],
        ids=str,
    )
    def test_settings(self, gate: GateRun, argument: str, settings: Json, kinds: list[str]) -> None:
        """a budget below max_running, or none, is refused"""
        expect.rejects(
            lambda: gate.candidate.call("new", **settings), argument,
            f"ChunkedScheduler with {settings}", kinds=kinds,
        )  # fmt: skip

    @pytest.mark.parametrize("more", [-1, 1])
    def test_tokens_that_do_not_fit_the_step(self, gate: GateRun, more: int) -> None:
        """one token too many or too few for a step is refused, and nothing has changed"""
        requests = [request(gate, name, length, 4) for name, length in (("a", 3), ("long", 40))]
        seen: list[Any] = []
        what = f"{2 + more} tokens for a step of two sequences"

        def attempt() -> None:
            run = gate.candidate.start(
                "mismatched", requests=requests, more=more, max_running=2, max_tokens=12
            )
            seen.append(run.step().value)
            run.step()

        expect.rejects(attempt, "token_ids", what)
        before, after = seen[0]
        if before != after:
            raise GateFailure(
                Code.STALE_STATE, f"{what}: after the refusal", str(before), str(after),
                likely="Check first, then note what was computed.",
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "more", "what"),
        [
            ("prompt_ids", {"prompt": []}, "an empty prompt"),
            ("prompt_ids", {"prompt": [1] * 257}, "a prompt longer than the context"),
            ("request_id", {"id": "good"}, "the id of a request in the middle of its prompt"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )  # fmt: skip
    def test_requests(self, gate: GateRun, argument: str, more: Json, what: str) -> None:
        """a bad request is refused as in stage 11"""
        good = request(gate, "good", 40, 3)
        bad = {**request(gate, "bad", 4, 3), **more}

        def attempt() -> None:
            run = gate.candidate.start(
                "serve", arrivals=[[0, good], [2, bad]], aborts=[], num_blocks=30, block_size=4,
                max_running=2, max_tokens=9, watermark=0,
            )  # fmt: skip
            for _ in range(4):
                run.step()

        expect.rejects(attempt, argument, what)


@pytest.mark.contract
class TestChunks:
    """One prompt, alone and beside others."""

    @pytest.mark.parametrize(
        ("block_size", "budget"), [(4, 8), (16, 5), (1, 7), (4, 6), (3, 16), (8, 64)]
    )
    def test_a_long_prompt(self, gate: GateRun, block_size: int, budget: int) -> None:
        """a long prompt is fed in chunks of the budget, whatever the size of a block"""
        what = f"a prompt of 37 tokens, {budget} a step, in blocks of {block_size}"
        life = serve(
            gate, [request(gate, "a", 37, 4)], what, max_tokens=budget, max_running=2,
            block_size=block_size,
        )  # fmt: skip
        full, rest = divmod(37, budget)
        has_chunks(life, "a", [budget] * full + [rest] * (rest > 0) + [1] * 3, what)

    def test_a_large_budget(self, gate: GateRun) -> None:
        """a chunk may be nearly all of the context"""
        what = "a prompt of 240 tokens with a budget of 200"
        life = serve(gate, [request(gate, "a", 240, 3)], what, max_tokens=200, block_size=16)
        has_chunks(life, "a", [200, 40, 1, 1], what)

    def test_a_budget_for_whole_documents(self, gate: GateRun) -> None:
        """no chunk is smaller than the budget allows, however large that is"""
        lengths = [8000, 3, 900]
        what = "prompts of 8,000, 3 and 900 tokens with a budget of 9,000"
        fed = expect.result_of(
            lambda: gate.candidate.call(
                "fed_in_one_step", lengths=lengths, max_running=4, max_tokens=9000
            ),
            what,
        )
        wanted = [[f"r{i}", 0, length] for i, length in enumerate(lengths)]
        if sorted(fed) != wanted:
            raise GateFailure(
                Code.WRONG_COUNT, f"{what}: who feeds from where how many tokens in the first step",
                str(wanted), str(fed),
                likely="The budget alone cuts a prompt: there is no other limit of a chunk.",
            )  # fmt: skip

    @pytest.mark.parametrize("more", [-1, 0, 1, 2])
    def test_a_prompt_around_the_budget(self, gate: GateRun, more: int) -> None:
        """a prompt of exactly the budget is one step; one token more is two"""
        what = f"a prompt of {12 + more} tokens with a budget of 12"
        life = serve(gate, [request(gate, "a", 12 + more, 3)], what, max_tokens=12)
        has_chunks(life, "a", [min(12, 12 + more), *[more] * (more > 0), 1, 1], what)

    def test_those_that_decode_are_in_every_step(self, gate: GateRun) -> None:
        """those that decode get a token in every step, and the prompt gets the rest"""
        requests = [request(gate, name, 3 + i, 14) for i, name in enumerate("abc")]
        requests.append(request(gate, "long", 40, 3))
        what = "three that decode and a prompt of 40, with a budget of 10"
        life = serve(gate, requests, what, max_tokens=10, at=[0, 0, 0, 4])
        has_chunks(life, "long", [7] * 5 + [5, 1, 1], what)

    def test_the_next_prompt_takes_what_is_left(self, gate: GateRun) -> None:
        """several prompts share a step, in the order of their arrival"""
        lengths = {"a": 6, "b": 9, "c": 30, "d": 2, "e": 11}
        requests = [request(gate, name, length, 3) for name, length in lengths.items()]
        what = "prompts of 6, 9, 30, 2 and 11 tokens with a budget of 20"
        life = serve(gate, requests, what, max_tokens=20, max_running=5)
        has_chunks(life, "c", [5, 18, 7, 1, 1], what)
        has_chunks(life, "e", [9, 2, 1, 1], what)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_a_budget_as_small_as_allowed(self, gate: GateRun, size: int) -> None:
        """with a budget of max_running nobody starves: a prompt takes the place of a decode"""
        requests = [request(gate, f"r{i}", n, 5) for i, n in enumerate((3, 1, 17, 2, 9, 5))]
        what = f"six requests, with max_tokens = max_running = {size}"
        serve(gate, requests, what, max_tokens=size, max_running=size, at=[0, 0, 1, 1, 2, 9])

    def test_a_budget_larger_than_all(self, gate: GateRun) -> None:
        """with a budget that is never reached it is the scheduler of stage 11, step by step"""
        shapes = [(9, 30), (2, 4), (18, 20), (14, 17), (1, 3), (8, 9)]
        requests = [request(gate, f"r{i}", n, new) for i, (n, new) in enumerate(shapes)]
        settings: Json = {
            "max_tokens": 10_000, "max_running": 3, "num_blocks": 12, "watermark": 1,
            "at": [0, 0, 2, 2, 5, 5],
        }  # fmt: skip
        mine = serve(gate, requests, "a budget of 10,000", **settings)
        theirs = serve(gate, requests, "stage 11", stage_11=True, **settings)
        if not mine.preempted:
            raise RuntimeError("nobody was preempted: the pool is not tight any more")
        for index, (one, other) in enumerate(zip(mine.raw, theirs.raw, strict=False)):
            for key in ("fed", "outputs", "after"):
                if one[key] != other[key]:
                    raise GateFailure(
                        Code.WRONG_VALUE, f"with a budget that is never reached: {key}",
                        str(other[key])[:160], str(one[key])[:160], where=f"step {index}",
                        likely="Where the budget cuts nothing, this is stage 11.",
                    )  # fmt: skip
        if len(mine.raw) != len(theirs.raw):
            raise GateFailure(
                Code.WRONG_COUNT, "with a budget that is never reached: steps",
                str(len(theirs.raw)), str(len(mine.raw)),
            )  # fmt: skip

    def test_end_tokens_and_limits(self, gate: GateRun) -> None:
        """end tokens, limits of 0 and 1, and prompts that fill the context"""
        oracle = nano_oracle()
        context = oracle.config.max_context
        prompt, expected = oracle.prompt(gate.rng, 19, 8)
        at = next(i for i in range(2, 8) if expected[i] not in expected[:i])
        end = expected[at]
        requests = [
            {"id": "stops", "prompt": prompt, "new": 8, "eos": [end]},
            {"id": "ignores", "prompt": prompt, "new": 8, "eos": [end], "ignore_eos": True},
            {"id": "at once", "prompt": prompt, "new": 8, "eos": [expected[0]]},
            request(gate, "none", 30, 0),
            request(gate, "one", 30, 1),
            request(gate, "full", context, 9),
            request(gate, "nearly", context - 2, 9),
            request(gate, "ends in the prompt", 25, 4, eos=list(range(256, 300))),
        ]
        serve(gate, requests, "end tokens and limits", max_tokens=33, max_running=4)

    def test_an_end_token_in_the_middle_of_a_prompt(self, gate: GateRun) -> None:
        """what the model would say in the middle of a prompt ends nothing"""
        prompt, expected = nano_oracle().prompt(gate.rng, 24, 3)
        logits = nano_oracle().logits(prompt)
        inside = {int(logits[position].argmax()) for position in (7, 15)} - set(expected)
        one = {"id": "a", "prompt": prompt, "new": 3, "eos": sorted(inside)}
        serve(gate, [one], "end tokens that the middle of a prompt suggests", max_tokens=8)


@pytest.mark.contract
class TestBlocks:
    """The pool: prefixes, preemption and aborts in the middle of a prompt."""

    @pytest.mark.parametrize(("block_size", "budget"), [(4, 10), (8, 5), (1, 6)])
    def test_chunks_are_published(self, gate: GateRun, block_size: int, budget: int) -> None:
        """the full blocks of each chunk are found once they are written, and not before"""
        what = f"a prompt of 41, {budget} a step, in blocks of {block_size}"
        life = serve(
            gate, [request(gate, "a", 41, 3)], what, max_tokens=budget, block_size=block_size
        )
        for index, found in enumerate(life.found):
            if "a" not in found:
                continue
            start, count = life.steps[index]["a"]
            length = 41 + max(0, start + count - 40)
            wanted = min((start + count) // block_size, (length - 1) // block_size)
            if found["a"] != wanted:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: blocks that another sequence would find",
                    f"{wanted}, of {start + count} tokens computed", str(found["a"]),
                    where=f"step {index}",
                    likely="A chunk's blocks are published when the pass has written them: not "
                    "one step early, and not at the end of the prompt.",
                )  # fmt: skip

    def test_a_twin_finds_the_first_chunks(self, gate: GateRun) -> None:
        """a request that begins alike starts behind what its twin has computed"""
        first = request(gate, "first", 40, 6)
        twin = {**first, "id": "twin"}
        cousin = {**first, "id": "cousin", "prompt": first["prompt"][:18] + [5] * 7}
        salted = {**first, "id": "salted", "salt": "other"}
        requests = [first, request(gate, "beside", 3, 12), twin, cousin, salted]
        what = "a prompt of 40 and its twin, which comes three steps later"
        life = serve(gate, requests, what, max_tokens=9, at=[0, 0, 3, 5, 6])
        starts = {
            name: next(fed[name][0] for fed in life.steps if name in fed)
            for name in ("twin", "cousin", "salted")
        }
        if starts["twin"] < 16 or starts["cousin"] != 16 or starts["salted"]:
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: where it starts",
                "twin behind the chunks that were computed, cousin at 16, salted at 0",
                str(starts), likely="Every chunk is published, in `update`.",
            )  # fmt: skip

    def test_a_prompt_that_is_preempted(self, gate: GateRun) -> None:
        """whoever is preempted in the middle of its prompt begins again, and ends the same"""
        requests = [
            request(gate, "a", 4, 26), request(gate, "b", 5, 26), request(gate, "long", 32, 4),
        ]  # fmt: skip
        what = "a prompt of 32 beside two that grow, in a pool that is too small"
        life = serve(gate, requests, what, max_tokens=4, block_size=2, num_blocks=26, at=[0, 0, 3])
        if not any(name == "long" and fed < 32 for _, name, fed, _ in life.preempted):
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: who is preempted",
                "'long', in the middle of its prompt", str(life.preempted),
                likely="The newest gives its blocks back, whatever it is doing.",
            )  # fmt: skip

    def test_a_long_text_that_is_preempted(self, gate: GateRun) -> None:
        """whoever is preempted with many tokens feeds them again in chunks"""
        requests = [request(gate, "a", 6, 40), request(gate, "b", 6, 40)]
        what = "two texts of 46 in a pool for one and a half"
        life = serve(gate, requests, what, max_tokens=7, block_size=4, num_blocks=17)
        if not any(name == "b" and of > 14 for _, name, _, of in life.preempted):
            raise RuntimeError("b was not preempted late: the pool is not what it was")

    @pytest.mark.parametrize("step", [1, 3, 5])
    def test_an_abort_in_the_middle_of_a_prompt(self, gate: GateRun, step: int) -> None:
        """a client goes away in the middle of its prompt: all blocks come back"""
        requests = [
            request(gate, "a", 5, 12), request(gate, "long", 50, 4), request(gate, "next", 20, 4),
        ]  # fmt: skip
        what = f"a prompt of 50 that is aborted before step {step}"
        life = serve(
            gate, requests, what, max_tokens=9, max_running=2, num_blocks=24,
            aborts=[[step, "long"], [step, "nobody"]],
        )  # fmt: skip
        if life.tokens.get("long") or life.reasons.get("long") != "abort":
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: its end", "FinishReason.ABORT, and no token",
                f"{life.reasons.get('long')}, {life.tokens.get('long')}",
            )  # fmt: skip

    def test_an_id_that_comes_again(self, gate: GateRun) -> None:
        """an id is free when its request was aborted: the next one begins at its own beginning"""
        requests = [
            request(gate, "a", 5, 16), request(gate, "again", 50, 4), request(gate, "again", 45, 4),
        ]  # fmt: skip
        what = "a request with the id of one that was aborted in the middle of its prompt"
        life = serve(gate, requests, what, max_tokens=9, at=[0, 0, 4], aborts=[[3, "again"]])
        has_chunks(life, "again", [4, 8, 8, 8, 8, 8, 8, 8, 5, 1, 1, 1], what)

    def test_a_request_larger_than_the_pool(self, gate: GateRun) -> None:
        """a request that can never fit is refused; one that just fits is served in chunks"""
        requests = [
            request(gate, "too large", 40, 10), request(gate, "fits", 40, 9),
            request(gate, "other", 7, 5),
        ]  # fmt: skip
        what = "49 and 48 positions in a pool of 12 blocks of 4"
        serve(gate, requests, what, max_tokens=8, num_blocks=12, too_large=["too large"])


@pytest.mark.contract
class TestLives:
    """Long lives, and several at once."""

    def test_two_schedulers(self, gate: GateRun) -> None:
        """two schedulers in turn do not disturb each other"""
        lists = [
            [request(gate, "a", 30, 4), request(gate, "b", 11, 4)],
            [request(gate, "a", 17, 4), request(gate, "b", 26, 4)],
        ]
        settings: Json = {"max_running": 4, "watermark": 0}
        judges = []

        def interleave() -> None:
            runs = []
            for requests, budget in zip(lists, (9, 6), strict=True):
                judge = Judge(requests, "one of two", max_tokens=budget, block_size=4, **settings)
                judges.append(judge)
                runs.append(
                    gate.candidate.start(
                        "serve", arrivals=[[0, r] for r in requests], aborts=[], num_blocks=40,
                        block_size=4, max_tokens=budget, **settings,
                    )
                )  # fmt: skip
            active = list(zip(runs, judges, strict=True))
            while active:
                for run, judge in list(active):
                    step = run.step()
                    if step.done:
                        active.remove((run, judge))
                    else:
                        judge.step(step.value)

        try:
            expect.result_of(interleave, "two schedulers in turn")
            for judge in judges:
                judge.end(set())
        except GateFailure as failure:
            failure.code = Code.STALE_STATE
            raise

    @pytest.mark.parametrize("life", range(6))
    def test_random_lives(self, gate: GateRun, life: int) -> None:
        """any budget, pool and requests: every step by the rules, every text its own"""
        rng = gate.rng
        block_size = rng.choice([1, 2, 4, 5, 8, 16])
        size = rng.choice([1, 2, 4, 8])
        budget = size + rng.choice([0, 1, 3, 9, 30])
        beginning = [rng.randrange(256) for _ in range(20)]
        requests, at, now = [], [], 0
        for index in range(10):
            one = request(gate, f"r{index}", rng.choice([1, 3, 9, 25, 50]), rng.choice([1, 5, 14]))
            if rng.random() < 0.4:
                one["prompt"] = beginning[: rng.randrange(1, 21)] + one["prompt"]
            requests.append(one)
            at.append(now)
            now += rng.choice([0, 0, 1, 6])
        largest = max(-(-(len(r["prompt"]) + r["new"] - 1) // block_size) for r in requests)
        rooms = [largest, largest + 1, largest * 3 // 2, 2 * largest, 4 * largest]
        num_blocks = rooms[life % len(rooms)]
        aborts = [[rng.randrange(4, 20), f"r{rng.randrange(10)}"] for _ in range(rng.randrange(3))]
        serve(
            gate, requests, f"ten requests, budget {budget}, {size} at a time, {num_blocks} blocks "
            f"of {block_size}", max_tokens=budget, max_running=size, block_size=block_size,
            num_blocks=num_blocks, at=at, aborts=sorted(aborts), watermark=rng.choice([0, 0, 1]),
        )  # fmt: skip

    def test_a_long_life(self, gate: GateRun) -> None:
        """the budget is that of every step, the hundredth as the first"""
        kept = {}
        for count in (4, 24):
            requests = [request(gate, f"r{i}", 21, 3) for i in range(count)]
            what = f"{count} requests, one every third step"
            at = [3 * i for i in range(count)]
            kept[count] = serve(gate, requests, what, max_tokens=9, max_running=3, at=at).kept
        if kept[24] > kept[4]:
            raise GateFailure(
                Code.TOO_MUCH_MEMORY, "what a scheduler holds when all is done grows with the "
                "requests that it has served", f"{kept[4]} elements, as after 4 requests",
                f"{kept[24]} after 24",
                likely="Something is noted for each request, or each step, and never removed.",
            )  # fmt: skip


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.number
def test_budget(gate: GateRun) -> None:
    """tokens in every step of a trace, counted"""
    budget = 32
    requests = [
        request(gate, f"r{i}", gate.rng.randrange(20, 161), gate.rng.randrange(8, 33))
        for i in range(16)
    ]
    what = "a trace of 16 requests"
    life = serve(
        gate,
        requests,
        what,
        max_tokens=budget,
        max_running=8,
        block_size=16,
        at=[3 * i for i in range(16)],
    )
    sizes = life.sizes()
    gate.exact(
        "budget", max(sizes), at_most=budget,
        text=f"{max(sizes)} tokens in the largest of {len(sizes)} steps",
        message="a step is over its budget",
    )  # fmt: skip
    # `serve` has looked at every step by itself; here are the steps that had more than they took.
    full = sum(size == budget for size in sizes)
    cut = sum(
        any(start + count < len(r["prompt"]) for r in requests
            for start, count in [fed.get(r["id"], (10**9, 0))])
        for fed in life.steps
    )  # fmt: skip
    gate.exact(
        "filled", full, at_least=cut,
        text=f"{full} steps used all of it, among them all {cut} that left part of a prompt for "
        "later",
        message="a prompt was cut, and tokens of the budget were left over",
    )  # fmt: skip


@pytest.mark.number
def test_cost(gate: GateRun) -> None:
    """the decisions of a step look at no more of a long text than of a short one"""
    short, long = 72, 8008  # tokens; both end in the middle of a block of 16
    rows, chunk, steps = 8, 4, 16
    found = {
        length: expect.result_of(
            lambda length=length: gate.candidate.call(
                "looked_at", length=length, count=rows, chunk=chunk, waiting=length, steps=steps
            ),
            f"decisions on texts of {length:,} tokens",
        )
        for length in (short, long)
    }
    for length, counts in found.items():
        if counts["fed"] != (rows + chunk) * steps:
            raise GateFailure(
                Code.WRONG_COUNT, f"tokens in {steps} steps of {rows} that decode and {chunk} "
                f"of a prompt, at {length:,}", str((rows + chunk) * steps), str(counts["fed"]),
            )  # fmt: skip
    tokens = (rows + chunk) * steps
    each = {length: counts["looked_at"] / tokens for length, counts in found.items()}
    gate.exact(
        "step_cost", round(each[long] / max(each[short], 1.0), 2), at_most=1.0,
        text=f"{each[long]:.1f} tokens, table entries and requests are looked at for each "
        f"token that is fed, in texts of {long:,}; {each[short]:.1f} in texts of {short}",
        message="deciding costs more, the longer the texts and the queue are: in every step "
        "something walks through tokens, tables or those that wait",
    )  # fmt: skip


@pytest.mark.number
def test_gap(gate: GateRun) -> None:
    """how long those who decode wait while a long prompt arrives, and what it costs"""
    arrivals = Arrivals(gate)

    def words(ratio: PairedRatio) -> str:
        return (
            f"{ratio.median:.2f}x shorter: at most {1e3 * ratio.candidate_s:.0f} ms between two "
            f"tokens, {1e3 * ratio.baseline_s:.0f} without chunks"
        )

    gate.ratio(
        "gap", lambda: arrivals.episode("baseline"), lambda: arrivals.episode("candidate"),
        text=words, max_slices=Arrivals.MOST, warmup=Arrivals.WARMUP,
        notes=lambda _: [arrivals.prediction()],
        slower=lambda ratio: f"the longest gap is {words(ratio)}: a long prompt is computed in one "
        "step, or deciding takes long",
    )  # fmt: skip
    arrivals.throughput()
    arrivals.latencies()


class Arrivals:
    """Requests that decode on both sides; in each episode a long prompt joins them."""

    MOST, WARMUP = 25, 1  # episodes

    def __init__(self, gate: GateRun) -> None:
        self.gate = gate
        self.count, self.prompt, self.budget, self.steps = gate.bar("arrival")
        episodes = self.MOST + self.WARMUP
        own = 33  # two blocks to be cached, and a token
        new = own * self.count // self.budget + self.steps + 8
        self.running = [request(gate, f"r{i}", own, new) for i in range(self.count)]
        self.prompts = [request(gate, f"p{i}", self.prompt, 2) for i in range(episodes)]
        blocks = self.count * (-(-(own + new) // 16)) + -(-(self.prompt + 2) // 16)
        self.arguments = {
            "model": gate.model, "running": self.running, "prompts": self.prompts,
            "steps": self.steps, "num_blocks": blocks + 1, "block_size": 16,
            "max_running": self.count + 1, "max_tokens": self.budget,
        }  # fmt: skip
        self.runs: dict[str, Run] = {}
        sides = ("baseline", "candidate")
        self.whole: dict[str, list[float]] = {side: [] for side in sides}  # seconds of an episode
        self.first: dict[str, list[float]] = {side: [] for side in sides}  # until p's first token
        self.gaps: dict[str, list[float]] = {side: [] for side in sides}  # of those who decode
        # By side: what was said, by episode and id.
        self.said: dict[str, dict[tuple[int, str], list[int]]] = {side: {} for side in sides}
        self.parted: set[tuple[int, str]] = set()

    def episode(self, side: str) -> float:
        """One prompt arrives on one side; the longest gap between two tokens of who decodes."""
        if side not in self.runs:
            worker = self.gate.baseline if side == "baseline" else self.gate.candidate
            self.runs[side] = worker.start("arrivals", **self.arguments)
        index = len(self.whole[side])
        ready = expect.result_of(self.runs[side].step, f"prompts on {self.gate.model}")
        self.take(side, index, ready.value)
        prompt = self.prompts[index]["id"]
        clock, gaps = 0.0, []
        last = {r["id"]: 0.0 for r in self.running}
        came = dict.fromkeys((*last, prompt), 0)
        for _ in range(self.steps):
            reply = expect.result_of(self.runs[side].step, f"a step on {self.gate.model}")
            clock += reply.seconds
            for name, tokens in self.take(side, index, reply.value):
                if name not in came:
                    continue  # a prompt that should have ended before: it is short of tokens
                came[name] += len(tokens)
                if name in last:
                    gaps.append(clock - last[name])
                    last[name] = clock
                elif came[name] == 1:
                    self.first[side].append(clock)
        for name, count in came.items():
            wanted = 2 if name == prompt else self.steps
            if count != wanted:
                raise GateFailure(
                    Code.TOO_FEW_TOKENS if count < wanted else Code.TOO_MANY_TOKENS,
                    f"{name!r} while a prompt of {self.prompt} arrives on {self.gate.model}",
                    f"{wanted} tokens in {self.steps} steps", str(count),
                )  # fmt: skip
        self.whole[side].append(clock)
        self.gaps[side] += gaps if index >= self.WARMUP else []
        self.compare()
        return max(gaps)

    def take(self, side: str, index: int, outputs: Any) -> list[tuple[str, list[int]]]:
        """Note what a step said, by id."""
        if not isinstance(outputs, list) or any("types" not in o for o in outputs):
            raise GateFailure(
                Code.WRONG_TYPE, "what `update` returns", "a list of Output", repr(outputs)[:80]
            )
        found = [(output["id"], output["tokens"]) for output in outputs]
        for name, tokens in found:
            self.said[side].setdefault((index, name), []).extend(tokens)
        return found

    def compare(self) -> None:
        """Both sides say the same as far as both have come, near-ties aside.

        Before an episode one side may have come further than the other.
        """
        prompts = {r["id"]: r["prompt"] for r in (*self.running, *self.prompts)}
        baseline, candidate = self.said["baseline"], self.said["candidate"]
        for key in set(baseline) & set(candidate) - self.parted:
            pairs = enumerate(zip(baseline[key], candidate[key], strict=False))
            at = next((i for i, (one, other) in pairs if one != other), None)
            if at is None:
                continue
            wanted, got = baseline[key][at], candidate[key][at]
            name = key[1]
            prefix = prompts[name] + candidate[key][:at]
            if not near_tie(self.gate.model, self.gate.device, prefix, got, wanted):
                raise GateFailure(
                    Code.WRONG_TOKEN, f"request {name!r} on {self.gate.model} differs from the "
                    "baseline's", str(wanted), str(got), where=f"token {at}",
                )  # fmt: skip
            self.parted.add(key)  # two texts from here on

    def throughput(self) -> None:
        """Seconds of whole episodes: the same tokens on both sides.

        The gap may be plain after episodes that say too little of this: then there are more.
        """
        bar = bar_of(self.gate.bar("throughput"))
        prior = self.gate.options.prior.get("throughput", [])
        while True:
            pairs = list(zip(*self.whole.values(), strict=True))[self.WARMUP :]
            ratio = PairedRatio([*prior, *pairs])
            enough = len(pairs) == self.MOST
            seen = look(ratio, bar, final_at=len(ratio) if enough else len(ratio) + 1)
            if seen.verdict is not None:
                break
            for side in ("candidate", "baseline") if len(pairs) % 2 else ("baseline", "candidate"):
                self.episode(side)
        verdict = seen.verdict
        tokens = self.count * self.steps + 2 + self.prompt
        rate = tokens / ratio.candidate_s
        self.gate.interval(
            "throughput", ratio, seen.interval, verdict, "x",
            text=f"{ratio.median:.2f}x the tokens per second of stage 11: {rate:,.0f}, prompts "
            "included", needs=str(bar),
        )  # fmt: skip
        if verdict is Verdict.FAIL:
            low, high = seen.interval
            raise GateFailure(
                Code.TOO_SLOW, f"throughput is {ratio.median:.2f}x that of stage 11", str(bar),
                f"interval [{low:.2f}, {high:.2f}], {seen.slices} episodes",
            )  # fmt: skip

    def latencies(self) -> None:
        """Percentiles of the gaps, and the prompt's own wait: on both sides, reported."""

        def percentiles(side: str) -> list[float]:
            values = [1e3 * gap for gap in self.gaps[side]]
            return [float(p) for p in numpy.percentile(values, (50, 95, 99, 100))]

        mine, theirs = percentiles("candidate"), percentiles("baseline")
        self.gate.report(
            "itl", round(theirs[2] / mine[2], 2), unit="x",
            text="p50, p95, p99, max: " + ", ".join(f"{p:.0f}" for p in mine) + " ms; "
            + ", ".join(f"{p:.0f}" for p in theirs) + " without chunks",
        )  # fmt: skip
        first = {side: statistics.median(waits) for side, waits in self.first.items()}
        ratio = first["candidate"] / first["baseline"]
        self.gate.report(
            "ttft", round(ratio, 2), unit="x",
            text=f"the prompt waits {1e3 * first['candidate']:.0f} ms for its first token, "
            f"{1e3 * first['baseline']:.0f} without chunks: {ratio:.2f}x as long",
            note="that is the price: its chunks share their steps with those who decode",
        )  # fmt: skip

    def prediction(self) -> str:
        """What the bills of the two longest steps promise, on this machine as it is now."""
        bills = Bills(self.gate)
        past = len(self.running[0]["prompt"]) + self.steps // 2
        chunk = self.budget - self.count
        seconds = {}
        for name, new, before in (("whole", self.prompt, 0), ("chunk", chunk, self.prompt - chunk)):
            work = step_work(bills, [past] * self.count, new, before)
            split = bills.split(work, 1.0)
            seconds[name] = split.predicted
        positions = (self.count + self.prompt) / self.budget
        ratio = seconds["whole"] / seconds["chunk"]
        return (
            f"predicted {ratio:.1f}x from the bills of a step: "
            f"{1e3 * seconds['whole']:.0f} ms for {self.count + self.prompt} positions, "
            f"{1e3 * seconds['chunk']:.0f} for {self.budget}, {positions:.1f} times fewer"
        )


def step_work(bills: Bills, contexts: list[int], new: int, past: int) -> StepWork:
    """Work of a step in which some decode, and `new` tokens of a prompt follow `past` of them.

    contexts: of those that decode, the new token included.
    """
    config = bills.config
    work = bills.decode([*contexts, past + new])  # one row of the prompt goes through the head
    pair = 4 * config.num_layers * config.num_heads * config.head_dim  # a query meets a key
    one = bills.decode([1])
    row = one.flops - 2 * config.vocab_size * config.hidden_size - pair
    pairs = sum(past + i + 1 for i in range(new - 1))
    return StepWork(work.weight_bytes, work.kv_bytes, work.flops + (new - 1) * row + pairs * pair)
