"""Stage 06, the judge: the load harness."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn

import load_oracle as oracle
import numpy
import pytest

from course.check import expect
from course.check.channel import Foreign, short
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun, bar_of
from course.measure.ratio import Bar, PairedRatio, Verdict, look

STAGE = 6
TICK = 1 / 1024  # every delay is a multiple of this, so that sums of delays are exact

Json = dict[str, Any]


LIKELY = {
    "stamps": "Another clock than the event loop's, or one that is read after something else.",
    "cut_short": "`except BaseException`, or tasks that nobody cancels.",
    "sent": "`sent` is read before the task that sends has begun to run.",
    "count": "The count is that of the answer so far: the last one holds, and 0 is a count.",
    "absent": "Token times are taken for unknown though every chunk says its number, or the "
    "server's count is not kept.",
    "token_times": "A chunk is taken for one token, or a chunk without text for a token.",
    "ttft": "It counts from `sent`, or to a chunk without text.",
    "itl": "Each token but the first closes one gap; tokens of one chunk have none between them.",
    "tpot": "n tokens have n - 1 gaps between the first and the last.",
    "e2e": "It counts from `sent`, or to the last chunk instead of the end.",
    "percentile": "The rank is q / 100 * (n - 1), and between two values it is interpolated.",
    "made_up_window": "Only the requests that are kept are looked at: one of the warm-up whose end "
    "is not known closes the window before it opens.",
    "empty_window": "There is no window where warm-up and cool-down take every request, nor where "
    "it would close as it opens.",
    "steady_window": "The burst at the start or the tail at the end is taken for steady state.",
    "throughput": "Tokens belong to the window in which they came, of requests that finished.",
    "occupancy": "First tokens are counted as gaps, waiting requests as decoding, or a request's "
    "stretch is not cut at the edges of the window.",
    "edge": "Under way is what was due before the window's end and not over before its start.",
    "summarize": "Requests belong to the window in which they were due, gaps to that in which "
    "their token came; percentiles are of all values together.",
}


# -- comparing -----------------------------------------------------------------------------------


def same(
    got: Any, expected: Any, what: str, code: Code = Code.WRONG_VALUE, where: str = "",
    likely: str = "", made_up: str = "",
) -> None:  # fmt: skip
    """A number, a list of numbers, or None where nothing could be measured.

    likely: why the value may be wrong; made_up: why there may be one where none should be.
    """
    if expected is None and got is not None:
        raise GateFailure(
            Code.MADE_UP, f"{what} could not be measured", "None", short(got, 80), where=where,
            likely=made_up,
        )  # fmt: skip
    if expected is None:
        return
    if got is None:
        raise GateFailure(
            code, f"{what} is absent", short(expected, 80), "None", where=where, likely=likely
        )
    if isinstance(expected, list):
        if not isinstance(got, list):
            wrong(what, "a list", got)
        if len(got) != len(expected):
            raise GateFailure(
                code, f"{what} has the wrong number of values", f"{len(expected)}: "
                f"{short(expected, 120)}", f"{len(got)}: {short(got, 120)}", where=where,
                likely=likely,
            )  # fmt: skip
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, f"{what}[{index}]", code, where, likely)
        return
    number = expect.is_number(got, what)
    if not math.isclose(number, expected, rel_tol=1e-9, abs_tol=1e-9):
        raise GateFailure(
            code, what, f"{expected:,.6g}", f"{number:,.6g}", where=where, likely=likely
        )


def call(gate: GateRun, name: str, *args: Any, what: str = "") -> Any:
    """A function of plain values."""
    run = lambda: gate.candidate.call("function", name=name, args=list(args))  # noqa: E731
    return expect.result_of(run, what or f"{name}({', '.join(short(a, 40) for a in args)})")


def timeline(
    chunks: Sequence[tuple[float, int | None]], output_tokens: int | None = None,
    ended: float | None = 9.0, *, intended: float = 1.0, sent: float = 1.5,
    error: str | None = None,
) -> Json:  # fmt: skip
    """A timeline as the scenarios take it."""
    return {
        "intended": intended, "sent": sent, "chunks": [list(chunk) for chunk in chunks],
        "output_tokens": output_tokens, "ended": ended, "error": error,
    }  # fmt: skip


# -- arrivals ------------------------------------------------------------------------------------


@pytest.mark.contract
class TestArrivals:
    """When the requests of an open loop are due."""

    def times(self, gate: GateRun, *args: Any) -> list[float]:
        """Arrival times as a list of plain numbers, as many as were asked for."""
        what = f"arrival_times{args}"
        got = call(gate, "arrival_times", *args)["value"]
        if not isinstance(got, list):
            wrong(what, "a list", got)
        if len(got) != args[1]:
            raise GateFailure(
                Code.WRONG_VALUE, f"{what} gives one time for each request", f"{args[1]} times",
                f"{len(got)}: {short(got, 60)}",
            )  # fmt: skip
        return [expect.is_number(time, f"{what}: time {i}") for i, time in enumerate(got)]

    def test_constant_arrivals(self, gate: GateRun) -> None:
        """constant arrivals: one every 1 / rate, the first at 0"""
        for rate, count in ((4.0, 9), (0.5, 3), (1000.0, 5), (3, 0)):
            got = self.times(gate, rate, count, "constant", 1)
            same(got, [i / rate for i in range(count)], f"arrivals at {rate} per second")

    def test_poisson_gaps_are_exponential(self, gate: GateRun) -> None:
        """Poisson arrivals: independent exponential gaps with a mean of 1 / rate"""
        count = 4000
        rate = 2.0 ** gate.rng.choice((-2, -1, 1, 2, 3, 4, 5))  # at 1 per second, rate is gap
        seed = gate.rng.randrange(1 << 30)
        times = numpy.array(self.times(gate, rate, count, "poisson", seed))
        gaps = numpy.diff(times, prepend=0.0) * rate  # in units of the mean gap
        what = f"{count} Poisson arrivals at {rate:g} per second"
        if gaps.min() < 0:
            raise GateFailure(Code.WRONG_VALUE, f"{what} are not in order", "never decreasing")
        if abs(gaps.mean() - 1) > 5 / math.sqrt(count):
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: the mean gap", f"{1 / rate:.4g} s",
                f"{gaps.mean() / rate:.4g} s",
            )  # fmt: skip
        distance = kolmogorov_smirnov(gaps)
        if distance > 2.8 / math.sqrt(count):  # an exponential sample does so once in 3 million
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: the gaps have not the exponential distribution",
                f"a distance of at most {2.8 / math.sqrt(count):.3f} from it", f"{distance:.3f}",
            )  # fmt: skip
        likeness = float(numpy.corrcoef(gaps[:-1], gaps[1:])[0, 1])
        if abs(likeness) > 5 / math.sqrt(count):
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: neighbouring gaps depend on each other",
                "a correlation near 0", f"{likeness:.2f}",
            )  # fmt: skip

    def test_the_first_poisson_arrival(self, gate: GateRun) -> None:
        """Poisson arrivals: there is a random gap before the first request, too"""
        seeds = [gate.rng.randrange(1 << 30) for _ in range(200)]
        firsts = numpy.array([self.times(gate, 1.0, 1, "poisson", seed)[0] for seed in seeds])
        distance = kolmogorov_smirnov(firsts)
        if distance > 2.8 / math.sqrt(len(seeds)):
            raise GateFailure(
                Code.WRONG_VALUE, "the first of Poisson arrivals comes after a random gap, too: "
                f"its times for {len(seeds)} seeds, at 1 per second",
                "exponential, with a mean of 1 s", f"a mean of {firsts.mean():.3g} s, from "
                f"{firsts.min():.3g} s to {firsts.max():.3g} s",
                likely="The first request is sent at 0.",
            )  # fmt: skip
        self.times(gate, 5.0, 0, "poisson", 1)

    def test_a_seed_repeats(self, gate: GateRun) -> None:
        """the same seed gives the same times, another seed others"""
        # Text is hashed otherwise in every process, and in none of them as in this second one.
        elsewhere = gate.candidate_in(gate.device, PYTHONHASHSEED="1234")
        found = []
        for seed in (0, 7, 8):
            args = (5.0, 50, "poisson", seed)
            one, again = (self.times(gate, *args) for _ in range(2))
            if one != again:
                raise GateFailure(
                    Code.STALE_STATE, f"arrival_times{args} gives other times the second time",
                    short(one[:3]), short(again[:3]), likely="`seed or ...`, where a seed of 0 is "
                    "none, or a generator that is kept from call to call.",
                )  # fmt: skip
            there = elsewhere.call("function", name="arrival_times", args=list(args))["value"]
            if there != one:
                raise GateFailure(
                    Code.STALE_STATE, f"arrival_times{args} gives other times in another process",
                    short(one[:3]), short(there, 60),
                    likely="The seed is made with `hash`, which Python changes with every process.",
                )  # fmt: skip
            found.append(one)
        if found[0] == found[1] or found[1] == found[2]:
            raise GateFailure(Code.WRONG_VALUE, "arrival_times does not look at its seed")
        if not gate.candidate.call("shared_randomness"):
            raise GateFailure(
                Code.STALE_STATE, "arrival_times seeds or draws from the random numbers that all "
                "code shares", "a random.Random of its own",
                likely="`random.seed(seed)`, or `numpy.random.seed(seed)`",
            )  # fmt: skip

    def test_what_is_meant_if_not_said(self, gate: GateRun) -> None:
        """arrivals are Poisson's, of seed 0, if nothing else is said"""
        for left_out in ((), ("poisson",)):
            args = (5.0, 50, *left_out)
            got, wanted = self.times(gate, *args), self.times(gate, 5.0, 50, "poisson", 0)
            if got != wanted:
                raise GateFailure(
                    Code.WRONG_VALUE, f"arrival_times{args} gives other times than with the "
                    "defaults of its other arguments, process='poisson' and seed=0",
                    short(wanted[:3]), short(got[:3]),
                    likely="A default in the signature was changed.",
                )  # fmt: skip

    def test_the_list_is_the_callers(self, gate: GateRun) -> None:
        """what a caller does to the list of times changes no other list"""
        for args in ((5.0, 10, "poisson", 3), (5.0, 10, "constant", 3)):
            before, after = gate.candidate.call("arrivals_of_a_changed_list", args=list(args))
            if before != after:
                raise GateFailure(
                    Code.STALE_STATE, f"arrival_times{args} is not the same any more after its "
                    "caller has emptied the list that came of it", short(before[:3]),
                    short(after[:3]), likely="One list is kept and given to every caller.",
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("args", "argument", "kind"),
        [
            ((0.0, 5, "poisson"), "rate", "ValueError"),
            ((-1.0, 5, "constant"), "rate", "ValueError"),
            ((math.inf, 5, "constant"), "rate", "ValueError"),
            ((math.nan, 5, "poisson"), "rate", "ValueError"),
            (("fast", 5, "poisson"), "rate", "TypeError"),
            ((1.0, -1, "poisson"), "count", "ValueError"),
            ((1.0, 2.5, "constant"), "count", "TypeError"),
            ((1.0, 5, "uniform"), "process", "ValueError"),
        ],
    )
    def test_bad_arrivals_are_refused(
        self, gate: GateRun, args: tuple[Any, ...], argument: str, kind: str
    ) -> None:
        """bad input of arrival_times gets an error that names the argument"""
        expect.rejects(
            lambda: gate.candidate.call("function", name="arrival_times", args=list(args)),
            argument, f"arrival_times{args}", kinds=[kind],
        )  # fmt: skip


def kolmogorov_smirnov(gaps: Any) -> float:
    """The largest distance between the gaps' distribution and the exponential one of mean 1."""
    ordered = numpy.sort(gaps)
    exact = 1 - numpy.exp(-ordered)
    steps = numpy.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - exact).max(), (exact - steps[:-1]).max()))


# -- loads in virtual time -----------------------------------------------------------------------


def answer(gate: GateRun, tokens: int = 5, **more: Any) -> Json:
    """A role, then a few chunks of text at random times, then an end that carries the count."""
    delays = [gate.rng.randrange(20, 400) * TICK for _ in range(tokens + 2)]
    text = [[delay, 1, None] for delay in delays[1:-1]]
    return {
        "chunks": [[delays[0], 0, None], *text, [delays[-1], 0, tokens]],
        "rest": gate.rng.randrange(5, 50) * TICK, **more,
    }  # fmt: skip


def run(gate: GateRun, kind: str, script: list[Json], how: Any, what: str, **more: Any) -> Json:
    """A load in virtual time, its timelines all of the right type."""
    scenario = lambda: gate.candidate.call(  # noqa: E731
        "load", kind=kind, script=script, how=how, **more
    )
    found = expect.result_of(scenario, what)
    check_types(found["timelines"], what)
    return found


def check_types(timelines: list[Any], what: str) -> None:
    """Every timeline is a Timeline, and every chunk of it a Stamp."""
    for index, one in enumerate(timelines):
        if not isinstance(one, dict):
            wrong(f"{what}: timelines[{index}] is no Timeline", "Timeline", one)
        if not isinstance(one["chunks"], list):
            wrong(f"{what}: timelines[{index}].chunks is no list", "a list", one["chunks"])
        for number, chunk in enumerate(one["chunks"]):
            if not (isinstance(chunk, list) and len(chunk) == 2):
                wrong(f"{what}: timelines[{index}].chunks[{number}] is no Stamp", "Stamp", chunk)


def wrong(what: str, wanted: str, got: Any) -> NoReturn:
    """Fail with WRONG_TYPE."""
    shown = f"{got.type}: {got.repr[:80]}" if isinstance(got, Foreign) else short(got, 80)
    raise GateFailure(
        Code.WRONG_TYPE, what, wanted, shown,
        likely="A plain tuple, a dict or an array instead of the type that the signature names.",
    )  # fmt: skip


def check(found: Json, wanted: list[Json], what: str) -> None:
    """Each request was sent when it was due, and its timeline is what its answer was."""
    got = found["timelines"]
    if len(got) != len(wanted):
        raise GateFailure(
            Code.WRONG_LOAD, f"{what}: one timeline for each request that was sent",
            str(len(wanted)), str(len(got)),
        )  # fmt: skip
    places = [f"request {index} of {len(wanted)}" for index in range(len(wanted))]
    for one, other, where in zip(got, wanted, places, strict=True):
        for name in ("intended", "sent"):
            same(one[name], other[name], f"{what}: `{name}`", Code.WRONG_LOAD, where)
    for one, other, where in zip(got, wanted, places, strict=True):
        if one["error"] != other["error"]:
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: `error`", repr(other["error"]), repr(one["error"]),
                where=where,
            )  # fmt: skip
        times, tokens = (
            [[chunk[i] for chunk in t["chunks"]] for t in (one, other)] for i in (0, 1)
        )
        same(
            times[0], times[1], f"{what}: the times of the chunks", where=where,
            likely=LIKELY["stamps"],
        )  # fmt: skip
        if tokens[0] != tokens[1] or one["output_tokens"] != other["output_tokens"]:
            raise GateFailure(
                Code.WRONG_VALUE, f"{what}: the tokens of the chunks, and the server's count",
                f"{tokens[1]}, {other['output_tokens']}", f"{tokens[0]}, {one['output_tokens']}",
                where=where, likely=LIKELY["count"],
            )  # fmt: skip
        same(one["ended"], other["ended"], f"{what}: `ended`", where=where, likely=LIKELY["stamps"])


def in_flight(found: Json) -> Iterator[tuple[float, int]]:
    """(time, requests between sent and over) after all that happens at that time."""
    count, moments = 0, found["events"]
    for index, (time, event, _) in enumerate(moments):
        count += (event == "sent") - (event == "over")
        if index + 1 == len(moments) or moments[index + 1][0] > time:
            yield time, count


def check_concurrency(found: Json, concurrency: int, total: int, what: str) -> None:
    """So many in flight until the last is sent, and never more, and none twice."""
    sent = [index for _, event, index in found["events"] if event == "sent"]
    if sent != list(range(total)):
        raise GateFailure(
            Code.WRONG_LOAD, f"{what}: every request is sent once, in order",
            f"0 to {total - 1}", short(sent, 80),
        )  # fmt: skip
    last = max((time for time, event, _ in found["events"] if event == "sent"), default=0.0)
    for time, count in in_flight(found):
        if count > concurrency or (time < last and count != concurrency):
            raise GateFailure(
                Code.WRONG_LOAD, f"{what}: requests in flight", str(concurrency), str(count),
                where=f"at {time:.3f} s",
            )  # fmt: skip


def check_over(found: Json, wanted: list[Json], what: str) -> None:
    """The load is over as its last answer is."""
    last = max(one["ended"] for one in wanted)
    if not math.isclose(found["ended"], last, abs_tol=TICK / 2):
        raise GateFailure(
            Code.WRONG_LOAD, f"{what}: the load is over when all requests have ended",
            f"at {last:.3f} s", f"at {found['ended']:.3f} s",
            likely="It waits until every arrival, be a request left for it or not.",
        )  # fmt: skip


def check_kept(found: Json, what: str) -> None:
    """Each timeline is there by the time of its first chunk, in the order of sending."""
    intended = [one["intended"] for one in found["timelines"]]
    kept = found["kept"]
    late = [i for i, count in enumerate(kept) if count is not None and count <= i]
    if late:
        raise GateFailure(
            Code.WRONG_LOAD, f"{what}: a timeline is appended as its request is sent",
            f"a list of at least {late[0] + 1}", f"of {kept[late[0]]}",
            where=f"when the first chunk of request {late[0]} comes",
            likely="It is appended once the answer has ended.",
        )  # fmt: skip
    if intended != sorted(intended):
        raise GateFailure(
            Code.WRONG_LOAD, f"{what}: timelines are in the order in which requests were sent",
            short(sorted(intended), 80), short(intended, 80),
        )  # fmt: skip


def refused_at_once(gate: GateRun, count: int) -> list[Json]:
    """Answers of which two are errors as `send` is called: one foreseen, one not."""
    script = [answer(gate, 3) for _ in range(count)]
    script[1] = {"chunks": [], "at_once": True, "error": "no connection"}
    script[4] = {"chunks": [], "at_once": True, "bug": True}
    return script


def counted(gate: GateRun) -> list[Json]:
    """Answers whose chunks carry the count so far; then an empty one, counted, and one without."""
    delays = [gate.rng.randrange(20, 400) * TICK for _ in range(4)]
    counts = ((0, 0), (2, 2), (1, 3), (0, 3))
    running = [[delay, n, told] for delay, (n, told) in zip(delays, counts, strict=True)]
    none = [[delay, n, None] for delay, (n, _) in zip(delays, counts, strict=True)]
    return [{"chunks": c} for c in (running, [[delays[0], 0, None], [delays[1], 0, 0]], none)]


def check_cut(
    gate: GateRun, kind: str, script: list[Json], how: Any, wanted: list[Json], cut: float,
    what: str,
) -> None:  # fmt: skip
    """A load that is cancelled at `cut` ends at once, and has kept what was seen until then."""
    found = run(gate, kind, script, how, what, cancel_at=cut)
    late = [i for time, event, i in found["events"] if event == "sent" and time > cut]
    if late or found["tasks"] or not found["cancelled"]:
        raise GateFailure(
            Code.WRONG_LOAD, f"{what} goes on", "no task left, and the cancellation passed on",
            f"{found['tasks']} tasks left, {len(late)} more requests sent, the cancellation "
            + ("passed on" if found["cancelled"] else "swallowed"),
            likely=LIKELY["cut_short"],
        )  # fmt: skip
    check(found, [oracle.seen_until(one, cut) for one in wanted if one["sent"] < cut], what)


@pytest.mark.contract
class TestClosedLoop:
    """N in flight, exactly."""

    def test_one_request(self, gate: GateRun) -> None:
        """one request: what is stamped when"""
        script = [answer(gate)]
        found = run(gate, "closed", script, 1, "one request")
        check(found, oracle.closed(script, 1), "one request")

    def test_timelines_are_kept_as_requests_are_sent(self, gate: GateRun) -> None:
        """timelines are appended as requests are sent, in that order, and not as they end"""
        script = [answer(gate, 3) for _ in range(6)]
        script[0]["rest"] = 60.0  # the first to be sent is the last to end
        found = run(gate, "closed", script, 2, "6 requests, the first of them slow")
        check_kept(found, "6 requests, the first of them slow")

    def test_a_second_load_is_like_the_first(self, gate: GateRun) -> None:
        """two loads, one after the other, know nothing of each other"""
        script = [answer(gate) for _ in range(5)]
        first, second = (run(gate, "closed", script, 2, "a load, twice") for _ in range(2))
        if first != second:
            raise GateFailure(
                Code.STALE_STATE, "the same load a second time gives other timelines",
                f"{len(first['timelines'])} timelines", f"{len(second['timelines'])} timelines",
            )  # fmt: skip

    def test_n_in_flight(self, gate: GateRun) -> None:
        """N in flight, each replaced as soon as it ends"""
        for concurrency, total in ((1, 5), (3, 14), (8, 30), (5, 3), (200, 230)):
            longest = 8 if total < 100 else 1
            script = [answer(gate, gate.rng.randrange(longest) + 1) for _ in range(total)]
            what = f"{total} requests, {concurrency} at a time"
            found = run(gate, "closed", script, concurrency, what)
            check_concurrency(found, concurrency, total, what)
            check(found, oracle.closed(script, concurrency), what)
            check_over(found, oracle.closed(script, concurrency), what)

    def test_no_request(self, gate: GateRun) -> None:
        """no request: nothing is sent, and the load is over"""
        found = run(gate, "closed", [], 4, "a load of no requests")
        if found["timelines"] or found["events"] or found["ended"]:
            raise GateFailure(Code.WRONG_LOAD, "a load of no requests does something", "nothing")

    def test_requests_are_taken_one_by_one(self, gate: GateRun) -> None:
        """a request is taken only when it is sent"""
        found = run(gate, "closed", [answer(gate) for _ in range(6)], 2, "6 requests, 2 at a time")
        times = {(event, index): time for time, event, index in found["events"]}
        for index in range(6):
            if times["taken", index] != times["sent", index]:
                raise GateFailure(
                    Code.WRONG_LOAD, "requests are taken before they can be sent",
                    f"at {times['sent', index]:.3f} s", f"at {times['taken', index]:.3f} s",
                    where=f"request {index}", likely="`list(requests)`",
                )  # fmt: skip

    def test_a_failure_is_one_requests_own(self, gate: GateRun) -> None:
        """a request that fails is noted, and the others go on"""
        script = [answer(gate) for _ in range(9)]
        script[1] |= {"error": "HTTP 429", "chunks": []}
        script[3] |= {"error": "closed early", "chunks": script[3]["chunks"][:3]}
        script[4] |= {"bug": True}
        script[8] |= {"error": "timeout", "chunks": []}
        what = "a load in which some requests fail"
        found = run(gate, "closed", script, 2, what)
        check(found, oracle.closed(script, 2), what)
        check_concurrency(found, 2, 9, what)

    def test_send_itself_may_raise(self, gate: GateRun) -> None:
        """a request whose `send` raises before there is an answer has failed like any other"""
        script = refused_at_once(gate, 7)
        what = "a load in which calling `send` raises"
        check(run(gate, "closed", script, 2, what), oracle.closed(script, 2), what)

    def test_counts_of_the_server(self, gate: GateRun) -> None:
        """`output_tokens` is the last count that a chunk has brought, be it 0"""
        script = counted(gate)
        what = "a server that counts with every chunk"
        check(run(gate, "closed", script, 2, what), oracle.closed(script, 2), what)

    def test_a_load_that_is_cut_short(self, gate: GateRun) -> None:
        """cancelled: nothing more is sent, and the timelines hold what was seen"""
        script = [answer(gate, 6) for _ in range(12)]
        wanted = oracle.closed(script, 3)
        cut = wanted[5]["chunks"][3][0] + TICK / 2
        check_cut(gate, "closed", script, 3, wanted, cut, "a closed loop that is cancelled")

    @pytest.mark.parametrize(("concurrency", "kind"), [(0, "ValueError"), (1.5, "TypeError")])
    def test_bad_concurrency_is_refused(self, gate: GateRun, concurrency: Any, kind: str) -> None:
        """a concurrency that is no number of requests is refused"""
        expect.rejects(
            lambda: gate.candidate.call("load", kind="closed", script=[], how=concurrency),
            "concurrency", f"concurrency = {concurrency}", kinds=[kind],
        )  # fmt: skip


@pytest.mark.contract
class TestOpenLoop:
    """Requests come when they are due, whatever the server does."""

    def times(self, gate: GateRun, count: int, most: int = 200) -> list[float]:
        """Arrivals at random multiples of the tick."""
        now, times = 0, []
        for _ in range(count):
            now += gate.rng.randrange(1, most)
            times.append(now * TICK)
        return times

    def test_requests_are_sent_when_they_are_due(self, gate: GateRun) -> None:
        """each request is sent at its time, however many are in flight"""
        arrivals = self.times(gate, 20)
        script = [answer(gate, gate.rng.randrange(1, 9)) for _ in arrivals]
        what = "20 requests, each at its time"
        found = run(gate, "open", script, arrivals, what)
        check(found, oracle.on_time(script, arrivals), what)

    def test_timelines_are_kept_as_requests_are_sent(self, gate: GateRun) -> None:
        """timelines are appended as requests are sent, in that order, and not as they end"""
        arrivals = self.times(gate, 6)
        script = [answer(gate, 3) for _ in arrivals]
        script[0]["rest"] = 60.0
        found = run(gate, "open", script, arrivals, "6 requests, the first of them slow")
        check_kept(found, "6 requests, the first of them slow")

    def test_nothing_limits_the_requests_in_flight(self, gate: GateRun) -> None:
        """hundreds of requests in flight: a server that hangs keeps no other request from going"""
        arrivals = [i * 2 * TICK for i in range(700)]
        script = [{"chunks": [[8.0, 1, None], [TICK, 1, 2]]} for _ in arrivals]
        what = "700 requests within 2 s, each answered after 8 s"
        check(run(gate, "open", script, arrivals, what), oracle.on_time(script, arrivals), what)

    def test_a_server_that_stalls(self, gate: GateRun) -> None:
        """a server that stalls: requests keep coming, and their waiting is measured"""
        arrivals = [i * 32 * TICK for i in range(40)]
        script = [{"chunks": [[8 * TICK, 1, None], [8 * TICK, 1, 2]]} for _ in arrivals]
        script[10]["chunks"][0][0] = 2.0
        what = "a server that answers one at a time, and stalls for 2 s"
        found = run(gate, "open", script, arrivals, what, slots=1)
        check(found, oracle.queued(script, arrivals), what)

    def test_a_client_that_is_late_itself(self, gate: GateRun) -> None:
        """a client that is kept busy sends late, catches up, and says when it was to send"""
        arrivals = [i * 64 * TICK for i in range(16)]
        script = [answer(gate, 2) for _ in arrivals]
        script[5]["busy"] = 300 * TICK
        free = arrivals[5] + script[5]["busy"]
        what = "a client that computes for 0.3 s"
        found = run(gate, "open", script, arrivals, what)["timelines"]
        if len(found) != len(arrivals):
            raise GateFailure(Code.WRONG_LOAD, what, f"{len(arrivals)} timelines", str(len(found)))
        for index, (one, due) in enumerate(zip(found, arrivals, strict=True)):
            where = f"request {index} of {len(arrivals)}"
            sent = max(due, free) if index > 5 else due
            same(one["intended"], due, f"{what}: `intended`", Code.WRONG_LOAD, where)
            same(one["sent"], sent, f"{what}: `sent`", Code.WRONG_LOAD, where)

    def test_sent_is_when_send_is_called(self, gate: GateRun) -> None:
        """`sent` is read as the request goes out, not when somebody planned to send it"""
        # Each chunk comes just as the next request is due, and keeps the client busy.
        arrivals = [i * 1.0 for i in range(5)]
        script = [{"chunks": [[1.0, 1, 1]], "busy_chunk": 300 * TICK} for _ in arrivals]
        what = "requests that are due as a chunk comes which takes 0.3 s to work off"
        found = run(gate, "open", script, arrivals, what)
        sent = {index: time for time, event, index in found["events"] if event == "sent"}
        if len(found["timelines"]) != len(arrivals):
            count = str(len(found["timelines"]))
            raise GateFailure(Code.WRONG_LOAD, what, f"{len(arrivals)} timelines", count)
        for index, one in enumerate(found["timelines"]):
            same(
                one["sent"], sent[index], f"{what}: `sent`", Code.WRONG_LOAD,
                f"request {index} of {len(arrivals)}", LIKELY["sent"],
            )  # fmt: skip

    def test_simultaneous_and_missing_partners(self, gate: GateRun) -> None:
        """several at one time; more requests than times; no requests at all"""
        script, times = [answer(gate, 2) for _ in range(4)], [0.0, 0.0, 0.5]
        what = "4 requests for 3 times, two of them equal"
        found = run(gate, "open", script, times, what)
        check(found, oracle.on_time(script[:3], times), what)
        # The first time that has no request lies before the end of the answer: whether a loop looks
        # for a request before it sleeps or after that makes no difference.
        what = "1 request for 4 times, the last two of them long after its answer"
        one = {**script[0], "rest": 1.0}
        found = run(gate, "open", [one], [0.25, 0.5, 100.0, 1000.0], what)
        check(found, [oracle.expected(one, 0.25, 0.25, 0.25)], what)
        check_over(found, [oracle.expected(one, 0.25, 0.25, 0.25)], what)
        check(run(gate, "open", [], [], "no request"), [], "no request")

    def test_an_endless_source(self, gate: GateRun) -> None:
        """requests may have no end: no more of them are taken than there are times"""
        script, times = [answer(gate, 2) for _ in range(3)], [0.0, 0.25, 0.5]
        what = "3 times, and requests without end"
        found = run(gate, "open", script, times, what, source="endless")
        taken = sum(event == "taken" for _, event, _ in found["events"])
        if taken > 100:  # it takes them all, and has only come back because the gate's do end
            raise GateFailure(
                Code.WRONG_LOAD, f"{what}: requests that are taken", "3", f"{taken}, and it would "
                "take more for ever", likely="`list(requests)`",
            )  # fmt: skip
        check(found, oracle.on_time(script, times), what)

    def test_a_failure_is_one_requests_own(self, gate: GateRun) -> None:
        """a request that fails is noted, and the others go on"""
        arrivals = self.times(gate, 6)
        script = [answer(gate) for _ in arrivals]
        script[0] |= {"error": "HTTP 500", "chunks": []}
        script[2] |= {"bug": True}
        what = "an open loop in which two requests fail"
        found = run(gate, "open", script, arrivals, what)
        check(found, oracle.on_time(script, arrivals), what)

    def test_send_itself_may_raise(self, gate: GateRun) -> None:
        """a request whose `send` raises before there is an answer has failed like any other"""
        arrivals = self.times(gate, 7)
        script = refused_at_once(gate, 7)
        what = "an open loop in which calling `send` raises"
        check(run(gate, "open", script, arrivals, what), oracle.on_time(script, arrivals), what)

    def test_a_load_that_is_cut_short(self, gate: GateRun) -> None:
        """cancelled: nothing more is sent, and the timelines hold what was seen"""
        arrivals = self.times(gate, 12)
        script = [answer(gate, 6) for _ in arrivals]
        wanted = oracle.on_time(script, arrivals)
        cut = arrivals[7] + TICK / 2
        what = "an open loop that is cancelled while requests are due"
        check_cut(gate, "open", script, arrivals, wanted, cut, what)
        cut = arrivals[-1] + TICK / 2
        what = "an open loop that is cancelled while the last answers come"
        check_cut(gate, "open", script, arrivals, wanted, cut, what)

    @pytest.mark.parametrize("arrivals", [[-1.0, 2.0], [2.0, 1.0], [0.0, math.nan], [math.inf]])
    def test_bad_arrivals_are_refused(self, gate: GateRun, arrivals: list[float]) -> None:
        """arrivals that are negative, not in order or not finite are refused"""
        expect.rejects(
            lambda: gate.candidate.call("load", kind="open", script=[], how=arrivals),
            "arrivals", f"arrivals = {arrivals}",
        )  # fmt: skip


BOTH = pytest.mark.parametrize("kind", ["closed", "open"])


def either(
    gate: GateRun, kind: str, script: list[Json], what: str, **more: Any
) -> tuple[Json, list[Json]]:
    """A closed loop of 2, or an open one of one request per second; and its timelines."""
    arrivals = [float(index) for index in range(len(script))]
    how: Any = 2 if kind == "closed" else arrivals
    wanted = oracle.closed(script, 2) if kind == "closed" else oracle.on_time(script, arrivals)
    return run(gate, kind, script, how, what, **more), wanted


@pytest.mark.contract
class TestBothLoops:
    """What a loop must not care about: what it sends, how long that takes, and how it fails."""

    @BOTH
    def test_empty_requests_are_requests(self, gate: GateRun, kind: str) -> None:
        """a request is sent whatever it is: an empty text, 0 or None"""
        what = f"requests that are None, '', 0, () and {{}} ({kind} loop)"
        found, wanted = either(gate, kind, [answer(gate) for _ in range(5)], what, source="empty")
        if len(found["timelines"]) < len(wanted):
            raise GateFailure(
                Code.WRONG_LOAD, f"{what}: each is sent", str(len(wanted)),
                str(len(found["timelines"])), likely="`if request`, or `next(requests, None)`: "
                "what a request is says nothing on whether there is one.",
            )  # fmt: skip
        check(found, wanted, what)

    @BOTH
    def test_an_answer_that_takes_days(self, gate: GateRun, kind: str) -> None:
        """a load waits for an answer however long it takes: giving up is for `send` to do"""
        script = [answer(gate, 3) for _ in range(4)]
        day = 24 * 3600.0
        script[1] = {"chunks": [[2 * day, 1, None], [2 * day, 1, 2]], "rest": 2 * day}
        what = f"an answer that takes six days ({kind} loop)"
        found, wanted = either(gate, kind, script, what)
        if len(found["timelines"]) > 1 and found["timelines"][1]["error"] is not None:
            raise GateFailure(
                Code.WRONG_LOAD, f"{what} is given up, though nothing has failed", "no error",
                short(found["timelines"][1]["error"], 60),
                likely="`asyncio.timeout` or `wait_for`: the loop has no say in when to give up.",
            )  # fmt: skip
        check(found, wanted, what)

    @BOTH
    def test_a_kind_of_request_failed(self, gate: GateRun, kind: str) -> None:
        """a subclass of RequestFailed is one: its message is the error"""
        script = [answer(gate, 3) for _ in range(4)]
        script[1] |= {"error": "HTTP 529", "special": True}
        what = f"`send` raises a subclass of RequestFailed ({kind} loop)"
        check(*either(gate, kind, script, what), what)


# -- one request ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A timeline, and what can be said of it."""

    what: str
    given: Json
    token_times: list[float] | None
    ttft: float | None
    itl: list[float] | None
    tpot: float | None
    e2e: float | None


ROLE, END = (2.0, 0), (3.0, 0)  # chunks without text
CASES = [
    Case("one token a chunk",
         timeline([ROLE, (2.25, 1), (2.5, 1), (3.0, 1), END], 3, 3.125),
         [2.25, 2.5, 3.0], 1.25, [0.25, 0.5], 0.375, 2.125),
    Case("chunks of 2, 3 and 1 tokens, and no count by the server",
         timeline([(2.0, 2), (2.5, 3), (3.0, 1)], None, 3.0),
         [2.0, 2.0, 2.5, 2.5, 2.5, 3.0], 1.0, [0.0, 0.5, 0.0, 0.0, 0.5], 0.2, 2.0),
    Case("chunks of 1 and 4 tokens, confirmed by the server",
         timeline([ROLE, (2.0, 1), (2.5, 4), END], 5),
         [2.0, 2.5, 2.5, 2.5, 2.5], 1.0, [0.5, 0.0, 0.0, 0.0], 0.125, 8.0),
    Case("as many chunks of unknown size as the server counted tokens",
         timeline([ROLE, (2.0, None), (2.5, None), (2.75, None), END], 3),
         [2.0, 2.5, 2.75], 1.0, [0.5, 0.25], 0.375, 8.0),
    Case("fewer chunks of unknown size than the server counted tokens",
         timeline([ROLE, (2.0, None), (2.5, None), (3.0, None), END], 9),
         None, 1.0, None, 0.125, 8.0),
    Case("chunks of unknown size, and no count at all",
         timeline([ROLE, (2.0, None), (2.5, None)]),
         None, 1.0, None, None, 8.0),
    Case("chunks of which one has an unknown size, and no count",
         timeline([(2.0, 1), (2.5, None), (3.0, 1)]),
         None, 1.0, None, None, 8.0),
    Case("a count that contradicts the sizes of the chunks",
         timeline([(2.0, 1), (2.5, 2), (3.0, 1)], 6),
         None, 1.0, None, 0.2, 8.0),
    Case("as many chunks as tokens, though one of them has two",
         timeline([(2.0, 2), (2.5, None), (3.0, None)], 3),
         None, 1.0, None, 0.5, 8.0),
    Case("an answer that came in one piece at the end",
         timeline([(9.0, 0)], 64), None, None, None, None, 8.0),
    Case("an answer in one piece, without a count",
         timeline([(9.0, 0)]), None, None, None, None, 8.0),
    Case("an empty answer",
         timeline([ROLE, END], 0), [], None, [], None, 8.0),
    Case("a single token",
         timeline([ROLE, (2.5, 1), END], 1), [2.5], 1.5, [], None, 8.0),
    Case("five tokens in a single chunk",
         timeline([(2.5, 5), END], 5), [2.5] * 5, 1.5, None, None, 8.0),
    Case("a request that failed half-way",
         timeline([ROLE, (2.0, 1), (2.5, 1)], None, 2.75, error="closed early"),
         [2.0, 2.5], None, None, None, None),
    Case("a request that was refused",
         timeline([], None, 1.75, error="HTTP 429"), None, None, None, None, None),
    Case("a request that failed with an error of no words",
         timeline([ROLE, (2.0, 1), (2.5, 1)], None, 2.75, error=""),
         [2.0, 2.5], None, None, None, None),
    Case("a request whose end is not known",
         timeline([ROLE, (2.0, 1), (2.5, 1)], None, None),
         [2.0, 2.5], None, None, None, None),
]  # fmt: skip


@pytest.mark.contract
class TestOneRequest:
    """What a timeline says, and what it does not say."""

    @pytest.mark.parametrize("name", ["token_times", "ttft", "itl", "tpot", "e2e"])
    def test_figures_of_a_request(self, gate: GateRun, name: str) -> None:
        """token times, TTFT, ITL, TPOT and E2E of timelines worked out by hand"""
        for case in CASES:
            what = f"{name} of {case.what}"
            got = expect.result_of(
                lambda c=case: gate.candidate.call("metric", name=name, timeline=c.given), what
            )
            shown = f"due at 1 s; chunks as (time, tokens): {short(case.given['chunks'], 120)}"
            same(got, getattr(case, name), what, where=shown, likely=LIKELY[name])

    def test_latencies_count_from_the_intended_time(self, gate: GateRun) -> None:
        """a request that was sent late: its waiting counts from when it was due"""
        late = timeline([(5.0, 1), (6.0, 1)], 2, 6.5, intended=1.0, sent=4.0)
        for name, wanted in (("ttft", 4.0), ("e2e", 5.5), ("tpot", 1.0), ("itl", [1.0])):
            got = gate.candidate.call("metric", name=name, timeline=late)
            what = f"{name} of a request that was due at 1 s and sent at 4 s"
            same(got, wanted, what, likely=LIKELY[name])


# -- many requests -------------------------------------------------------------------------------


@pytest.mark.contract
class TestPercentile:
    """Linear interpolation between ranks."""

    def test_percentiles(self, gate: GateRun) -> None:
        """percentiles are those of NumPy"""
        for count in (1, 2, 3, 10, 101, 250):
            values = [gate.rng.choice((1, 10)) * gate.rng.random() for _ in range(count)]
            for q in (0, 12.5, 50, 90, 99, 100):
                found = call(gate, "percentile", values, q, what=f"percentile({count} values, {q})")
                wanted = float(numpy.percentile(values, q))
                what = f"percentile({count} values, {q})"
                same(found["value"], wanted, what, likely=LIKELY["percentile"])
                expect.unchanged(values, found["args"][0], "the list of values")

    @pytest.mark.parametrize(
        ("values", "q", "argument"), [([], 50, "values"), ([1.0], -1, "q"), ([1.0], 101, "q")]
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, values: list[float], q: float, argument: str
    ) -> None:
        """no values, or a percentile outside of 0 to 100, is refused"""
        expect.rejects(
            lambda: gate.candidate.call("function", name="percentile", args=[values, q]),
            argument, f"percentile({values}, {q})",
        )  # fmt: skip


def aggregate(gate: GateRun, name: str, timelines: list[Json], *args: Any, what: str) -> Any:
    """A figure of many requests, which must leave their order alone."""
    found = expect.result_of(
        lambda: gate.candidate.call("aggregate", name=name, timelines=timelines, args=list(args)),
        what,
    )
    if not found["unchanged"]:
        raise GateFailure(Code.MUTATED_INPUT, f"{what}: the list of timelines was changed")
    return found["value"]


def window(start: float, end: float) -> list[Any]:
    """A window as an argument of `aggregate`."""
    return ["window", start, end]


@pytest.mark.contract
class TestSteadyWindow:
    """Warm-up and cool-down are cut."""

    def found(self, gate: GateRun, timelines: list[Json], *args: Any, what: str) -> Any:
        """The window as (start, end), or None."""
        value = aggregate(gate, "steady_window", timelines, *args, what=what)
        if value is not None and not (isinstance(value, dict) and {"start", "end"} <= set(value)):
            wrong(what, "a Window, or None", value)
        return None if value is None else [value["start"], value["end"]]

    def test_both_ends_are_cut(self, gate: GateRun) -> None:
        """the window opens after the warm-up, and closes before the load drains"""
        many = [
            timeline([], ended=i + gate.rng.uniform(1, 5), intended=i * 0.5, sent=i * 0.5)
            for i in range(20)
        ]
        for warmup, cooldown in ((0, 1), (4, 4), (0, 7), (9, 10), (18, 1)):
            what = f"the steady window of 20 requests, warmup {warmup}, cooldown {cooldown}"
            wanted = [warmup * 0.5, (20 - cooldown) * 0.5]
            found = self.found(gate, many, warmup, cooldown, what=what)
            same(found, wanted, what, likely=LIKELY["steady_window"])
            mixed = gate.rng.sample(many, len(many))
            same(self.found(gate, mixed, warmup, cooldown, what=what), wanted, f"{what}, unsorted")
        what = "the steady window of 20 requests, warmup 4, cooldown left out"
        same(
            self.found(gate, many, 4, what=what), [2.0, 9.5], what,
            likely="The default of `cooldown`, 1, was changed in the signature.",
        )  # fmt: skip

    def test_a_request_whose_end_is_not_known(self, gate: GateRun) -> None:
        """the window closes before the first request whose end is not known"""
        many = [timeline([], intended=float(i), sent=float(i)) for i in range(10)]
        many[6]["ended"] = many[8]["ended"] = None
        what = "the steady window of a load that was cut short"
        same(self.found(gate, many, 2, 2, what=what), [2.0, 6.0], what)
        many[1]["ended"] = None
        same(
            self.found(gate, many, 2, 2, what=what), None,
            "the steady window of a load with a warm-up request whose end is not known",
            made_up=LIKELY["made_up_window"],
        )  # fmt: skip
        failed = [{**one, "ended": 99.0, "error": "HTTP 500"} for one in many]
        same(self.found(gate, failed, 2, 2, what=what), [2.0, 8.0], "failed requests have ended")

    def test_nothing_is_left(self, gate: GateRun) -> None:
        """too few requests, or all at one time: there is no steady window"""
        many = [timeline([], intended=float(i), sent=float(i)) for i in range(6)]
        for warmup, cooldown in ((3, 3), (6, 1), (0, 6), (50, 50)):
            what = f"the steady window of 6 requests, warmup {warmup}, cooldown {cooldown}"
            same(
                self.found(gate, many, warmup, cooldown, what=what), None, what,
                made_up=LIKELY["empty_window"],
            )  # fmt: skip
        same(self.found(gate, [], 0, 1, what="no requests"), None, "the window of no requests")
        together = [timeline([]) for _ in range(6)]
        what = "the steady window of requests that were all due at one time"
        same(
            self.found(gate, together, 1, 1, what=what), None, what, made_up=LIKELY["empty_window"]
        )

    @pytest.mark.parametrize(
        ("args", "argument"), [((-1, 1), "warmup"), ((0, 0), "cooldown"), ((0, -2), "cooldown")]
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, args: tuple[int, int], argument: str
    ) -> None:
        """a negative warm-up, or a cool-down of nothing, is refused"""
        expect.rejects(
            lambda: gate.candidate.call(
                "aggregate", name="steady_window", timelines=[], args=list(args)
            ),
            argument, f"steady_window(..., {args[0]}, {args[1]})",
        )  # fmt: skip


def some(gate: GateRun, count: int, style: str = "counted") -> list[Json]:
    """Random timelines, in steady state from about 5 s to 15 s.

    style: "counted" (chunks of known sizes), "one each" (unknown sizes, as many as tokens),
    "usage" (unknown sizes, fewer than tokens), "piece" (not streamed), "nothing" (no count).
    """
    rng, many = gate.rng, []
    for index in range(count):
        intended = index * 16 / count + rng.random() / 8
        now = intended + rng.uniform(0.1, 2.0)
        sizes = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randrange(2, 25))]
        chunks: list[tuple[float, int | None]] = [(now - 0.05, 0)]
        for size in sizes:
            chunks.append((now, size if style == "counted" else None))
            now += rng.choice((1, 1, 1, 4)) * rng.uniform(0.05, 0.2)
        totals = {"one each": len(sizes), "usage": sum(sizes) + 1, "nothing": None}
        total = totals.get(style, sum(sizes))
        if style == "piece":
            chunks = [(now, 0)]
        many.append(
            timeline(chunks, total, now + 0.01, intended=intended, sent=intended + rng.random() / 9)
        )
    rng.shuffle(many)
    return many


@pytest.mark.contract
class TestManyRequests:
    """Inside a window: tokens by their own time, requests by when they were due."""

    def test_throughput_and_occupancy_by_hand(self, gate: GateRun) -> None:
        """throughput and occupancy of two requests, worked out by hand"""
        # Tokens at 2, 3, 4 and 5 s, and at 3.5 and 6.5 s. The window holds 3, 3.5, 4 and 5.
        pair = [
            timeline([(2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1)], 4, 5.5, intended=1.0),
            timeline([(3.5, 1), (6.5, 1)], 2, 7.0, intended=2.5),
        ]
        inside = window(2.5, 5.5)
        what = "tokens per second from 2.5 s to 5.5 s"
        same(aggregate(gate, "throughput", pair, inside, what=what), 4 / 3, what)
        # Gaps that close inside: 1, 1 and 1 s. First tokens inside: the one at 3.5 s. By counting:
        # the first request from 2.5 to 5 s, the second from 3.5 to 5.5 s.
        wanted = [(4 / 3 - 1 / 3) * 1.0, 4.5 / 3]
        check_occupancy(gate, pair, 2.5, 5.5, wanted, "two requests, worked out by hand")

    def test_edges_of_a_window(self, gate: GateRun) -> None:
        """a request that ends just as the window opens is under way, one due as it closes is not"""
        many = [
            timeline([(1.0, 1), (2.0, 1), (3.0, 1)], 3, 3.0, intended=0.5),
            timeline([(3.5, 1), (4.5, 1)], 2, 4.75, intended=2.5),
            timeline([(6.0, None)], None, 6.5, intended=5.0),  # nobody knows how many tokens
        ]
        what = "three requests at the edges of a window"
        given = shown(many, 3.0, 5.0)
        got = aggregate(gate, "throughput", many, window(3.0, 5.0), what=what)
        # The tokens at 3.0, 3.5 and 4.5 s; gaps of 1 and 1 s; one first token.
        same(got, 3 / 2, f"{what}: throughput", where=given, likely=LIKELY["edge"])
        got = both(aggregate(gate, "occupancy", many, window(3.0, 5.0), what=what), what)
        same(got, [1.0, 0.5], f"{what}: occupancy (product, counted)", where=given,
             likely=LIKELY["edge"])  # fmt: skip

    def test_windows_cut_through_requests(self, gate: GateRun) -> None:
        """random requests, and windows that cut through them"""
        for style in ("counted", "one each"):
            many = some(gate, 60, style)
            for start, end in ((5.0, 12.0), (6.5, 6.75), (0.0, 40.0), (7.0, 15.5)):
                check_window(gate, many, start, end, f"60 requests from {start} s to {end} s")

    def test_all_values_together(self, gate: GateRun) -> None:
        """percentiles are of all values together, and a mean is of all values alike"""
        many = some(gate, 6)
        slow = some(gate, 1)[0]
        slow["chunks"] = [[time * 3, tokens] for time, tokens in slow["chunks"]]
        slow["ended"] = slow["chunks"][-1][0] + 1
        check_summary(gate, [*many, slow], 0.0, 100.0, "a slow request among short ones")

    def test_what_the_server_does_not_say(self, gate: GateRun) -> None:
        """unknown sizes: no ITL and no occupancy, but throughput, TTFT, TPOT and E2E"""
        check_window(gate, some(gate, 30, "usage"), 4.0, 12.0, "chunks of unknown size")
        check_window(gate, some(gate, 30, "piece"), 4.0, 12.0, "answers in one piece")
        check_window(gate, some(gate, 30, "nothing"), 4.0, 12.0, "no count at all")

    def test_a_sum_needs_every_part(self, gate: GateRun) -> None:
        """one request without a count: figures that need all are absent, and others say so"""
        for style in ("usage", "piece", "nothing"):
            many = [*some(gate, 30), *some(gate, 2, style)]
            check_window(gate, many, 0.0, 40.0, f"two requests without sizes ({style}) among 32")

    def test_failed_requests_are_counted_and_not_averaged(self, gate: GateRun) -> None:
        """failed requests are counted by kind, and are in no latency and no sum"""
        many = some(gate, 40)
        for index, one in enumerate(many[:12]):
            kind = ("HTTP 429", "HTTP 429", "closed early", "")[index % 4]
            one |= {"error": kind, "chunks": one["chunks"][: index % 5]}
            one["ended"] = one["intended"] + 0.001
        check_window(gate, many, 3.0, 13.0, "40 requests of which 12 fail")
        for one in many:
            one["error"] = "HTTP 503"
        check_window(gate, many, 3.0, 13.0, "requests that all fail")

    def test_requests_under_way_do_not_count(self, gate: GateRun) -> None:
        """requests whose end is not known have no latencies, and are no failures"""
        many = some(gate, 30)
        for one in many[::3]:
            one["ended"] = None
        check_window(gate, many, 3.0, 13.0, "requests of which a third is under way")

    def test_nothing_in_the_window(self, gate: GateRun) -> None:
        """a window in which nothing happened"""
        check_window(gate, some(gate, 10), 500.0, 600.0, "a window after the end")
        check_window(gate, [], 0.0, 1.0, "no requests at all")

    def test_occupancy_of_a_load_with_a_closed_form(self, gate: GateRun) -> None:
        """a closed loop against constant delays: throughput and occupancy of a closed form

        Of N users, N (n - 1) g / (w + (n - 1) g) are between their first and their last token.
        """
        users, tokens, wait, gap = 4, 17, 512 * TICK, 24 * TICK
        one = {"chunks": [[wait, 1, None], *[[gap, 1, None]] * (tokens - 2), [gap, 1, tokens]]}
        script = [one for _ in range(10 * users)]
        for index in range(users):  # users who begin together would stay together
            script[index] = {"chunks": [[wait * (index + 1) / users, 1, 1]]}
        what = f"{users} users, {tokens} tokens each"
        found = run(gate, "closed", script, users, what)
        check(found, oracle.closed(script, users), what)
        many = found["timelines"]
        # From a request of the first user to a later one of the same: whole rounds of everybody.
        # Half a tick later, so that nothing happens on an edge.
        start, end = (many[i * users]["intended"] + TICK / 2 for i in (2, 9))
        decoding = (tokens - 1) * gap
        wanted = users * decoding / (wait + decoding)
        check_occupancy(gate, many, start, end, [wanted, wanted], what)
        got = aggregate(gate, "throughput", many, window(start, end), what=what)
        rate = users * tokens / (wait + decoding)
        where = shown(many, start, end)
        same(got, rate, f"{what}: throughput", where=where, likely=LIKELY["throughput"])


def shown(many: list[Json], start: float, end: float) -> str:
    """A window, and the first timelines that touch it, in a line or three."""
    touching = oracle.alive(many, start, end)
    parts = [f"the window from {start:.6g} s to {end:.6g} s: {len(touching)} finished requests"]
    for one in touching[:3]:
        chunks = ", ".join(
            f"{time:.5g}" + ("" if n == 1 else " (?)" if n is None else f" ({n})")
            for time, n in one["chunks"][:6]
        )
        more = ", ..." if len(one["chunks"]) > 6 else ""
        parts.append(f"due {one['intended']:.5g}, chunks {chunks}{more}, over {one['ended']:.5g}")
    return "; ".join(parts) + ("; ..." if len(touching) > 3 else "")


def check_window(gate: GateRun, many: list[Json], start: float, end: float, what: str) -> None:
    """Throughput, occupancy and summary of one window."""
    got = aggregate(gate, "throughput", many, window(start, end), what=what)
    wanted = oracle.tokens_per_second(many, start, end)
    where = shown(many, start, end)
    same(got, wanted, f"{what}: throughput", where=where, likely=LIKELY["throughput"])
    check_occupancy(gate, many, start, end, oracle.little(many, start, end), what)
    check_summary(gate, many, start, end, what)


def check_occupancy(
    gate: GateRun, many: list[Json], start: float, end: float, wanted: list[float] | None,
    what: str,
) -> None:  # fmt: skip
    """Both sides of Little's law, or None."""
    got = both(aggregate(gate, "occupancy", many, window(start, end), what=what), what)
    same(
        got, wanted, f"{what}: occupancy (product, counted)", where=shown(many, start, end),
        likely=LIKELY["occupancy"],
    )  # fmt: skip


def both(value: Any, what: str) -> Any:
    """An Occupancy as a list of its two sides."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"product", "counted"}:
        wrong(f"{what}: occupancy", "an Occupancy, or None", value)
    return [value["product"], value["counted"]]


def check_summary(gate: GateRun, many: list[Json], start: float, end: float, what: str) -> None:
    """Every field of a Summary."""
    got = aggregate(gate, "summarize", many, window(start, end), what=what)
    wanted = oracle.summary(many, start, end)
    where = shown(many, start, end)
    if not isinstance(got, dict) or not set(wanted) < set(got):
        wrong(f"{what}: summarize", "a Summary", got)
    edges = got.get("window")
    if not isinstance(edges, dict) or not {"start", "end"} <= set(edges):
        wrong(f"{what}: summarize(...).window", "the Window that was given", edges)
    same([edges["start"], edges["end"]], [start, end], f"{what}: window")
    if got["errors"] != wanted["errors"]:
        raise GateFailure(
            Code.WRONG_VALUE, f"{what}: errors", str(wanted["errors"]), short(got["errors"], 80),
            where=where, likely=LIKELY["summarize"],
        )  # fmt: skip
    for name in ("requests", "request_rate", "throughput"):
        same(got[name], wanted[name], f"{what}: {name}", where=where, likely=LIKELY["summarize"])
    for name in ("ttft", "itl", "tpot", "e2e", "lag"):
        if got[name] is None or wanted[name] is None:
            same(got[name], wanted[name], f"{what}: {name}", where=where)
            continue
        if not isinstance(got[name], dict) or set(got[name]) != set(wanted[name]):
            wrong(f"{what}: {name}", "a Stat", got[name])
        for field, value in wanted[name].items():
            same(
                got[name][field], value, f"{what}: {name}.{field}", where=where,
                likely=LIKELY["summarize"],
            )  # fmt: skip
    same(
        both(got["occupancy"], what), wanted["occupancy"], f"{what}: occupancy", where=where,
        likely=LIKELY["occupancy"],
    )  # fmt: skip


# -- the number: real time, real HTTP ------------------------------------------------------------

BLOCKS = 25  # a run is cut into so many stretches of time, and each gives one ratio
NOISY = 0.005  # seconds: a machine on which one server timer in ten is later than that


@dataclass(frozen=True)
class Recorded:
    """What the server wrote down of one request, by a clock that all processes share."""

    received: float
    sent: list[list[Any]]  # [when, tokens] of each chunk
    late: list[float]

    @property
    def ttft(self) -> float:
        """From the request to the first token."""
        return float(self.sent[0][0]) - self.received

    def gaps(self, start: float, end: float) -> Iterator[float]:
        """The gap before each token that was sent in the window."""
        times = [time for time, tokens in self.sent for _ in range(tokens)]
        yield from (b - a for a, b in pairwise(times) if start <= b < end)


class Runs:
    """Loads over HTTP, seen from both ends, until every figure has its verdict."""

    def __init__(self, gate: GateRun, kind: str, names: Sequence[str]) -> None:
        self.gate = gate
        self.kind = kind
        prior = gate.options.prior
        self.ratios = {name: PairedRatio(prior.get(name, [])) for name in names}
        self.final_at = {name: len(ratio) + 4 * BLOCKS for name, ratio in self.ratios.items()}
        self.lateness: list[float] = []

    def load(self, count: int, how: Any) -> tuple[list[Json], list[Recorded]]:
        """One load: the client's timelines and the server's records, in the order of sending."""
        what = f"a load of {count} requests over HTTP"
        server = self.gate.baseline.start(
            "serve", seed=self.gate.rng.randrange(1 << 30), kind=self.kind
        )
        url = server.step().value
        timelines = expect.result_of(
            lambda: self.gate.candidate.call(
                "drive", kind=self.kind, url=url, count=count, how=how
            ),
            what,
        )
        check_types(timelines, what)
        records = [Recorded(received, sent, late)
                   for received, sent, _, late in server.step().value]  # fmt: skip
        server.stop()
        failed = [one["error"] for one in timelines if one["error"] is not None]
        if failed:
            raise GateFailure(
                Code.CRASHED, f"{what}: requests that the server answered have failed",
                "no failure", f"{len(failed)}: {failed[0]}",
            )  # fmt: skip
        if not len(timelines) == len(records) == count:
            raise GateFailure(
                Code.WRONG_LOAD, f"{what}: one timeline for each request", str(count),
                f"{len(records)} requests came, {len(timelines)} timelines",
            )  # fmt: skip
        self.lateness += [late for record in records for late in record.late]
        return timelines, records

    def compare(
        self, timelines: list[Json], blocks: list[tuple[float, float]], figure: str,
        recorded: Callable[[int, float, float], list[float]],
    ) -> None:  # fmt: skip
        """Add one ratio for each block and percentile: the server's over the client's.

        recorded: what the server wrote down of a block: its index, start and end are given.
        """
        found = expect.result_of(
            lambda: self.gate.candidate.call(
                "summaries", timelines=timelines, windows=[list(block) for block in blocks]
            ),
            "summarize, of a load over HTTP",
        )
        for index, (block, got) in enumerate(zip(blocks, found, strict=True)):
            values = recorded(index, *block)
            if not values:
                raise GateFailure(
                    Code.MISMEASURED, "the server had nothing to do in the middle of the load",
                    "requests that keep coming", f"{block[1] - block[0]:.2f} s without any",
                    likely="Requests are held back, or sent all at once.",
                )  # fmt: skip
            for name, ratio in self.ratios.items():
                level = name.removeprefix(f"{figure}_")
                if not isinstance(got, dict) or not isinstance(got.get(figure), dict):
                    raise GateFailure(
                        Code.MISMEASURED, f"{figure} of {len(values)} values is absent", "a Stat",
                        short(got, 80), likely=LIKELY["absent"],
                    )  # fmt: skip
                measured = expect.is_number(got[figure].get(level), f"{figure}.{level}")
                if not measured > 0:
                    raise GateFailure(
                        Code.MISMEASURED, f"{figure}.{level} must be above 0", "> 0", str(measured),
                        likely="A clock that does not go on, or chunks that are stamped together.",
                    )  # fmt: skip
                ratio.add(float(numpy.percentile(values, float(level[1:]))), measured)

    @property
    def open(self) -> bool:
        """Whether another run is needed, the first of which shows how late the server itself is.

        One figure that is off ends the gate, whatever the others would come to.
        """
        verdicts = [self.looked(name).verdict for name in self.ratios]
        undecided = None in verdicts and Verdict.FAIL not in verdicts
        return undecided or not self.lateness

    def looked(self, name: str) -> Any:
        """The state of one figure."""
        return look(self.ratios[name], self.bar(name), final_at=self.final_at[name])

    def bar(self, name: str) -> Bar:
        """The band of one figure. An interval that lies outside decides, however wide it is."""
        return replace(bar_of(self.gate.bar(name)), max_spread=1e9)

    def record(self, figure: str) -> None:
        """Every figure with its verdict; the first that is off ends the gate."""
        late = float(numpy.percentile(self.lateness, 90))
        for name, ratio in self.ratios.items():
            seen = self.looked(name)
            verdict = seen.verdict or Verdict.INCONCLUSIVE
            if verdict is Verdict.FAIL and late > NOISY:
                verdict = Verdict.INCONCLUSIVE  # the server's own timers are late: blame nobody
            measured, recorded = 1e3 * ratio.candidate_s, 1e3 * ratio.baseline_s
            bar = self.bar(name)
            self.gate.interval(
                name, ratio, seen.interval, verdict, "x",
                text=f"{recorded:,.1f} ms by the server's record, measured "
                f"{100 / ratio.median - 100:+.1f}%",
                needs=str(bar), extra={"server_late_p90": late},
            )  # fmt: skip
            if verdict is Verdict.FAIL:
                low, high = seen.interval
                raise GateFailure(
                    Code.MISMEASURED,
                    f"{name.replace('_', ' ').upper()} is not what the server recorded",
                    f"{recorded:,.1f} ms, recorded over measured within {bar}",
                    f"{measured:,.1f} ms, interval [{low:.2f}, {high:.2f}]",
                )  # fmt: skip


def cut(start: float, end: float) -> list[tuple[float, float]]:
    """A stretch of time in blocks of the same length."""
    edges = [start + (end - start) * i / BLOCKS for i in range(BLOCKS + 1)]
    return list(pairwise(edges))


@pytest.mark.number
def test_ttft(gate: GateRun) -> None:
    """TTFT of an open loop against the server's record"""
    runs = Runs(gate, "open", ["ttft_p50", "ttft_p99"])
    rate, edge, each = 40.0, 20, 10
    arrivals = [i / rate for i in range(2 * edge + each * BLOCKS)]
    while runs.open:
        gate.tell("TTFT: an open loop over HTTP")
        timelines, records = runs.load(len(arrivals), arrivals)
        # A block begins half-way between two requests, so that both ends agree who belongs to it.
        first = records[0].received + (edge - 0.5) / rate
        blocks = cut(first, first + each * BLOCKS / rate)
        waits = [record.ttft for record in records[edge:-edge]]
        runs.compare(
            timelines, blocks, "ttft", lambda i, a, b, w=waits: w[each * i : each * (i + 1)]
        )
    runs.record("ttft")


@pytest.mark.number
def test_itl_and_occupancy(gate: GateRun) -> None:
    """ITL and Little's law of a closed loop against the server's record"""
    runs = Runs(gate, "closed", ["itl_p50", "itl_p99"])
    users, count = gate.bar("users"), 6 * gate.bar("users")
    products, counts = [], []
    while runs.open:
        gate.tell("ITL: a closed loop over HTTP")
        timelines, records = runs.load(count, users)
        start, end = records[users].received, records[count - users].received
        runs.compare(
            timelines, cut(start, end), "itl",
            lambda i, a, b, r=records: [gap for one in r for gap in one.gaps(a, b)],
        )  # fmt: skip
        [got] = gate.candidate.call("summaries", timelines=timelines, windows=[[start, end]])
        product = both(got.get("occupancy") if isinstance(got, dict) else got, "a load over HTTP")
        if product is None:
            raise GateFailure(
                Code.MISMEASURED, "occupancy is absent", "an Occupancy", "None",
                likely=LIKELY["absent"],
            )  # fmt: skip
        products.append(expect.is_number(product[0], "occupancy.product"))
        counts.append(recorded_occupancy(records, start, end))
    runs.record("itl")
    product, counted = statistics.fmean(products), statistics.fmean(counts)
    bar = gate.bar("littles_law")
    gate.exact(
        "littles_law", round(product / counted, 4), **bar, unit="x", code=Code.MISMEASURED,
        text=f"throughput x ITL is {product:.2f}, the server counted {counted:.2f}", counted=False,
        message="throughput x mean ITL is not the number of requests between first and last token",
    )  # fmt: skip
    gate.report(
        "occupancy", round(product, 2),
        f"{product:.1f} of {users} requests in flight were between first and last token",
    )  # fmt: skip


def recorded_occupancy(records: list[Recorded], start: float, end: float) -> float:
    """The time-average of requests between the first and the last chunk that was sent."""
    spans = ((one.sent[0][0], one.sent[-1][0]) for one in records)
    busy = sum(max(0.0, min(last, end) - max(first, start)) for first, last in spans)
    return busy / (end - start)
