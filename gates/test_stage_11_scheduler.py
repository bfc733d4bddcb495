"""Stage 11, the judge: the scheduler."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from scheduling import OUTPUT, Desk
from texts import check_text
from traces import log_uniform
from two_sizes import TwoSizes

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun
from course.check.oracle import nano_oracle, near_tie
from course.measure.ratio import PairedRatio

STAGE = 11

MOST_KEPT = 16 << 10  # bytes; the ids of 800 that were preempted alone take 40,000

Json = dict[str, Any]


@pytest.mark.contract
class TestAdding:
    """What `add` takes on, ends at once, or refuses."""

    def test_one_request(self, gate: GateRun) -> None:
        """one request is admitted, decoded to its limit, and leaves nothing behind"""
        desk = Desk(gate, 8, 4, "one request", context=32, roomy=True)
        desk.add(desk.request(5, 7))
        desk.finish()
        desk.step()  # without work: an empty step, and no Output
        desk.add(desk.request(1, 1))
        desk.finish()

    def test_a_limit_of_zero(self, gate: GateRun) -> None:
        """a limit of 0 ends at once with LENGTH, and needs no room"""
        desk = Desk(gate, 2, 4, "a limit of 0", max_running=1)
        desk.ends_at_once(desk.request(3, 0), "length")
        desk.add(desk.request(3, 4))
        desk.ends_at_once(desk.request(30, 0), "length")
        desk.step()
        desk.ends_at_once(desk.request(3, 0), "length")
        desk.finish()

    def test_what_can_never_fit(self, gate: GateRun) -> None:
        """a request that can never fit is refused at once, with both numbers, and stops nobody"""
        desk = Desk(gate, 5, 4, "a request that never fits", max_running=2)
        first = desk.add(desk.request(9, 3))
        for length, new in ((21, 1), (17, 5), (2, 20), (20, 2), (60, 60)):
            request = desk.request(length, new)
            why = desk.ends_at_once(request, "refused")
            needed = desk.blocks_for(length + new - 1)
            if not {str(needed), "5"} <= set(numbers_in(why)):
                raise GateFailure(
                    Code.WRONG_VALUE, f"the reason for refusing {length} + {new} tokens",
                    f"says that {needed} blocks are needed and that there are 5", repr(why),
                    likely="Whoever reads it wants to know by how much it does not fit.",
                )  # fmt: skip
        desk.add(desk.request(4, 4))
        desk.step()
        desk.ends_at_once(desk.request(21, 9), "refused")
        desk.finish()
        must_have_ended(desk, first)

    def test_what_just_fits(self, gate: GateRun) -> None:
        """a request that takes the pool to its last place is served: the last token is never fed"""
        for length, new in ((20, 1), (17, 4), (1, 20), (8, 13)):
            desk = Desk(gate, 5, 4, f"{length} + {new} tokens", watermark=2)
            desk.add(desk.request(length, new))
            desk.add(desk.request(2, 3))
            desk.finish()

    def test_the_context(self, gate: GateRun) -> None:
        """a prompt as long as the context says one token; the context ends a text"""
        desk = Desk(gate, 6, 4, "a context of 24", context=24)
        desk.add(desk.request(24, 5))
        desk.add(desk.request(20, 100))
        desk.add(desk.request(1, 500, ignore_eos=True))
        desk.finish()
        if desk.tally.ended != ["r0", "r1", "r2"]:
            raise GateFailure(
                Code.OUT_OF_TURN, "the context: who ended when", "['r0', 'r1', 'r2']",
                str(desk.tally.ended),
            )  # fmt: skip

    def test_end_tokens(self, gate: GateRun) -> None:
        """an end token, in the first step too, ends with STOP and is the last; others do not"""
        desk = Desk(gate, 80, 4, "end tokens", context=40, roomy=True)
        for new in (1, 2, 5):
            desk.add(desk.ends_after(6, new, 30))
        request = desk.ends_after(7, 3, 3)
        desk.add(request)  # at its limit and an end token: STOP
        several = desk.ends_after(5, 2, 9)
        other = next(t for t in range(256) if t not in desk.text(several, 9))
        desk.add({**several, "eos": [other, *several["eos"]]})
        desk.add(desk.ends_after(4, 2, 6, ignore_eos=True))
        prompt = desk.request(4, 3)
        while prompt["prompt"][0] in desk.text(prompt, 3):
            prompt = desk.request(4, 3)
        desk.add({**prompt, "eos": prompt["prompt"][:1]})  # an end token in the prompt is none
        desk.finish()

    @pytest.mark.parametrize(
        ("argument", "more", "kinds", "what"),
        [
            ("prompt_ids", {"prompt": []}, ["ValueError"], "an empty prompt"),
            ("prompt_ids", {"prompt": [256]}, ["ValueError"], "a token past the vocabulary"),
            ("prompt_ids", {"prompt": [1] * 257}, ["ValueError"], "a prompt past the context"),
            ("prompt_ids", {"prompt": [1.0]}, ["TypeError", "ValueError"], "a token of 1.0"),
            ("eos_ids", {"eos": [-1]}, ["ValueError"], "an end token of -1"),
            ("request_id", {"id": "r0"}, ["ValueError"], "the id of one that runs"),
            ("request_id", {"id": "r1"}, ["ValueError"], "the id of one that waits"),
            ("request_id", {"id": "r0", "new": 0}, ["ValueError"], "a served id for 0 tokens"),
            ("request_id", {"id": "r1", "new": 99}, ["ValueError"], "a served id, and too large"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " in value else "",
    )
    def test_bad_requests(
        self, gate: GateRun, argument: str, more: Json, kinds: list[str], what: str
    ) -> None:
        """a bad request is refused by name, and the others are served"""
        desk = Desk(gate, 9, 4, "a bad request", max_running=1)
        for _ in range(2):
            desk.add(desk.request(5, 3))
        desk.step()
        desk.refuses({**desk.request(3, 3), **more}, argument, what, kinds)
        desk.finish()

    def test_an_id_can_be_used_again(self, gate: GateRun) -> None:
        """the id of one that has ended, was aborted or refused may come again"""
        desk = Desk(gate, 4, 4, "ids that come again", max_running=2)
        for _ in range(2):
            desk.add({**desk.request(3, 2), "id": "again"})
            desk.step()
            desk.abort("again")
            desk.ends_at_once({**desk.request(30, 2), "id": "again"}, "refused")
            desk.add({**desk.request(2, 3), "id": "again"})
            desk.finish()
            desk.ends_at_once({**desk.request(2, 0), "id": "again"}, "length")

    @pytest.mark.parametrize(
        ("argument", "value", "kinds"),
        [
            ("max_running", 0, ["ValueError"]),
            ("max_running", 2.0, ["TypeError", "ValueError"]),
            ("max_running", True, ["TypeError", "ValueError"]),
            ("watermark", -1, ["ValueError"]),
            ("watermark", None, ["TypeError", "ValueError"]),
            ("watermark", False, ["TypeError", "ValueError"]),
        ],
    )
    def test_bad_settings(self, gate: GateRun, argument: str, value: Any, kinds: list[str]) -> None:
        """max_running is at least 1, watermark at least 0"""
        settings: Json = {"max_running": 4, "watermark": 0, argument: value}
        expect.rejects(
            lambda: gate.candidate.call(
                "new", desk="bad", num_blocks=4, block_size=4, vocab_size=256, max_context=64,
                **settings,
            ),
            argument, f"{argument} = {value!r}", kinds=kinds,
        )  # fmt: skip


def numbers_in(text: str) -> list[str]:
    """Whole numbers of a sentence."""
    return "".join(c if c.isdigit() else " " for c in text).split()


def must_have_ended(desk: Desk, *names: str) -> None:
    """These have been served to the end."""
    for name in names:
        if name not in desk.tally.ended:
            raise GateFailure(
                Code.STARVED, f"{desk.what}: {name} is not served to its end", "it ends",
                str(desk.tally.ended),
            )  # fmt: skip


@pytest.mark.contract
class TestQueues:
    """Who runs and who waits, where there is room for all."""

    def test_first_come_first_served(self, gate: GateRun) -> None:
        """as many run as may, in the order of arrival; who ends makes room in the next step"""
        desk = Desk(gate, 20, 8, "ten requests", max_running=4, context=40, roomy=True)
        for i in range(10):
            desk.add(desk.request(3 + 5 * (i % 3), 2 + (7 * i) % 5))
        desk.finish()

    def test_many_at_once(self, gate: GateRun) -> None:
        """as many are admitted in one step as there is room for, be they ever so many"""
        desk = Desk(
            gate, 2 * 80, 4, "eighty requests", max_running=80, context=8, roomy=True
        )  # fmt: skip
        for _ in range(80):
            desk.add(desk.request(3, 2))
        desk.finish()

    def test_they_come_while_others_run(self, gate: GateRun) -> None:
        """newcomers are prefilled beside those that decode, all in one step"""
        desk = Desk(
            gate, 50, 4, "requests that come one by one", max_running=5, context=40, roomy=True
        )
        for i in range(8):
            desk.add(desk.request(1 + 6 * (i % 2), 6))
            if i % 3 != 1:
                desk.step()
        desk.finish()

    @pytest.mark.parametrize("most", [1, 2])
    def test_few_may_run(self, gate: GateRun, most: int) -> None:
        """max_running is neither exceeded nor missed"""
        desk = Desk(gate, 20, 4, f"max_running = {most}", max_running=most, context=40, roomy=True)
        for _ in range(4):
            desk.add(desk.request(5, 3))
        desk.finish()

    def test_an_abort(self, gate: GateRun) -> None:
        """one that waits, runs, or was preempted can be aborted; others are not served any more"""
        desk = Desk(gate, 6, 2, "aborts", max_running=3)
        names = [desk.add(desk.request(3, 7)) for _ in range(5)]
        desk.abort("nobody")
        desk.abort(names[4])  # it waits, and has never run
        desk.step()
        while desk.tally.preempted == 0 and len(desk.live) == 4:
            desk.step()
        desk.abort(names[2])  # it was preempted
        desk.abort(names[1])
        desk.abort(names[1])  # for the second time
        desk.step()
        desk.abort(names[0])  # the oldest, which runs
        desk.step()
        late = desk.add(desk.request(2, 2))
        desk.finish()
        desk.abort(late)  # it has ended
        must_have_ended(desk, names[3], late)

    def test_the_last_one_is_aborted(self, gate: GateRun) -> None:
        """after an abort of all there is no work, and work may come"""
        desk = Desk(gate, 6, 2, "an abort of all", max_running=1)
        names = [desk.add(desk.request(4, 4)) for _ in range(2)]
        desk.step()
        for name in names:
            desk.abort(name)
        desk.step()
        desk.add(desk.request(3, 3))
        desk.finish()

    def test_two_schedulers(self, gate: GateRun) -> None:
        """two schedulers do not know each other"""
        desks = [
            Desk(gate, 7, 4, "one of two schedulers", max_running=2, name=name) for name in "xy"
        ]
        try:
            for _ in range(3):
                for desk in desks:
                    desk.add(desk.request(5, 6))
            while any(desk.live for desk in desks):
                for desk in desks:
                    desk.step()
        except GateFailure as failure:
            if failure.code in (Code.WRONG_VALUE, Code.CRASHED, Code.STARVED, Code.OUT_OF_TURN):
                failure.code = Code.STALE_STATE
            raise

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_wrong_number_of_tokens(self, gate: GateRun, count: int) -> None:
        """one token for each sequence of the step; with another number nothing changes"""
        desk = Desk(gate, 20, 4, "another number of tokens", max_running=2, context=40)
        for _ in range(3):
            desk.add(desk.request(5, 3))
        desk.refuses_tokens([7] * count)
        desk.step()
        desk.refuses_tokens([7] * count)
        desk.finish()


@pytest.mark.contract
class TestPreemption:
    """Too few blocks for all."""

    def test_the_newest_gives_way(self, gate: GateRun) -> None:
        """where no block is free the newest gives all of its back, keeps its tokens, and waits"""
        desk = Desk(gate, 6, 2, "three that grow", max_running=3)
        names = [desk.add(desk.request(3, 9)) for _ in range(3)]
        desk.finish()
        must_have_ended(desk, *names)

    def test_one_gives_way_to_itself(self, gate: GateRun) -> None:
        """the one that needs a block may be the newest: it is not in the step then"""
        desk = Desk(gate, 5, 2, "the newest needs a block", max_running=2)
        desk.add(desk.request(4, 5))  # it needs its third block when the other needs its second
        desk.add(desk.request(2, 5))
        desk.finish()

    def test_several_at_once(self, gate: GateRun) -> None:
        """as many give way as it takes, and no more"""
        desk = Desk(gate, 12, 1, "blocks of one token", max_running=6)
        for _ in range(6):
            desk.add(desk.request(1, 12))
        desk.finish()

    def test_nobody_gives_way_while_a_block_is_free(self, gate: GateRun) -> None:
        """the last free block is used before anybody is preempted"""
        desk = Desk(gate, 4, 4, "the last block", max_running=2, watermark=0)
        desk.add(desk.request(4, 5))
        desk.add(desk.request(3, 6))
        desk.finish()
        if desk.tally.preempted:
            raise GateFailure(
                Code.WRONG_VALUE, f"{desk.what}: preemptions, where both fit", "0",
                str(desk.tally.preempted),
            )  # fmt: skip

    def test_nobody_is_admitted_in_a_step_that_preempts(self, gate: GateRun) -> None:
        """a victim that would fit at once, since its twin has what it needs, waits for a step"""
        desk = Desk(gate, 10, 2, "two of one prompt that grow", max_running=2)
        first = desk.request(8, 8)
        for name in ("one", "two"):
            desk.add({**first, "id": name})
        desk.finish()

    def test_a_long_prompt_is_not_passed_over(self, gate: GateRun) -> None:
        """one that does not fit keeps those behind it waiting, and is served"""
        desk = Desk(gate, 10, 2, "a long prompt behind two short ones", max_running=4)
        for _ in range(2):
            desk.add(desk.request(3, 6))
        long = desk.add(desk.request(17, 3))
        short = [desk.add(desk.request(1, 2)) for _ in range(6)]
        desk.step()
        for _ in range(3):
            short.append(desk.add(desk.request(1, 2)))
            desk.step()
        desk.finish()
        must_have_ended(desk, long, *short)

    @pytest.mark.parametrize("watermark", [1, 2, 3])
    def test_the_watermark(self, gate: GateRun, watermark: int) -> None:
        """admission leaves the watermark free, each of several in one step too"""
        desk = Desk(gate, 9, 2, f"watermark = {watermark}", max_running=8, watermark=watermark)
        for length in (3, 3, 4, 2, 5, 3, 2):
            desk.add(desk.request(length, 4))
        desk.finish()

    @pytest.mark.parametrize("watermark", [2, 7, 1000])
    def test_the_watermark_where_nothing_runs(self, gate: GateRun, watermark: int) -> None:
        """where nothing runs the watermark is waived, or nobody would ever be admitted"""
        desk = Desk(gate, 6, 2, f"watermark = {watermark}", max_running=4, watermark=watermark)
        for length in (9, 11, 4, 10):
            desk.add(desk.request(length, 2 if length > 9 else 3))
        desk.finish()

    def test_aborts_make_room(self, gate: GateRun) -> None:
        """blocks of an aborted one are there for the next step"""
        desk = Desk(gate, 6, 4, "an abort for room", max_running=3)
        first = desk.add(desk.request(16, 4))
        second = desk.add(desk.request(17, 4))
        desk.step()
        desk.abort(first)
        if second not in desk.step():
            raise GateFailure(
                Code.STARVED, f"{desk.what}: {second} fits since {first} is gone",
                "it is in the next step", "it is not",
            )  # fmt: skip
        desk.finish()

    def test_end_tokens_of_the_preempted(self, gate: GateRun) -> None:
        """end tokens and limits count from where a preempted one left off"""
        desk = Desk(gate, 6, 2, "three that grow and end", max_running=3)
        for new in (7, 6, 8):
            desk.add(desk.ends_after(3, new, 9))
        desk.finish()


@pytest.mark.contract
class TestSharing:
    """Cached beginnings, shared blocks, and what a later stage replaces."""

    def test_a_beginning_is_found_again(self, gate: GateRun) -> None:
        """what was computed is found by one that begins alike, while it runs and after it"""
        desk = Desk(gate, 30, 4, "texts that begin alike", max_running=2, context=32, roomy=True)
        first = desk.request(13, 3)
        desk.add(first)
        desk.step()
        desk.add({**desk.request(1, 2), "prompt": [*first["prompt"][:9], 3, 1]})
        desk.step()
        self.found(desk, 8, "an earlier prompt's beginning, while it runs")
        desk.finish()
        text = first["prompt"] + desk.text(first, 3)
        desk.add({**desk.request(1, 2), "prompt": [*text, 5, 6]})
        desk.step()
        self.found(desk, 8 + 12, "an earlier text's beginning, after its end")
        desk.add({**desk.request(1, 2), "prompt": [*text, 5], "salt": "another"})
        desk.step()
        self.found(desk, 8 + 12, "the same text with another salt")
        desk.finish()

    def found(self, desk: Desk, wanted: int, what: str) -> None:
        """So many tokens have been found in the cache by all admissions so far."""
        if desk.tally.cached != wanted:
            raise GateFailure(
                Code.WRONG_VALUE, f"tokens found in the cache, in all: {what}", str(wanted),
                str(desk.tally.cached),
                likely="Whoever is admitted takes the cached blocks; whatever a pass has computed "
                "is published when it has been computed.",
            )  # fmt: skip

    def test_twins(self, gate: GateRun) -> None:
        """two that begin alike in one step: nobody finds what is not computed yet"""
        desk = Desk(gate, 30, 4, "two of one prompt in one step", context=32, roomy=True)
        first = desk.request(13, 4)
        for name in ("one", "two"):
            desk.add({**first, "id": name})
        desk.step()
        desk.add({**first, "id": "three"})
        desk.step()
        self.found(desk, 12, "the prompt of two, by a third")
        desk.finish()

    def test_a_full_block_that_is_decoded(self, gate: GateRun) -> None:
        """a block that fills up while decoding is published too, if it is the last step's too"""
        desk = Desk(gate, 30, 4, "an answer", context=32, roomy=True)
        request = desk.request(3, 10)  # what is fed in its last step fills the third block
        desk.add(request)
        desk.finish()
        text = request["prompt"] + desk.text(request, 10)
        desk.add({**desk.request(1, 1), "prompt": text})
        desk.step()
        self.found(desk, 12, "an answer of an earlier request, as a prompt")

    def test_shared_blocks_are_copied(self, gate: GateRun) -> None:
        """a block that somebody else holds is copied before it is written: the step says so"""
        desk = Desk(
            gate, 24, 4, "a table that others hold too", max_running=2, context=32, roomy=True
        )
        one = desk.add(desk.request(6, 8))
        two = desk.add(desk.request(3, 8))
        desk.step()
        desk.fork(one)
        desk.fork(two)
        desk.step()
        desk.step()
        desk.finish()

    def test_what_is_found_needs_no_room(self, gate: GateRun) -> None:
        """one whose beginning is found is admitted if there is room for the rest of it"""
        desk = Desk(
            gate, 10, 4, "a text that runs already", max_running=2, watermark=2, context=20,
            roomy=True,
        )  # fmt: skip
        first = desk.request(17, 4)
        desk.add(first)
        desk.step()
        desk.add({**first, "id": "twin"})  # of its five blocks four are in use, and five are free
        desk.step()
        desk.finish()

    def test_copies_in_a_full_pool(self, gate: GateRun) -> None:
        """a copy needs a block: those that others hold too do not come free with a victim"""
        desk = Desk(gate, 6, 4, "tables that others hold too", max_running=3, context=16)
        first, second, third = (desk.add(desk.request(6, 3)) for _ in range(3))
        running = desk.step()
        for name in (first, third):
            if name in running:
                desk.fork(name)
        desk.finish()
        must_have_ended(desk, first, second, third)

    def test_a_subclass_has_a_budget(self, gate: GateRun) -> None:
        """share decides how much is fed in a step that is made up so far, and who is admitted"""
        desk = Desk(gate, 30, 4, "a budget of 6 tokens a step", max_running=4, budget=6)
        for length in (3, 17, 9, 2, 11, 5):
            desk.add(desk.request(length, 4))
        desk.finish()
        desk = Desk(gate, 11, 2, "a budget of 4 tokens a step", max_running=3, budget=4)
        for length in (3, 12, 5, 4, 9):
            desk.add(desk.request(length, 6))
        desk.finish()


@pytest.mark.contract
class TestWhateverComes:
    """Random lives of a scheduler, in any pool that fits the largest request."""

    @pytest.mark.parametrize("index", range(14))
    def test_random_requests(self, gate: GateRun, index: int) -> None:
        """the oldest gets on in every step, every request is served, every block accounted for"""
        rng = gate.rng
        size = [1, 2, 3, 4, 7][index % 5]
        longest, most = 18, 10
        largest = -(-(longest + most - 1) // size)
        num_blocks = [largest, largest, largest + 1, largest * 3 // 2, 2 * largest, 4 * largest][
            index % 6
        ]
        running = rng.choice([1, 2, 3, 6, 8])
        desk = Desk(
            gate, num_blocks, size, "random requests", max_running=running,
            watermark=rng.choice([0, 0, 1, 2, 5]), budget=running + 3 if index % 4 == 3 else None,
        )  # fmt: skip
        live(desk, rng, 16, longest, most)


def live(desk: Desk, rng: random.Random, count: int, longest: int, most: int) -> None:
    """Requests come at random, alike or not, some end early, some are aborted, some never fit."""
    beginnings = [[rng.randrange(256) for _ in range(longest // 2)] for _ in range(2)]
    for _ in range(count):
        while desk.live and rng.random() < 0.6:
            desk.step()
        kind = rng.random()
        new = rng.choice([1, 2, most, most, most])
        length = rng.choice([1, longest, rng.randrange(1, longest + 1)])
        if kind < 0.08:
            fit = desk.num_blocks * desk.block_size
            desk.ends_at_once(desk.request(min(fit, 200), 2 + fit - min(fit, 200)), "refused")
            continue
        if kind < 0.3:
            request = desk.ends_after(length, rng.randrange(1, new + 1), new)
        else:
            request = desk.request(length, new)
            if kind < 0.7:
                request["prompt"] = (rng.choice(beginnings) + request["prompt"])[:longest]
        if kind > 0.9:
            request["salt"] = rng.choice(["a", "b"])
        desk.add(request)
        if rng.random() < 0.1:
            desk.abort(rng.choice([*desk.live, *desk.tally.ended]))
    desk.finish()


# -- on nano --------------------------------------------------------------------------------------


@dataclass
class Service:
    """What came of some requests on nano: tokens, ends, and the counts of every step."""

    said: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    computed: int = 0
    preempted: int = 0
    seconds: float = 0.0
    bytes: int = 0
    last: dict[str, int] = field(default_factory=dict)  # the step of the newest token, or arrival
    waits: list[tuple[str, int, int]] = field(default_factory=list)  # id, since when, until when
    spoken: list[list[str]] = field(default_factory=list)  # of each step: who got a token
    running: list[int] = field(default_factory=list)  # how many, after each step


class Serving:
    """Requests through the candidate in an engine, a step at a time."""

    def __init__(
        self, gate: GateRun, arrivals: list[tuple[int, Json]], what: str, *, num_blocks: int,
        block_size: int, model: str = "nano", cache: bool = True, context: int = 0,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.what, self.num_blocks = what, num_blocks
        self.arrivals = arrivals
        self.service = Service()
        self.running: set[str] = set()
        self.known: set[str] = set()
        self.most_steps = 10 + max(t for t, _ in arrivals) + sum(r["new"] for _, r in arrivals)
        self.run = gate.candidate.start(
            "serve", model=model, arrivals=[list(pair) for pair in arrivals], cache=cache,
            num_blocks=num_blocks, block_size=block_size, settings=settings, context=context,
        )  # fmt: skip

    def step(self) -> bool:
        """One step; False when all has been served."""
        service = self.service
        reply = expect.result_of(self.run.step, self.what)
        service.seconds += reply.seconds
        if reply.done:
            service.bytes = reply.value
            return False
        found = reply.value
        for when, request in self.arrivals:
            if when == service.steps:
                self.known.add(request["id"])
                service.last[request["id"]] = service.steps - 1
        if any(found["added"]):
            raise GateFailure(
                Code.WRONG_VALUE, f"{self.what}: what add returns", "None", str(found["added"])
            )
        self.take(found["outputs"])
        # One that ran, and has neither ended nor is in this step, was preempted.
        ran = {name for name in self.running if name not in service.ends or name in found["fed"]}
        service.preempted += len(ran - set(found["fed"])) if found["fed"] else 0
        self.running = set(found["running"])
        service.running.append(len(self.running))
        service.computed += found["computed"]
        service.steps += 1
        if service.steps > self.most_steps:
            self.run.stop()
            raise GateFailure(
                Code.STARVED, f"{self.what}: there is still work", f"at most {self.most_steps} "
                "steps: each brings the oldest request on", str(service.steps),
            )  # fmt: skip
        return True

    def take(self, outputs: Any) -> None:
        """The outputs of a step."""
        service = self.service
        spoken = []
        for output in outputs:
            if not isinstance(output, dict) or output.get("types") != OUTPUT:
                raise GateFailure(
                    Code.WRONG_TYPE, f"{self.what}: what a step returns", "a list of Output",
                    repr(output)[:80],
                )  # fmt: skip
            name = output["id"]
            if name not in self.known or name in service.ends:
                raise GateFailure(
                    Code.TOO_MANY_TOKENS, f"{self.what}: an Output of {name!r}, which is not being "
                    "served", "none", str(output),
                )  # fmt: skip
            service.said.setdefault(name, []).extend(output["tokens"])
            service.waits.append((name, service.last[name], service.steps))
            service.last[name] = service.steps
            spoken.append(name)
            if output["finish"] is not None:
                service.ends[name] = output["finish"]
        service.spoken.append(spoken)

    def check(self) -> Service:
        """Every text is that of an independent model, and ended where and why it must."""
        for _, request in self.arrivals:
            name = request["id"]
            where = f"{self.what}: request {name!r}"
            got = self.service.said.get(name, [])
            reason = check_text(
                request["prompt"], got, request["new"], request.get("eos", ()), where
            )
            if self.service.ends.get(name) != reason:
                raise GateFailure(
                    Code.WRONG_VALUE, f"{where}: why it ended", reason,
                    str(self.service.ends.get(name)),
                )  # fmt: skip
        return self.service


@pytest.mark.contract
class TestOnNano:
    """In an engine, with a real model."""

    def test_the_preempted_say_what_they_would_have_said(self, gate: GateRun) -> None:
        """in a tight pool, with and without a cache, every text is what nano says undisturbed"""
        oracle = nano_oracle()
        arrivals = []
        for index, (length, new) in enumerate(((9, 14), (3, 16), (12, 9), (1, 15), (9, 12))):
            prompt, expected = oracle.prompt(gate.rng, length, new)
            request: Json = {"id": f"n{index}", "prompt": prompt, "new": new}
            if index == 3:
                request["eos"] = [expected[7]]
            arrivals.append((index // 2, request))
        arrivals.append((3, {**arrivals[0][1], "id": "again"}))
        for cache in (True, False):
            what = f"six requests in nine blocks, {'with' if cache else 'without'} a cache"
            serving = Serving(
                gate, arrivals, what, num_blocks=9, block_size=4, cache=cache, max_running=4,
                watermark=1,
            )  # fmt: skip
            while serving.step():
                pass
            serving.check()


# -- numbers --------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """What the chapter's rules do with requests of known lengths, where nothing is found again."""

    steps: int = 0
    computed: int = 0
    preempted: int = 0
    most_used: int = 0
    running: list[int] = field(default_factory=list)  # how many, after each step


def simulate(
    arrivals: list[tuple[int, Json]], num_blocks: int, block_size: int, *, max_running: int,
    watermark: int, reserve: int | None = None,
) -> Simulation:  # fmt: skip
    """Blocks are numbers here. `reserve`: tokens that each request is given room for beforehand; 0
    for as many as it will really have.
    """
    found = Simulation()
    pending = deque((when, len(r["prompt"]), r["new"]) for when, r in arrivals)
    waiting: deque[list[int]] = deque()  # [tokens, tokens still to come, blocks]
    running: list[list[int]] = []
    free = num_blocks
    while pending or waiting or running:
        while pending and pending[0][0] <= found.steps:
            _, tokens, new = pending.popleft()
            waiting.append([tokens, new, 0])
        preempted = 0
        for row in list(running):
            while row[2] and -(-row[0] // block_size) > row[2]:
                if free:
                    free, row[2] = free - 1, row[2] + 1
                    continue
                victim = running.pop()
                free, victim[2] = free + victim[2], 0
                waiting.appendleft(victim)
                preempted += 1
        found.computed += len(running)
        found.preempted += preempted
        while not preempted and waiting and len(running) < max_running:
            row = waiting[0]
            room = row[0] if reserve is None else reserve or row[0] + row[1] - 1
            needed = min(-(-room // block_size), num_blocks)
            if needed + (watermark if running else 0) > free:
                break
            free, row[2] = free - needed, needed
            found.computed += row[0]
            running.append(waiting.popleft())
        found.most_used = max(found.most_used, num_blocks - free)
        for row in list(running):
            row[0], row[1] = row[0] + 1, row[1] - 1
            if row[1] == 0:
                free += row[2]
                running.remove(row)
        found.running.append(len(running))
        found.steps += 1
    return found


def trace(gate: GateRun) -> list[tuple[int, Json]]:
    """Bursts of requests, the same number in each, the next one while the last is still served."""
    count, shortest, longest, prompt = gate.bar("trace")
    burst, gap = gate.bar("bursts")
    vocab = 256
    arrivals = []
    for i, (length, new) in enumerate(
        log_uniform(gate.rng, count, shortest, longest, prompt, hand=burst)
    ):
        tokens = [gate.rng.randrange(vocab) for _ in range(length)]
        arrivals.append((i // burst * gap, {"id": f"t{i}", "prompt": tokens, "new": new}))
    return arrivals


class Halves:
    """A trace, in all the blocks that it can need and in half of what it takes up at its peak."""

    def __init__(self, gate: GateRun, model: str) -> None:
        self.gate, self.model = gate, model
        self.arrivals = trace(gate)
        self.block_size = gate.bar("block_size")
        self.settings: Json = {
            "max_running": gate.bar("trace")[0], "watermark": gate.bar("watermark")
        }  # fmt: skip
        plenty = sum(-(-(len(r["prompt"]) + r["new"]) // self.block_size) for _, r in self.arrivals)
        self.peak = self.rules(plenty).most_used
        self.half = -(-self.peak // 2)
        self.sides = [self.serving(blocks) for blocks in (plenty, self.half)]

    def rules(self, num_blocks: int, **changed: Any) -> Simulation:
        """What the chapter's rules make of it."""
        return simulate(self.arrivals, num_blocks, self.block_size, **{**self.settings, **changed})

    def serving(self, num_blocks: int) -> Serving:
        """The trace in a pool of this size, in which nobody finds anything."""
        return Serving(
            self.gate, self.arrivals, f"the trace in {num_blocks} blocks", num_blocks=num_blocks,
            block_size=self.block_size, model=self.model, cache=False,
            context=self.gate.bar("context"), **self.settings,
        )  # fmt: skip

    def run(self) -> list[Service]:
        """A step of each in turn, until all has been served."""
        going = list(self.sides)
        while going:
            going = [side for side in going if side.step()]
        return [side.service for side in self.sides]


@pytest.mark.number
def test_half_the_memory(gate: GateRun) -> None:
    """a trace in half of the blocks that it takes up at its peak, counted"""
    halves = Halves(gate, "none")
    free, tight = halves.run()
    arrivals, half, rules = halves.arrivals, halves.half, halves.rules(halves.half)
    for one in halves.sides:
        must_be_served(one)
    throughput = round(100 * free.steps / tight.steps, 1)
    longest = max(len(r["prompt"]) + r["new"] - 1 for _, r in arrivals)
    slots, known = (halves.rules(half, watermark=0, reserve=room).steps for room in (longest, 0))
    gate.exact(
        "throughput", throughput, at_least=gate.bar("throughput"), unit="%",
        text=f"{tight.steps} steps with {half} blocks, {free.steps} with the {halves.peak} of the "
        f"peak: {throughput:.1f}% of the throughput",
        message="half of the memory costs more of the throughput than it must",
        likely="Blocks are kept for tokens that do not exist yet: a request is admitted only when "
        "there is room for all that it may say.",
        note=f"slots of the longest would take {slots} steps; reservations of each one's own "
        f"length, if it were known, {known}",
    )  # fmt: skip
    gate.exact(
        "steps", tight.steps, at_most=rules.steps,
        text=f"{tight.steps} steps; by the rules {rules.steps}",
        message="the trace takes more steps than the rules of the chapter",
        likely="Somebody waits who would have had room.",
    )  # fmt: skip
    must_run_by_the_rules(tight, rules)
    useful = sum(len(r["prompt"]) + r["new"] - 1 for _, r in arrivals)
    share = round(100 * (1 - useful / tight.computed), 1)
    greedy = halves.rules(half, watermark=0)
    gate.exact(
        "recomputed", share, at_most=gate.bar("recomputed"), unit="%",
        text=f"{tight.computed - useful:,} of {tight.computed:,} tokens: {share:.1f}%, for "
        f"{tight.preempted} preemptions",
        message="too much of what is computed has been computed before",
        likely="Thrashing: whoever is admitted is preempted soon after.",
        note=f"with a watermark of 0 it would be {100 * (1 - useful / greedy.computed):.1f}%, for "
        f"{greedy.preempted} preemptions",
    )  # fmt: skip
    wait, bound = longest_wait(
        arrivals, tight, half, halves.block_size, gate.bar("watermark"), gate.bar("trace")[0]
    )
    gate.exact(
        "wait", wait, at_most=bound, code=Code.STARVED,
        text=f"{wait} steps at most until somebody's next token; those before it may take {bound}",
        message="somebody waits for longer than those before it can take",
    )  # fmt: skip


def must_run_by_the_rules(service: Service, rules: Simulation) -> None:
    """In each step as many run as by the rules: a trace may be done in time for all that."""
    for step, (got, expected) in enumerate(zip(service.running, rules.running, strict=False)):
        if got != expected:
            raise GateFailure(
                Code.WRONG_COUNT, f"how many run after step {step} of the trace",
                f"{expected}, by the rules of the chapter", str(got),
                likely="As many are admitted in each step that preempts nobody as there is room "
                "for, in order." if got < expected else "Who ran when is not by the rules.",
            )  # fmt: skip


def must_be_served(serving: Serving) -> None:
    """Every request has all its tokens, and ended with the last of them."""
    for _, request in serving.arrivals:
        name = request["id"]
        got = len(serving.service.said.get(name, []))
        if got != request["new"] or serving.service.ends.get(name) != "length":
            code = Code.TOO_FEW_TOKENS if got < request["new"] else Code.TOO_MANY_TOKENS
            raise GateFailure(
                code, f"{serving.what}: request {name!r}", f"{request['new']} tokens, and LENGTH",
                f"{got}, and {serving.service.ends.get(name)}",
            )  # fmt: skip


def longest_wait(
    arrivals: list[tuple[int, Json]], service: Service, num_blocks: int, block_size: int,
    watermark: int, max_running: int,
) -> tuple[int, int]:  # fmt: skip
    """The longest wait, and its bound, in steps; or one that exceeds its bound.

    While somebody waits, all that run are older, and each of them gets a token in every step. They
    are as many as the pool has room for: fewer blocks than the largest request needs are free
    beside the watermark, or its own just became free.
    """
    requests = {r["id"]: r for _, r in arrivals}
    order = {name: place for place, name in enumerate(requests)}
    largest = max(-(-(len(r["prompt"]) + r["new"] - 1) // block_size) for r in requests.values())
    at_once = max(1, -(-(num_blocks - largest - watermark) // largest))
    at_once = min(at_once, max_running)
    said: dict[str, list[int]] = {name: [] for name in requests}  # steps of its tokens
    for step, names in enumerate(service.spoken):
        for name in names:
            said[name].append(step)
    found = [(0, 1)]
    for name, since, until in service.waits:
        if until - since == 1:
            continue
        left = sum(
            requests[older]["new"] - sum(step <= since for step in said[older])
            for older in requests
            if order[older] < order[name]
        )
        found.append((until - since, left // at_once + 1))
    return max(found, key=lambda pair: (pair[0] > pair[1], pair[0]))


@pytest.mark.number
def test_memory(gate: GateRun) -> None:
    """nothing is kept of requests that have ended, were refused or aborted"""
    rounds = 800
    kept = expect.result_of(
        lambda: gate.candidate.call("kept_bytes", rounds=rounds), "requests that come and go"
    )
    if expect.is_int(kept, "bytes kept") > MOST_KEPT:
        raise GateFailure(
            Code.TOO_MUCH_MEMORY, "a scheduler grows while requests come and go",
            f"at most {MOST_KEPT:,} bytes more", f"{kept:,} after {5 * rounds:,} of them",
            likely="Something of every request is kept: its id, its tokens, or the steps.",
        )  # fmt: skip


@pytest.mark.number
def test_adding_and_the_queue(gate: GateRun) -> None:
    """a new id is looked up, and not searched for among all that wait"""
    few, many, adds = 10, 1000, 20
    found = {
        waiting: expect.result_of(
            lambda waiting=waiting: gate.candidate.call(
                "ids_looked_at", waiting=waiting, adds=adds
            ),
            f"requests added to {waiting:,}",
        )
        for waiting in (few, many)
    }
    for waiting, counts in found.items():
        if counts["waiting"] != waiting + adds:
            raise GateFailure(
                Code.WRONG_VALUE, f"how many wait, of {waiting + adds:,} that were added",
                f"{waiting + adds:,}", f"{counts['waiting']:,}",
            )  # fmt: skip
    short, long = (found[waiting]["looked_at"] for waiting in (few, many))
    if long > 2 * short + adds:
        raise GateFailure(
            Code.WRONG_COUNT, f"ids that {adds} calls of `add` look at, with {many:,} that wait",
            f"about as many as with {few}: {short}", f"{long:,}",
            likely="Whether an id is being served is searched for among all of them; `live` finds "
            "it at once.",
        )  # fmt: skip


@pytest.mark.number
def test_time_and_the_queue(gate: GateRun) -> None:
    """a step takes as long with many waiting requests as with few"""
    few, many = gate.bar("queues")
    queues = TwoSizes(gate, "queued", [few, many], "a queue", block_size=4)

    def words(ratio: PairedRatio) -> str:
        return f"a step is {ratio.median:.2f}x as fast with {many:,} waiting as with {few:,}"

    gate.ratio(
        "queue_time",
        lambda: queues.step(few, few + 8),
        lambda: queues.step(many, many + 8),
        text=words, itself=True, max_spread=50.0,
        slower=lambda ratio: f"{words(ratio)}: something walks through the queue",
    )  # fmt: skip


@pytest.mark.number
def test_texts(gate: GateRun) -> None:
    """the same trace with a model: every text is what it would have been with all the memory"""
    model = "nano" if gate.tier == "cpu" else "bench"
    halves = Halves(gate, model)
    free, tight = halves.run()
    for one in halves.sides:
        if model == "nano":
            one.check()
        else:
            must_be_served(one)
    for _, request in halves.arrivals if model != "nano" else ():
        same_text(gate, model, request, free.said[request["id"]], tight.said[request["id"]])
    ratio = free.seconds / tight.seconds
    held = f"; the pool of {halves.half} blocks and the model take {tight.bytes / 1e9:.1f} GB"
    gate.report(
        "wall_time", round(ratio, 2), unit="x",
        text=f"{ratio:.2f}x of the speed, step by step beside each other",
        note=f"on {model}: {tight.steps} steps against {free.steps}, and {tight.computed:,} tokens "
        f"against {free.computed:,}" + (held if tight.bytes else ""),
    )  # fmt: skip


def same_text(gate: GateRun, model: str, request: Json, free: list[int], tight: list[int]) -> None:
    """Two texts of a model in low precision are the same up to a near-tie."""
    parted = next((i for i, (a, b) in enumerate(zip(free, tight, strict=True)) if a != b), None)
    if parted is None:
        return
    prefix = request["prompt"] + tight[:parted]
    if not near_tie(model, gate.device, prefix, tight[parted], free[parted]):
        raise GateFailure(
            Code.WRONG_TOKEN, f"request {request['id']!r} says something else in half of the "
            "memory", str(free[parted]), str(tight[parted]), f"token {parted}",
        )  # fmt: skip
