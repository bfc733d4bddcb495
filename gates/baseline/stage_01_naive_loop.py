"""The baseline of stage 01: transformers' own `generate(use_cache=False)`, a token at a time.

`generate` runs in a thread that is let go on only when the next token is asked for, so that a step
of the baseline is one forward pass of transformers and nothing runs ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from course.model.transformers_view import as_transformers


class StepStreamer:
    """A transformers streamer that holds `generate` until the next token is wanted."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.came = threading.Semaphore(0)
        self.token: int | None = None
        self.prompt_seen = False
        self.closed = False

    def put(self, value: torch.Tensor) -> None:
        """Called by transformers with the prompt, and then with each token."""
        if not self.prompt_seen:  # the prompt itself comes first
            self.prompt_seen = True
            return
        self.token = int(value.reshape(-1)[-1])
        self.came.release()
        self.go.acquire()
        if self.closed:
            raise StopIteration("no more tokens are wanted")

    def end(self) -> None:
        """Called when there is no more."""
        self.token = None
        self.came.release()


_model = cache(as_transformers)


def generate(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int] = ()
) -> Iterator[int]:
    """As stage 01's, by transformers."""
    peer = _model(model)
    streamer = StepStreamer()
    ids = torch.tensor([list(prompt_ids)], device=model.device)

    def run() -> None:
        torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                peer.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                    do_sample=False, use_cache=False, streamer=streamer, pad_token_id=0,
                    eos_token_id=list(eos_ids) or None,
                )  # fmt: skip
        except StopIteration:
            pass  # closed before its end
        streamer.end()

    threads = torch.get_num_threads()
    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        while True:
            streamer.came.acquire()
            if streamer.token is None:
                return
            yield streamer.token
            streamer.go.release()
    finally:
        streamer.closed = True
        streamer.go.release()
        worker.join()
