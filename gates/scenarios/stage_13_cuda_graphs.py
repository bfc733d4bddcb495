"""Stage 13, the half that runs beside the solution."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from growth import grown_by
from paged import as_views, batch_from, chosen, random_past, served
from poison import poison
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course import graphs as recorder
from course import parts
from course.graphs.capture import to_host
from course.measure.counters import NewTensors
from course.types import StepBatch

__all__ = [
    "allocations",
    "attention",
    "captured_attention",
    "eager",
    "eager_operations",
    "graphed",
    "kept_bytes",
    "left_behind",
    "made",
    "made_elsewhere",
    "planned_in_layers",
    "read_by_graphs",
    "steps",
]


def graphs_of(env: Any) -> Any:
    """CUDA graphs where there is a GPU, and the course's recorder elsewhere."""
    return torch.cuda if env.device == "cuda" else recorder


def device_of(env: Any) -> torch.device:
    """Where the pool lies. Not its name: a recorder takes the word "cpu" for a copy to the host."""
    return torch.device(env.device)


class CountedGraphs:
    """`graphs`, and what it was asked for: sizes of captures, and of the graphs replayed."""

    def __init__(self, env: Any, model: Any) -> None:
        self._graphs, self._model = graphs_of(env), model
        self.sizes: dict[int, int] = {}  # of each captured graph, by identity
        self.replayed: list[int] = []  # rows of each graph that was replayed, in order
        self.pools: set[Any] = set()
        counted = self

        class CUDAGraph(self._graphs.CUDAGraph):  # type: ignore[misc, name-defined]
            """A graph whose replays are noted."""

            def replay(self) -> None:
                """Replay, and note it."""
                counted.replayed.append(counted.sizes.get(id(self), 0))
                super().replay()

        self.CUDAGraph = CUDAGraph
        self._kept: list[Any] = []  # so that no identity is used twice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)

    @contextmanager
    def graph(self, cuda_graph: Any, *args: Any, **named: Any) -> Iterator[None]:
        """Capture, and note how many rows went through the model."""
        before = self._model.counts.positions
        with self._graphs.graph(cuda_graph, *args, **named):
            yield
        self.sizes[id(cuda_graph)] = self._model.counts.positions - before
        self._kept.append(cuda_graph)
        self.pools.add(cuda_graph.pool())

    def recorded(self) -> dict[int, int]:
        """Operations of each captured graph, by its rows; only the recorder tells."""
        return {self.sizes[id(graph)]: getattr(graph, "num_operations", 0) for graph in self._kept}

    def pool_bytes(self) -> int:
        """Bytes of all pools that captures went to; only the recorder tells."""
        return sum(map(recorder.reserved_bytes, self.pools))


class Operations(TorchDispatchMode):
    """Counts the operations that Python asks torch for; views are none, and no replay is seen."""

    count = 0
    integers = 0  # those that give integers: slots and positions are, and attention has none

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it."""
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        parts = result if isinstance(result, (list, tuple)) else [result]
        self.integers += not func.is_view and any(
            isinstance(part, torch.Tensor) and part.dtype in (torch.int64, torch.int32)
            for part in parts
        )
        return result


class Waiting(TorchFunctionMode):
    """Counts what brings values from the device to the host: there, it waits for all that runs."""

    NAMES = frozenset({
        "__array__", "__bool__", "__contains__", "__float__", "__format__", "__index__", "__int__",
        "__repr__", "cpu", "equal", "item", "nonzero", "numpy", "tolist", "unique",
    })  # fmt: skip
    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.count += name in self.NAMES or to_host(name, args, kwargs)
        return func(*args, **kwargs)


def of_heads(config: Any, heads: list[int]) -> Any:
    """A configuration of two layers with these query heads, KV heads and width."""
    return replace(
        config, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2]
    )


def attention(
    env: Any, model: str, heads: list[int], num_blocks: int, block_size: int, todo: list[Any],
    unwritten: float = math.nan,
) -> Iterator[list[torch.Tensor]]:  # fmt: skip
    """The attention alone, run eagerly, on a pool full of NaN or of another value."""
    config = of_heads(env.model(model).config, heads)
    attend = env.solution.GraphDecodeAttention(
        config, num_blocks, block_size, device=device_of(env)
    )
    poison(attend, unwritten)
    for _, values, layers in todo:
        attend.plan(batch_from(values, env.device))
        yield [
            attend(layer, *as_views(*(tensor.to(env.device)[None] for tensor in tensors)))[0]
            for layer, tensors in enumerate(layers)
        ]


def captured_attention(
    env: Any, model: str, heads: list[int], num_blocks: int, block_size: int, width: int,
    todo: list[Any],
) -> Iterator[list[torch.Tensor]]:  # fmt: skip
    """The same in a graph that was captured before the first step, for rows that are nobody's.

    The batch holds junk when it is planned, and rows for nobody from then on.
    Steps that are no decode of as many rows as the last one run eagerly, as in an engine.
    """
    graphs = graphs_of(env)
    config = of_heads(env.model(model).config, heads)
    attend = env.solution.GraphDecodeAttention(
        config, num_blocks, block_size, device=device_of(env)
    )
    poison(attend)
    rows = len(todo[-1][1]["context_lens"])
    nobody = {
        "token_ids": [0] * rows, "positions": [0] * rows,
        "query_start_loc": list(range(rows + 1)), "context_lens": [1] * rows,
        "block_tables": [[0] * width] * rows, "slot_mapping": [-1] * rows,
        "logit_rows": list(range(rows)),
    }  # fmt: skip
    step = batch_from(nobody, env.device)
    inputs = [[tensor.to(env.device)[None].clone() for tensor in layer] for layer in todo[-1][2]]

    def run() -> list[torch.Tensor]:
        return [attend(layer, *tensors) for layer, tensors in enumerate(inputs)]

    for name in nobody:
        getattr(step, name).fill_(Echo.JUNK)
    attend.plan(step)
    for name, values in nobody.items():
        getattr(step, name).copy_(torch.tensor(values))
    side = graphs.Stream()
    side.wait_stream(graphs.current_stream())
    with graphs.stream(side):
        run()
    graphs.current_stream().wait_stream(side)
    graph = graphs.CUDAGraph()
    with graphs.graph(graph):
        out = run()
    for _, values, layers in todo:
        given = [[tensor.to(env.device)[None] for tensor in tensors] for tensors in layers]
        if len(values["token_ids"]) == len(values["context_lens"]) == rows:
            for name in ("token_ids", "positions", "context_lens", "slot_mapping"):
                getattr(step, name).copy_(torch.tensor(values[name]))
            tables = torch.tensor(values["block_tables"])
            step.block_tables.fill_(-1)[:, : tables.shape[1]] = tables
            for mine, new in zip(inputs, given, strict=True):
                for target, source in zip(mine, new, strict=True):
                    target.copy_(source)
            graph.replay()
            yield [tensor[0] for tensor in out]
        else:
            attend.plan(batch_from(values, env.device))
            yield [attend(layer, *tensors)[0] for layer, tensors in enumerate(given)]


def pool_of(attend: Any, num_blocks: int) -> list[torch.Tensor]:
    """Keys and values [L, num_blocks, block_size, Hkv, D], without the block that is nobody's."""
    return [attend.keys[:, :num_blocks].clone(), attend.values[:, :num_blocks].clone()]


def steps(
    env: Any, model: str, buckets: list[int], width: int, num_blocks: int, block_size: int,
    todo: list[dict[str, Any]], before: int = 0, pools: bool = False, twin: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Steps through a runner, on a pool full of NaN.

    The first reply says what making the runner took; then one for each step.

    Args:
        todo: the fields of each batch.
        before: steps that run eagerly before the runner is made, so that it meets a pool in use.
        pools: whether to tell all keys and values, too.
        twin: whether a second runner, on a pool of its own, takes every step as well.
    """
    decoder = env.counting(model)

    def attention_of() -> Any:
        attend = env.solution.GraphDecodeAttention(
            decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=device_of(env)
        )
        poison(attend)
        return attend

    attend = attention_of()

    def seen() -> dict[str, Any]:
        return {"pools": pool_of(attend, num_blocks)} if pools else {}

    early = []
    for values in todo[:before]:
        batch = batch_from(values, env.device)
        attend.plan(batch)
        early.append(
            decoder.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)
        )
    yield {"logits": early, **seen()}
    graphs = CountedGraphs(env, decoder)
    runner = env.solution.GraphRunner(decoder, attend, list(buckets), width, graphs)
    others = []
    if twin:
        mirror = env.solution.GraphRunner(decoder, attention_of(), list(buckets), width, graphs)
        others.append(mirror)
    yield {
        "captured": list(graphs.sizes.values()),
        "graph_pools": len(graphs.pools),
        "pool_bytes": graphs.pool_bytes(),
        "recorded": graphs.recorded(),
        **seen(),
    }
    for index, values in enumerate(todo[before:]):
        batch = batch_from(values, env.device)
        graphs.replayed.clear()
        counts = decoder.counts
        with Operations() as asked, Waiting() as waited:
            logits = runner(batch)
        reply = {
            "waited": waited.count,
            "forwards": (decoder.counts - counts).forward_passes,
            "replayed": list(graphs.replayed),
            "captures": len(graphs.sizes),
            "operations": asked.count + len(graphs.replayed),
            "logits": logits.clone() if isinstance(logits, torch.Tensor) else logits,
            "batch": {name: [v, getattr(batch, name).tolist()] for name, v in values.items()},
            **seen(),
        }
        for other in others:  # it sees other texts at other times
            other(batch_from(todo[before:][-1 - index], env.device))
        del batch, logits
        gc.collect(0)
        yield reply


class Echo:
    """A model and its attention in one: it writes down what a pass reads.

    In a graph the writing is part of what is replayed, so it shows what the replay has read, rows
    that stand for nobody included.
    """

    JUNK = -7777
    NAMES = ("context_lens", "block_tables", "slot_mapping", "query_start_loc")

    def __init__(self, env: Any, config: Any) -> None:
        self.config, self.device, self.dtype = config, torch.device(env.device), torch.float32
        self.weight = torch.ones(1, config.vocab_size, device=env.device)
        self.batch: StepBatch | None = None
        # By the shapes of a step, since a graph must find its tensors where they were.
        self.read: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    def parameters(self) -> Iterator[torch.Tensor]:
        """One weight."""
        yield self.weight

    def plan(self, batch: StepBatch) -> None:
        """As an attention's. Room for what is noted is made here, outside of any graph's pool."""
        self.batch = batch
        tensors = {name: getattr(batch, name) for name in (*self.NAMES, "token_ids", "positions")}
        self._room(len(batch.token_ids), tensors)

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """As an attention's: writes down what the batch says."""
        self._note(q.shape[1], {name: getattr(self.batch, name) for name in self.NAMES})
        return q

    def forward(
        self, token_ids: Any, positions: Any, attend: Any, logit_rows: Any = None, taps: Any = ()
    ) -> Any:
        """As a model's; the logits say nothing of use."""
        if self.batch is None:
            raise RuntimeError("attend.plan was not called before a forward pass")
        rows = token_ids.shape[1]
        self._note(rows, {"token_ids": token_ids[0], "positions": positions[0]})
        q = torch.ones(1, rows, 1, 1, device=self.device)
        attend(0, q, q, q)
        said = token_ids[0][:, None].float() @ self.weight  # a library's, as a model's are
        return said[None] if logit_rows is None else said[logit_rows]

    def _note(self, rows: int, tensors: dict[str, torch.Tensor]) -> None:
        kept = self._room(rows, tensors)
        for name, tensor in tensors.items():
            kept[name].copy_(tensor)

    def _room(self, rows: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = self.read.setdefault((rows, *self.batch.block_tables.shape), {})
        for name, tensor in tensors.items():
            if name not in kept:
                kept[name] = torch.full_like(tensor, self.JUNK)
        return kept

    @torch.inference_mode()  # a runner may be in it when it plans
    def told(self) -> dict[str, Any] | None:
        """What was read since the last call of this; None if nothing was."""
        found = None
        for kept in self.read.values():
            if bool((kept["token_ids"] != self.JUNK).any()):
                found = {name: tensor.tolist() for name, tensor in kept.items()}
            for tensor in kept.values():
                tensor.fill_(self.JUNK)
        return found


def read_by_graphs(
    env: Any, model: str, buckets: list[int], width: int, todo: list[dict[str, Any]]
) -> Iterator[Any]:
    """For each step: what the pass has read, by the name of the field."""
    echo = Echo(env, env.model(model).config)
    runner = env.solution.GraphRunner(echo, echo, list(buckets), width, graphs_of(env))
    echo.told()
    for values in todo:
        runner(batch_from(values, env.device))
        yield echo.told()


def made(env: Any, model: str, buckets: Any, width: Any) -> None:
    """Make a runner, and nothing else."""
    decoder = env.model(model)
    attend = env.solution.GraphDecodeAttention(decoder.config, 4, 4, device=device_of(env))
    attend.keys.zero_()
    attend.values.zero_()
    env.solution.GraphRunner(decoder, attend, buckets, width, graphs_of(env))


def made_elsewhere(env: Any, model: str, buckets: list[int], width: int) -> None:
    """Make a runner and take a step while new tensors, unless told where to, lie on "meta".

    On a GPU the default is another device than the model's, too: the host.
    """
    decoder = env.model(model)
    attend = env.solution.GraphDecodeAttention(decoder.config, 64, 4, device=device_of(env))
    attend.keys.zero_()
    attend.values.zero_()
    batch = batch_from(decode_fields([5] * (max(buckets) - 1), 4, width), env.device)
    with torch.device("meta"):
        runner = env.solution.GraphRunner(decoder, attend, buckets, width, graphs_of(env))
        runner(batch)


def decode_fields(lengths: list[int], block_size: int, width: int) -> dict[str, Any]:
    """A decode step of texts that have tables of their own, as plain lists."""
    tables = [[row * width + column for column in range(width)] for row in range(len(lengths))]
    positions = [length - 1 for length in lengths]
    return {
        "token_ids": [7] * len(lengths),
        "positions": positions,
        "query_start_loc": list(range(len(lengths) + 1)),
        "context_lens": lengths,
        "block_tables": tables,
        "slot_mapping": [
            table[p // block_size] * block_size + p % block_size
            for table, p in zip(tables, positions, strict=True)
        ],
        "logit_rows": list(range(len(lengths))),
    }


def eager_operations(env: Any, model: str, rows: int, block_size: int) -> int:
    """Operations of a decode step through stage 08: the baseline. Its plan is one part of it."""
    decoder = env.model(model)
    attend = env.solution.PagedAttention(decoder.config, 64, block_size, device=env.device)
    attend.keys.zero_()
    attend.values.zero_()
    batch = batch_from(decode_fields([6] * rows, block_size, 2), env.device)
    with Operations() as asked:
        attend.plan(batch)
        decoder.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)
    return asked.count


def planned_in_layers(env: Any, model: str, rows: int, block_size: int) -> list[int]:
    """Operations that give integers, in each layer but the first, of a decode step."""
    config = env.model(model).config
    attend = env.solution.GraphDecodeAttention(config, 64, block_size, device=device_of(env))
    attend.keys.zero_()
    attend.values.zero_()
    attend.plan(batch_from(decode_fields([6] * rows, block_size, 2), env.device))
    found = []
    for layer, tensors in enumerate(random_past(config, rows, 1, env.device, torch.float32)):
        with Operations() as asked:
            attend(layer, *tensors)
        found.append(asked.integers)
    return found[1:]


def left_behind(
    env: Any, model: str, buckets: list[int], width: int, rows: int, times: int
) -> list[int]:
    """Bytes of tensors that are alive after an eager and a replayed step, and after several."""
    decoder = env.model(model)
    attend = env.solution.GraphDecodeAttention(decoder.config, 64, 4, device=device_of(env))
    attend.keys.zero_()
    attend.values.zero_()
    runner = env.solution.GraphRunner(decoder, attend, list(buckets), width, graphs_of(env))
    found = []
    new = NewTensors()
    for index in range(times):
        length = 2 + index % (4 * width - 2)
        for some in (max(buckets) + 1, rows):  # eagerly, and by a replay
            runner(batch_from(decode_fields([length] * some, 4, width), env.device))
        if index in (0, times - 1):
            found.append(new.bytes())
    return found


def kept_bytes(env: Any, model: str, buckets: list[int], width: int, rows: int, times: int) -> int:
    """Bytes of Python objects by which a runner grows in some replayed steps.

    The batches are made beforehand, and the first replays are left out: caches fill there.
    """
    decoder = env.model(model)
    attend = env.solution.GraphDecodeAttention(decoder.config, 64, 4, device=device_of(env))
    attend.keys.zero_()
    attend.values.zero_()
    runner = env.solution.GraphRunner(decoder, attend, list(buckets), width, graphs_of(env))
    lengths = range(2, 4 * width, 5)
    batches = [batch_from(decode_fields([n] * rows, 4, width), env.device) for n in lengths]

    def play(count: int) -> None:
        for index in range(count):
            runner(batches[index % len(batches)])

    return grown_by(lambda: play(times), after=lambda: play(2 * len(batches)))


def allocations(
    env: Any, model: str, buckets: list[int], width: int, block_size: int, rows: int, times: int
) -> dict[str, int]:
    """On a GPU: memory that was asked for in some decode steps, and kernels that one launches."""
    decoder = env.model(model)
    attend = env.solution.GraphDecodeAttention(
        decoder.config, rows * width, block_size, dtype=decoder.dtype, device=device_of(env)
    )
    attend.keys.zero_()
    attend.values.zero_()
    runner = env.solution.GraphRunner(decoder, attend, list(buckets), width, torch.cuda)
    batch = batch_from(decode_fields([block_size] * rows, block_size, width), env.device)
    runner(batch)

    def asked_for() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = asked_for()
    for _ in range(times):
        runner(batch)
    made = asked_for() - before
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        runner(batch)
        torch.cuda.synchronize()
    launches = [e for e in profile.events() if e.name.startswith(("cudaLaunch", "cuLaunch"))]
    replays = [e for e in profile.events() if e.name.startswith("cudaGraphLaunch")]
    return {"allocations": made, "launches": len(launches), "replays": len(replays)}


def step_batch_of() -> Any:
    """Stage 08's `step_batch`."""
    return parts.step_batch


def timed(
    env: Any, runner_of: Any, model: str, tables: list[list[int]], lengths: list[int],
    *, num_blocks: int, block_size: int, steps: int, seed: int,
) -> Iterator[list[list[float]]]:  # fmt: skip
    """Decode steps of texts with a random past; what `chosen` says of each step."""
    decoder = env.model(model)
    attend, run = runner_of(decoder, num_blocks, block_size, max(map(len, tables)))
    make = step_batch_of()
    rows = []
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        sequence = served([7] * (length + 1), 0, table)
        attend.plan(make([sequence], [length], block_size, device=env.device))
        past = random_past(decoder.config, length, seed + index, env.device, decoder.dtype)
        for layer, (q, k, v) in enumerate(past):
            attend(layer, q, k, v)
        sequence.num_computed = length
        rows.append(sequence)
    yield []  # ready: what follows is timed
    for _ in range(steps):
        found = chosen(run(make(rows, [1] * len(rows), block_size, device=env.device)))
        for row, (token, _) in zip(rows, found, strict=True):
            row.num_computed += 1
            row.tokens.append(int(token))
        yield found


def graphed(env: Any, **arguments: Any) -> Iterator[Any]:
    """Timed decode steps through graphs."""

    def runner_of(decoder: Any, num_blocks: int, block_size: int, width: int) -> Any:
        attend = env.solution.GraphDecodeAttention(
            decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=device_of(env)
        )
        attend.keys.zero_()
        attend.values.zero_()
        rows = len(arguments["lengths"])
        return attend, env.solution.GraphRunner(decoder, attend, [rows], width, graphs_of(env))

    yield from timed(env, runner_of, **arguments)


def eager(env: Any, **arguments: Any) -> Iterator[Any]:
    """The same through stage 08, operation by operation: the baseline."""

    def runner_of(decoder: Any, num_blocks: int, block_size: int, width: int) -> Any:
        attend = env.solution.PagedAttention(
            decoder.config, num_blocks, block_size, dtype=decoder.dtype, device=env.device
        )

        def run(batch: Any) -> Any:
            attend.plan(batch)
            return decoder.forward(
                batch.token_ids[None], batch.positions[None], attend, batch.logit_rows
            )

        return attend, run

    yield from timed(env, runner_of, **arguments)
