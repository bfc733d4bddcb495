"""A config.json is read as transformers means it, and what is not supported is refused by name."""

from typing import Any

import pytest

from course.model import ModelConfig, RopeScaling, UnsupportedModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_what_is_left_out_has_the_default_of_the_architecture() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.max_context) == (4, 16, 2048)
    assert (config.rope_theta, config.rope_scaling, config.norm_eps) == (10_000.0, None, 1e-6)
    assert (config.tie_embeddings, config.qkv_bias, config.qk_norm) == (False, False, False)
    assert config.eos_ids == ()
    qwen3 = read(
        model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_key_value_heads=2,
    )  # fmt: skip
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.max_context) == (128, True, 32768)


@pytest.mark.parametrize(
    ("written", "expected"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 9], (7, 9))]
)
def test_end_of_text_is_none_one_or_several(written: Any, expected: tuple[int, ...]) -> None:
    assert read(eos_token_id=written).eos_ids == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
    ids=["transformers 4", "older", "transformers 5"],
)
def test_rope_is_read_from_every_generation_of_files(rope: dict[str, Any]) -> None:
    config = read(**rope)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 2,
                "sliding_window": 16,
            },
            "sliding_window",
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "sliding",
        ),
        (
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 1,
            },
            "sliding_window",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64},
    ],
    ids=["none", "as long as the context", "switched off"],
)
def test_a_window_that_never_hides_anything_is_no_obstacle(changes: dict[str, Any]) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert read(**{**mistral, "num_key_value_heads": 2, **changes})


@pytest.mark.parametrize("missing", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != missing})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_layers"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(**changes)


def test_rope_scaling_checks_itself() -> None:
    with pytest.raises(UnsupportedModel, match="yarn"):
        RopeScaling("yarn", 2.0)
    with pytest.raises(ValueError, match="factor"):
        RopeScaling("linear", 0.0)
    with pytest.raises(ValueError, match="high_freq_factor"):
        RopeScaling("llama3", 8.0, low_freq_factor=4.0, high_freq_factor=4.0)


def test_weights_are_counted_as_published() -> None:
    """Llama-3.2-1B has 1,235,814,400 parameters, Llama-3-8B 8,030,261,248, SmolLM2 134,515,008."""
    from course.model.fetch import SMOLLM2_BYTES
    from course.model.seeded import BENCH_1B, BENCH_8B

    assert BENCH_1B.num_weights == 1_235_814_400
    assert BENCH_8B.num_weights == 8_030_261_248
    assert SMOLLM2_BYTES == 4 * 134_515_008
