"""The bills of a decode step, checked by hand and by the articles' figures."""

from dataclasses import dataclass

import pytest

from course.measure import Roofline, Split, decode_work, host_overhead, narrow, split_step


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_3_8B = Shape(128_256, 4096, 14_336, 32, 32, 8, 128)
TINY = Shape(10, 4, 6, 2, 2, 1, 2)


def roofline(device="cpu", bandwidth=100.0, flops=1000.0):
    return Roofline(
        device=device, threads=1, torch_version="", array_bytes=1, cache_bytes=1,
        read_bandwidth=bandwidth, copy_bandwidth=1.0, flops={"float32": flops},
        tried=("float32",), busy=False,
    )  # fmt: skip


def test_work_by_hand():
    work = decode_work(TINY, [3, 5], weight_itemsize=4, kv_itemsize=2)
    q, k, v, o = 4 * 4, 4 * 2, 4 * 2, 4 * 4
    weights = 2 * (q + k + v + o + 3 * 4 * 6) + 10 * 4
    assert work.weight_bytes == 4 * weights
    positions = 2 * (3 + 5)  # in both layers
    assert work.kv_bytes == 2 * (2 + 2) * positions  # K and V, one head of width 2 each, 2 bytes
    products = 2 * weights * 2  # of two sequences
    attention = 2 * (2 * 2 + 2 * 2) * positions  # two query heads: scores, then sums
    assert work.flops == products + attention
    assert work.intensity == work.flops / (work.weight_bytes + work.kv_bytes)


def test_work_of_llama_3_8b():
    work = decode_work(LLAMA_3_8B, [1000], weight_itemsize=2, kv_itemsize=2)
    assert work.kv_bytes == 131_072 * 1000
    # All weights but the embedding table, whose rows are looked up: 8.03e9 - 0.53e9.
    assert work.weight_bytes / 2 == pytest.approx(7.504e9, rel=1e-3)
    assert decode_work(LLAMA_3_8B, [1], weight_itemsize=2, kv_itemsize=2).intensity == (
        pytest.approx(1.0, rel=1e-3)  # one FLOP per byte at 16 bits
    )


def test_intensity_is_the_batch_size():
    one = decode_work(LLAMA_3_8B, [1], weight_itemsize=2, kv_itemsize=2)
    many = decode_work(LLAMA_3_8B, [1] * 32, weight_itemsize=2, kv_itemsize=2)
    assert many.weight_bytes == one.weight_bytes
    assert many.intensity == pytest.approx(32, rel=0.01)


def test_bills_on_a_cpu_add_up():
    work = decode_work(TINY, [3, 5], weight_itemsize=4, kv_itemsize=2)
    bills = split_step(work, roofline(), dtype="float32", host_s=1.0, measured_s=20.0)
    assert bills.weights == work.weight_bytes / 100
    assert bills.kv == work.kv_bytes / 100
    assert bills.arithmetic == work.flops / 1000
    assert bills.floor == bills.weights + bills.kv
    assert bills.predicted == 1.0 + bills.floor
    assert bills.unexplained == pytest.approx(20.0 - bills.predicted)
    assert bills.utilisation == bills.floor / 20.0
    assert bills.largest == "weights"
    assert bills.as_dict()["predicted"] == bills.predicted


def test_past_the_ridge_arithmetic_sets_the_floor():
    work = decode_work(TINY, [1] * 1000, weight_itemsize=4, kv_itemsize=1e-9)
    bills = split_step(work, roofline(), dtype="float32", host_s=0.0, measured_s=1.0)
    assert bills.floor == bills.arithmetic
    assert bills.largest == "arithmetic"


def test_a_gpus_host_runs_ahead():
    work = decode_work(TINY, [1], weight_itemsize=4, kv_itemsize=4)
    gpu = roofline("cuda:0 NVIDIA H200")
    slow_host = split_step(work, gpu, dtype="float32", host_s=99.0, measured_s=100.0)
    assert slow_host.predicted == 99.0
    assert slow_host.largest == "host"
    fast_host = split_step(work, gpu, dtype="float32", host_s=0.5, measured_s=100.0)
    assert fast_host.predicted == fast_host.floor


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: decode_work(TINY, [], weight_itemsize=1, kv_itemsize=1), "context_lens"),
        (lambda: decode_work(TINY, [0], weight_itemsize=1, kv_itemsize=1), "context_lens"),
        (lambda: decode_work(TINY, [1], weight_itemsize=0, kv_itemsize=1), "itemsize"),
        (lambda: host_overhead(lambda: None, steps=0), "steps"),
        (lambda: split_step(WORK, roofline(), dtype="int8", host_s=0, measured_s=1), "int8"),
        (lambda: split_step(WORK, roofline(), dtype="float32", host_s=0, measured_s=0), "measured"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


WORK = decode_work(TINY, [1], weight_itemsize=4, kv_itemsize=4)


def test_a_narrow_model_makes_the_same_calls_on_next_to_nothing():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from course.model import FullAttention
    from course.model.seeded import NANO, seeded_decoder

    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    made = {}
    for name, config in (("full", NANO), ("narrow", narrow(NANO))):
        model = seeded_decoder(config, device=torch.device("cpu"), dtype=torch.float32)
        step = torch.tensor([[1]]), torch.tensor([[0]]), FullAttention(), [-1]
        model(*step)
        with Calls() as calls:
            model(*step)
        made[name] = calls.names
        assert host_overhead(lambda model=model, step=step: model(*step), steps=3) > 0
    assert made["narrow"] == made["full"]
    assert narrow(NANO).num_layers == NANO.num_layers
    full = decode_work(NANO, [1], weight_itemsize=4, kv_itemsize=4)
    less = decode_work(narrow(NANO), [1], weight_itemsize=4, kv_itemsize=4)
    assert less.weight_bytes < full.weight_bytes / 4


def test_split_is_plain_values():
    bills = Split(1, 2, 3, 4, 12, host_overlaps=False)
    assert bills.as_dict() == {
        "host": 1, "weights": 2, "kv": 3, "arithmetic": 4, "measured": 12, "host_overlaps": False,
        "floor": 5, "predicted": 6, "unexplained": 6, "utilisation": 5 / 12,
        "largest": "arithmetic",
    }  # fmt: skip
