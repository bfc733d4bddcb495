"""A model's shape and tokenizer, without its weights: for whoever only needs to talk about it."""

from __future__ import annotations

from pathlib import Path

from course.model.catalogue import BENCHES, _benches
from course.model.config import ModelConfig
from course.model.fetch import fetch
from course.model.seeded import NANO
from course.model.store import cached_folder
from course.model.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from course.model.weights import read_config

__all__ = ["load_config", "load_tokenizer"]


def load_config(name: str, device: str = "cpu") -> ModelConfig:
    """The shape of a model by any name that `load` takes; errors as there."""
    if name == "nano":
        return NANO
    if name in BENCHES:
        return _benches()["bench-1b" if name == "bench" and device == "cuda" else name]
    return read_config(_folder(name))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model by any name that `load` takes; errors as there."""
    if name == "nano" or name in BENCHES:
        return ByteTokenizer(load_config(name).vocab_size)
    folder = _folder(name)
    return FileTokenizer(folder, read_config(folder).eos_ids)


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else cached_folder(name) or fetch(name)
