"""Counters are exact: every expected figure here is derived by hand."""

import functools
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from course.measure.counters import (
    CopiedBytes,
    CountingModel,
    NewTensors,
    WorkCounts,
    tensor_bytes,
)


class FakeModel:
    """Answers like a decoder of 7 words, and knows how to refuse."""

    config = "config"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def parameters(self):
        return iter([self.weight])

    def named_parameters(self):
        return iter([("weight", self.weight)])

    def with_linears(self, factory):
        factory("weight", self.weight, None)
        return FakeModel()

    def forward(self, token_ids, positions, attend, logit_rows=None, taps=()):
        if token_ids.shape != positions.shape:
            raise ValueError("positions")
        shape = (*token_ids.shape, 7) if logit_rows is None else (len(logit_rows), 7)
        logits = torch.zeros(shape)
        return (logits, [torch.zeros(1)] * len(taps)) if taps else logits


def ids(batch, tokens):
    return torch.zeros(batch, tokens, dtype=torch.int64)


def test_counts_passes_positions_and_rows():
    model = CountingModel(FakeModel())
    assert model.forward(ids(2, 5), ids(2, 5), None).shape == (2, 5, 7)
    model(ids(1, 8), ids(1, 8), None, [-1])
    logits, taps = model(ids(1, 1), ids(1, 1), None, logit_rows=torch.tensor([0]), taps=(0, 1))
    assert logits.shape == (1, 7)
    assert len(taps) == 2
    assert model.counts == WorkCounts(forward_passes=3, positions=10 + 8 + 1, logit_rows=10 + 1 + 1)


def test_counts_can_be_subtracted_and_reset():
    model = CountingModel(FakeModel())
    model(ids(1, 3), ids(1, 3), None)
    before = model.counts
    model(ids(1, 4), ids(1, 4), None, [])
    assert model.counts - before == WorkCounts(1, 4, 0)
    model.reset()
    assert model.counts == WorkCounts()


def test_a_refused_call_is_not_counted():
    model = CountingModel(FakeModel())
    with pytest.raises(ValueError, match="positions"):
        model(ids(1, 3), ids(1, 4), None)
    assert model.counts == WorkCounts()


def test_the_surface_is_the_models_and_the_layers_stay_out_of_reach():
    inner = FakeModel()
    model = CountingModel(inner)
    assert model.config == "config"
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert list(model.parameters()) == [inner.weight]
    assert dict(model.named_parameters()) == {"weight": inner.weight}
    with pytest.raises(AttributeError):
        _ = model.layers


def test_a_model_with_other_linears_counts_into_the_same_counts():
    model = CountingModel(FakeModel())
    other = model.with_linears(lambda name, weight, bias: None)
    other(ids(1, 2), ids(1, 2), None)
    model(ids(1, 3), ids(1, 3), None)
    assert model.counts == other.counts == WorkCounts(2, 5, 5)


def test_counts_the_real_model():
    from course.model import FullAttention, load

    model = CountingModel(load("nano", device="cpu").model)
    tokens = torch.tensor([[1, 2, 3, 4]])
    logits = model(tokens, torch.arange(4)[None], FullAttention(), [-1])
    assert logits.shape == (1, model.config.vocab_size)
    assert model.counts == WorkCounts(1, 4, 1)


CACHE = (4, 10, 8)  # 320 fp32 elements, 1,280 bytes


@pytest.mark.parametrize(
    ("copy", "elements"),
    [
        (lambda c: torch.cat([c, c[:1]]), 320 + 80),
        (lambda c: torch.stack([c, c]), 640),
        (lambda c: c.clone(), 320),
        (lambda c: c.transpose(0, 1).contiguous(), 320),
        (lambda c: c.transpose(0, 1).reshape(-1), 320),
        (lambda c: c.repeat(1, 1, 3), 960),
        (lambda c: c.repeat_interleave(2, dim=0), 640),
        (lambda c: c.index_select(1, torch.tensor([0, 3])), 64),
        (lambda c: c[torch.tensor([0, 1])], 160),
        (lambda c: c.gather(2, torch.zeros(4, 10, 2, dtype=torch.int64)), 80),
        (lambda c: c.double(), 640),  # in units of 4 bytes
        (lambda c: torch.slice_scatter(c, c[:1], 0, 0, 1), 320),
        (lambda c: torch.where(c > 0, c, c), 320),
        (lambda c: torch.nn.functional.pad(c, (0, 2)), 400),
        (lambda c: c.roll(1, 0), 320),
        # In place only what is addressed is written.
        (lambda c: c.copy_(torch.zeros(1)), 320),
        (lambda c: c.__setitem__((slice(None), 3), torch.zeros(4, 8)), 32),
        (lambda c: c.__setitem__(torch.tensor([1, 2]), torch.zeros(8)), 160),
        (lambda c: c.index_put_((torch.tensor([0, 1]), torch.tensor([2, 3])), torch.ones(8)), 16),
        (lambda c: c.__setitem__((slice(None), torch.tensor([2, 3])), torch.zeros(8)), 64),
        (lambda c: c.__setitem__(torch.arange(4) < 3, torch.zeros(8)), 240),
        (lambda c: c.index_copy_(1, torch.tensor([4]), torch.ones(4, 1, 8)), 32),
        (lambda c: c.scatter_(0, torch.zeros(2, 10, 8, dtype=torch.int64), c.new_ones(CACHE)), 160),
        (lambda c: c.masked_scatter_(torch.arange(8) < 2, torch.ones(100)), 80),
        (lambda c: torch._foreach_copy_([c, c], [c, c]), 640),
        # Views, fills and arithmetic copy nothing.
        (lambda c: c.view(-1)[5:].expand(3, -1), 0),
        (lambda c: c.zero_(), 0),
        (lambda c: c + c, 0),
        (lambda c: c @ c.transpose(1, 2), 0),
        (lambda c: c.to(torch.float32), 0),
    ],
)
def test_bytes_written_by_copying(copy, elements):
    cache = torch.zeros(CACHE)
    with CopiedBytes() as copied:
        copy(cache)
    assert copied.bytes == 4 * elements, copied.by_op


def test_a_cache_that_concatenates_moves_quadratically_more():
    tokens, slot = 50, torch.zeros(1, 8)
    with CopiedBytes() as grown:
        cache = torch.zeros(0, 8)
        for _ in range(tokens):
            cache = torch.cat([cache, slot])
    with CopiedBytes() as written:
        cache = torch.zeros(tokens, 8)
        for position in range(tokens):
            cache[position] = slot[0]
    assert grown.bytes == 32 * tokens * (tokens + 1) // 2
    assert written.bytes == 32 * tokens
    assert grown.by_op == {"cat": grown.bytes}
    grown.reset()
    assert grown.bytes == 0


def test_a_mode_can_be_entered_again_and_goes_on_counting():
    copied = CopiedBytes()
    for _ in range(2):
        with copied:
            torch.zeros(3).clone()
        torch.zeros(3).clone()
    assert copied.bytes == 24


@dataclass
class Holder:
    first: object
    second: object = None


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown, hidden):
        self.shown = shown
        self.__hidden = hidden

    def method(self):
        return self.__hidden


def test_tensor_bytes_follows_objects_and_containers():
    def t():
        return torch.zeros(5)  # 20 bytes

    assert tensor_bytes(t()) == 20
    assert tensor_bytes([t(), (t(), {t()}), {"a": t(), "b": [t()]}, deque([t()])]) == 120
    assert tensor_bytes(Holder(t(), Holder(t()))) == 40
    assert tensor_bytes(Slotted(t(), t())) == 40
    assert tensor_bytes(Slotted(t(), t()).method) == 40
    assert tensor_bytes(torch.nn.Linear(3, 2)) == 4 * (6 + 2)
    assert tensor_bytes(["text", 3, None, torch.float32, t().shape]) == 0


def test_a_storage_counts_once_and_whole():
    whole = torch.zeros(10, 10)
    assert tensor_bytes([whole, whole[0], whole.T, whole.view(-1)[:3]]) == 400
    assert tensor_bytes(whole[0]) == 400


def test_cycles_and_depth():
    holder = Holder(torch.zeros(5))
    holder.second = holder
    assert tensor_bytes(holder) == 20
    deep = [torch.zeros(5)]
    for _ in range(10):
        deep = [deep]
    assert tensor_bytes(deep) == 20
    assert tensor_bytes(deep, max_depth=5) == 0
    with pytest.raises(ValueError, match="max_depth"):
        tensor_bytes(holder, max_depth=-1)


def test_a_tensor_near_one_holder_is_found_although_a_longer_way_exists():
    tensor_holder = [torch.zeros(5)]
    long_way = [[[[tensor_holder]]]]
    assert tensor_bytes([long_way, tensor_holder], max_depth=2) == 20


def test_what_the_model_owns_can_be_left_out():
    model = torch.nn.Linear(100, 100)
    cache = Holder(model, torch.zeros(5))
    assert tensor_bytes(cache) == 4 * 10_100 + 20
    assert tensor_bytes(cache, exclude=[model]) == 20


def test_an_opaque_tensor_counts_by_its_shape():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert tensor_bytes([torch.zeros(6, 5).to_mkldnn()]) == 120


def test_new_tensors_are_found_wherever_they_are_kept():
    kept = {}

    @functools.cache
    def remembers(size):
        return torch.zeros(size)

    def closure():
        inside = torch.zeros(5)
        return lambda: inside

    old = torch.zeros(1000)
    made = NewTensors()
    assert made.bytes() == 0
    view, kept["mine"] = old[:10], torch.zeros(100)
    assert made.bytes() == 400
    assert view.numel() == 10
    remembers(10)
    holds = closure()
    assert made.bytes() == 400 + 40 + 20
    assert holds().numel() == 5
    assert made.bytes(exclude=[kept]) == 60
    del kept["mine"]
    assert made.bytes() == 60


def test_a_tensor_that_is_gone_does_not_hide_a_new_one():
    gone = torch.zeros(100)
    made = NewTensors()
    del gone
    new = [torch.zeros(100) for _ in range(20)]
    assert made.bytes() == 20 * 400 == 400 * len(new)
