"""Stage 04: static batching. A step reads the weights once, for every row of a batch.

The `logit_rows` of `Decoder.forward` number the rows of [B, T] laid end to end: column t of row b
is b * T + t.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from course.model import Decoder, ModelConfig, masked_attention
from course.parts import KVCache
from course.types import check_generation


def pad_left(
    prompts: Sequence[Sequence[int]],
    pad_id: int = 0,
    *,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put prompts of different lengths into one rectangle, each ending in the last column.

    Args:
        prompts: B prompts, B >= 1, none of them empty; T is the length of the longest.
        pad_id: the token that fills the columns before a prompt. Which one must not matter.

    Returns:
        token_ids [B, T] int64; positions [B, T] int64, 0 at the first token of each prompt, and 0
        in the padding; starts [B] int64: the column in which each prompt begins.
    """
    raise NotImplementedError("your code goes here")


class PaddedCache(KVCache):
    """Stage 02's cache, for rows that do not all begin in the same column.

    A *column* is a slot of the cache, the same for every row; a *position* is what RoPE turns by,
    and each row counts its own. Row b's sequence begins in column `starts[b]`: position 0.

    Args:
        config, capacity, dtype, device: as for `KVCache`; `capacity` counts columns.
        starts: int64 [B].
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        starts: torch.Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, capacity, batch_size=len(starts), dtype=dtype, device=device)
        self.starts = starts

    def visible(self, queries: int) -> torch.Tensor:
        """What the next T = `queries` columns may see of the S = length + T up to their end.

        Returns:
            bool [B, T, S]: True where a column of row b's sequence, at or before the query's own,
            is seen. A query in the padding sees itself, and nothing else.
        """
        raise NotImplementedError("your code goes here")

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend from T new columns to everything that they may see.

        Args:
            q: [B, T, Hq, D].
            k, v: [B, T, Hkv, D].

        Returns:
            [B, T, Hq, D].
        """
        raise NotImplementedError("your code goes here")


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    eos_ids: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Continue several prompts greedily, all of them in every forward pass.

    Each row is what `generate` of stage 02 gives for its prompt alone, ended by its own end token
    or its own limit. The batch ends with its last row. Until then every row is computed in every
    pass, ended or not: that is what makes it static.

    Args:
        prompts: token ids; their order is the order of the rows.
        max_new_tokens: a limit for all rows, or one for each.
        eos_ids: tokens that end a row.

    Yields:
        One list for each pass, as soon as that pass is done: for each prompt its next token, or
        None if it has ended. No prompts, or no row with a limit above 0, computes and yields
        nothing.

    Raises:
        ValueError, TypeError: as `check_generation`, naming the prompt as `prompts[i]`; or
            `max_new_tokens` has another length than `prompts`.
    """
    count = len(prompts)
    limits = max_new_tokens if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * count
    if len(limits) != count:
        raise ValueError(f"max_new_tokens must hold a limit for each of {count}, got {len(limits)}")
    left = [
        check_generation(model.config, prompt, limit, eos_ids, name=f"prompts[{i}]")
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    raise NotImplementedError("your code goes here")
