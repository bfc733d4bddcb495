"""Stage 05, the half that runs beside the solution."""

from collections.abc import Iterator
from typing import Any

import torch
from poison import new_memory_is_nan

from course.measure.counters import NewTensors, tensors_in
from course.measure.flops import CountedFlops
from course.types import FinishReason, Output, Request, SamplingParams

__all__ = [
    "left_behind",
    "overflow",
    "refused",
    "serve",
    "serve_timed",
    "slots",
    "static_timed",
    "work",
]


def serve(
    env: Any, model: str, arrivals: list[Any], num_slots: int, capacity: int | None = None
) -> Iterator[dict[str, Any]]:
    """Requests through one batcher, until there is no work; each step with the counts so far.

    arrivals: [step, request], in order; a request is added before that step. A step is made even
    where there is no work yet.
    """
    counting = env.counting(model)
    with new_memory_is_nan():
        batcher = env.solution.ContinuousBatcher(counting, num_slots, capacity)
    pending = list(arrivals)
    step = 0
    while pending or batcher.has_work:
        while pending and pending[0][0] <= step:
            batcher.add(request_of(pending.pop(0)[1]))
        outputs = batcher.step()
        counts = counting.counts
        yield {
            "outputs": plain(outputs),
            "passes": counts.forward_passes,
            "positions": counts.positions,
            "head_rows": counts.logit_rows,
        }
        step += 1
    return {"after": plain(batcher.step()), "passes": counting.counts.forward_passes}


def refused(
    env: Any, model: str, requests: list[Any], bad: Any, num_slots: int, capacity: int | None,
    steps: int,
) -> Iterator[Any]:  # fmt: skip
    """Add good requests, make some steps, and add one that must be refused; then serve the others
    to the end.
    """
    batcher = env.solution.ContinuousBatcher(env.model(model), num_slots, capacity)
    for request in requests:
        batcher.add(request_of(request))
    found = [plain(batcher.step()) for _ in range(steps)]
    error: BaseException | None = None
    try:
        batcher.add(request_of(bad))
    except Exception as raised:
        error = raised
    while batcher.has_work:
        found.append(plain(batcher.step()))
    yield found
    if error is not None:
        raise error
    yield None


def slots(
    env: Any, model: str, num_slots: int, capacity: int, passes: list[Any]
) -> Iterator[dict[str, Any]]:
    """Feed chunks through a SlotCache whose memory is full of junk.

    passes: ["feed", slots, token ids [B, T]] or ["release", slot]. Positions are the cache's own.
    """
    decoder = env.model(model)
    cache = make(env, decoder, num_slots, capacity)
    for tensor in tensors_in(cache):
        if tensor.is_floating_point():
            tensor.fill_(1e3)
    for kind, chosen, *rest in passes:
        if kind == "release":
            cache.release(chosen)
            continue
        token_ids = torch.tensor(rest[0], device=env.device)
        planned = tuple(chosen) if len(chosen) % 2 else chosen  # any sequence of slots
        positions = cache.plan(planned, token_ids.shape[1])
        yield {"positions": positions, "logits": decoder.forward(token_ids, positions, cache)}


def overflow(env: Any, model: str, capacity: int, stored: int, more: int) -> Iterator[Any]:
    """Fill slot 1 of 2, ask for more than fits, feed one more to slot 0, and fill slot 1 up.

    Yields the refusal, the logits of slot 0, and the positions that slot 1 goes on with.
    """
    decoder = env.model(model)
    cache = make(env, decoder, 2, capacity)

    def feed(chosen: list[int], token: int, queries: int) -> torch.Tensor:
        positions = cache.plan(chosen, queries)
        token_ids = torch.full_like(positions, token)
        return decoder.forward(token_ids, positions, cache, list(range(-len(chosen), 0)))

    feed([0], 5, 1)
    feed([1], 7, stored)
    error = kind = None
    try:
        cache.plan([0, 1], more)
    except Exception as raised:
        error, kind = str(raised), type(raised).__name__
    yield {"error": error, "kind": kind}
    yield feed([0], 5, 1)
    cache.release(0)
    try:
        yield cache.plan([1], capacity - stored).tolist() if stored < capacity else []
    except Exception as raised:
        yield f"{type(raised).__name__}: {raised}"


def serve_timed(
    env: Any, model: str, requests: list[Any], num_slots: int, capacity: int
) -> Iterator[Any]:
    """All requests at once; the tokens of each step, and nothing else."""
    batcher = env.solution.ContinuousBatcher(env.model(model), num_slots, capacity)
    for request in requests:
        batcher.add(request_of(request))
    while batcher.has_work:
        yield plain(batcher.step())


def work(env: Any, model: str, requests: list[Any], num_slots: int, capacity: int) -> int:
    """Floating-point operations of serving these requests, matrix products and attention."""
    batcher = env.solution.ContinuousBatcher(env.model(model), num_slots, capacity)
    for request in requests:
        batcher.add(request_of(request))
    with CountedFlops() as flops:
        while batcher.has_work:
            batcher.step()
    return flops.total


def left_behind(env: Any, model: str, requests: list[Any], times: int) -> list[int]:
    """Bytes of tensors that are alive when all requests are served, the first time and the last."""
    decoder, made = env.model(model), NewTensors()
    batcher = env.solution.ContinuousBatcher(decoder, 2)
    found = []
    for _ in range(times):
        for request in requests:
            batcher.add(request_of(request))
        while batcher.has_work:
            batcher.step()
        found.append(made.bytes())
    return [found[0], found[-1]]


def static_timed(env: Any, model: str, requests: list[Any], num_slots: int) -> Iterator[Any]:
    """The same in static batches, through the baseline."""
    made = [request_of(request) for request in requests]
    for step in env.solution.serve(env.model(model), made, num_slots):
        yield plain(step)


def make(env: Any, decoder: Any, num_slots: int, capacity: int) -> Any:
    return env.solution.SlotCache(
        decoder.config, num_slots, capacity, dtype=decoder.dtype, device=env.device
    )


def request_of(given: dict[str, Any]) -> Request:
    """A request from the plain values that the judge sends."""
    params = SamplingParams(
        max_new_tokens=given["new"],
        temperature=given.get("temperature", 0.0),
        ignore_eos=given.get("ignore_eos", False),
    )
    return Request(given["id"], tuple(given["prompt"]), params, tuple(given.get("eos", ())))


def plain(outputs: Any) -> Any:
    """Outputs as plain values; anything else as it is, for the judge to name."""
    if not isinstance(outputs, list) or not all(isinstance(o, Output) for o in outputs):
        return outputs
    return [
        {
            "id": output.request_id,
            "tokens": list(output.token_ids),
            "reason": None if output.finish_reason is None else str(output.finish_reason),
            "types": types_of(output),
        }
        for output in outputs
    ]


def types_of(output: Output) -> dict[str, str]:
    """The types of an Output's fields; no reason is as good as one."""
    reason = FinishReason.STOP if output.finish_reason is None else output.finish_reason
    fields = {"token_ids": output.token_ids, "text": output.text, "finish_reason": reason}
    return {name: type(value).__name__ for name, value in fields.items()}
