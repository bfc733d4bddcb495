"""The models of the course by name, and how one is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course.model.config import ModelConfig
from course.model.decoder import Decoder
from course.model.seeded import NANO, seeded_decoder, seeded_hash
from course.model.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["LoadedModel", "load"]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    name: str
    config: ModelConfig
    model: Decoder
    tokenizer: Tokenizer
    weights_hash: str  # 16 hex digits: equal hashes, equal weights
    source: str  # where the weights came from, for people


def load(
    name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> LoadedModel:
    """Load a model by name."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "nano":
        model = seeded_decoder(NANO, device=device, dtype=dtype or torch.float32)
        return LoadedModel(
            name=name,
            config=NANO,
            model=model,
            tokenizer=ByteTokenizer(NANO.vocab_size),
            weights_hash=seeded_hash(NANO),
            source="random weights from a seed",
        )
    raise ValueError(f"name {name!r} is not known")
