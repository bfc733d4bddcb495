# WRONG_COUNT (control): room for the longest is reserved at admission, and nobody is preempted
"""The baseline of stage 11: stage 05's admission, over blocks.

A request is admitted when the longest context could be held back for it, beside those that run. So
every append finds its block, and nobody ever has to give any back.
"""

from __future__ import annotations

from collections import deque

from course.types import (
    FinishReason,
    OutOfBlocks,
    Output,
    Sequence,
    Step,
    check_generation,
    require_int,
    require_range,
)


class Scheduler:
    """First come, first served, in as many slots of the longest context as the pool has."""

    def __init__(self, allocator, config, *, max_running, watermark=0):
        for name, value, low in (("max_running", max_running, 1), ("watermark", watermark, 0)):
            require_int(name, value)
            require_range(name, value, low=low)
        self.allocator, self.config = allocator, config
        self.max_running, self.watermark = max_running, watermark
        self.waiting, self.running, self.live = deque(), [], {}

    @property
    def has_work(self):
        """Whether a request waits or runs."""
        return bool(self.live)

    def add(self, request):
        """Queue a request."""
        name = request.request_id
        limit = check_generation(
            self.config, request.prompt_ids, request.params.max_new_tokens, request.eos_ids
        )
        if name in self.live:
            raise ValueError(f"request_id {name!r} is still being served")
        if limit == 0:
            return Output(name, finish_reason=FinishReason.LENGTH)
        needed, room = (
            self.allocator.blocks_for(len(request.prompt_ids) + limit - 1),
            self.allocator,
        )
        if needed > room.num_blocks:
            reason = f"it needs {needed} blocks, and the pool has {room.num_blocks}"
            return Output(name, finish_reason=FinishReason.REFUSED, reason=reason)
        sequence = self.live[name] = Sequence.of(request)
        self.waiting.append(sequence)
        return None

    def abort(self, request_id):
        """End a request."""
        if request_id not in self.live:
            return None
        self._end(self.live[request_id], FinishReason.ABORT)
        return Output(request_id, finish_reason=FinishReason.ABORT)

    def share(self, sequence, step):
        """All that has not been fed."""
        return len(sequence.tokens) - sequence.num_computed

    def schedule(self):
        """Everybody feeds; then as many are admitted as there are slots."""
        step, allocator = Step(), self.allocator
        for sequence in list(self.running):
            count = self.share(sequence, step)
            if count:
                table, computed = sequence.block_table, sequence.num_computed
                step.copies.extend(allocator.append(table, computed, count))
                step.add(sequence, count)
        slots = max(1, allocator.num_blocks // allocator.blocks_for(self.config.max_context))
        while self.waiting and len(self.running) < min(slots, self.max_running):
            sequence = self.waiting[0]
            if self.share(sequence, step) == 0:
                break
            try:
                allocator.admit(sequence, reserve=self.watermark if self.running else 0)
            except OutOfBlocks:
                break
            self.running.append(self.waiting.popleft())
            step.add(sequence, self.share(sequence, step))
        return step

    def update(self, step, token_ids):
        """One token for each."""
        if len(token_ids) != len(step.sequences):
            raise ValueError(f"token_ids must hold {len(step.sequences)}, got {len(token_ids)}")
        outputs = []
        for sequence, count, token in zip(step.sequences, step.counts, token_ids, strict=True):
            sequence.num_computed += count
            self.allocator.publish(sequence)
            sequence.tokens.append(token)
            request, reason = sequence.request, None
            full = len(sequence.tokens) > self.config.max_context
            if full or len(sequence.output_ids) == request.params.max_new_tokens:
                reason = FinishReason.LENGTH
            if token in request.eos_ids and not request.params.ignore_eos:
                reason = FinishReason.STOP
            if reason is not None:
                self._end(sequence, reason)
            outputs.append(Output(request.request_id, (token,), finish_reason=reason))
        return outputs

    def _end(self, sequence, reason):
        sequence.finish_reason = reason
        del self.live[sequence.request.request_id]
        (self.running if sequence.block_table else self.waiting).remove(sequence)
        self.allocator.free(sequence.block_table)
