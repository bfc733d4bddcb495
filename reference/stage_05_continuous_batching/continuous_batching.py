"""Stage 05: continuous batching. Who joins and who leaves is decided anew at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceABC

import torch

from course.model import Decoder, ModelConfig, masked_attention
from course.types import FinishReason, Output, Request, Sequence, check_generation


class SlotCache:
    """Keys and values of up to N sequences, each in a slot of its own and of its own length.

    `plan` says which slots the next forward pass serves; the pass then calls this object as its
    `attend`. All memory is reserved when the cache is made.

    Args:
        config: gives `num_layers`, `num_kv_heads` (Hkv) and `head_dim` (D).
        num_slots: N, at least 1.
        capacity: positions of each slot, at least 1.
        dtype, device: of the keys and values.

    Raises:
        ValueError: `num_slots` or `capacity` is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        # solution: begin
        shape = (config.num_layers, num_slots, capacity, config.num_kv_heads, config.head_dim)
        # Zeros, since what is masked is still multiplied: by 0, which NaN survives.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * num_slots
        # solution: end

    def plan(self, slots: SequenceABC[int], queries: int) -> torch.Tensor:
        """Prepare a pass that feeds T = `queries` new positions to each of B different slots.

        Args:
            slots: the slot of each row, B of them.
            queries: T, at least 1.

        Returns:
            positions int64 [B, T]: those of the new tokens, each row's own.

        Raises:
            ValueError: a slot has no room for T more; the message names `capacity`. Nothing is
                changed then.
        """
        # solution: begin
        starts = [self.lengths[slot] for slot in slots]
        longest = max(starts) + queries
        if longest > self.capacity:
            raise ValueError(f"capacity is {self.capacity} positions, but {longest} are needed")
        for slot in slots:
            self.lengths[slot] += queries
        device = self.keys.device
        columns = torch.arange(longest, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + columns[:queries]  # [B, T]
        self.rows = torch.tensor(slots, device=device)[:, None]  # [B, 1]
        self.positions = positions
        self.visible = columns <= positions[:, :, None]  # [B, T, S]
        # All slots in order need no gathering: a view will do.
        self.all_slots = list(slots) == list(range(len(self.lengths)))
        return positions
        # solution: end

    def release(self, slot: int) -> None:
        """Make a slot free for another sequence, which must see nothing of this one."""
        # solution: begin
        self.lengths[slot] = 0  # what is stored stays, out of sight
        # solution: end

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store the keys and values of the planned pass, and attend, each row to its own slot.

        Args:
            q: [B, T, Hq, D].
            k, v: [B, T, Hkv, D].

        Returns:
            [B, T, Hq, D].
        """
        # solution: begin
        self.keys[layer, self.rows, self.positions] = k
        self.values[layer, self.rows, self.positions] = v
        longest = self.visible.shape[-1]
        keys, values = self.keys[layer, :, :longest], self.values[layer, :, :longest]
        if not self.all_slots:
            keys, values = keys[self.rows[:, 0]], values[self.rows[:, 0]]
        return masked_attention(q, keys, values, self.visible)
        # solution: end


class ContinuousBatcher:
    """Serves requests in up to N slots. A slot that falls free is taken again at once.

    A step admits waiting requests, in the order of their coming, as long as a slot is free; each is
    prefilled by a pass of its own. Then one decode pass serves every running request. So a request
    gets one token in every step, and a second one, from its prefill, in the step that admits it.

    Args:
        num_slots: N, at least 1.
        capacity: positions of each slot; the model's whole context by default.
    """

    def __init__(self, model: Decoder, num_slots: int, capacity: int | None = None) -> None:
        self.model = model
        self.capacity = model.config.max_context if capacity is None else capacity
        self.cache = SlotCache(
            model.config, num_slots, self.capacity, dtype=model.dtype, device=model.device
        )
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # slot -> the sequence in it
        self.free = deque(range(num_slots))

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. It is served from the next step in which a slot is free.

        `limit`, the request's own or what the context leaves, serves this check and is not kept:
        that the context has come to its end is for `step` to notice.

        Raises:
            ValueError, TypeError: as `check_generation`, naming the prompt as `prompt_ids`; the id
                is that of a request that is not finished (`request_id`); the request needs more
                positions than a slot has (`capacity`); it is not greedy (`temperature`).
        """
        limit = check_generation(
            self.model.config, request.prompt_ids, request.params.max_new_tokens, request.eos_ids
        )
        needed = len(request.prompt_ids) + max(0, limit - 1)
        if needed > self.capacity:
            raise ValueError(f"capacity of a slot is {self.capacity}, the request needs {needed}")
        if not request.params.greedy:
            raise ValueError(f"temperature must be 0, got {request.params.temperature}")
        # solution: begin
        live = (*self.waiting, *self.running.values())
        if any(sequence.request.request_id == request.request_id for sequence in live):
            raise ValueError(f"request_id {request.request_id!r} is still being served")
        self.waiting.append(Sequence.of(request))
        # solution: end

    def step(self) -> list[Output]:
        """Admit what fits, and give every running request its next token.

        Returns:
            An Output for each token, in the order of computing; the last one of a request says why
            it ended: STOP for an end token (which is among the tokens), LENGTH at its limit or at
            the end of the context. A request with a limit of 0 is one Output without a token.
            Without work, nothing is computed and the list is empty.
        """
        # solution: begin
        outputs: list[Output] = []
        while self.waiting and self.free:
            sequence = self.waiting.popleft()
            if sequence.request.params.max_new_tokens == 0:
                outputs.append(Output(sequence.request.request_id, (), "", FinishReason.LENGTH))
                continue
            slot = self.free.popleft()
            self.running[slot] = sequence
            outputs += self._feed([slot])
        if self.running:
            outputs += self._feed(sorted(self.running))
        return outputs
        # solution: end

    # solution: begin
    def _feed(self, slots: list[int]) -> list[Output]:
        """One pass over what each slot's sequence has not been fed yet; equally many for each."""
        sequences = [self.running[slot] for slot in slots]
        feeds = [sequence.tokens[sequence.num_computed :] for sequence in sequences]
        queries = len(feeds[0])
        positions = self.cache.plan(slots, queries)
        token_ids = torch.tensor(feeds, device=self.model.device)  # [B, T]
        last = torch.arange(1, len(slots) + 1, device=self.model.device) * queries - 1
        logits = self.model.forward(token_ids, positions, self.cache, last)  # [B, V]
        outputs = []
        for slot, sequence, token in zip(slots, sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.finish_reason = self._finished(sequence)
            if sequence.finished:
                del self.running[slot]
                self.cache.release(slot)
                self.free.append(slot)
            outputs.append(
                Output(sequence.request.request_id, (token,), "", sequence.finish_reason)
            )
        return outputs

    def _finished(self, sequence: Sequence) -> FinishReason | None:
        """Why the newest token is the last one, if it is."""
        request = sequence.request
        if sequence.tokens[-1] in request.eos_ids and not request.params.ignore_eos:
            return FinishReason.STOP
        full = len(sequence.tokens) > self.model.config.max_context
        if len(sequence.output_ids) == request.params.max_new_tokens or full:
            return FinishReason.LENGTH
        return None

    # solution: end
