"""The models of the course by name, and how one is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from course.model.config import ModelConfig
from course.model.decoder import Decoder
from course.model.fetch import SMOLLM2, SMOLLM2_BYTES, fetch
from course.model.hub import is_hub_id
from course.model.seeded import (
    BENCH_1B,
    BENCH_8B,
    NANO,
    bench_cpu,
    seeded_decoder,
    seeded_hash,
)
from course.model.store import cached_folder, cached_hub_ids, source_of
from course.model.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from course.model.weights import hash_weights, read_config, read_weights, weight_files

__all__ = ["CatalogueEntry", "LoadedModel", "catalogue", "load"]


BENCHES = ("bench", "bench-1b", "bench-8b")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    name: str
    config: ModelConfig
    model: Decoder
    tokenizer: Tokenizer
    weights_hash: str  # 16 hex digits: equal hashes, equal weights
    source: str  # where the weights came from, for people


@dataclass(frozen=True)
class CatalogueEntry:
    """A line of `course model list`."""

    name: str
    description: str
    cached: bool  # `load` needs no network
    size: int  # bytes of the weights, once loaded in the default dtype


def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load a model: its weights on the device, its tokenizer, and where they came from.

    name: a name of the catalogue, a folder with config.json, tokenizer.json and safetensors, or
        a hub id ("owner/model") of a supported architecture. What is not on this machine yet is
        fetched; what is, is loaded without touching the network.
    device: a GPU where there is one, else the CPU.
    dtype: float32 on a CPU and for nano, bfloat16 on a GPU.

    Raises:
        ValueError: an unknown name, a device that is not there, or a file that lacks something.
        FileNotFoundError: a folder without one of its files.
        UnsupportedModel: naming what the decoder does not support.
        ModelUnavailable: the model could not be fetched.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} is not on this machine")
    name = os.fspath(name)
    if name == "nano":  # the same numbers everywhere
        return _load_seeded(name, NANO, device, dtype or torch.float32, draw_on="cpu")
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if name in BENCHES:
        name = "bench-1b" if name == "bench" and device.type == "cuda" else name
        draw_on = "cuda" if device.type == "cuda" else "cpu"
        return _load_seeded(name, _benches()[name], device, dtype, draw_on)
    if name not in (SMOLLM2, "") and (folder := Path(name).expanduser()).is_dir():
        return _load_folder(name, folder, device, dtype)
    if name == SMOLLM2 or is_hub_id(name):
        return _load_folder(name, cached_folder(name) or fetch(name), device, dtype)
    raise ValueError(
        f"name {name!r} is neither a folder, nor a hub id, nor in the catalogue: "
        + ", ".join(("nano", *BENCHES, SMOLLM2))
    )


def catalogue() -> list[CatalogueEntry]:
    """What `load` knows by name, and the hub models that were fetched before."""
    entries = [CatalogueEntry("nano", "random weights, tiny: contracts", True, _bytes(NANO, 4))]
    for name, config in _benches().items():
        on, width = ("CPU", 4) if name == "bench" else ("GPU", 2)
        what = f"random weights, {config.num_layers} layers: timings on a {on}"
        entries.append(CatalogueEntry(name, what, True, _bytes(config, width)))
    cached = cached_folder(SMOLLM2) is not None
    entries.append(CatalogueEntry(SMOLLM2, "SmolLM2-135M-Instruct: text", cached, SMOLLM2_BYTES))
    for name in cached_hub_ids():
        folder = cached_folder(name)
        if folder is not None:
            size = sum(file.stat().st_size for file in weight_files(folder))
            entries.append(CatalogueEntry(name, "from the Hugging Face hub", True, size))
    return entries


def _benches() -> dict[str, ModelConfig]:
    from course.measure.machine import last_level_cache_bytes

    return dict(
        zip(BENCHES, (bench_cpu(last_level_cache_bytes()), BENCH_1B, BENCH_8B), strict=True)
    )


def _bytes(config: ModelConfig, width: int) -> int:
    return config.num_weights * width


def _load_seeded(
    name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype, draw_on: str
) -> LoadedModel:
    model = seeded_decoder(config, device=device, dtype=dtype, draw_on=draw_on).pack()
    return LoadedModel(
        name=name,
        config=config,
        model=model,
        tokenizer=ByteTokenizer(config.vocab_size),
        weights_hash=seeded_hash(config, draw_on),
        source="random weights from a seed",
    )


def _load_folder(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    config = read_config(folder)
    tokenizer = FileTokenizer(folder, config.eos_ids)
    weights = read_weights(folder, config, device=device, dtype=dtype)
    model = Decoder(config, weights)
    del weights  # else every plain weight outlives its packing
    return LoadedModel(
        name=name,
        config=config,
        model=model.pack(),
        tokenizer=tokenizer,
        weights_hash=hash_weights(folder),
        source=source_of(folder),
    )
