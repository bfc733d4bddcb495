"""A from-scratch decoder, its weights and its tokenizer: what every stage runs on."""

from course.model.attention import Attend, FullAttention, causal_attention
from course.model.catalogue import LoadedModel, load
from course.model.config import ModelConfig, RopeScaling, UnsupportedModel
from course.model.decoder import Decoder
from course.model.tokenizer import Tokenizer

__all__ = [
    "Attend",
    "Decoder",
    "FullAttention",
    "LoadedModel",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "UnsupportedModel",
    "causal_attention",
    "load",
]
