"""The decoder's surface: rows, taps, bad input, other weight layers, and what nano is good for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course.model import Decoder, FullAttention, LoadedModel, load
from course.model.layers import PackedLinear, fastest_linear
from course.model.seeded import NANO, bench_cpu, seeded_decoder, seeded_hash

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not PackedLinear.usable(CPU, torch.float32), reason="this torch has no oneDNN"
)


def run(model: Decoder, ids: Any, positions: Any = None, **options: Any) -> Any:
    ids = torch.as_tensor(ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids) if positions is None else positions
    return model(ids, torch.as_tensor(positions), FullAttention(), **options)


def ids(batch: int, t: int) -> Tensor:
    return torch.randint(0, 256, (batch, t), generator=torch.Generator().manual_seed(batch * t))


def test_logits_of_every_position(nano: LoadedModel) -> None:
    logits = run(nano.model, ids(2, 5))
    assert logits.shape == (2, 5, 320)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad


@pytest.mark.parametrize("rows", [[-1], [0, 9], [4, 4, -10], [], torch.tensor([3, -2])], ids=str)
def test_logit_rows_are_rows_of_all_logits(nano: LoadedModel, rows: Any) -> None:
    full = run(nano.model, ids(2, 5)).flatten(0, 1)
    expected = full[torch.as_tensor(rows).long()]
    logits = run(nano.model, ids(2, 5), logit_rows=rows)
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=1e-5)


def test_only_the_asked_rows_go_through_the_head(nano: LoadedModel) -> None:
    seen: list[int] = []

    def factory(name: str, weight: Tensor, bias: Tensor | None) -> Any:
        def linear(x: Tensor) -> Tensor:
            if name == "lm_head":
                seen.append(x.numel() // x.shape[-1])
            return nn.functional.linear(x, weight, bias)

        return linear

    model = nano.model.with_linears(factory)
    run(model, ids(2, 5), logit_rows=[-1])
    run(model, ids(2, 5))
    assert seen == [1, 10]


def test_taps_are_the_states_between_layers(nano: LoadedModel) -> None:
    logits, taps = run(nano.model, ids(2, 5), taps=[2, 0])
    assert [tap.shape for tap in taps] == [(2, 5, 64)] * 2
    assert torch.equal(logits, run(nano.model, ids(2, 5)))
    assert torch.equal(nano.model.lm_head(nano.model.norm(taps[0])), logits)
    assert not torch.equal(taps[0], taps[1])
    rows, _ = run(nano.model, ids(2, 5), taps=[1], logit_rows=[-1])
    assert rows.shape == (1, 320)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "token_ids"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, "token_ids"),
        ({"ids": torch.zeros(0, 3, dtype=torch.int64)}, ValueError, "token_ids"),
        ({"ids": torch.zeros(1, 3)}, TypeError, "token_ids"),
        ({"ids": torch.zeros(1, 3, dtype=torch.int32)}, TypeError, "token_ids"),
        ({"ids": [[1, 2, 3]]}, TypeError, "token_ids"),
        ({"ids": torch.tensor([[1, 320, 3]])}, ValueError, "token_ids must lie in 0 .. 319"),
        ({"ids": torch.tensor([[1, -1, 3]])}, ValueError, "token_ids"),
        ({"positions": torch.zeros(1, 4, dtype=torch.int64)}, ValueError, "positions"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions"),
        ({"positions": torch.zeros(1, 3)}, TypeError, "positions"),
        ({"positions": torch.tensor([[0, 1, 256]])}, ValueError, "positions must lie in 0 .. 255"),
        ({"positions": torch.tensor([[-1, 0, 1]])}, ValueError, "positions"),
        ({"logit_rows": [3]}, ValueError, "logit_rows"),
        ({"logit_rows": [-4]}, ValueError, "logit_rows"),
        ({"logit_rows": torch.tensor([[0]])}, ValueError, "logit_rows"),
        ({"logit_rows": torch.tensor([0.0])}, TypeError, "logit_rows"),
        ({"logit_rows": torch.tensor([True, False, True])}, TypeError, "logit_rows"),
        ({"taps": [3]}, ValueError, "taps"),
        ({"taps": [-1]}, ValueError, "taps"),
    ],
)
def test_bad_input_is_named(
    nano: LoadedModel, change: dict[str, Any], error: type[Exception], named: str
) -> None:
    good = {"ids": torch.tensor([[1, 2, 3]]), "positions": torch.tensor([[0, 1, 2]])}
    arguments = {**good, **change}
    with pytest.raises(error, match=named):
        nano.model(arguments.pop("ids"), arguments.pop("positions"), FullAttention(), **arguments)


def test_attention_of_the_wrong_shape_is_named(nano: LoadedModel) -> None:
    with pytest.raises(ValueError, match="attend must return"):
        nano.model(
            torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), lambda i, q, k, v: q.transpose(1, 2)
        )


def test_attend_is_handed_each_layer_in_turn(nano: LoadedModel) -> None:
    calls: list[tuple[int, torch.Size, torch.Size, torch.Size]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((layer, q.shape, k.shape, v.shape))
        return FullAttention()(layer, q, k, v)

    nano.model(ids(2, 5), torch.arange(5).expand(2, 5), attend)
    q, kv = (2, 5, 4, 16), (2, 5, 2, 16)
    assert calls == [(i, q, kv, kv) for i in range(3)]


def test_missing_and_misshapen_weights_are_named() -> None:
    weights = {name: torch.zeros(shape) for name, shape in NANO.weight_shapes().items()}
    with pytest.raises(ValueError, match=r"layers\.1\.qkv\.weight"):
        Decoder(NANO, {k: v for k, v in weights.items() if k != "layers.1.qkv.weight"})
    with pytest.raises(ValueError, match=r"norm\.weight must be \(64,\)"):
        Decoder(NANO, weights | {"norm.weight": torch.zeros(65)})


class TestWithLinears:
    """A decoder with other weight layers shares everything else."""

    def test_names_shapes_and_a_bias(self, tiny: Callable[[str], Path]) -> None:
        model = load(tiny("qwen2"), device="cpu").model
        seen: dict[str, tuple[Any, ...]] = {}

        def factory(name: str, weight: Tensor, bias: Tensor | None) -> Any:
            seen[name] = (tuple(weight.shape), None if bias is None else tuple(bias.shape))
            return fastest_linear(name, weight, bias)

        model.with_linears(factory)
        parts = ["qkv", "o", "gate_up", "down"]
        assert list(seen) == [f"layers.{i}.{p}" for i in range(2) for p in parts] + ["lm_head"]
        assert seen["layers.0.qkv"] == ((80, 48), (80,))
        assert seen["layers.1.gate_up"] == ((160, 48), None)
        assert seen["lm_head"] == ((96, 48), None)

    def test_shares_all_but_the_weight_layers(self, nano: LoadedModel) -> None:
        other = nano.model.with_linears(lambda name, weight, bias: PackedLinear(weight, bias))
        assert other is not nano.model
        assert other.embed.weight is nano.model.embed.weight
        assert other.cos is nano.model.cos
        assert other.layers[0].attn_norm.weight is nano.model.layers[0].attn_norm.weight
        assert isinstance(other.layers[0].qkv, PackedLinear)
        assert not isinstance(nano.model.layers[0].qkv, PackedLinear)
        assert torch.allclose(run(other, ids(1, 9)), run(nano.model, ids(1, 9)), atol=1e-4)

    def test_the_layers_are_used(self, nano: LoadedModel) -> None:
        doubled = nano.model.with_linears(
            lambda name, weight, bias: (
                lambda x: (
                    2.0 * nn.functional.linear(x, weight)
                    if name == "lm_head"
                    else nn.functional.linear(x, weight)
                )
            )
        )
        assert torch.equal(run(doubled, ids(1, 9)), 2 * run(nano.model, ids(1, 9)))

    def test_can_be_repeated_while_the_weights_can_be_read(self, nano: LoadedModel) -> None:
        packed = nano.model.with_linears(lambda name, weight, bias: PackedLinear(weight, bias))
        again = packed.with_linears(fastest_linear)
        assert torch.equal(again.layers[2].down.weight, nano.model.layers[2].down.weight)
        opaque = nano.model.with_linears(lambda name, weight, bias: lambda x: x @ weight.T)
        with pytest.raises(TypeError, match=r"layers\.0\.qkv"):
            opaque.with_linears(fastest_linear)

    def test_a_factory_that_returns_nothing(self, nano: LoadedModel) -> None:
        with pytest.raises(TypeError, match="factory"):
            nano.model.with_linears(lambda name, weight, bias: None)  # type: ignore[arg-type, return-value]


@needs_packing
class TestPackedLinear:
    """oneDNN's layout: the same numbers, up to the order of sums."""

    @pytest.mark.parametrize("rows", [1, 2, 8, 33])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_equals_a_plain_layer(self, rows: int, with_bias: bool) -> None:
        torch.manual_seed(rows)
        weight, x = torch.randn(70, 50), torch.randn(2, rows, 50)
        bias = torch.randn(70) if with_bias else None
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert (PackedLinear(weight, bias)(x) - expected).abs().max() < 1e-4

    def test_no_rows(self) -> None:
        assert PackedLinear(torch.randn(7, 5), None)(torch.randn(0, 5)).shape == (0, 7)

    def test_the_weight_comes_back_bit_for_bit(self) -> None:
        weight = torch.randn(130, 70)
        assert torch.equal(PackedLinear(weight, None).weight, weight)

    def test_only_where_it_pays(self) -> None:
        large = torch.zeros(512, 512)
        assert isinstance(fastest_linear("", large, None), PackedLinear)
        assert not isinstance(fastest_linear("", large[:8], None), PackedLinear)
        assert not isinstance(fastest_linear("", large.bfloat16(), None), PackedLinear)


class TestNano:
    """The model that contracts run on has to notice mistakes."""

    @staticmethod
    def greedy(model: Decoder, new: int) -> tuple[Tensor, Tensor]:
        """20 prompts of 12 bytes, continued: (tokens [20, new], top-2 gaps [20, new])."""
        text, gaps = ids(20, 12), []
        for _ in range(new):
            length = text.shape[1]
            top = run(model, text, logit_rows=range(length - 1, text.numel(), length)).topk(2)
            gaps.append(top.values[:, 0] - top.values[:, 1])
            text = torch.cat((text, top.indices[:, :1]), 1)
        return text[:, 12:], torch.stack(gaps, 1)

    def test_text_is_not_monotonous(self, nano: LoadedModel) -> None:
        tokens, _ = self.greedy(nano.model, 48)
        assert all(len(set(row.tolist())) > 24 for row in tokens)
        assert len(tokens.unique()) > 200

    def test_near_ties_are_rare_and_rounding_is_small(self, nano: LoadedModel) -> None:
        """Against fp64, on 960 tokens: fp32 moves a gap by less than 1e-4, and few are smaller.

        So a token that differs at a gap above 1e-4 is a mistake, and one below is no proof of any.
        """
        exact = seeded_decoder(NANO, device=CPU, dtype=torch.float64)
        text, gaps = self.greedy(nano.model, 48)
        logits, exact_logits = run(nano.model, text).double(), run(exact, text)
        best = exact_logits.topk(2)
        moved = (logits - exact_logits).gather(-1, best.indices).diff(dim=-1).abs()
        assert moved.max() < 1e-4
        assert (gaps < 1e-4).float().mean() < 0.005
        near = best.values.diff(dim=-1).abs()[..., 0] < 1e-4
        assert ((logits.argmax(-1) == best.indices[..., 0]) | near).all()

    @pytest.mark.parametrize("place", [0, 20, 38])
    def test_every_token_of_the_context_counts(self, nano: LoadedModel, place: int) -> None:
        batch = ids(8, 40)
        changed = batch.clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        difference = run(nano.model, changed)[:, -1] - run(nano.model, batch)[:, -1]
        assert difference.abs().amax(-1).min() > 0.05

    def test_a_position_that_is_off_by_one_shows(self, nano: LoadedModel) -> None:
        batch = ids(8, 40)
        late = torch.arange(40).expand(8, 40).clone()
        late[:, -1] += 1
        difference = run(nano.model, batch, late)[:, -1] - run(nano.model, batch)[:, -1]
        assert difference.abs().amax(-1).min() > 0.3

    def test_is_the_same_everywhere(self, nano: LoadedModel) -> None:
        """Drawn from integers: these very bits on every machine."""
        weight = nano.model.layers[2].down.weight
        assert weight.flatten()[:4].tolist() == PINNED
        assert nano.weights_hash == seeded_hash(NANO) == "00184b0da5daca7a"
        assert load("nano", device="cpu").model is not nano.model

    def test_another_seed_or_shape_has_another_hash(self) -> None:
        hashes = {seeded_hash(NANO), seeded_hash(NANO, seed=1), seeded_hash(NANO, "cuda")}
        assert len(hashes | {seeded_hash(replace(NANO, num_layers=4))}) == 4


PINNED = [-0.2838810980319977, -0.409010112285614, 0.4017755389213562, 0.09086614847183228]


@pytest.mark.parametrize(("cache_mib", "layers"), [(8, 3), (32, 3), (96, 4), (128, 6), (1024, 8)])
def test_bench_is_larger_than_the_cache(cache_mib: int, layers: int) -> None:
    config = bench_cpu(cache_mib << 20)
    assert config.num_layers == layers
    if layers < 8:
        assert 4 * config.num_weights >= 4 * (cache_mib << 20)


def test_importing_it_is_cheap(child: Callable[[str], str]) -> None:
    code = (
        "import sys, course.model; course.model.load('nano', device='cpu'); "
        "print(sorted({'transformers', 'tokenizers', 'huggingface_hub', 'jinja2.sandbox', "
        "'sympy', 'torch._dynamo'} & set(sys.modules)))"
    )
    assert child(code) == "[]"
