"""The models of contracts in another type: what is stored must have the model's own."""

from typing import Any

import torch

from course.model.seeded import NANO, seeded_decoder


def nano_in_float64(env: Any) -> Any:
    """Nano with the same weights as ever, in float64: a cache in float32 does not fit to it."""
    return seeded_decoder(NANO, device=torch.device(env.device), dtype=torch.float64)
