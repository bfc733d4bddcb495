"""The shape of a model, and what this decoder can and cannot run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ModelConfig", "RopeScaling", "UnsupportedModel"]

# `model_type` in config.json -> the class that its weights belong to.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# What a config.json means when it leaves a key out: the defaults of transformers' config classes.
DEFAULT_CONTEXT = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}
DEFAULT_KV_HEADS = {"llama": None, "qwen2": 32, "qwen3": 32, "mistral": 8}


class UnsupportedModel(ValueError):
    """The model needs something that this decoder does not compute. The message names it."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the context of pre-training.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides the slow ones, keeps the
    fast ones and blends between: a frequency is slow when fewer than ``low_freq_factor`` of its
    turns fit into ``original_context`` positions, and fast when more than ``high_freq_factor`` do.
    """

    kind: str  # "llama3" | "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear"):
            raise UnsupportedModel(f"rope_type {self.kind!r}: only default, linear and llama3 are")
        if self.factor <= 0:
            raise ValueError(f"factor must be positive, got {self.factor}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model's shape and arithmetic, except its weights.

    Raises:
        ValueError: sizes that do not fit together; the message names the field.
    """

    architecture: str  # "llama" | "qwen2" | "qwen3" | "mistral"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; each serves num_heads / num_kv_heads query heads
    head_dim: int
    max_context: int  # positions 0 .. max_context - 1 exist
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False  # the LM head is the embedding table
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_context",
        ):  # fmt: skip
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(_unknown_architecture(self.architecture))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight tensor of a `Decoder`, by name. A tied head has none."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * dim, self.num_kv_heads * dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "qkv.weight": (q + 2 * kv, hidden),
            "o.weight": (hidden, q),
            "mlp_norm.weight": (hidden,),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
        }
        if self.qkv_bias:
            layer["qkv.bias"] = (q + 2 * kv,)
        if self.qk_norm:
            layer["qk_norm.weight"] = (self.num_heads + self.num_kv_heads, dim)
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def num_weights(self) -> int:
        """Elements of all weight tensors; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a Hugging Face ``config.json``.

        Raises:
            UnsupportedModel: naming the key that this decoder does not support.
            ValueError: a required key is missing, or sizes do not fit together.
        """
        architecture = str(raw.get("model_type"))
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(_unknown_architecture(architecture))
        _refuse_unsupported(architecture, raw)

        def required(key: str) -> int:
            if raw.get(key) is None:
                raise ValueError(f"config.json has no {key!r}")
            return int(raw[key])

        heads, hidden = required("num_attention_heads"), required("hidden_size")
        head_dim = raw.get("head_dim") or (128 if architecture == "qwen3" else hidden // heads)
        eos = raw.get("eos_token_id")
        theta, scaling = _rope(raw)
        return cls(
            architecture=architecture,
            vocab_size=required("vocab_size"),
            hidden_size=hidden,
            intermediate_size=required("intermediate_size"),
            num_layers=required("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads", DEFAULT_KV_HEADS[architecture]) or heads,
            head_dim=head_dim,
            max_context=int(raw.get("max_position_embeddings", DEFAULT_CONTEXT[architecture])),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )


def _unknown_architecture(name: str) -> str:
    return f"architecture {name!r} is not supported; these are: {', '.join(ARCHITECTURES)}"


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind != "llama3":
        raise UnsupportedModel(
            f"rope_type {kind!r} is not supported; these are: default, linear, llama3"
        )
    return theta, RopeScaling(
        "llama3",
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _refuse_unsupported(architecture: str, raw: Mapping[str, Any]) -> None:
    classes = raw.get("architectures") or [ARCHITECTURES[architecture]]
    if classes[0] != ARCHITECTURES[architecture]:
        raise UnsupportedModel(
            f"architectures {classes[0]!r} is not supported for model_type {architecture!r}; "
            f"{ARCHITECTURES[architecture]} is"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config ({method}) is not supported")
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {act!r} is not supported; silu is")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModel(f"{key} is not supported")
    if _slides(architecture, raw):
        raise UnsupportedModel(
            f"sliding_window {raw.get('sliding_window')} is shorter than the context and in use: "
            "sliding-window attention is not supported"
        )


def _slides(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether some layer of this model cannot see its whole context."""
    window = raw.get("sliding_window", 4096 if architecture == "mistral" else None)
    context = raw.get("max_position_embeddings", DEFAULT_CONTEXT[architecture])
    if window is not None and window >= context:
        return False
    if raw.get("layer_types"):
        return any(kind != "full_attention" for kind in raw["layer_types"])
    if architecture == "mistral":
        return window is not None
    in_use = architecture != "llama" and bool(raw.get("use_sliding_window"))
    return in_use and raw.get("max_window_layers", 28) < raw.get("num_hidden_layers", 0)
