"""Stage 11: the scheduler. Who runs, who waits, and who gives blocks back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceABC

from course.parts import PrefixCachingAllocator
from course.types import (
    FinishReason,
    HasVocabulary,
    OutOfBlocks,
    Output,
    Request,
    Sequence,
    Step,
    check_generation,
    require_int,
    require_range,
)


class Scheduler:
    """Decides for each step which sequences feed which tokens, in a pool that is too small for all.

    Requests are served in the order of their arrival. Those that run come first, the oldest first,
    and feed their next token. Where no block is left for one, the newest is *preempted*: it gives
    all its blocks back, so that nothing of it is computed (`num_computed`, `num_cached`), keeps its
    tokens, and waits in front of all others. When it is admitted again it feeds them all anew. No
    more are preempted than it takes. Then those that wait are admitted, in order, as many as there
    is room for; one that does not fit keeps those behind it waiting.

    So the oldest request that is not finished is in every step, and a pool that is large enough for
    the largest request finishes them all.

    `waiting` and `running` are in the order of arrival, and whoever runs is older than whoever
    waits. No sequence is in both. One that waits has no blocks. What a step or an `add` costs here
    does not depend on how many wait.

    Args:
        allocator: the pool; only this scheduler allocates from it.
        config: gives `vocab_size` and `max_context`.
        max_running: most sequences that run at a time, at least 1.
        watermark: blocks that admission leaves free for those that run already, at least 0. Where
            nothing runs, it may use them too.

    Raises:
        ValueError, TypeError: `max_running` or `watermark` is out of range, or no int.
    """

    def __init__(
        self,
        allocator: PrefixCachingAllocator,
        config: HasVocabulary,
        *,
        max_running: int,
        watermark: int = 0,
    ) -> None:
        for name, value, low in (("max_running", max_running, 1), ("watermark", watermark, 0)):
            require_int(name, value)
            require_range(name, value, low=low)
        self.allocator = allocator
        self.config = config
        self.max_running = max_running
        self.watermark = watermark
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.live: dict[str, Sequence] = {}  # all that wait or run, by request_id

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> Output | None:
        """Queue a request behind all others.

        Returns:
            None; or the request's only Output, if it ends here: LENGTH for a limit of 0 tokens,
            REFUSED, with a reason, if it needs more blocks than the whole pool has. It needs room
            for its prompt and all that it may generate, the last token left out: that is never fed.
            The reason says how many blocks it needs, and how many there are.

        Raises:
            ValueError, TypeError: as `check_generation`, naming the prompt as `prompt_ids`; the id
                is that of a request that waits or runs (`request_id`), whatever it asks for.
        """
        limit = check_generation(
            self.config, request.prompt_ids, request.params.max_new_tokens, request.eos_ids
        )
        raise NotImplementedError("your code goes here")

    def abort(self, request_id: str) -> Output | None:
        """End a request whose client has gone away, and give its blocks back.

        It is called between steps: after `update`, before `schedule`.

        Returns:
            An Output with the reason ABORT, which its Sequence has as `finish_reason` too; None if
            no such request waits or runs.
        """
        raise NotImplementedError("your code goes here")

    def share(self, sequence: Sequence, step: Step) -> int:
        """How many tokens a sequence feeds in a step that is made up so far: all it has not fed.

        `schedule` asks it for every sequence, and for one that waits before and after its
        admission: blocks that are found in the cache need not be fed. For 0 the sequence is left
        out of the step, and one that waits is not admitted. Stage 12 replaces it.
        """
        return len(sequence.tokens) - sequence.num_computed

    def schedule(self) -> Step:
        """Decide what the next pass computes, and make room for it.

        Nobody is admitted in a step that preempts. A sequence that is in the step is not preempted
        in it. The step is empty only if there is no work.

        Returns:
            The sequences that feed, in the order of arrival: those admitted now come last.
        """
        raise NotImplementedError("your code goes here")

    def update(self, step: Step, token_ids: SequenceABC[int]) -> list[Output]:
        """Take note of what a pass has computed: keys and values, and a token for each sequence.

        From now on others find the full blocks that it has written.

        Args:
            step: the one that `schedule` returned last.
            token_ids: the next token of each of its sequences.

        Returns:
            An Output for each, in order; the last one of a request says why it ended: STOP for an
            end token (which is among the tokens) unless it ignores them (`ignore_eos`), LENGTH at
            its limit or at the end of the context. The blocks of what has ended are free, and its
            Sequence has that `finish_reason` too.

        Raises:
            ValueError: not one token for each sequence of the step (`token_ids`). Nothing has
                changed then.
        """
        if len(token_ids) != len(step.sequences):
            raise ValueError(
                f"token_ids must hold {len(step.sequences)} tokens, got {len(token_ids)}"
            )
        raise NotImplementedError("your code goes here")
