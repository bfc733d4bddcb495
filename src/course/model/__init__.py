"""A from-scratch decoder, its weights and its tokenizer: what every stage runs on."""

from course.model.attention import (
    Attend,
    FullAttention,
    causal_attention,
    masked_attention,
)
from course.model.catalogue import CatalogueEntry, LoadedModel, catalogue, load
from course.model.config import ModelConfig, RopeScaling, UnsupportedModel
from course.model.decoder import Decoder
from course.model.fetch import fetch
from course.model.store import ModelUnavailable
from course.model.tokenizer import Tokenizer

__all__ = [
    "Attend",
    "CatalogueEntry",
    "Decoder",
    "FullAttention",
    "LoadedModel",
    "ModelConfig",
    "ModelUnavailable",
    "RopeScaling",
    "Tokenizer",
    "UnsupportedModel",
    "catalogue",
    "causal_attention",
    "fetch",
    "load",
    "masked_attention",
]
