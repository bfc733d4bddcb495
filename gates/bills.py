"""The bills of a step, for the note under a time: what was predicted, its split, and the floor.

Bandwidth and operations per second are measured in the same run, with as many threads as the
workers have, and so is the host's share. Nothing in here decides a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from course.check.gate import GateRun
from course.measure import StepWork, decode_work, host_overhead, narrow, pass_work, split_step
from course.measure.roofline import Roofline, probe_now
from course.measure.split import Split
from course.model import FullAttention
from course.model.describe import load_config
from course.model.seeded import seeded_decoder


class Bills:
    """What steps of the gate's model, or of another one, cost on this machine, as it is now."""

    def __init__(self, gate: GateRun, model: str | None = None) -> None:
        self.device = torch.device(gate.device)
        self.threads = gate.options.threads
        self.config = load_config(model or gate.model, gate.device)
        # Seeded models are made in the dtype of their device; the real one is float32 on a CPU.
        self.dtype = torch.float32 if gate.device == "cpu" else torch.bfloat16

    def decode(self, context_lens: list[int], *, kv_times: float = 1.0) -> StepWork:
        """Work of a step that decodes a token for each sequence.

        Args:
            kv_times: how often the keys and values are moved, reading them once being 1.
        """
        size = self.dtype.itemsize
        work = decode_work(self.config, context_lens, weight_itemsize=size, kv_itemsize=size)
        return StepWork(work.weight_bytes, kv_times * work.kv_bytes, work.flops)

    def whole_pass(self, positions: int) -> StepWork:
        """Work of a pass over a whole text, as the naive loop makes one in every step."""
        return pass_work(self.config, positions, self.dtype.itemsize)

    def split(self, work: StepWork, measured_s: float) -> Split:
        """The bills of a step that took `measured_s` seconds."""
        return split_step(
            work, self.roofline, dtype=self.dtype, host_s=self.host_s, measured_s=measured_s
        )

    @cached_property
    def roofline(self) -> Roofline:
        """Measured now: what was measured before may have met another machine."""
        with self._as_in_workers():
            return probe_now(self.device, (self.dtype,))

    @cached_property
    def host_s(self) -> float:
        """Seconds of a step of a model as deep, with next to nothing in it."""
        model = seeded_decoder(narrow(self.config), device=self.device, dtype=self.dtype)
        ids = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        with self._as_in_workers(), torch.inference_mode():
            return host_overhead(
                lambda: model.forward(ids, ids, FullAttention(), ids[0]), self.device
            )

    @contextmanager
    def _as_in_workers(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def split_words(split: Split, step: str) -> str:
    """A split in one line; `step` says of what: "a step of 8 rows"."""
    bills = {
        "host": split.host, "weights": split.weights, "KV": split.kv,
        "arithmetic": split.arithmetic,
    }  # fmt: skip
    parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in bills.items())
    return (
        f"{step}: {parts}; floor {_ms(split.floor)} of {_ms(split.measured)} ms "
        f"({split.utilisation:.0%})"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
