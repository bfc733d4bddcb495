"""Floating-point operations of a piece of code, counted: exact on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

__all__ = ["CountedFlops"]


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    count: int = sdpa_flop_count(q, k, v)
    return count


# torch counts the attention kernels of GPUs; the one of a CPU has another name.
_CPU_KERNEL = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


class CountedFlops(FlopCounterMode):
    """Counts the operations of matrix products and of attention while it is entered.

    A multiply and an add are two. Attention counts over every key that it is given, masked or not,
    as a kernel computes it. Elementwise arithmetic is not counted.

    Example: one query over a cache of n positions, each head of D elements::

        with CountedFlops() as flops:
            masked_attention(q, keys, values, visible)
        assert flops.total == 4 * num_heads * n * D
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_CPU_KERNEL)

    @property
    def total(self) -> int:
        """Operations since it was entered."""
        total: int = self.get_total_flops()
        return total
