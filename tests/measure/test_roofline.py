"""The roofline: held against a C program, and its cache against damage. No bare times."""

import json
import math
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course.measure import (
    Bar,
    PairedRatio,
    Roofline,
    Verdict,
    measure_pair,
    probe,
    roofline,
    verdict,
)
from course.measure.roofline import (
    cache_bytes,
    copy_bandwidth,
    copy_probe,
    matmul_flops,
    matmul_probe,
    probe_bytes,
    read_bandwidth,
    read_probe,
)

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(scope="module")
def read_memory(tmp_path_factory):
    """The compiled C program."""
    if CC is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("read") / "read_memory"
    source = Path(__file__).with_name("read_memory.c")
    command = [CC, "-O3", "-march=native", "-pthread", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"the C compiler refuses: {built.stderr[-500:]}")
    return program


@contextmanager
def reading_in_c(program: Path, nbytes: int, threads: int):
    """Run the C program; a function that reads the array once and gives its seconds."""
    words = nbytes // 8
    total = words * (words - 1) // 2 % 2**64
    process = subprocess.Popen(
        [str(program), str(nbytes), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def step() -> float:
        process.stdin.write("\n")
        seconds, found = process.stdout.readline().split()
        assert int(found) == total, "it did not read everything"
        return float(seconds)

    try:
        yield step
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("threads", sorted({1, torch.get_num_threads()}))
def test_the_read_probe_is_as_fast_as_a_c_program(read_memory, threads):
    """As fast as a plain C loop over an array of the same size with as many threads.

    Between 0.6 and 1.5 times as fast, by a paired ratio: no interval lies wholly outside of that.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = read_probe("cpu")
        with reading_in_c(read_memory, int(ours.work), threads) as step:
            result = measure_pair(step, ours.seconds, Bar(0.6, "no_worse_than"), max_slices=50)
    finally:
        torch.set_num_threads(before)
    assert result.verdict is not Verdict.FAIL, result
    inverse = PairedRatio((b, a) for a, b in result.ratio.pairs)
    assert verdict(inverse, Bar(1 / 1.5, "no_worse_than"), final_at=50) is not Verdict.FAIL, result


def test_the_comparison_with_c_can_fail(read_memory):
    """A probe that reads an eighth of what it claims does not get through."""
    ours = read_probe("cpu", 8 << 20)
    with reading_in_c(read_memory, 64 << 20, 1) as step:
        result = measure_pair(ours.seconds, step, Bar(0.6, "no_worse_than"), max_slices=50)
    assert result.verdict is not Verdict.PASS, result


def test_arrays_are_larger_than_the_cache():
    assert cache_bytes("cpu") > 0
    assert probe_bytes("cpu") >= 2 * cache_bytes("cpu") or probe_bytes("cpu") < 1 << 30
    assert read_probe("cpu").work == probe_bytes("cpu")


def test_an_array_is_no_larger_than_an_eighth_of_free_memory(monkeypatch):
    monkeypatch.setattr(roofline, "_free_bytes", lambda device: 80 << 20)
    assert probe_bytes("cpu") == 10 << 20


def test_work_is_counted_in_the_right_units():
    assert read_probe("cpu", 8000).work == 8000
    assert copy_probe("cpu", 8000).work == 16_000  # read and written
    assert matmul_probe("cpu", torch.float32, 10).work == 2 * 10**3


def test_copies_copy_and_products_multiply():
    assert torch.equal(copy_probe("cpu", 80).run(), torch.ones(10, dtype=torch.int64))
    assert matmul_probe("cpu", torch.float32, 8).run().shape == (8, 8)
    assert matmul_probe("cpu", torch.bfloat16, 8).run().dtype == torch.bfloat16


def test_int8_products_accumulate_in_int32():
    product = matmul_probe("cpu", torch.int8, 64)
    try:
        out = product.run()
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this torch has no int8 product here: {error}")
    assert out.dtype == torch.int32


def test_single_figures_are_finite_and_positive():
    figures = [
        read_bandwidth("cpu", 1 << 20),
        copy_bandwidth("cpu", 1 << 20),
        matmul_flops("cpu", torch.float32, 64),
        matmul_flops("cpu", torch.float32),
    ]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


def test_a_rate_keeps_the_best_and_counts_its_runs():
    rate = read_probe("cpu", 1 << 16).rate(0.0, least_runs=7)
    assert rate.runs == 7
    assert rate.best >= rate.median > 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: read_probe("cpu", 7), "nbytes"),
        (lambda: copy_probe("cpu", 0), "nbytes"),
        (lambda: matmul_probe("cpu", torch.float32, 0), "n must"),
        (lambda: read_probe("cpu", 80).rate(0, least_runs=0), "least_runs"),
        (lambda: probe("meta"), "device"),
        (lambda: cache_bytes("meta"), "device"),
        (lambda: MEASURED.ridge("float64"), "float64"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


# --- what is kept between runs --------------------------------------------------------------------

MEASURED = Roofline(
    device="cpu", threads=2, torch_version="2", array_bytes=8, cache_bytes=2,
    read_bandwidth=50.0, copy_bandwidth=40.0, flops={"float32": 200.0},
    tried=("float32", "float16"), busy=False,
)  # fmt: skip
DTYPES = (torch.float32, torch.float16)


class Measurements:
    """Takes the place of measuring: hands out what it is told to, and counts."""

    def __init__(self, *results):
        self.results = list(results)
        self.taken = 0

    def __call__(self, device, dtypes):
        self.taken += 1
        return self.results[min(self.taken, len(self.results)) - 1]


@pytest.fixture
def measured(monkeypatch):
    def use(*results):
        measurements = Measurements(*results)
        monkeypatch.setattr(roofline, "_measure", measurements)
        return measurements

    return use


def test_the_second_probe_measures_nothing(measured, tmp_path):
    taken, cache = measured(MEASURED), tmp_path / "machine.json"
    assert probe(dtypes=DTYPES, cache=cache) == MEASURED
    assert probe(dtypes=DTYPES, cache=cache) == MEASURED
    assert probe(dtypes=DTYPES[:1], cache=cache) == MEASURED
    # float16 could not be measured here: it is known to be absent, and not tried again.
    assert taken.taken == 1
    assert probe(dtypes=DTYPES, cache=cache, refresh=True) == MEASURED
    assert taken.taken == 2


def test_a_dtype_never_tried_is_measured(measured, tmp_path):
    with_int8 = replace(MEASURED, flops={"int8": 900.0}, tried=("int8",))
    taken, cache = measured(MEASURED, with_int8), tmp_path / "machine.json"
    probe(dtypes=DTYPES, cache=cache)
    both = probe(dtypes=(torch.int8,), cache=cache)
    assert taken.taken == 2
    assert both.flops == {"float32": 200.0, "int8": 900.0}
    assert probe(dtypes=(*DTYPES, torch.int8), cache=cache) == both
    assert taken.taken == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: text.replace("50.0", "99.0"),
        lambda text: "not JSON",
        lambda text: text.replace("read_bandwidth", "bandwidth"),
    ],
)
def test_a_damaged_record_is_measured_again(measured, tmp_path, damage):
    taken, cache = measured(MEASURED), tmp_path / "machine.json"
    probe(dtypes=DTYPES, cache=cache)
    cache.write_text(damage(cache.read_text()))
    assert probe(dtypes=DTYPES, cache=cache) == MEASURED
    assert taken.taken == 2
    assert probe(dtypes=DTYPES, cache=cache) == MEASURED
    assert taken.taken == 2


def test_a_busy_machine_is_measured_three_times_and_the_best_is_kept(measured, tmp_path):
    low = replace(MEASURED, read_bandwidth=20.0, flops={"float32": 210.0}, busy=True)
    taken, cache = measured(low, replace(MEASURED, busy=True), low), tmp_path / "machine.json"
    for _ in range(5):
        best = probe(dtypes=DTYPES, cache=cache)
    assert taken.taken == 3
    assert best.busy
    assert best.read_bandwidth == 50.0
    assert best.flops == {"float32": 210.0}
    assert best.probes == 3


def test_a_quiet_moment_settles_it(measured, tmp_path):
    low = replace(MEASURED, read_bandwidth=20.0, busy=True)
    taken, cache = measured(low, MEASURED), tmp_path / "machine.json"
    for _ in range(4):
        best = probe(dtypes=DTYPES, cache=cache)
    assert taken.taken == 2
    assert not best.busy


def test_other_threads_are_another_record(measured, tmp_path):
    taken, cache = measured(MEASURED), tmp_path / "machine.json"
    probe(dtypes=DTYPES, cache=cache)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        probe(dtypes=DTYPES, cache=cache)
    finally:
        torch.set_num_threads(before)
    assert taken.taken == 2


def test_the_default_place_is_the_courses_state_folder(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    measured(MEASURED)
    probe(dtypes=DTYPES)
    assert len(json.loads((tmp_path / ".course" / "machine.json").read_text())) == 1


def test_outside_of_a_course_nothing_is_kept(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "absent"))
    taken = measured(MEASURED)
    assert probe(dtypes=DTYPES) == probe(dtypes=DTYPES) == MEASURED
    assert taken.taken == 2


@pytest.mark.parametrize(
    "change",
    [
        {"read_bandwidth": 0.0},
        {"copy_bandwidth": math.inf},
        {"flops": {"float32": -1.0}},
        {"flops": None},
        {"read_bandwidth": "fast"},
        {"unknown": 1},
        {"tried": None},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match="not a roofline"):
        Roofline.from_dict({**MEASURED.as_dict(), **change})


def test_a_record_survives_json():
    assert Roofline.from_dict(json.loads(json.dumps(MEASURED.as_dict()))) == MEASURED
    assert MEASURED.ridge(torch.float32) == MEASURED.ridge("float32") == 4.0


def test_a_real_probe(tmp_path):
    found = probe(cache=tmp_path / "machine.json")
    assert found.device == "cpu"
    assert found.threads == torch.get_num_threads()
    assert found.flops["float32"] > 0
    assert set(found.flops) <= set(found.tried) == {"float32", "bfloat16", "float16", "int8"}
    assert found.ridge("float32") > 0
    assert found.copy_bandwidth > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match="cuda"):
        probe("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_probe_of_a_gpu(tmp_path):
    found = probe("cuda", cache=tmp_path / "machine.json")
    assert found.device.startswith("cuda:0 ")
    assert found.array_bytes >= 4 * found.cache_bytes
    assert found.flops["bfloat16"] > found.flops["float32"]
    assert 0.3 < found.read_bandwidth / found.copy_bandwidth < 3
    assert found.ridge("bfloat16") > 10


def test_others_are_noticed(monkeypatch):
    """Ten seconds on two cores: this process used 4, everybody 9, so others a quarter."""
    moments = iter([(0.0, 0.0, 0.0), (9.0, 4.0, 20.0)])
    monkeypatch.setattr(roofline._OthersWatch, "_times", staticmethod(lambda: next(moments)))
    assert roofline._OthersWatch().share() == 0.25


def test_the_times_of_everybody_contain_our_own():
    busy, own, total = roofline._OthersWatch._times()
    assert own > 0
    assert 0 < busy <= total
