"""Dense causal attention against softmax(q k^T / sqrt(D)) v, written out in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from course.model import FullAttention, causal_attention, masked_attention
from course.model.config import ModelConfig, RopeScaling
from course.model.layers import inverse_frequencies, rope_tables, rotate


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head and one query at a time; nothing clever."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    offset, group = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                seen = offset + t + 1
                keys, values = k[b, :seen, h // group], v[b, :seen, h // group]
                weights = torch.softmax(keys @ q[b, t, h] / math.sqrt(q.shape[3]), 0)
                out[b, t, h] = weights @ values
    return out


def draw(batch: int, t: int, s: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(batch + t + s)
    kv = torch.randn(2, batch, s, kv_heads, 16)
    return torch.randn(batch, t, heads, 16), kv[0], kv[1]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 9), (7, 7), (3, 9), (2, 3)])
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_the_oracle(batch: int, t: int, s: int, heads: int, kv_heads: int) -> None:
    q, k, v = draw(batch, t, s, heads, kv_heads)
    out = causal_attention(q, k, v)
    assert out.shape == q.shape
    assert (out - oracle(q, k, v)).abs().max() < 1e-5


def test_the_future_is_not_seen() -> None:
    """Poison in the keys past a query's own position does not reach it."""
    q, k, v = draw(1, 4, 10, 4, 2)
    before = causal_attention(q, k, v)
    k[:, 8:], v[:, 8:] = 1e4, 1e4
    after = causal_attention(q, k, v)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.allclose(before[:, 2:], after[:, 2:])


def test_takes_views_of_a_larger_cache() -> None:
    q, k, v = draw(2, 1, 20, 6, 2)
    out = causal_attention(q, k[:, 3:9], v[:, 3:9])
    assert (out - oracle(q, k[:, 3:9], v[:, 3:9])).abs().max() < 1e-5


def test_one_query_copies_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is handed the caller's own keys and values, per KV head: nothing was repeated."""
    handed: list[Tensor] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        handed.extend((k, v))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v = draw(1, 1, 512, 6, 2)
    causal_attention(q, k, v)
    assert [t.data_ptr() for t in handed] == [k.data_ptr(), v.data_ptr()]
    assert all(t.shape == (1, 2, 512, 16) for t in handed)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_a_mask_for_each_row(heads: int, kv_heads: int) -> None:
    """Any set of keys for any query, head by head as the formula has it."""
    q, k, v = draw(3, 4, 9, heads, kv_heads)
    visible = torch.rand(3, 4, 9) < 0.5
    visible[:, :, 2] = True  # everybody sees something
    out = masked_attention(q, k, v, visible)
    for b in range(3):
        for t in range(4):
            seen = visible[b, t]
            one = q[b : b + 1, t : t + 1]
            wanted = oracle(one, k[b : b + 1, seen], v[b : b + 1, seen])
            assert (out[b, t] - wanted[0, 0]).abs().max() < 1e-5


def test_one_mask_for_all_rows_and_the_causal_one() -> None:
    q, k, v = draw(2, 3, 7, 6, 2)
    triangle = torch.ones(1, 3, 7, dtype=torch.bool).tril(4)
    out = masked_attention(q, k, v, triangle)
    assert torch.equal(out, masked_attention(q, k, v, triangle.expand(2, -1, -1)))
    assert (out - causal_attention(q, k, v)).abs().max() < 1e-6


def test_what_is_masked_has_a_weight_of_exactly_zero() -> None:
    q, k, v = draw(1, 2, 6, 4, 2)
    visible = torch.ones(1, 2, 6, dtype=torch.bool)
    visible[:, :, 3:] = False
    before = masked_attention(q, k, v, visible)
    k[:, 3:], v[:, 3:] = 1e4, -1e4
    assert torch.equal(masked_attention(q, k, v, visible), before)


def test_masks_that_do_not_fit() -> None:
    q, k, v = draw(2, 3, 7, 6, 2)
    with pytest.raises(TypeError, match=r"visible must be bool, got torch\.float32"):
        masked_attention(q, k, v, torch.ones(2, 3, 7))
    for shape in ((3, 7), (2, 3, 6), (2, 7, 3), (3, 3, 7), (2, 1, 7)):
        with pytest.raises(ValueError, match="visible must be"):
            masked_attention(q, k, v, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="disagree"):
        masked_attention(q, k[:, :6], v, torch.ones(2, 3, 7, dtype=torch.bool))


@pytest.mark.parametrize(
    ("q", "k", "v", "named"),
    [
        ((1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8), "fewer"),
        ((1, 1, 4, 8), (1, 3, 3, 8), (1, 3, 3, 8), "disagree"),
        ((1, 1, 4, 8), (1, 3, 2, 8), (1, 4, 2, 8), "disagree"),
        ((2, 1, 4, 8), (1, 3, 2, 8), (1, 3, 2, 8), "disagree"),
        ((1, 1, 4, 8), (1, 3, 2, 6), (1, 3, 2, 6), "disagree"),
    ],
)
def test_shapes_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        causal_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_full_attention_keeps_nothing() -> None:
    q, k, v = draw(1, 5, 5, 4, 2)
    attend = FullAttention()
    first = attend(0, q, k, v)
    attend(0, *draw(1, 3, 3, 4, 2))
    assert torch.equal(attend(0, q, k, v), first)
    assert vars(attend) == {}


def config(scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig("llama", 10, 32, 64, 1, 2, 2, 16, 64, rope_scaling=scaling)


def test_rope_depends_on_distance_alone() -> None:
    """The product of a turned query and a turned key is the same wherever the pair stands."""
    cos, sin = rope_tables(config())
    q, k = torch.randn(16), torch.randn(16)

    def product(i: int, j: int) -> Tensor:
        return rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j])

    assert torch.allclose(product(7, 3), product(40, 36), atol=1e-5)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-3)
    assert torch.equal(rotate(q, cos[0], sin[0]), q)


def test_rope_is_a_turn_of_pairs() -> None:
    """Written with complex numbers: dimensions (d, d + D/2) are one number, turned."""
    cos, sin = rope_tables(config())
    x = torch.randn(5, 16)
    angles = torch.arange(5.0)[:, None] * inverse_frequencies(config())
    turned = torch.complex(x[:, :8], x[:, 8:]) * torch.polar(torch.ones(5, 8), angles)
    assert torch.allclose(rotate(x, cos[:5], sin[:5]), torch.cat((turned.real, turned.imag), 1))


def test_llama3_keeps_fast_turns_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(config())
    scaled = inverse_frequencies(config(RopeScaling("llama3", 8.0, original_context=64)))
    turns = 64 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
