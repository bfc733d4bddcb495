"""Stage 05, the judge: continuous batching."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from bills import Bills
from leftovers import keeps_nothing
from texts import check_text
from traces import log_uniform

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle, near_tie
from course.measure.ratio import PairedRatio

STAGE = 5
TOLERANCE = 1e-3  # float32 logits against float64 ones
NUM_SLOTS = 8  # of the traces

Json = dict[str, Any]


def request(gate: GateRun, name: str, length: int, new: int, **more: Any) -> Json:
    """A request as the scenarios take it, with a random prompt of bytes."""
    prompt = [gate.rng.randrange(256) for _ in range(length)]
    return {"id": name, "prompt": prompt, "new": new, **more}


OUTPUT = {"token_ids": "tuple", "text": "str", "finish_reason": "FinishReason"}


@dataclass
class Service:
    """What came of some requests: their tokens, why they ended, and the counts of every step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    first_step: dict[str, int] = field(default_factory=dict)
    steps: list[Json] = field(default_factory=list)  # passes, positions, head_rows, new, outputs

    def take(self, step: int, outputs: Any, known: set[str], what: str) -> int:
        """Take in the outputs of one step; returns how many tokens they hold."""
        if not isinstance(outputs, list):
            raise GateFailure(
                Code.WRONG_TYPE, f"{what}: what step {step} returns", "a list of Output",
                repr(outputs)[:80],
            )  # fmt: skip
        count = 0
        for output in outputs:
            if not isinstance(output, dict) or "types" not in output:
                raise GateFailure(
                    Code.WRONG_TYPE, f"{what}: what step {step} returns", "a list of Output",
                    f"a list that holds {output!r:.80}",
                )  # fmt: skip
            name = output["id"]
            if not isinstance(name, str) or name not in known:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: an output for a request that was not added",
                    f"one of {sorted(known)}", repr(name), where=f"step {step}",
                )  # fmt: skip
            if output["types"] != OUTPUT:
                raise GateFailure(
                    Code.WRONG_TYPE, f"{what}: the fields of an Output", str(OUTPUT),
                    str(output["types"]), where=f"step {step}",
                )  # fmt: skip
            if len(output["tokens"]) > 1:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: an Output for each token", "at most one token",
                    str(output["tokens"]), where=f"step {step}",
                )  # fmt: skip
            if name in self.reasons:
                raise GateFailure(
                    Code.TOO_MANY_TOKENS, f"{what}: request {name!r} goes on after it had ended",
                    "nothing more", f"{output['tokens']}", where=f"step {step}",
                )  # fmt: skip
            mine = self.tokens.setdefault(name, [])
            for token in output["tokens"]:
                mine.append(expect.is_int(token, f"{what}: a token of request {name!r}"))
            self.first_step.setdefault(name, step)
            count += len(output["tokens"])
            if output["reason"] is not None:
                self.reasons[name] = output["reason"]
        return count


def serve(
    gate: GateRun, requests: list[Json], what: str, *, num_slots: int = 2,
    capacity: int | None = None, at: list[int] | None = None,
) -> Service:  # fmt: skip
    """Requests through a batcher on nano, the i-th added before step at[i] (all at once, if not
    said), and every text held against an independent model."""
    arrivals = list(map(list, zip(at or [0] * len(requests), requests, strict=True)))
    context = nano_oracle().config.max_context
    most = 20 + max([0, *(at or [])]) + sum(min(r["new"], context) for r in requests)
    service = Service()
    known: set[str] = set()

    def run() -> Json:
        scenario = gate.candidate.start(
            "serve", model="nano", arrivals=arrivals, num_slots=num_slots, capacity=capacity
        )
        for step in scenario:
            index = len(service.steps)
            known.update(r["id"] for when, r in arrivals if when <= index)
            new = service.take(index, step.value["outputs"], known, what)
            service.steps.append({**step.value, "new": new})
            if len(service.steps) > most:
                scenario.stop()
                raise GateFailure(
                    Code.TOO_MANY_TOKENS, f"{what}: there is still work, and nothing left to do",
                    f"at most {most} steps", f"{len(service.steps)}",
                )  # fmt: skip
        assert scenario.finished is not None
        return scenario.finished.value

    ended = expect.result_of(run, what)
    if ended["after"] != []:
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: a step without work", "an empty list", str(ended["after"])
        )
    if service.steps and ended["passes"] != service.steps[-1]["passes"]:
        raise GateFailure(
            Code.WRONG_COUNT, f"{what}: a step without work computes nothing", "0 passes",
            str(ended["passes"] - service.steps[-1]["passes"]),
        )  # fmt: skip
    for one in requests:
        check_request(service, one, what)
    return service


def check_request(service: Service, request: Json, what: str) -> None:
    """One request's text is what an independent model says, and ended where and why it must."""
    name = request["id"]
    where = f"{what}: request {name!r} ({len(request['prompt'])} tokens)"
    eos_ids = () if request.get("ignore_eos") else request.get("eos", ())
    got = service.tokens.get(name, [])
    reason = check_text(request["prompt"], got, request["new"], eos_ids, where)
    if service.reasons.get(name) != reason:
        raise GateFailure(
            Code.WRONG_VALUE, f"{where}: why it ended", f"FinishReason.{reason.upper()}",
            str(service.reasons.get(name)),
        )  # fmt: skip


@pytest.mark.contract
class TestSlots:
    """`SlotCache`, as the attention of nano."""

    def test_each_row_attends_to_its_own_slot(self, gate: GateRun) -> None:
        """rows of different lengths, in any slots, equal their texts alone"""
        passes = [
            ["feed", [2], self.chunk(gate, 1, 7)],
            ["feed", [0], self.chunk(gate, 1, 3)],
            ["feed", [0, 2], self.chunk(gate, 2, 1)],
            ["feed", [2, 0], self.chunk(gate, 2, 1)],
            ["feed", [1], self.chunk(gate, 1, 5)],
            ["feed", [0, 1, 2], self.chunk(gate, 3, 1)],
            ["feed", [1, 2], self.chunk(gate, 2, 3)],
            ["feed", [0, 1, 2], self.chunk(gate, 3, 2)],
        ]
        self.feed(gate, passes, "three slots of different lengths")

    def test_a_slot_that_was_used_before(self, gate: GateRun) -> None:
        """a released slot shows nothing of its last owner"""
        passes = [
            ["feed", [0], self.chunk(gate, 1, 9)],
            ["feed", [1], self.chunk(gate, 1, 4)],
            ["release", 0],
            ["feed", [0], self.chunk(gate, 1, 2)],
            ["feed", [0, 1], self.chunk(gate, 2, 1)],
            ["release", 1],
            ["feed", [1], self.chunk(gate, 1, 1)],
            ["feed", [0, 1], self.chunk(gate, 2, 1)],
        ]
        self.feed(gate, passes, "slots that are used again")

    def test_a_slot_to_the_brim(self, gate: GateRun) -> None:
        """every position of a slot can be used"""
        passes = [
            ["feed", [1], self.chunk(gate, 1, 11)],
            ["feed", [1], self.chunk(gate, 1, 1)],
            ["feed", [0], self.chunk(gate, 1, 12)],
        ]
        self.feed(gate, passes, "slots of 12 positions, filled", capacity=12)

    def test_a_neighbour_does_not_matter(self, gate: GateRun) -> None:
        """another neighbour of the same length changes nothing, bit for bit"""
        first, second = self.chunk(gate, 1, 5), self.chunk(gate, 1, 8)
        other = [[(token + 1) % 256 for token in second[0]]]
        found = []
        for neighbour in (second, other):
            passes = [["feed", [0], first], ["feed", [1], neighbour], ["feed", [0, 1], [[7], [9]]]]
            found.append(self.feed(gate, passes, "two slots")[-1])
        if not (found[0][0] == found[1][0]).all():
            difference = float((found[0][0] - found[1][0]).abs().max())
            raise GateFailure(
                Code.WRONG_LOGITS, "another neighbour changes a row", "the same bits",
                f"off by {difference:.3g}",
            )  # fmt: skip

    @pytest.mark.parametrize(("stored", "more"), [(6, 1), (5, 2)])
    def test_a_full_slot_refuses_more(self, gate: GateRun, stored: int, more: int) -> None:
        """a pass that does not fit is refused before anything has changed"""
        what = f"{more} positions for a slot of 6 that holds {stored}"

        def attempt() -> list[Any]:
            run = gate.candidate.start(
                "overflow", model="nano", capacity=6, stored=stored, more=more
            )
            return [step.value for step in run]

        refusal, logits, positions = expect.result_of(attempt, what)
        if refusal["error"] is None:
            raise GateFailure(
                Code.NO_ERROR_RAISED, f"{what}: accepted", "a ValueError that names `capacity`",
                "no error",
            )  # fmt: skip
        if refusal["kind"] != "ValueError" or "capacity" not in refusal["error"]:
            raise GateFailure(
                Code.WRONG_ERROR, f"{what}: refused, but not in a way that helps",
                "a ValueError that names `capacity`", f"{refusal['kind']}: {refusal['error']}",
            )  # fmt: skip
        wanted = nano_oracle().logits([5, 5])[-1:]
        got = expect.is_tensor(logits, f"{what}: the logits of the other slot", wanted.shape)
        expect.close(
            got, wanted, atol=TOLERANCE, what=f"{what}: the other slot, after the refusal",
            code=Code.STALE_STATE,
        )  # fmt: skip
        if stored < 6 and positions != [list(range(stored, 6))]:
            raise GateFailure(
                Code.STALE_STATE, f"{what}: the slot that was full, after the refusal",
                f"positions {[list(range(stored, 6))]}", str(positions),
                likely="Its length was moved, or reset, before the refusal.",
            )  # fmt: skip

    def chunk(self, gate: GateRun, rows: int, length: int) -> list[list[int]]:
        """Random bytes."""
        return [[gate.rng.randrange(256) for _ in range(length)] for _ in range(rows)]

    def feed(self, gate: GateRun, passes: list[Any], what: str, *, capacity: int = 40) -> list[Any]:
        """Positions and logits of each pass against those of every row's text alone."""

        def run() -> list[Any]:
            scenario = gate.candidate.start(
                "slots", model="nano", num_slots=3, capacity=capacity, passes=passes
            )
            return [step.value for step in scenario]

        found = deque(expect.result_of(run, what))
        texts: dict[int, list[int]] = {}
        logits = []
        for index, (kind, chosen, *rest) in enumerate(passes):
            if kind == "release":
                texts.pop(chosen)
                continue
            values, chunk = found.popleft(), rest[0]
            rows, new = len(chunk), len(chunk[0])
            starts = [len(texts.get(slot, [])) for slot in chosen]
            positions = expect.is_tensor(
                values["positions"], f"{what}: positions of pass {index}", (rows, new)
            )
            wanted = [[start + i for i in range(new)] for start in starts]
            if positions.tolist() != wanted:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{what}: positions of pass {index}", str(wanted),
                    str(positions.tolist()),
                )  # fmt: skip
            logits.append(values["logits"])
            for row, slot in enumerate(chosen):
                texts[slot] = texts.get(slot, []) + chunk[row]
                expect.close(
                    values["logits"][row], nano_oracle().logits(texts[slot])[-new:],
                    atol=TOLERANCE, row="position",
                    what=f"{what}: pass {index}, slot {slot} at length {len(texts[slot])}",
                )  # fmt: skip
        return logits


@pytest.mark.contract
class TestBatcher:
    """`ContinuousBatcher`, on nano."""

    def test_each_request_is_its_own_text(self, gate: GateRun) -> None:
        """each request equals its text alone, whoever comes and goes beside it"""
        lengths, news = (5, 1, 12, 3, 30, 2, 7), (9, 3, 1, 14, 5, 8, 2)
        requests = [
            request(gate, f"r{i}", n, new)
            for i, (n, new) in enumerate(zip(lengths, news, strict=True))
        ]
        serve(gate, requests, "seven requests in three slots", num_slots=3)

    def test_requests_come_while_others_run(self, gate: GateRun) -> None:
        """requests are taken in while others run, and after a pause"""
        requests = [request(gate, name, 4 + i, 5) for i, name in enumerate("abcdef")]
        serve(gate, requests, "requests that come one by one", at=[0, 2, 3, 3, 14, 40])

    def test_an_empty_queue_at_the_start(self, gate: GateRun) -> None:
        """a step without work returns an empty list, and work may come later"""
        service = serve(gate, [request(gate, "late", 6, 4)], "a request that comes late", at=[3])
        if any(step["passes"] for step in service.steps[:3]):
            raise GateFailure(
                Code.WRONG_COUNT, "a step without work computes nothing", "0 passes",
                str(service.steps[2]["passes"]),
            )  # fmt: skip
        serve(gate, [], "no requests at all")

    def test_more_slots_than_requests(self, gate: GateRun) -> None:
        """slots that nobody needs do no harm"""
        requests = [request(gate, "a", 5, 6), request(gate, "b", 9, 3)]
        serve(gate, requests, "two requests in eight slots", num_slots=8)

    def test_one_slot(self, gate: GateRun) -> None:
        """one slot serves one after the other"""
        requests = [request(gate, name, 3, 4) for name in "abc"]
        serve(gate, requests, "three requests in one slot", num_slots=1)

    def test_end_tokens(self, gate: GateRun) -> None:
        """an end token ends its request with STOP, and is its last token"""
        oracle = nano_oracle()
        prompt, expected = oracle.prompt(gate.rng, 9, 12)
        at = next(i for i in range(2, 12) if expected[i] not in expected[:i])
        end, unsaid = expected[at], next(t for t in range(256) if t not in expected)
        requests = [
            {"id": "stops", "prompt": prompt, "new": 12, "eos": [end]},
            {"id": "ignores", "prompt": prompt, "new": 12, "eos": [end], "ignore_eos": True},
            {"id": "at once", "prompt": prompt, "new": 12, "eos": [expected[0], end]},
            request(gate, "other", 5, 12),
            request(gate, "last", 5, 6),
            {"id": "last allowed", "prompt": prompt, "new": at + 1, "eos": [end]},
            {"id": "the second", "prompt": prompt, "new": 12, "eos": [unsaid, end]},
        ]
        serve(gate, requests, "end tokens")

    def test_limits(self, gate: GateRun) -> None:
        """limits of 0 and 1, and a prompt that fills the context"""
        context = nano_oracle().config.max_context
        requests = [
            request(gate, "none", 5, 0),
            request(gate, "one", 5, 1),
            request(gate, "full", context, 9),
            request(gate, "nearly", context - 2, 9),
            request(gate, "huge", 250, 10**9),
            request(gate, "none too", 5, 0),
            request(gate, "some", 2, 6),
        ]
        serve(gate, requests, "limits")
        service = serve(gate, [request(gate, "none", 5, 0)], "max_new_tokens = 0")
        if service.steps[-1]["passes"]:
            raise GateFailure(
                Code.WRONG_COUNT, "max_new_tokens = 0 must compute nothing", "0 forward passes",
                str(service.steps[-1]["passes"]),
            )  # fmt: skip

    def test_a_slot_smaller_than_the_context(self, gate: GateRun) -> None:
        """a request may fill its slot to the last position"""
        requests = [request(gate, "fits", 8, 5), request(gate, "too", 12, 1)]
        serve(gate, requests, "slots of 12 positions", capacity=12)

    def test_a_slot_larger_than_the_context(self, gate: GateRun) -> None:
        """the context ends a text, also where its slot has room for more"""
        context = nano_oracle().config.max_context
        requests = [request(gate, "ends", context - 2, 9), request(gate, "other", 5, 6)]
        serve(gate, requests, "slots larger than the context", capacity=context + 8)

    def test_the_order_of_coming(self, gate: GateRun) -> None:
        """requests are admitted in the order of their coming"""
        lengths = (20, 3, 11, 2, 15)
        requests = [request(gate, f"r{i}", n, 4 + i) for i, n in enumerate(lengths)]
        service = serve(gate, requests, "five requests in two slots")
        came = [service.first_step[r["id"]] for r in requests]
        if came != sorted(came):
            raise GateFailure(
                Code.WRONG_VALUE, "a request was overtaken", "first tokens in the order of coming",
                f"first tokens in the steps {came}",
            )  # fmt: skip

    def test_a_slot_that_prefill_frees(self, gate: GateRun) -> None:
        """a slot that a prefill frees, or that nobody needed, is taken in the same step"""
        requests = [
            request(gate, "a", 5, 1), request(gate, "none", 4, 0), request(gate, "b", 3, 1),
            request(gate, "c", 6, 3),
        ]  # fmt: skip
        service = serve(gate, requests, "requests of one token in one slot", num_slots=1)
        first = {name: service.first_step[name] for name in "abc"}
        if set(first.values()) != {0}:
            raise GateFailure(
                Code.WRONG_COUNT, "as long as a slot is free, the next request is admitted",
                "first tokens of a, b and c in step 0", f"in the steps {first}",
            )  # fmt: skip

    def test_the_order_of_computing(self, gate: GateRun) -> None:
        """a step returns its tokens in the order in which they were computed"""
        requests = [request(gate, "a", 5, 6), request(gate, "z", 4, 4)]
        service = serve(gate, requests, "a request that comes beside another", at=[0, 2])
        came = [output["id"] for output in service.steps[2]["outputs"]]
        if came[0] != "z" and sorted(came) == ["a", "z", "z"]:
            raise GateFailure(
                Code.WRONG_VALUE, "the outputs of a step that admits `z` beside `a`",
                "z from its prefill, then a and z from the decode pass", ", ".join(came),
            )  # fmt: skip

    def test_two_tokens_at_the_beginning(self, gate: GateRun) -> None:
        """a newcomer gets a token from its prefill and one from the decode pass of the same step"""
        service = serve(gate, [request(gate, "a", 4, 6)], "a request of six tokens")
        came = [step["new"] for step in service.steps]
        if came[:1] == [1]:
            raise GateFailure(
                Code.WRONG_VALUE, "the tokens of each step, one request of six tokens",
                str([2, 1, 1, 1, 1]), str(came),
                likely="The newcomer is left out of the decode pass of its first step.",
            )  # fmt: skip

    def test_tokens_come_as_they_are_computed(self, gate: GateRun) -> None:
        """a step makes at most one decode pass, and returns its tokens"""
        requests = [request(gate, name, 4, 6) for name in "ab"]
        service = serve(gate, requests, "two requests of six tokens")
        for index, step in enumerate(service.steps):
            if step["new"] > (4 if index == 0 else 2):
                raise GateFailure(
                    Code.NOT_STREAMING, "a request gets one token a step, and one from its prefill",
                    "at most 2 tokens", f"{step['new']} in step {index}",
                )  # fmt: skip
        passes = [0, *(step["passes"] for step in service.steps)]
        made = [after - before for before, after in pairwise(passes)]
        if made != [3] + [1] * (len(made) - 1):
            raise GateFailure(
                Code.WRONG_COUNT, "a pass for each prefill, and one for all who decode",
                f"3 passes, then 1 in each step: {[3] + [1] * (len(made) - 1)}", str(made),
            )  # fmt: skip

    def test_an_id_may_come_again(self, gate: GateRun) -> None:
        """a batcher that has served is as good as new"""
        requests = [request(gate, "a", 5, 4), request(gate, "b", 9, 3)]
        arrivals = [[0, requests[0]], [0, requests[1]], [12, requests[0]], [12, requests[1]]]
        found: list[Any] = []

        def run() -> None:
            scenario = gate.candidate.start("serve", model="nano", arrivals=arrivals, num_slots=2)
            found.extend(step.value["outputs"] for step in scenario)

        expect.result_of(run, "the same two requests twice")
        first, second = Service(), Service()
        for index, outputs in enumerate(found):
            half = first if index < 12 else second
            half.take(index, outputs, {"a", "b"}, "the same two requests twice")
        for half, name in ((first, "the first time"), (second, "the second time")):
            for one in requests:
                check_request(half, one, name)

    def test_two_batchers(self, gate: GateRun) -> None:
        """two batchers in turn do not disturb each other"""
        lists = [
            [request(gate, "a", 5, 6), request(gate, "b", 3, 6)],
            [request(gate, "a", 2, 6), request(gate, "b", 8, 6)],
        ]
        services = [Service(), Service()]

        def interleave() -> None:
            runs = [
                gate.candidate.start(
                    "serve", model="nano", arrivals=[[0, r] for r in requests], num_slots=2
                )
                for requests in lists
            ]
            for index in range(5):
                for run, service in zip(runs, services, strict=True):
                    service.take(index, run.step().value["outputs"], {"a", "b"}, "in turn")
            for run in runs:
                run.stop()

        expect.result_of(interleave, "two batchers in turn")
        for service, requests in zip(services, lists, strict=True):
            for one in requests:
                got = service.tokens.get(one["id"], [])
                if len(got) != 6 or nano_oracle().first_wrong(one["prompt"], got):
                    raise GateFailure(
                        Code.STALE_STATE, "two batchers in turn disturb each other",
                        str(nano_oracle().greedy(one["prompt"], 6)[0]), str(got),
                    )  # fmt: skip

    @pytest.mark.parametrize(
        ("argument", "more", "kinds", "what"),
        [
            ("prompt_ids", {"prompt": []}, ["ValueError"], "an empty prompt"),
            ("prompt_ids", {"prompt": [320]}, ["ValueError"], "a token past the vocabulary"),
            ("prompt_ids", {"prompt": [1] * 257}, ["ValueError"], "a prompt past the context"),
            ("capacity", {"prompt": [1] * 13}, ["ValueError"], "a prompt longer than a slot"),
            ("capacity", {"new": 10}, ["ValueError"], "a request longer than a slot"),
            ("request_id", {"id": "good"}, ["ValueError"], "the id of a waiting request"),
            ("request_id", {"id": "good"}, ["ValueError"], "the id of a running request"),
            ("temperature", {"temperature": 0.7}, ["ValueError"], "a request to be sampled"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )  # fmt: skip
    def test_bad_requests_are_refused(
        self, gate: GateRun, argument: str, more: Json, kinds: list[str], what: str
    ) -> None:
        """a bad request is refused at once, by name, and the others are served"""
        good = request(gate, "good", 4, 3)
        bad = {**request(gate, "bad", 4, 3), **more}
        served: list[Any] = []

        def attempt() -> None:
            run = gate.candidate.start(
                "refused", model="nano", requests=[good], bad=bad, num_slots=1, capacity=12,
                steps=int("running" in what),
            )  # fmt: skip
            served.extend(run.step().value)
            run.step()

        expect.rejects(attempt, argument, what, kinds=kinds)
        service = Service()
        for index, outputs in enumerate(served):
            service.take(index, outputs, {"good"}, what)
        check_request(service, good, f"beside {what}")

    @pytest.mark.parametrize("size", [0, -1])
    @pytest.mark.parametrize("argument", ["num_slots", "capacity"])
    def test_sizes_below_one_are_refused(self, gate: GateRun, argument: str, size: int) -> None:
        """a number of slots or a capacity below 1 is refused"""
        sizes: Json = {"num_slots": 2, "capacity": 8, argument: size}

        def attempt() -> None:
            gate.candidate.start("serve", model="nano", arrivals=[], **sizes).step()

        expect.rejects(attempt, argument, f"{argument} = {size}")


@dataclass(frozen=True)
class Simulation:
    """Requests of known lengths, served in slots by the rules of the chapter."""

    decode_passes: int
    occupancy: float  # of the slots, over the decode passes made while requests wait
    resident: float  # mean positions stored over positions reserved


def simulate(requests: list[Json], num_slots: int, capacity: int) -> Simulation:
    """Admit while a slot is free, decode all that run, retire what has ended."""
    waiting = deque((len(r["prompt"]), r["new"]) for r in requests)
    running: list[list[int]] = []  # [positions stored, tokens still to come]
    passes, busy, stored = 0, [], []
    while waiting or running:
        while waiting and len(running) < num_slots:
            length, new = waiting.popleft()
            if new > 1:
                running.append([length, new - 1])
        if not running:
            continue
        passes += 1
        if waiting:
            busy.append(len(running) / num_slots)
        for row in running:
            row[0] += 1
            row[1] -= 1
        stored.append(sum(length for length, _ in running) / (num_slots * capacity))
        running = [row for row in running if row[1] > 0]
    mean = statistics.fmean
    return Simulation(passes, mean(busy) if busy else 1.0, mean(stored) if stored else 0.0)


def static_passes(requests: list[Json], num_slots: int) -> int:
    """Decode passes of static batches in the order of coming."""
    news = [r["new"] for r in requests]
    groups = [news[i : i + num_slots] for i in range(0, len(news), num_slots)]
    return sum(max(group) - 1 for group in groups)


def trace(gate: GateRun, count: int, shortest: int, longest: int, prompt: int) -> list[Json]:
    """Requests whose outputs are log-uniform, dealt out evenly to static batches: see `traces`."""
    lengths = log_uniform(gate.rng, count, shortest, longest, prompt, hand=NUM_SLOTS)
    return [request(gate, f"r{i}", length, new) for i, (length, new) in enumerate(lengths)]


@pytest.mark.number
def test_steps(gate: GateRun) -> None:
    """decode steps, occupancy and positions of a trace, counted"""
    capacity = nano_oracle().config.max_context
    requests = trace(gate, 32, 8, 128, 32)
    service = serve(gate, requests, "a trace of 32 requests in 8 slots", num_slots=NUM_SLOTS)
    mine = simulate(requests, NUM_SLOTS, capacity)
    prompts = {r["id"]: len(r["prompt"]) for r in requests}
    decode_passes, busy, before, waiting = 0, [], 0, len(requests)
    for index, step in enumerate(service.steps):
        admitted = [name for name, first in service.first_step.items() if first == index]
        waiting -= len(admitted)
        rows = step["positions"] - before - sum(prompts[name] for name in admitted)
        before = step["positions"]
        decode_passes += rows > 0
        if waiting and rows > 0:
            busy.append(min(rows, step["new"] - len(admitted)) / NUM_SLOTS)
    static = static_passes(requests, NUM_SLOTS)
    gate.exact(
        "steps", round(static / max(1, decode_passes), 3), at_least=gate.bar("steps"),
        text=f"{decode_passes} decode steps against {static} of static batches: "
        f"{static / max(1, decode_passes):.2f}x fewer",
        message="a slot that falls free must be taken again in the next step",
    )  # fmt: skip
    occupancy = statistics.fmean(busy) if busy else 0.0
    gate.exact(
        "occupancy", round(occupancy, 3), at_least=gate.bar("occupancy"),
        text=f"{occupancy:.2f} of the slots do useful work while requests wait",
        message="slots stand idle, or compute for nobody, while requests wait",
    )  # fmt: skip
    useful = sum(len(r["prompt"]) + r["new"] - 1 for r in requests)
    positions = service.steps[-1]["positions"]
    gate.exact(
        "positions", positions, equals=useful,
        text=f"{positions:,}, of which {useful:,} are somebody's",
        message="no padding, no idle row: only tokens that are fed are computed",
    )  # fmt: skip
    tokens = sum(r["new"] for r in requests)
    head_rows = service.steps[-1]["head_rows"]
    gate.exact(
        "head_rows", head_rows, equals=tokens,
        text=f"{head_rows:,} rows through the LM head for {tokens:,} tokens",
        message="one row of each sequence needs the head, in a prefill too",
    )  # fmt: skip
    passes = service.steps[-1]["passes"]
    gate.exact(
        "passes", passes, at_most=len(requests) + mine.decode_passes,
        text=f"{passes} forward passes, {len(requests)} of them prefills",
        message="one pass for each prefill, and one for each decode step",
    )  # fmt: skip
    gate.report(
        "resident", round(100 * mine.resident, 1), unit="%",
        text=f"{100 * mine.resident:.0f}% of the positions that the slots reserve hold a token, "
        "on average",
        note="the rest is reserved for texts that end sooner: stage 07 pays that bill",
    )  # fmt: skip


@pytest.mark.number
def test_what_is_left(gate: GateRun) -> None:
    """nothing is kept of requests that have ended"""
    requests = [request(gate, f"k{i}", 4, 3) for i in range(3)]
    likely = "Logits, or tensors of requests that have ended, are kept."
    keeps_nothing(gate, "serving three requests", 6, likely, requests=requests)


@pytest.mark.number
def test_work(gate: GateRun) -> None:
    """operations of the same texts in short slots and in long ones"""
    requests = [request(gate, f"w{i}", 2 + i, 12 + i) for i in range(6)]
    short = 64  # the longest needs 23; who attends in steps of 16, 32 or 64 loses nothing
    long = nano_oracle().config.max_context
    few, many = (
        expect.result_of(
            lambda slot=slot: gate.candidate.call(
                "work", model="nano", requests=requests, num_slots=4, capacity=slot
            ),
            f"six requests in slots of {slot} positions",
        )
        for slot in (short, long)
    )
    gate.exact(
        "work", round(many / max(1, few), 3), equals=1.0, code=Code.TOO_MUCH_TRAFFIC,
        text=f"{many / max(1, few):.2f}x the operations in slots of {long} positions as in slots "
        f"of {short}",
        message="a step works over what its slots reserve, and not over what they hold",
        likely="Attention is given all columns of a slot; those past the longest context are empty",
    )  # fmt: skip


@pytest.mark.number
def test_wall_time(gate: GateRun) -> None:
    """the whole trace against static batches"""
    race = Race(gate)
    ratio = PairedRatio()
    for index in range(gate.bar("races")):
        gate.tell(f"wall time: race {index + 1} of {gate.bar('races')}")
        ratio.add(*race.run())
    name = "wall_time"

    def words(found: PairedRatio) -> str:
        low, high = min(found.ratios), max(found.ratios)
        return f"{found.median:.2f}x faster than static, {low:.2f} to {high:.2f} over {len(found)}"

    gate.report(name, round(ratio.median, 2), words(ratio), unit="x", note=race.prediction())


class Race:
    """A trace through both workers, a step of each in turn, each until it has finished."""

    def __init__(self, gate: GateRun) -> None:
        self.gate = gate
        self.model = gate.model
        count, shortest, longest, prompt = gate.bar("trace")
        self.shape = (count, shortest, longest, prompt)
        self.capacity = longest + prompt
        self.requests: list[Json] = []
        self.seconds: dict[str, float] = {}

    def prediction(self) -> str:
        """What the decode steps of the last trace promise, and the floor of its passes."""
        steps = simulate(self.requests, NUM_SLOTS, self.capacity).decode_passes
        gain = static_passes(self.requests, NUM_SLOTS) / steps
        prefills = len(self.requests)
        bills = Bills(self.gate)
        read = bills.decode([1]).weight_bytes / bills.roofline.read_bandwidth
        floor, took = (prefills + steps) * read, self.seconds["candidate"]
        return (
            f"predicted {gain:.2f}x from the decode steps; {prefills} prefills of one prompt each "
            f"cost the difference. Floor: {prefills + steps} passes read the weights in "
            f"{floor:.2f} of {took:.2f} s: {floor / took:.0%}"
        )

    def run(self) -> tuple[float, float]:
        """Seconds of the baseline, and of the candidate."""
        requests = self.requests = trace(self.gate, *self.shape)
        sides: dict[str, Callable[[], Any]] = {
            "baseline": lambda: self.gate.baseline.start(
                "static_timed", model=self.model, requests=requests, num_slots=NUM_SLOTS
            ),
            "candidate": lambda: self.gate.candidate.start(
                "serve_timed", model=self.model, requests=requests, num_slots=NUM_SLOTS,
                capacity=self.capacity,
            ),
        }  # fmt: skip
        runs = {side: start() for side, start in sides.items()}
        seconds = dict.fromkeys(runs, 0.0)
        services = {side: Service() for side in runs}
        known = {r["id"] for r in requests}
        active = list(runs)
        while active:
            for side in tuple(active):
                step = expect.result_of(runs[side].step, f"the trace on {self.model}")
                seconds[side] += step.seconds
                if step.done:
                    active.remove(side)
                else:
                    services[side].take(0, step.value, known, f"the trace on {self.model}")
        for one in requests:
            self.compare(one, *(services[side].tokens.get(one["id"], []) for side in runs))
        self.seconds = seconds
        return seconds["baseline"], seconds["candidate"]

    def compare(self, request: Json, baseline: list[int], candidate: list[int]) -> None:
        """Every request has its tokens, and they are those of the baseline, near-ties aside."""
        what = f"request {request['id']!r} on {self.model}"
        if len(candidate) != request["new"]:
            raise GateFailure(
                Code.TOO_FEW_TOKENS if len(candidate) < request["new"] else Code.TOO_MANY_TOKENS,
                f"{what}: the text ends in the wrong place", f"{request['new']} tokens",
                str(len(candidate)),
            )  # fmt: skip
        parted = next(
            (i for i, (a, b) in enumerate(zip(baseline, candidate, strict=True)) if a != b), None
        )
        if parted is None:
            return
        prefix = request["prompt"] + candidate[:parted]
        if not near_tie(self.model, self.gate.device, prefix, candidate[parted], baseline[parted]):
            raise GateFailure(
                Code.WRONG_TOKEN, f"{what} differs from the baseline's", str(baseline[parted]),
                str(candidate[parted]), where=f"token {parted} of {request['new']}",
            )  # fmt: skip
