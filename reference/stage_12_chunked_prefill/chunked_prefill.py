"""Stage 12: chunked prefill. A step has a budget of tokens, and a long prompt takes several."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from course.parts import PrefixCachingAllocator, Scheduler
from course.types import HasVocabulary, Output, Sequence, Step, require_int, require_range


class ChunkedScheduler(Scheduler):
    """Stage 11's scheduler, in which no step computes more than `max_tokens` tokens.

    Sequences that decode come first, each with its one token. What the budget leaves goes to
    prompts, the oldest first, of which a step may compute a part, a *chunk*. The budget is used up
    as long as there is anything to compute.

    Args:
        max_tokens: of a step; at least `max_running`, so that whoever decodes is in every step.
        The others are those of Scheduler.

    Raises:
        ValueError, TypeError: as Scheduler; `max_tokens` is below `max_running`, or no int.
    """

    def __init__(
        self,
        allocator: PrefixCachingAllocator,
        config: HasVocabulary,
        *,
        max_running: int,
        max_tokens: int,
        watermark: int = 0,
    ) -> None:
        super().__init__(allocator, config, max_running=max_running, watermark=watermark)
        require_int("max_tokens", max_tokens)
        require_range("max_tokens", max_tokens, low=max_running)
        self.max_tokens = max_tokens

    def order(self) -> list[Sequence]:
        """Sequences that decode, oldest first, then those in the middle of their prompt."""
        # solution: begin
        # Sorting keeps the order of arrival within each of the two.
        return sorted(self.running, key=lambda s: len(s.tokens) - s.num_computed > 1)
        # solution: end

    def share(self, sequence: Sequence, step: Step) -> int:
        """How many tokens a sequence feeds in a step that is made up so far."""
        # solution: begin
        return min(super().share(sequence, step), self.max_tokens - step.num_tokens)
        # solution: end

    def update(self, step: Step, token_ids: SequenceABC[int]) -> list[Output]:
        """As Scheduler's; what is not at the end of its tokens yet gets none, and no Output.

        Its keys and values are computed, and may be found by others; the token that came with it is
        what the model would say in the middle of the prompt.
        """
        # solution: begin
        ended = Step()
        tokens = []
        for sequence, count, token in zip(step.sequences, step.counts, token_ids, strict=True):
            if sequence.num_computed + count == len(sequence.tokens):
                ended.add(sequence, count)
                tokens.append(token)
            else:
                sequence.num_computed += count
                self.allocator.publish(sequence)
        return super().update(ended, tokens)
        # solution: end
