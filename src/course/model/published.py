"""Shapes of published models, from their config.json files: for arithmetic, without weights."""

from __future__ import annotations

from course.model.config import ModelConfig

__all__ = ["PUBLISHED"]

PUBLISHED: dict[str, ModelConfig] = {
    "llama-2-7b": ModelConfig(
        architecture="llama", vocab_size=32_000, hidden_size=4096, intermediate_size=11_008,
        num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, max_context=4096,
    ),
    "llama-3-8b": ModelConfig(
        architecture="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_context=8192,
        rope_theta=500_000.0,
    ),
    "mistral-7b": ModelConfig(
        architecture="mistral", vocab_size=32_000, hidden_size=4096, intermediate_size=14_336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_context=32_768,
    ),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944,
        num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128, max_context=32_768,
        rope_theta=1_000_000.0, qkv_bias=True,
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288,
        num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, max_context=40_960,
        rope_theta=1_000_000.0, qk_norm=True,
    ),
    # Its heads are wider than hidden_size / num_heads.
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
        num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, max_context=40_960,
        rope_theta=1_000_000.0, tie_embeddings=True, qk_norm=True,
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536,
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_context=8192,
        rope_theta=100_000.0, tie_embeddings=True,
    ),
}  # fmt: skip
