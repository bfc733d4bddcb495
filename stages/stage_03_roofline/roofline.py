"""Stage 03: the roofline. How fast this machine can be, before anything is made faster."""

from __future__ import annotations

import statistics
import time

import torch

from course.model import ModelConfig


def measure_bandwidth(device: torch.device, cache_bytes: int) -> float:
    """The rate at which this machine reads memory, in bytes per second.

    Args:
        device: where to measure.
        cache_bytes: the size of the last-level cache. What is read must be several times larger,
            or the cache answers instead of the memory.

    Returns:
        Bytes read per second, the best that can be sustained: the median of several readings.
    """
    raise NotImplementedError("your code goes here")


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The rate at which this machine multiplies large matrices, in FLOP per second.

    Args:
        device: where to measure.
        dtype: of both matrices.

    Returns:
        Floating-point operations per second; a multiply and an add are two.
    """
    raise NotImplementedError("your code goes here")


def decode_weights(config: ModelConfig) -> int:
    """How many weights one decode step reads.

    Every layer's projections, biases and norms, the final norm, and the head. The embedding table
    is looked up, one row per token, and does not count; the head is read whole, and a head that is
    tied to the embedding is still a head.
    """
    raise NotImplementedError("your code goes here")


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: float) -> float:
    """The bytes of keys and values that one position adds to the cache, over all layers.

    Raises:
        ValueError: `bytes_per_value` is not above 0.
    """
    if not bytes_per_value > 0:
        raise ValueError(f"bytes_per_value must be above 0, got {bytes_per_value}")
    raise NotImplementedError("your code goes here")


def arithmetic_intensity(
    config: ModelConfig, batch_size: int, context_len: int, bytes_per_value: float
) -> float:
    """FLOP per byte of one decode step of `batch_size` sequences, each `context_len` tokens long.

    Counted are 2 FLOP per weight and sequence; 4 FLOP per query head, head dimension, layer and
    cached position (the scores, and the weighted sum of values); the weights read once for the
    whole batch; and the cache of every sequence. Weights and cache take `bytes_per_value` each.

    Raises:
        ValueError: `batch_size` is below 1 or `context_len` is negative.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if context_len < 0:
        raise ValueError(f"context_len must be at least 0, got {context_len}")
    raise NotImplementedError("your code goes here")


def decode_floor(
    config: ModelConfig,
    batch_size: int,
    context_len: int,
    bytes_per_value: float,
    bandwidth: float,
    flops: float,
) -> float:
    """The least time that a decode step can take on a machine, in seconds.

    Bytes and arithmetic overlap, so it is the longer of the two.

    Args:
        config, batch_size, context_len, bytes_per_value: as in `arithmetic_intensity`.
        bandwidth: bytes per second.
        flops: FLOP per second.

    Raises:
        ValueError: `bandwidth` or `flops` is not above 0, or as `arithmetic_intensity` does.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0, got {bandwidth}")
    if not flops > 0:
        raise ValueError(f"flops must be above 0, got {flops}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if context_len < 0:
        raise ValueError(f"context_len must be at least 0, got {context_len}")
    raise NotImplementedError("your code goes here")


def max_batch(
    config: ModelConfig,
    memory_bytes: float,
    weight_bytes: float,
    context_len: int,
    bytes_per_value: float,
) -> int:
    """How many sequences of `context_len` tokens fit beside the weights.

    Args:
        memory_bytes: of the device.
        weight_bytes: of the model, the embedding table included.
        context_len: at least 1.
        bytes_per_value: of the cache.

    Returns:
        Whole sequences; 0 when not even the weights fit.

    Raises:
        ValueError: `context_len` is below 1, or `bytes_per_value` is not above 0.
    """
    if context_len < 1:
        raise ValueError(f"context_len must be at least 1, got {context_len}")
    raise NotImplementedError("your code goes here")
