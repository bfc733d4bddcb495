"""Operations that are counted are those that paper gives."""

import pytest
import torch

from course.measure.flops import CountedFlops
from course.model import causal_attention, load, masked_attention


@pytest.mark.parametrize("keys", [1, 7, 64])
@pytest.mark.parametrize("hidden", [0, 5])
def test_attention_counts_every_key_that_it_is_given(keys: int, hidden: int) -> None:
    batch, heads, dim = 3, 4, 16
    q = torch.randn(batch, 1, heads, dim)
    k = torch.randn(batch, keys + hidden, 2, dim)
    visible = torch.arange(keys + hidden).expand(batch, 1, -1) < keys
    with torch.inference_mode(), CountedFlops() as flops:
        masked_attention(q, k, k, visible)
    assert flops.total == 4 * batch * heads * dim * (keys + hidden)


def test_attention_written_out_counts_the_same() -> None:
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 9, 4, 16)
    with CountedFlops() as flops:
        causal_attention(q, k, k)
    fused = flops.total
    with CountedFlops() as flops:
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        torch.einsum("bhts,bshd->bthd", scores.softmax(-1), k)
    assert flops.total == fused == 2 * 2 * 4 * 5 * 9 * 16


def test_a_pass_costs_two_operations_per_weight() -> None:
    model = load("nano").model

    class Nothing:
        def __call__(self, layer: int, q: torch.Tensor, k: object, v: object) -> torch.Tensor:
            return q

    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode(), CountedFlops() as flops:
        model.forward(ids, torch.arange(3)[None], Nothing())
    weights = dict(model.named_parameters())
    looked_up = "embed.weight"  # rows of it are read, and nothing is multiplied
    matrices = sum(w.numel() for n, w in weights.items() if w.ndim == 2 and n != looked_up)
    assert flops.total == 2 * 3 * matrices


def test_elementwise_arithmetic_is_free() -> None:
    with CountedFlops() as flops:
        (torch.ones(8) * 2 + 1).sum()
    assert flops.total == 0
