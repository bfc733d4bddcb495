"""One step of a scheduler, computed: the only place where decisions meet the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course.model import Decoder
from course.types import Sequence, Step, StepBatch

if TYPE_CHECKING:
    from torch import Tensor

LayOut = Callable[..., StepBatch]  # stage 08's step_batch


class Runner:
    """Computes the steps that a scheduler has decided, and takes the most likely tokens.

    Args:
        model: the decoder.
        attention: a pool of KV blocks with `plan`, `copy_blocks` and a call for each layer, as
            stage 08's PagedAttention.
        step_batch: lays tokens end to end, as stage 08's function of that name.
    """

    def __init__(self, model: Decoder, attention: Any, step_batch: LayOut) -> None:
        self.model = model
        self.attention = attention
        self.step_batch = step_batch

    def __call__(self, step: Step) -> list[int]:
        """The next token of each sequence of a step, by the logits of the last token it feeds."""
        self.attention.copy_blocks(step.copies)
        logits = self.forward(step.sequences, step.counts)
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    def forward(self, sequences: list[Sequence], counts: list[int]) -> Tensor:
        """Logits [S, V] of the last token that each sequence feeds."""
        block_size = self.attention.block_size
        batch = self.step_batch(sequences, counts, block_size, device=self.model.device)
        self.attention.plan(batch)
        logits = self.model.forward(
            batch.token_ids[None], batch.positions[None], self.attention, batch.logit_rows
        )
        assert not isinstance(logits, tuple)
        return logits
