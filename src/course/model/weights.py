"""Weights from a folder of safetensors files, and a hash that names them."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from course.model.config import ModelConfig, UnsupportedModel

__all__ = ["hash_weights", "read_config", "read_weights", "weight_files"]

INDEX = "model.safetensors.index.json"
HASH_FILE = ".weights-hash.json"

# Ours -> the tensors of a Hugging Face checkpoint that lie in it, one below the other.
TENSORS = {
    "embed.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
LAYER_TENSORS = {
    "attn_norm.weight": ["input_layernorm.weight"],
    "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "qk_norm.weight": ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
    "o.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}


def read_config(folder: Path) -> ModelConfig:
    """The model's config, with the end-of-text ids that its generation_config.json names.

    Raises:
        FileNotFoundError: the folder has no config.json.
        UnsupportedModel, ValueError: as `ModelConfig.from_hf`.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = json.loads(generation.read_text("utf-8")).get("eos_token_id")
        raw["eos_token_id"] = raw.get("eos_token_id") if eos is None else eos
    return ModelConfig.from_hf(raw)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model: those of the index where there is one.

    Raises:
        FileNotFoundError: there is none, or one that the index names is missing.
    """
    if (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(named))]
    else:
        files = [folder / "model.safetensors"]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {path.name}")
    return files


def read_weights(
    folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every tensor of `config.weight_shapes()`, read through a memory map into its own memory.

    Raises:
        FileNotFoundError: as `weight_files`.
        ValueError: a tensor is missing or of the wrong shape; the message names it.
        UnsupportedModel: the files hold tensors that this decoder would leave out.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, "pt")) for f in weight_files(folder)]
        stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118

        def take(name: str) -> Tensor:
            if name not in stored:
                raise ValueError(f"{folder} holds no tensor {name!r}")
            return stored.pop(name).get_tensor(name)

        weights = {}
        for name, shape in config.weight_shapes().items():
            parts = [take(source) for source in _sources(name)]
            if name.endswith("qk_norm.weight"):  # one weight [D] for all heads of a kind
                heads = (config.num_heads, config.num_kv_heads)
                parts = [p.expand(n, -1) for p, n in zip(parts, heads, strict=True)]
            weights[name] = _stack(name, parts, shape, device, dtype)
        if left := [name for name in stored if not _harmless(name, config)]:
            raise UnsupportedModel(f"{folder} holds tensors that are not supported: {left[:3]}")
    return weights


def hash_weights(folder: Path) -> str:
    """The first 16 hex digits of SHA-256 over the weight files in order; the same for the same
    bytes wherever they lie.

    Remembered in a file beside the weights, for as long as their sizes and times stay the same.
    """
    files = weight_files(folder)
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    memory = folder / HASH_FILE
    try:
        known = json.loads(memory.read_text("utf-8"))
        if known["files"] == stamp:
            return str(known["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never hashed, or no memory of ours
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    value = digest.hexdigest()[:16]
    try:
        draft = folder / f"{HASH_FILE}.{os.getpid()}"
        draft.write_text(json.dumps({"files": stamp, "hash": value}), "utf-8")
        draft.replace(memory)
    except OSError:
        pass  # a folder that cannot be written to is hashed again next time
    return value


def _sources(name: str) -> list[str]:
    if name in TENSORS:
        return TENSORS[name]
    _, index, rest = name.split(".", 2)
    return [f"model.layers.{index}.{source}" for source in LAYER_TENSORS[rest]]


def _harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints carry and that follow from the config or from others."""
    tied_copy = config.tie_embeddings and name == "lm_head.weight"
    return tied_copy or name.endswith("rotary_emb.inv_freq")


def _stack(
    name: str,
    parts: list[Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The parts below each other in one new tensor; copied once, also across devices."""
    rows = [part.shape[0] for part in parts]
    if sum(rows) != shape[0] or any(part.shape[1:] != shape[1:] for part in parts):
        raise ValueError(f"{name} must be {shape}, got {[tuple(part.shape) for part in parts]}")
    whole = torch.empty(shape, device=device, dtype=dtype)
    for target, part in zip(whole.split(rows), parts, strict=True):
        target.copy_(part)
    return whole
