"""Stage 12: chunked prefill. A step has a budget of tokens, and a long prompt takes several."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from course.parts import PrefixCachingAllocator, Scheduler
from course.types import HasVocabulary, Output, Sequence, Step, require_int, require_range


class ChunkedScheduler(Scheduler):
    """Stage 11's scheduler, in which no step computes more than `max_tokens` tokens.

    A step may compute a part of a prompt, a *chunk*, and the next step goes on behind it. Whoever
    has one token left to feed, as those that decode, is in every step. What that leaves of the
    budget goes to prompts, in the order of arrival, each as much as it can take; requests that wait
    are admitted with what is left then. Nothing of the budget is left over while a prompt could
    take it.

    So at most one sequence is in the middle of its prompt, and it is the newest that runs: whoever
    was cut took the last token of the budget, and nobody is admitted with nothing.

    Whom stage 11 would preempt is preempted, and nobody else. It feeds its tokens anew like a
    prompt, in chunks. Blocks are allocated as in stage 11, at admission and for the whole prompt: a
    chunk never lacks room.

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

    def share(self, sequence: Sequence, step: Step) -> int:
        """How many tokens a sequence feeds in a step that is made up so far; 0 for none.

        All that it has not fed, or as many as the budget leaves.
        """
        # solution: begin
        return min(super().share(sequence, step), self.max_tokens - step.num_tokens)
        # solution: end

    def update(self, step: Step, token_ids: SequenceABC[int]) -> list[Output]:
        """Take note of what a pass has computed, as Scheduler's does.

        A sequence that still has tokens to feed gets no token, and no Output: what came for it is
        what the model would say in the middle of its prompt. Its keys and values are computed, and
        may be found by others. Of one that has ended nothing is kept.

        Args:
            step: the one that `schedule` returned last.
            token_ids: the next token of each of its sequences. Both arguments stay as they are.

        Returns:
            An Output for each sequence that got a token, in the order of the step.

        Raises:
            ValueError: not one token for each sequence of the step (`token_ids`). Nothing has
                changed.
        """
        if len(token_ids) != len(step.sequences):
            raise ValueError(
                f"token_ids must hold {len(step.sequences)} tokens, got {len(token_ids)}"
            )
        # solution: begin
        ended, tokens = Step(), []
        for sequence, count, token in zip(step.sequences, step.counts, token_ids, strict=True):
            if sequence.num_computed + count == len(sequence.tokens):
                ended.add(sequence, count)
                tokens.append(token)
            else:
                sequence.num_computed += count
                self.allocator.publish(sequence)
        return super().update(ended, tokens)
        # solution: end
