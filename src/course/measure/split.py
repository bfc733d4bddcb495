"""Where a decode step's time goes: host, weights, KV cache, arithmetic.

The first three bills are predicted from counted work and the machine's roofline:

    weights     weight bytes / read bandwidth
    KV cache    KV bytes / read bandwidth
    arithmetic  operations / (operations per second)

and the fourth is measured: the *host overhead* is the step time of a model of the same depth that
is so narrow that nothing is left to read or to multiply (:func:`narrow`, :func:`host_overhead`).
Memory and arithmetic overlap, so the device takes the larger of the two. On a CPU the host's work
is done by the same cores, before and after; on a GPU it runs ahead of the queue, and the slower of
host and device sets the pace.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from course.measure.clock import now, sync

if TYPE_CHECKING:
    import torch

    from course.measure.roofline import Roofline

__all__ = [
    "ModelShape",
    "Split",
    "StepWork",
    "decode_work",
    "host_overhead",
    "narrow",
    "pass_work",
    "split_step",
]


class ModelShape(Protocol):
    """The fields of ``course.model.ModelConfig`` that decide how much work a step is."""

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""


@dataclass(frozen=True)
class StepWork:
    """What one decode step must read and compute."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte, to be held against ``Roofline.ridge``."""
        return self.flops / (self.weight_bytes + self.kv_bytes)


def decode_work(
    shape: ModelShape,
    context_lens: Sequence[int],
    *,
    weight_itemsize: float,
    kv_itemsize: float,
) -> StepWork:
    """Work of a step that decodes one token for each sequence.

    ``context_lens``: positions that each sequence attends to, the new one included.
    ``weight_itemsize``, ``kv_itemsize``: bytes per weight and per KV element (0.5 for 4 bits).

    Every weight matrix is read once, whatever the number of sequences, and the LM head is one of
    them; of the embedding table only one row per sequence is looked up, which is not counted, and
    neither are norms and biases. Each weight costs 2 operations per sequence. Attention reads every
    key and value once and does 4 operations per query head, element and position (2 for the score,
    2 for the sum).

    Raises ValueError when ``context_lens`` is empty or holds less than 1, or an itemsize is not
    positive.
    """
    if not context_lens or min(context_lens) < 1:
        raise ValueError(f"context_lens must hold lengths of at least 1, got {list(context_lens)}")
    if weight_itemsize <= 0 or kv_itemsize <= 0:
        raise ValueError(
            f"weight_itemsize and kv_itemsize must be positive, got {weight_itemsize} "
            f"and {kv_itemsize}"
        )
    query_width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    per_layer = shape.hidden_size * (2 * query_width + 2 * kv_width + 3 * shape.intermediate_size)
    weights = shape.num_layers * per_layer + shape.vocab_size * shape.hidden_size
    positions = shape.num_layers * sum(context_lens)
    return StepWork(
        weight_bytes=weights * weight_itemsize,
        kv_bytes=2 * kv_width * positions * kv_itemsize,
        flops=2 * weights * len(context_lens) + 4 * query_width * positions,
    )


def pass_work(shape: ModelShape, rows: int, itemsize: float) -> StepWork:
    """Work of a pass over the first `rows` positions of a text: prefill, or a naive step.

    All weights are read once. Each position multiplies by those of the layers, the last one by the
    head, too; position t attends to t + 1 positions, whose keys and values this very pass makes.

    Raises:
        ValueError: `rows` is below 1, or `itemsize` is not above 0.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    one = decode_work(shape, [1], weight_itemsize=itemsize, kv_itemsize=itemsize)
    pair = 4 * shape.num_layers * shape.num_heads * shape.head_dim  # a query meets a key
    head = 2 * shape.vocab_size * shape.hidden_size
    layers = one.flops - head - pair
    pairs = rows * (rows + 1) / 2
    return StepWork(one.weight_bytes, 0.0, layers * rows + head + pair * pairs)


@dataclass(frozen=True)
class Split:
    """The bills of one step, in seconds; ``measured`` is what the step really took."""

    host: float
    weights: float
    kv: float
    arithmetic: float
    measured: float
    host_overlaps: bool  # the host runs ahead of the device's queue (a GPU)

    @property
    def floor(self) -> float:
        """The least that the device needs: memory or arithmetic, whichever is more."""
        return max(self.weights + self.kv, self.arithmetic)

    @property
    def predicted(self) -> float:
        """The step time that the bills add up to."""
        return max(self.host, self.floor) if self.host_overlaps else self.host + self.floor

    @property
    def unexplained(self) -> float:
        """What the measured step took beyond the prediction; negative when it took less.

        Kernels that do not reach the roofline are in here.
        """
        return self.measured - self.predicted

    @property
    def utilisation(self) -> float:
        """Share of the measured step in which the floor's work would have been done."""
        return self.floor / self.measured

    @property
    def largest(self) -> str:
        """Name of the largest bill: "host", "weights", "kv" or "arithmetic"."""
        bills = {
            "host": self.host,
            "weights": self.weights,
            "kv": self.kv,
            "arithmetic": self.arithmetic,
        }
        return max(bills, key=lambda name: bills[name])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the derived ones included."""
        return {
            **dataclasses.asdict(self),
            "floor": self.floor,
            "predicted": self.predicted,
            "unexplained": self.unexplained,
            "utilisation": self.utilisation,
            "largest": self.largest,
        }


def split_step(
    work: StepWork,
    roofline: Roofline,
    *,
    dtype: torch.dtype | str,
    host_s: float,
    measured_s: float,
) -> Split:
    """Bill a measured step.

    ``dtype``: the type in which the products are computed. ``host_s``: from :func:`host_overhead`.

    Raises ValueError when ``measured_s`` is not positive, ``host_s`` is negative, or the roofline
    has no figure for ``dtype``.
    """
    if measured_s <= 0 or host_s < 0:
        raise ValueError(
            "measured_s must be positive and host_s not negative, "
            f"got {measured_s!r} and {host_s!r}"
        )
    bandwidth = roofline.read_bandwidth
    flops = roofline.ridge(dtype) * bandwidth
    return Split(
        host=host_s,
        weights=work.weight_bytes / bandwidth,
        kv=work.kv_bytes / bandwidth,
        arithmetic=work.flops / flops,
        measured=measured_s,
        host_overlaps=roofline.device.startswith("cuda"),
    )


C = TypeVar("C")


def narrow(config: C) -> C:
    """The same model with the same number of layers, and next to nothing in them.

    Every call that the host makes is still made: depth, options and the grouping of heads stay.
    ``config`` is a ``course.model.ModelConfig``.
    """
    groups = config.num_heads // config.num_kv_heads  # type: ignore[attr-defined]
    return dataclasses.replace(  # type: ignore[type-var]
        config,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_heads=groups,
        num_kv_heads=1,
        head_dim=16,
    )


def host_overhead(
    step: Callable[[], object],
    device: torch.device | str = "cpu",
    *,
    steps: int = 30,
    warmup: int = 5,
) -> float:
    """Median seconds of a step of a narrow model, from the call until the device is idle.

    ``step`` decodes one token with the model of :func:`narrow`, on the same cache and by the same
    code as the step that is to be split.

    Raises ValueError when ``steps`` is under 1 or ``warmup`` is negative.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(
            f"steps must be at least 1 and warmup not negative, got {steps} and {warmup}"
        )
    for _ in range(warmup):
        step()
    taken = []
    for _ in range(steps):
        sync(device)
        start = now()
        step()
        sync(device)
        taken.append(now() - start)
    return statistics.median(taken)
