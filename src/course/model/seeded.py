"""Models with random weights from a fixed seed: `nano` for contracts, `bench` for timings."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from course.model.config import ModelConfig, RopeScaling
from course.model.decoder import Decoder

__all__ = ["BENCH_1B", "BENCH_8B", "NANO", "bench_cpu", "seeded_decoder", "seeded_hash"]

SEED = 10  # of the first dozen, nano's widest smallest top-2 gap, and the fewest chance EOS

NANO = ModelConfig(
    architecture="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=256,
    norm_eps=1e-5,
    tie_embeddings=True,
    eos_ids=(257,),
)

BENCH_1B = ModelConfig(  # the shape of Llama-3.2-1B
    architecture="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_context=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor=32.0),
    norm_eps=1e-5,
    tie_embeddings=True,
    eos_ids=(257,),
)

BENCH_8B = ModelConfig(  # the shape of Llama-3-8B
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=8192,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    eos_ids=(257,),
)


def bench_cpu(cache_bytes: int) -> ModelConfig:
    """Few, wide layers: the smallest of 3 to 8 whose fp32 weights are 4x a cache of this size.

    Wide, so that a step is spent on weights and not on calling kernels; larger than the cache,
    so that every step reads them from memory as a large model's step would.
    """
    config = ModelConfig(
        architecture="llama",
        vocab_size=1024,
        hidden_size=1536,
        intermediate_size=4096,
        num_layers=3,
        num_heads=24,
        num_kv_heads=8,
        head_dim=64,
        max_context=8192,
        norm_eps=1e-5,
        tie_embeddings=True,
        eos_ids=(257,),
    )
    while config.num_layers < 8 and 4 * config.num_weights < 4 * cache_bytes:
        config = replace(config, num_layers=config.num_layers + 1)
    return config


def seeded_decoder(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    draw_on: str = "cpu",
    seed: int = SEED,
) -> Decoder:
    """A decoder with random weights that depend on the config, the seed and `draw_on`.

    draw_on: "cpu" for weights that are equal everywhere, "cuda" for billions of them in a second.

    Weights are uniform, of standard deviation 2 / sqrt(hidden) and 1 / sqrt(hidden) in the
    embedding, which makes the layers outweigh the residual: greedy text wanders instead of
    repeating itself, and every position of the context moves the logits.
    """
    fill = (_on_gpu if draw_on == "cuda" else _on_cpu)(device, dtype, seed)
    std = 1 / math.sqrt(config.hidden_size)
    weights: dict[str, Tensor] = {}
    for name, shape in config.weight_shapes().items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, device=device, dtype=dtype)
        else:
            weights[name] = fill(shape, std if name == "embed.weight" else 2 * std)
    return Decoder(config, weights)


def seeded_hash(config: ModelConfig, draw_on: str = "cpu", seed: int = SEED) -> str:
    """Names the weights of `seeded_decoder`, in 16 hex digits."""
    recipe = f"{sorted(asdict(config).items())} {seed} {draw_on}"
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


Fill = Callable[[tuple[int, ...], float], Tensor]  # (shape, standard deviation) -> weight


def _on_cpu(device: torch.device, dtype: torch.dtype, seed: int) -> Fill:
    """Uniform weights from integers: equal bit for bit on every machine, unlike normal ones."""
    draw = np.random.Generator(np.random.SFC64(seed))

    def fill(shape: tuple[int, ...], std: float) -> Tensor:
        values = torch.from_numpy(draw.random(shape, dtype=np.float32))
        return values.sub_(0.5).mul_(std * math.sqrt(12)).to(device, dtype)

    return fill


def _on_gpu(device: torch.device, dtype: torch.dtype, seed: int) -> Fill:
    draw = torch.Generator(device).manual_seed(seed)

    def fill(shape: tuple[int, ...], std: float) -> Tensor:
        half_width = std * math.sqrt(3)
        empty = torch.empty(shape, device=device, dtype=dtype)
        return empty.uniform_(-half_width, half_width, generator=draw)

    return fill
