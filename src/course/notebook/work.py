"""What a pass over many positions of one sequence must read and compute."""

from __future__ import annotations

from course.measure.split import StepWork, decode_work
from course.model import ModelConfig

__all__ = ["pass_work"]


def pass_work(config: ModelConfig, rows: int, itemsize: float) -> StepWork:
    """Work of a pass over the first `rows` positions of a text: prefill, or a naive step.

    All weights are read once. Each position multiplies by those of the layers, the last one by the
    head, too; position t attends to t + 1 positions, whose keys and values this very pass makes.

    Raises:
        ValueError: `rows` is below 1, or `itemsize` is not above 0.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    one = decode_work(config, [1], weight_itemsize=itemsize, kv_itemsize=itemsize)
    pair = 4 * config.num_layers * config.num_heads * config.head_dim  # a query meets a key
    head = 2 * config.vocab_size * config.hidden_size
    layers = one.flops - head - pair
    pairs = rows * (rows + 1) / 2
    return StepWork(one.weight_bytes, 0.0, layers * rows + head + pair * pairs)
