"""The words every stage shares.

A *request* is what a client sends. A *sequence* is a request that the engine has taken on: it owns
tokens and, from stage 07 on, cache blocks. A *step batch* is what one forward pass computes: some
tokens of some sequences, laid out flat; a *step* says which, before they are laid out. An *output*
is what one step adds to one request. A *timeline* is one request as its client saw it, from
outside, with a clock in hand.

Nothing here computes; nothing here knows how a stage does its work.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"  # an end-of-sequence token, or a stop string
    LENGTH = "length"  # max_new_tokens reached, or the context is full
    ABORT = "abort"  # the client went away
    REFUSED = "refused"  # the request can never be served, for a reason that is given


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. The defaults are greedy decoding.

    Raises:
        ValueError: a field is outside its range; the message names the field.
        TypeError: a field that must be a number is none, or one that must be whole is not.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0  # how many top log-probabilities to report per token

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "logprobs"):
            require_int(name, getattr(self, name))
            require_range(name, getattr(self, name), low=0)
        require_range("temperature", self.temperature, low=0.0)
        require_range("min_p", self.min_p, low=0.0, high=1.0)
        require_range("top_p", self.top_p, low=0.0, high=1.0)
        require_range("repetition_penalty", self.repetition_penalty, low=0.0)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            require_range(name, getattr(self, name))
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """What a client asks for: prompt tokens and how to continue them."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()
    arrival: float = 0.0  # seconds, on the engine's own clock
    model: str = ""  # an adapter of the engine's model: its keys and values differ from all others'
    cache_salt: str = ""  # cached prefixes are shared among requests of equal salt only


@dataclass
class Sequence:
    """A request being served. `tokens` is the prompt followed by everything generated so far.

    `num_computed` counts the tokens whose keys and values are in the cache: the tokens *fed*. The
    newest token has been emitted but not fed yet, so in steady decode
    `num_computed == len(tokens) - 1`.
    """

    request: Request
    tokens: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0  # of num_computed: found in the prefix cache when it was last admitted

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """The sequence of a request that has just been taken on."""
        return cls(request, list(request.prompt_ids))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepBatch:
    """One ragged forward pass: T tokens of S sequences, laid end to end, no padding.

    Sequence s owns the tokens `query_start_loc[s] : query_start_loc[s + 1]`: one (decode), several
    (verification of a draft) or a chunk of its prompt (prefill). Its queries are its *last*
    positions: query i of n sees the first `context_lens[s] - n + i + 1` positions.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32, the tokens of this step included
    block_tables: torch.Tensor  # [S, W] int32, padded with -1
    slot_mapping: torch.Tensor  # [T] int64: where each token's K and V go; -1 writes nowhere
    logit_rows: torch.Tensor  # [L] int64: the rows that need logits


@dataclass(frozen=True)
class Step:
    """What a scheduler has decided for one forward pass.

    Sequence s feeds its `counts[s]` tokens from `num_computed` on, and its block table has room for
    them. `copies` are blocks to be copied before anything is written, (source, destination).
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        """Let a sequence feed its next `count` tokens, at least 1."""
        self.sequences.append(sequence)
        self.counts.append(count)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(self.counts)


@dataclass(frozen=True)
class Output:
    """What one engine step adds to one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    reason: str = ""  # for REFUSED: what can never fit, and by how much


@dataclass(frozen=True)
class Chunk:
    """One piece of an answer, as a server sends it."""

    tokens: int | None  # in its text: 0 if it has none, None if there is text and nobody counts it
    output_tokens: int | None = None  # of the answer so far, where the server says so


class RequestFailed(Exception):
    """An answer that did not come, or broke off. The message is the kind of failure: "HTTP 429"."""


# How a request is sent: called with the request, it gives the answer's chunks as they come. It
# raises RequestFailed where there is no whole answer.
Send = Callable[[Any], AsyncIterator[Chunk]]


class Stamp(NamedTuple):
    """When a chunk came, and how many tokens its text has (see `Chunk`)."""

    time: float
    tokens: int | None


@dataclass
class Timeline:
    """One request as its client saw it. Times are in seconds, by the clock of the event loop."""

    intended: float  # when it was due
    sent: float  # when it really was sent: later, if the client itself was late
    chunks: list[Stamp] = field(default_factory=list)
    output_tokens: int | None = None  # the server's own count, if it gave one
    ended: float | None = None  # when the answer was over or had failed; None: it is not known yet
    error: str | None = None  # the kind of failure

    @property
    def finished(self) -> bool:
        """Whether the whole answer came."""
        return self.ended is not None and self.error is None


class OutOfBlocks(Exception):
    """More cache blocks are needed than are free. Whoever raises this has changed nothing.

    Args:
        needed, free: numbers of blocks; also attributes.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks are needed, and {free} are free")
        self.needed = needed
        self.free = free


class HasVocabulary(Protocol):
    """The two facts of a model's config that bound a prompt."""

    vocab_size: int
    max_context: int


def check_generation(
    config: HasVocabulary,
    prompt_ids: SequenceABC[int],
    max_new_tokens: int,
    eos_ids: Iterable[int] = (),
    *,
    name: str = "prompt_ids",
) -> int:
    """Check the arguments that every `generate` takes, and return how many tokens may be generated.

    A prompt of n tokens can be continued by at most `max_context - n + 1` tokens: the last one is
    emitted but never fed back.

    name: what an error calls the prompt; one of several is better called "prompts[3]".

    Raises:
        TypeError: an id is not an int.
        ValueError: `prompt_ids` is empty, holds an id outside the vocabulary, or is longer than the
            context; `max_new_tokens` is negative; `eos_ids` holds an id outside the vocabulary.
    """
    if not isinstance(prompt_ids, SequenceABC):
        kind = type(prompt_ids).__name__  # type: ignore[unreachable]  # not all callers are typed
        raise TypeError(f"{name} must be a sequence of token ids (ints), got {kind}")
    if len(prompt_ids) == 0:
        raise ValueError(f"{name} must hold at least one token, got none")
    _check_ids(name, prompt_ids, config.vocab_size)
    if not isinstance(eos_ids, Iterable):
        kind = type(eos_ids).__name__  # type: ignore[unreachable]
        raise TypeError(f"eos_ids must be a collection of token ids (ints), got {kind}")
    _check_ids("eos_ids", tuple(eos_ids), config.vocab_size)
    if len(prompt_ids) > config.max_context:
        raise ValueError(
            f"{name} must fit the context of {config.max_context} tokens, got {len(prompt_ids)}"
        )
    require_int("max_new_tokens", max_new_tokens)
    require_range("max_new_tokens", max_new_tokens, low=0)
    return min(max_new_tokens, config.max_context - len(prompt_ids) + 1)


def _check_ids(name: str, ids: SequenceABC[int], vocab_size: int) -> None:
    for index, token in enumerate(ids):
        require_int(f"{name}[{index}]", token)
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}[{index}] must lie in 0..{vocab_size - 1}, got {token}")


def require_int(name: str, value: object) -> None:
    """Raise a TypeError that names `name` unless `value` is an int, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def require_range(
    name: str, value: float, *, low: float | None = None, high: float | None = None
) -> None:
    """Raise an error that names `name` unless low <= value <= high.

    Raises:
        TypeError: `value` is no number. ValueError: it is outside the range, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        if high is None:
            wanted = f"at least {low}"
        elif low is None:
            wanted = f"at most {high}"
        else:
            wanted = f"between {low} and {high}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
