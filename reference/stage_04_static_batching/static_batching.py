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
    # solution: begin
    width = max(len(prompt) for prompt in prompts)
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    rows = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    columns = torch.arange(width, device=device)
    positions = (columns - starts[:, None]).clamp(min=0)
    return torch.tensor(rows, device=device), positions, starts
    # solution: end


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
        # solution: begin
        columns = torch.arange(self.length + queries, device=self.starts.device)
        own = columns[self.length :, None]  # [T, 1]: the column of each query
        # Softmax over nothing is 0 / 0. Where a kernel makes NaN of it, the next layer keeps NaN as
        # a key and a value, and even masked it poisons the sum. So padding sees itself.
        first = torch.minimum(self.starts[:, None, None], own)  # [B, T, 1]
        return (columns >= first) & (columns <= own)
        # solution: end

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
        # solution: begin
        if layer == 0:
            self.mask = self.visible(q.shape[1])  # the same in every layer of a pass
        keys, values = self.append(layer, k, v)
        return masked_attention(q, keys, values, self.mask)
        # solution: end


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
    # solution: begin
    rows = [i for i in range(count) if left[i] > 0]  # the prompt of each row of the batch
    if not rows:
        return
    token_ids, positions, starts = pad_left([prompts[i] for i in rows], device=model.device)
    width, steps = token_ids.shape[1], max(left)
    cache = PaddedCache(
        model.config, width + steps - 1, starts, dtype=model.dtype, device=model.device
    )
    while True:
        batch, queries = token_ids.shape
        last = torch.arange(1, batch + 1, device=model.device) * queries - 1  # [B]
        chosen = model.forward(token_ids, positions, cache, last).argmax(dim=-1)  # [B]
        step: list[int | None] = [None] * count
        for i, token in zip(rows, chosen.tolist(), strict=True):
            if left[i] > 0:
                step[i] = token
                left[i] = 0 if token in eos_ids else left[i] - 1
        yield step
        if not any(left):
            return
        token_ids = chosen[:, None]
        # A row that has ended goes on all the same, and may pass the end of the context.
        positions = (cache.length - starts)[:, None].clamp(max=model.config.max_context - 1)
    # solution: end
