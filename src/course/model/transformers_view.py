"""The same weights as a transformers model: a peer to compare with, in tests and in baselines."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from course.model.config import ModelConfig
from course.model.decoder import Decoder, DecoderLayer

__all__ = ["as_transformers"]


def as_transformers(model: Decoder) -> Any:
    """A transformers model for causal LM that shares its weights with `model` (no copy).

    Its weight layers are plain `nn.Linear`, as transformers has them. Importing transformers takes
    seconds; nothing else of the course does it at run time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.config.architecture, **_settings(model.config))
    with torch.device("meta"):  # shapes only: the weights are already here
        peer = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    peer.load_state_dict(_state(model), assign=True, strict=False)
    peer.tie_weights()
    rotary = peer.model.rotary_emb
    peer.model.rotary_emb = type(rotary)(config=config).to(model.device)  # its table is no weight
    left = [n for n, t in (*peer.named_parameters(), *peer.named_buffers()) if t.is_meta]
    if left:
        raise RuntimeError(f"transformers expects weights that this model has not: {left[:3]}")
    return peer.eval()


def _settings(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": list(config.eos_ids),
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _state(model: Decoder) -> dict[str, Tensor]:
    """Our fused weights under transformers' names, cut into its single ones as views."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm.weight,
    }
    if not config.tie_embeddings:
        state["lm_head.weight"] = model.lm_head.weight
    for i, module in enumerate(model.layers):
        layer = cast(DecoderLayer, module)
        prefix = f"model.layers.{i}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        state[prefix + "input_layernorm.weight"] = layer.attn_norm.weight
        state[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
        for name, rows in zip("qkv", layer.qkv.weight.split((q, kv, kv)), strict=True):
            state[f"{attention}{name}_proj.weight"] = rows
        if layer.qkv.bias is not None:
            for name, rows in zip("qkv", layer.qkv.bias.split((q, kv, kv)), strict=True):
                state[f"{attention}{name}_proj.bias"] = rows
        if layer.qk_norm is not None:
            # One norm over queries and keys at once, see the decoder: a row for each head.
            rows = layer.qk_norm.weight.reshape(-1, config.head_dim)
            state[attention + "q_norm.weight"] = rows[0]
            state[attention + "k_norm.weight"] = rows[-1]
        state[attention + "o_proj.weight"] = layer.o.weight
        gate, up = layer.gate_up.weight.chunk(2)
        state[mlp + "gate_proj.weight"], state[mlp + "up_proj.weight"] = gate, up
        state[mlp + "down_proj.weight"] = layer.down.weight
    return {name: tensor.detach() for name, tensor in state.items()}
