# WRONG_VALUE: a head's width is guessed from the hidden size
import statistics
import time

import torch


def measure_bandwidth(device, cache_bytes):
    count = max(4 * cache_bytes, 256 << 20) // 8
    array = torch.ones(count, dtype=torch.int64, device=device)
    seconds = median_seconds(lambda: array.sum(), device)
    return 8 * count / seconds


def measure_flops(device, dtype):
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    seconds = median_seconds(lambda: torch.mm(a, b), device)
    return 2 * n**3 / seconds


def median_seconds(run, device, repeats=9):
    readings = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        readings.append(time.perf_counter() - start)
    return statistics.median(readings[1:])


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_weights(config):
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_heads
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
    attention += config.qkv_bias * (q_size + 2 * kv_size) + config.qk_norm * 2 * head_dim
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return config.num_layers * layer + hidden + hidden * config.vocab_size


def kv_bytes_per_token(config, bytes_per_value):
    if not bytes_per_value > 0:
        raise ValueError(f"bytes_per_value must be above 0, got {bytes_per_value}")
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value


def cost(config, batch_size, context_len, bytes_per_value):
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if context_len < 0:
        raise ValueError(f"context_len must be at least 0, got {context_len}")
    weights = decode_weights(config)
    attention = 4 * config.num_heads * config.head_dim * config.num_layers * context_len
    cache = batch_size * context_len * kv_bytes_per_token(config, bytes_per_value)
    return batch_size * (2 * weights + attention), weights * bytes_per_value + cache


def arithmetic_intensity(config, batch_size, context_len, bytes_per_value):
    flops, moved = cost(config, batch_size, context_len, bytes_per_value)
    return flops / moved


def decode_floor(config, batch_size, context_len, bytes_per_value, bandwidth, flops):
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0, got {bandwidth}")
    if not flops > 0:
        raise ValueError(f"flops must be above 0, got {flops}")
    work, moved = cost(config, batch_size, context_len, bytes_per_value)
    return max(moved / bandwidth, work / flops)


def max_batch(config, memory_bytes, weight_bytes, context_len, bytes_per_value):
    if context_len < 1:
        raise ValueError(f"context_len must be at least 1, got {context_len}")
    per_sequence = context_len * kv_bytes_per_token(config, bytes_per_value)
    return max(0, int((memory_bytes - weight_bytes) // per_sequence))
