"""Stage 02: the KV cache. What the past computed is kept, and a step computes one position."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from course.model import Decoder, ModelConfig, causal_attention
from course.types import check_generation


class KVCache:
    """A contiguous KV cache for B sequences of equal length. It is also the `attend` of the model.

    All memory is reserved when the cache is made. `length` counts the positions whose keys and
    values are stored: the tokens *fed*. It moves when the last layer of a forward pass has written,
    so that every layer of one pass sees the same past.

    Args:
        config: gives `num_layers`, `num_kv_heads` (Hkv) and `head_dim` (D).
        capacity: positions to reserve, at least 1.
        batch_size: B, at least 1.
        dtype, device: of the keys and values.

    Raises:
        ValueError: `capacity` or `batch_size` is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        raise NotImplementedError("your code goes here")

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of T new positions, and return those of all S so far.

        Args:
            layer: 0 to num_layers - 1; the layers of a pass come in this order.
            k, v: [B, T, Hkv, D].

        Returns:
            Keys and values [B, S, Hkv, D], S = length + T: views of the cache, not copies.

        Raises:
            ValueError: length + T exceeds the capacity. Nothing is written then.
        """
        raise NotImplementedError("your code goes here")

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend from T new positions to everything so far, themselves included.

        Args:
            q: [B, T, Hq, D].
            k, v: [B, T, Hkv, D].

        Returns:
            [B, T, Hq, D].
        """
        raise NotImplementedError("your code goes here")


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
) -> Iterator[int]:
    """Continue a prompt greedily, as stage 01 does, without computing any position twice.

    The first pass (*prefill*) feeds the prompt. Every later pass (*decode*) feeds the one token
    that the pass before it emitted.

    Arguments, yields and errors are those of stage 01. The cache reserves no more positions than
    can be fed.
    """
    limit = check_generation(model.config, prompt_ids, max_new_tokens, eos_ids)
    raise NotImplementedError("your code goes here")
