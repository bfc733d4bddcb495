"""The baseline of stage 05: stage 04, N requests at a time in the order of their coming."""

from __future__ import annotations

from course.parts import generate_batch
from course.types import Output


def serve(model, requests, num_slots):
    """Static batches, one after the other; the outputs of each pass."""
    for start in range(0, len(requests), num_slots):
        batch = requests[start : start + num_slots]
        prompts = [list(request.prompt_ids) for request in batch]
        limits = [request.params.max_new_tokens for request in batch]
        for step in generate_batch(model, prompts, limits):
            yield [
                Output(request.request_id, (token,))
                for request, token in zip(batch, step, strict=True)
                if token is not None
            ]
