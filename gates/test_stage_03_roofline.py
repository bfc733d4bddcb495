"""Stage 03, the judge: the roofline."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import pytest

from course.check import expect
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.gate import GateRun, bar_of
from course.check.prompts import real_prompt
from course.measure.ratio import Bar, PairedRatio, PairedResult, Verdict, measure_pair
from course.measure.roofline import cache_bytes
from course.model.config import ModelConfig
from course.model.describe import load_config
from course.model.published import PUBLISHED

STAGE = 3
GIB = 1 << 30

# Parameters as their publishers count them: the oracle of `decode_weights`, less the embedding
# table where the head is a matrix of its own.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "smollm2-135m": 134_515_008,
}
KV_BYTES = {  # per token, at 16 bits: 2 x layers x KV heads x head dim x 2
    "llama-2-7b": 524_288,
    "llama-3-8b": 131_072,
    "mistral-7b": 131_072,
    "qwen2.5-7b": 57_344,
    "qwen3-8b": 147_456,
    "qwen3-0.6b": 114_688,
    "smollm2-135m": 23_040,
}


def read_by_decode(name: str) -> int:
    """Weights that a decode step reads."""
    config = PUBLISHED[name]
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return PARAMETERS[name] - table


def formula(gate: GateRun, function: str, config: ModelConfig, *args: Any) -> Any:
    return gate.candidate.call("formula", function=function, config=asdict(config), args=list(args))


def equals(gate: GateRun, function: str, name: str, args: tuple[Any, ...], expected: float) -> None:
    """A closed form at one published shape."""
    arguments = ", ".join([name, *(f"{a:g}" for a in args)])
    what = f"{function}({arguments})"
    got = expect.result_of(lambda: formula(gate, function, PUBLISHED[name], *args), what)
    expect.value(got, expected, what, rel=1e-9)


@pytest.mark.contract
class TestFormulas:
    """Closed forms, at the shapes of published models."""

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_weights_read_by_a_decode_step(self, gate: GateRun, name: str) -> None:
        """weights that a decode step reads, for published models"""
        equals(gate, "decode_weights", name, (), read_by_decode(name))

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_kv_bytes_per_token(self, gate: GateRun, name: str) -> None:
        """bytes of keys and values per token, for published models"""
        equals(gate, "kv_bytes_per_token", name, (2,), KV_BYTES[name])
        equals(gate, "kv_bytes_per_token", name, (0.5,), KV_BYTES[name] / 4)

    def test_intensity_without_a_cache_is_the_batch_size(self, gate: GateRun) -> None:
        """arithmetic intensity: 1 FLOP per byte and sequence at 16 bits, 0.5 at 32"""
        for batch_size in (1, 8, 64):
            equals(gate, "arithmetic_intensity", "llama-3-8b", (batch_size, 0, 2), batch_size)
            equals(gate, "arithmetic_intensity", "llama-3-8b", (batch_size, 0, 4), batch_size / 2)

    @pytest.mark.parametrize("name", ["llama-2-7b", "qwen2.5-7b", "qwen3-0.6b"])
    def test_intensity_with_a_cache(self, gate: GateRun, name: str) -> None:
        """arithmetic intensity with a cache to read"""
        for batch_size, context_len in ((1, 4096), (32, 1000)):
            flops, moved = decode_cost(name, batch_size, context_len, 2)
            args = (batch_size, context_len, 2)
            equals(gate, "arithmetic_intensity", name, args, flops / moved)
        flops, moved = decode_cost(name, 3, 700, 0.5)
        equals(gate, "arithmetic_intensity", name, (3, 700, 0.5), flops / moved)

    def test_the_floor_when_memory_is_the_limit(self, gate: GateRun) -> None:
        """the floor of a step that waits for memory"""
        _, moved = decode_cost("llama-3-8b", 4, 2000, 2)
        args = (4, 2000, 2, 2e12, 1e15)
        equals(gate, "decode_floor", "llama-3-8b", args, moved / 2e12)
        _, moved = decode_cost("smollm2-135m", 2, 300, 4)
        equals(gate, "decode_floor", "smollm2-135m", (2, 300, 4, 2e10, 1e15), moved / 2e10)

    def test_the_floor_when_arithmetic_is_the_limit(self, gate: GateRun) -> None:
        """the floor of a step that waits for arithmetic"""
        flops, _ = decode_cost("llama-3-8b", 512, 100, 2)
        args = (512, 100, 2, 4.8e12, 5e13)
        equals(gate, "decode_floor", "llama-3-8b", args, flops / 5e13)

    def test_the_largest_batch(self, gate: GateRun) -> None:
        """whole sequences that fit beside the weights"""
        equals(gate, "max_batch", "llama-3-8b", (80 * GIB, 14.9 * GIB, 8192, 2), 65)
        equals(gate, "max_batch", "llama-2-7b", (24 * GIB, 12.6 * GIB, 4096, 2), 5)
        equals(gate, "max_batch", "qwen2.5-7b", (16 * GIB, 14.2 * GIB, 32_768, 2), 1)
        equals(gate, "max_batch", "llama-3-8b", (14 * GIB, 10 * GIB, 8192, 2), 4)  # to the byte
        equals(gate, "max_batch", "llama-3-8b", (14 * GIB, 10 * GIB, 8192, 0.5), 16)

    def test_nothing_fits_when_the_weights_do_not(self, gate: GateRun) -> None:
        """the largest batch is 0 when the weights do not fit"""
        equals(gate, "max_batch", "llama-2-7b", (8 * GIB, 12.6 * GIB, 4096, 2), 0)

    @pytest.mark.parametrize(
        ("function", "args", "argument"),
        [
            ("kv_bytes_per_token", (0,), "bytes_per_value"),
            ("arithmetic_intensity", (0, 10, 2), "batch_size"),
            ("arithmetic_intensity", (1, -1, 2), "context_len"),
            ("decode_floor", (1, 10, 2, 0.0, 1e12), "bandwidth"),
            ("decode_floor", (1, 10, 2, -1.0, 1e12), "bandwidth"),
            ("decode_floor", (1, 10, 2, 1e12, -1.0), "flops"),
            ("decode_floor", (1, 10, 2, 1e12, 0.0), "flops"),
            ("decode_floor", (0, 10, 2, 1e12, 1e12), "batch_size"),
            ("decode_floor", (1, -1, 2, 1e12, 1e12), "context_len"),
            ("max_batch", (GIB, 0, 0, 2), "context_len"),
            ("max_batch", (GIB, 0, 100, 0), "bytes_per_value"),
        ],
    )
    def test_bad_input_is_refused(
        self, gate: GateRun, function: str, args: tuple[Any, ...], argument: str
    ) -> None:
        """bad input gets an error that names the argument"""
        shown = ", ".join(f"{arg:g}" for arg in args)
        expect.rejects(
            lambda: formula(gate, function, PUBLISHED["llama-3-8b"], *args),
            argument, f"{function}(config, {shown})",
        )  # fmt: skip

    def test_whole_numbers_are_ints(self, gate: GateRun) -> None:
        """counts are ints"""
        config = PUBLISHED["smollm2-135m"]
        for function, args in (("decode_weights", ()), ("max_batch", (GIB, 0, 100, 2))):
            got = expect.result_of(
                lambda f=function, a=args: formula(gate, f, config, *a), function
            )
            expect.is_int(got, function)


def decode_cost(
    name: str, batch_size: int, context_len: int, bytes_per_value: float
) -> tuple[float, float]:
    """FLOP and bytes of a decode step, from published figures."""
    config, weights = PUBLISHED[name], read_by_decode(name)
    per_position = 4 * config.num_heads * config.head_dim * config.num_layers
    flops = batch_size * (2 * weights + per_position * context_len)
    cache = batch_size * context_len * KV_BYTES[name] / 2 * bytes_per_value
    return flops, weights * bytes_per_value + cache


DOUBTFUL = 1.5  # a factor by which two processes may differ that do the same


@pytest.mark.number
def test_bandwidth(gate: GateRun) -> None:
    """read bandwidth against the course's own probe"""
    cache = cache_bytes(gate.device)
    readings = Readings(gate, "measure_bandwidth", [cache])
    # Whatever is read must exceed the cache, so an honest call takes at least this long.
    readings.compare("bandwidth", "GB/s", 1e9, least_work=2 * cache)


@pytest.mark.number
def test_flops(gate: GateRun) -> None:
    """matmul FLOP/s against the course's own probe"""
    dtype = "bfloat16" if gate.device == "cuda" else "float32"
    readings = Readings(gate, "measure_flops", [dtype])
    readings.compare("flops", "GFLOP/s", 1e9, least_work=1e8)


class Readings:
    """Two workers that measure the machine in turn, and how far they agree."""

    def __init__(self, gate: GateRun, function: str, args: list[Any]) -> None:
        self.gate = gate
        self.function = function
        self.args = args
        self._begin()

    def _begin(self) -> None:
        self.runs = {
            side: worker.start("readings", function=self.function, args=self.args)
            for side, worker in (
                ("candidate", self.gate.candidate), ("baseline", self.gate.baseline)
            )
        }  # fmt: skip
        self.seconds: list[float] = []
        self.found: dict[str, list[float]] = {"candidate": [], "baseline": []}

    def begin_anew(self) -> None:
        """Two other processes, which lie elsewhere in memory and on the cores."""
        for worker in (self.gate.candidate, self.gate.baseline):
            worker.kill()
        self._begin()

    def read(self, side: str) -> float:
        """One reading, in units per second."""
        taken = len(self.found["baseline"])
        self.gate.tell(f"{self.function}: reading {taken + 1} of each side")
        step = expect.result_of(self.runs[side].step, self.function)
        if side == "candidate":
            self.seconds.append(step.seconds)
        value = expect.is_number(step.value, self.function)
        if not value > 0:
            raise GateFailure(
                Code.WRONG_VALUE, f"{self.function} must be above 0", "> 0", str(value)
            )
        self.found[side].append(value)
        return value

    def _agreement(self, bar: Bar, prior: list[tuple[float, float]]) -> PairedResult:
        """Readings in turn, in seconds per unit: above 1 the candidate reads more."""
        return measure_pair(
            lambda: 1 / self.read("baseline"), lambda: 1 / self.read("candidate"), bar,
            prior=PairedRatio(prior), warmup=0,
        )  # fmt: skip

    def compare(self, name: str, unit: str, scale: float, *, least_work: float) -> None:
        """Interleave readings until their ratio is inside the band, or clearly outside."""
        bar = bar_of(self.gate.bar(name))
        result = self._agreement(bar, self.gate.options.prior.get(name, []))
        low, high = result.interval
        if result.verdict is Verdict.FAIL and low <= DOUBTFUL and high >= 1 / DOUBTFUL:
            self.begin_anew()  # two processes can differ for as long as they live
            result = self._agreement(bar, [])
        ratio, (low, high) = result.ratio, result.interval
        for run in self.runs.values():
            run.stop()
        mine = statistics.median(self.found["candidate"]) / scale
        course = statistics.median(self.found["baseline"]) / scale
        self.gate.interval(
            name, ratio, (low, high), result.verdict or Verdict.INCONCLUSIVE, "x",
            text=f"{mine:,.1f} {unit} against the probe's {course:,.1f}: {ratio.median:.2f}x",
            needs=str(bar), extra={"candidate": mine * scale},
        )  # fmt: skip
        if result.verdict is Verdict.FAIL:
            code = Code.TOO_SLOW if high < bar.value else Code.TOO_GOOD
            raise GateFailure(
                code, f"{self.function} does not agree with the course's probe",
                f"{bar.value:g} to {bar.upper:g} times {course:,.1f} {unit}",
                f"{mine:,.1f} {unit}, interval [{low:.2f}x, {high:.2f}x]",
            )  # fmt: skip
        self.must_have_worked(least_work / (course * scale), unit)

    def must_have_worked(self, least_seconds: float, unit: str) -> None:
        """A reading takes at least as long as the least work that could give it."""
        fastest = min(self.seconds)
        if fastest < 0.5 * least_seconds:
            raise GateFailure(
                Code.TOO_GOOD, f"{self.function} came back before it can have measured anything",
                f"at least {1e3 * least_seconds:.1f} ms", f"{1e3 * fastest:.2f} ms",
            )  # fmt: skip


@pytest.mark.number
def test_floor(gate: GateRun) -> None:
    """the floor of a decode step against a measured one"""
    by_name = {n.name: n for n in gate.numbers}
    width = gate.baseline.call("bytes_per_weight", model=gate.model)
    context_len = 64
    prompt = real_prompt(gate.model, gate.rng, context_len)
    run = gate.baseline.start("decode", model=gate.model, prompt_ids=prompt)
    run.step()  # the prefill
    seconds = statistics.median(run.step().seconds for _ in range(25))
    run.stop()
    config = load_config(gate.model, gate.device)
    bandwidth, flops = (by_name[n].extra["candidate"] for n in ("bandwidth", "flops"))
    args = [1, context_len, width, bandwidth, flops]
    floor = expect.is_number(
        expect.result_of(lambda: formula(gate, "decode_floor", config, *args), "decode_floor"),
        "decode_floor",
    )
    moved = decode_bytes(config, context_len, width)
    expect.value(floor, moved / bandwidth, "decode_floor of the measured step", rel=0.01)
    share = 100 * floor / seconds
    gate.exact(
        "floor", round(share, 1), at_most=105.0, unit="%", code=Code.TOO_GOOD, counted=False,
        text=f"{1e3 * floor:.1f} ms of a measured step of {1e3 * seconds:.1f} ms: "
        f"{share:.0f}% model-bandwidth utilisation",
        message="no step can be faster than its floor: bytes or bandwidth are counted wrongly",
        note="the rest is host overhead, and reading in pieces: see the split in the notebook",
    )  # fmt: skip


def decode_bytes(config: ModelConfig, context_len: int, width: int) -> float:
    """Bytes that a batch-1 decode step reads, from the shapes of the weights themselves."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return (config.num_weights - table + per_token * context_len) * width
