"""Stage 14, the half that runs beside the solution."""

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from paged import random_past
from torch.utils._python_dispatch import TorchDispatchMode

from course.measure.counters import NewTensors
from course.measure.interpreted import dot_precisions, last_programs
from course.measure.kernel_builds import build, recorded_launches
from course.measure.kernel_loads import LoadedBytes
from course.model import FullAttention
from course.model.seeded import NANO, seeded_decoder
from course.parts import KVCache

__all__ = [
    "builds",
    "decode",
    "far_end",
    "held_bytes",
    "linear",
    "loaded",
    "made_bytes",
    "matmul",
    "misaligned",
    "nano",
    "packed",
    "quantized",
    "text",
]


def quantized(
    env: Any, weight: Any, bits: int, group_size: Any = 32, layout: str = "plain"
) -> dict[str, Any]:
    """What the solution makes of a weight, whether its values are contiguous, and the weight then.

    layout: "transposed" for a weight whose columns are contiguous, "strided" for every other one of
    a wider tensor.
    """
    if isinstance(weight, torch.Tensor):
        weight = laid_out(weight.to(env.device), layout)
    if bits == 8:
        found = env.solution.quantize_int8(weight)
    else:
        found = env.solution.quantize_int4(weight, group_size)
    values = found[0] if isinstance(found, (tuple, list)) and found else None
    whole = not isinstance(values, torch.Tensor) or values.is_contiguous()
    return {"found": found, "contiguous": whole, "weight": weight}


def laid_out(weight: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, elsewhere in memory."""
    if layout == "transposed":
        return weight.T.contiguous().T
    if layout == "strided":
        return torch.stack((weight, torch.full_like(weight, 99.0)), dim=-1).flatten(1)[:, ::2]
    return weight


def packed(env: Any, values: torch.Tensor, group_size: int) -> Any:
    """What `pack_int4` returns."""
    return env.solution.pack_int4(values.to(env.device), group_size)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows, with NaN between them."""
    return torch.cat((x, x.new_full((len(x), 16), float("nan"))), dim=1)[:, : x.shape[1]]


def matmul(env: Any, x: torch.Tensor, weight: list[Any], group_size: int) -> Any:
    """What `quant_matmul` returns for tensors that the judge has made: values, scales, zeros."""
    given = [tensor.to(env.device) for tensor in weight]
    return env.solution.quant_matmul(apart(x.to(env.device)), *given, group_size=group_size)


def loaded(env: Any, x: torch.Tensor, weight: list[Any], group_size: int) -> dict[str, Any]:
    """The same in the interpreter, with the bytes that the kernel loads, and those next to them."""
    tensors, around = {}, {}
    for name, tensor in zip(("x", "values", "scales", "zeros"), (x, *weight), strict=False):
        tensors[name], around[f"before {name}"], around[f"past {name}"] = in_the_middle(tensor)
    given, *parts = tensors.values()
    with LoadedBytes({**tensors, **around}) as bytes_loaded, dot_precisions() as precisions:
        out = env.solution.quant_matmul(given, *parts, group_size=group_size)
    return {
        "out": out,
        "precisions": sorted(precisions),
        "values": bytes_loaded.of("values"),
        "steps": bytes_loaded.of(*(name for name in tensors if name in ("scales", "zeros"))),
        "past": {name: bytes_loaded.of(name) for name in around},
    }


def in_the_middle(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensor within a larger one; what lies before it there; and what lies behind it."""
    room, size = 1 << 16, tensor.numel()
    home = torch.zeros(room + size + room, dtype=tensor.dtype)
    home[room : room + size] = tensor.flatten()
    return home[room : room + size].view(tensor.shape), home[:room], home[room + size :]


def far_end(env: Any, columns: int, depth: int, bits: int) -> dict[str, int]:
    """Bytes that the last program loads of a weight of more than 2^31 bytes, and of what is before.

    Of the weight only addresses exist, until they are read. Nobody may write there: so no system
    has to promise the memory.
    """
    width, group = depth * bits // 8, 32
    size = columns * width
    before = 1 << 31  # where offsets lead that have wrapped round
    pages = mmap.mmap(-1, before + size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable")
        home = torch.frombuffer(pages, dtype=torch.uint8)
    values = home[before:].view(columns, width)
    if bits == 8:
        parts = [values.view(torch.int8), torch.ones(columns, dtype=torch.bfloat16)]
    else:
        parts = [values, *(torch.empty(columns, depth // group, dtype=torch.bfloat16),) * 2]
    known = {"values": values, "before": home[:before]}
    with LoadedBytes(known) as bytes_loaded, last_programs():
        env.solution.quant_matmul(torch.ones(1, depth), *parts, group_size=group)
    return {name: bytes_loaded.of(name) for name in known}


def linear(
    env: Any, weight: Any, bias: Any, bits: Any, group_size: Any, inputs: list[Any],
    layout: str = "plain",
) -> dict[str, Any]:  # fmt: skip
    """What a layer says to each input; and the weight and the inputs afterwards.

    layout: of the weight and of the inputs.
    """
    if isinstance(weight, torch.Tensor):
        weight = laid_out(weight.to(env.device), layout)
    bias = bias.to(env.device) if isinstance(bias, torch.Tensor) else bias
    layer = env.solution.QuantLinear(weight, bias, bits, group_size)
    inputs = [laid_out(x.to(env.device), layout) for x in inputs]
    before = [x.clone() for x in inputs]
    outputs = [layer(x) for x in inputs]
    return {
        "outputs": outputs,
        "module": isinstance(layer, torch.nn.Module),
        "weight": weight,
        "inputs": all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)),
    }


def misaligned(env: Any, weight: torch.Tensor, bits: int, x: torch.Tensor) -> Any:
    """The same for bfloat16 rows that begin at an odd element of a larger tensor."""
    layer = env.solution.QuantLinear(weight.to(env.device), None, bits, 32)
    home = torch.zeros(x.numel() + 3, dtype=torch.bfloat16, device=env.device)
    view = home[3:].view(x.shape)
    view.copy_(x)
    return layer(view)


def held_bytes(
    env: Any, shape: list[int], bits: int, group_size: int, biased: bool, dtype: str
) -> list[int]:
    """Bytes alive after a layer was made and its weight let go; and after it was used as well."""
    env.solution.QuantLinear(torch.ones(16, 128, device=env.device), None, bits, group_size)
    made = NewTensors()
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(env.device, kind)
    bias = torch.ones(shape[0], device=env.device, dtype=kind) if biased else None
    layer = env.solution.QuantLinear(weight, bias, bits, group_size)
    del weight, bias
    held = [made.bytes()]
    for rows in (1, 3, 40):
        layer(torch.ones(rows, shape[1], device=env.device, dtype=kind))
    return [*held, made.bytes()]


class Traffic(TorchDispatchMode):
    """Bytes of the tensors that operations make, and of those they read; views are none."""

    made = 0
    read_float = 0  # of floating type: a weight that a product reads in full precision

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to switch dynamo off is to import it: over a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and look at its tensors."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for part in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(part, torch.Tensor):
                    self.made += part.numel() * part.element_size()
            for part in (*args, *(kwargs or {}).values()):
                if isinstance(part, torch.Tensor) and part.is_floating_point():
                    self.read_float += part.numel() * part.element_size()
        return result


def made_bytes(env: Any, shape: list[int], bits: int, group_size: int, rows: int) -> dict[str, int]:
    """Bytes that a layer makes, and reads in a floating type, for so many rows."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(env.device)
    layer = env.solution.QuantLinear(weight, None, bits, group_size)
    del weight
    x = torch.ones(rows, shape[1], device=env.device)
    layer(x)
    with Traffic() as traffic:
        layer(x)
    return {"made": traffic.made, "read_float": traffic.read_float}


def nano(
    env: Any, bits: int, group_size: int, options: dict[str, Any], prompt: list[int]
) -> dict[str, Any]:
    """A small model, quantized: its logits, those of the original after it, and bytes made."""
    config = replace(NANO, **options)
    model = seeded_decoder(config, device=torch.device(env.device), dtype=torch.float32)
    ids = torch.tensor([prompt], device=env.device)
    positions = torch.arange(len(prompt), device=env.device)[None]
    with torch.no_grad():
        if config.qkv_bias:
            for _, layer in model.linears():
                if layer.bias is not None:
                    layer.bias.copy_(torch.linspace(-1, 1, len(layer.bias)))
    before = model.forward(ids, positions, FullAttention())[0]
    made = NewTensors()
    found = env.solution.quantize_model(model, bits, group_size)
    new_bytes = made.bytes()
    return {
        "logits": found.forward(ids, positions, FullAttention())[0],
        "before": before,
        "after": model.forward(ids, positions, FullAttention())[0],
        "bytes": new_bytes,
        "same": found is model,
    }


def quantize(env: Any, model: Any, bits: int | None, group_size: int) -> Any:
    """The model that is to be judged; the one that was loaded where `bits` is None."""
    return model if bits is None else env.solution.quantize_model(model, bits, group_size)


def text(
    env: Any, model: str, bits: int | None, group_size: int, ids: list[int], chunk: int,
    steps: int, prompt: int, generated: Any,
) -> Iterator[Any]:  # fmt: skip
    """A text through a model: logits [n, V] of everything that is asked for, piece by piece.

    First the bytes that quantizing has made. Then the text in prefill, `chunk` positions at a time;
    its first `steps` positions again, one by one; and what was generated after its first `prompt`
    tokens: in one pass, or, where `generated` is a number, by choosing the likeliest token so many
    times.
    """
    decoder = env.model(model)
    made = NewTensors()
    judged = quantize(env, decoder, bits, group_size)
    yield made.bytes()

    def fresh(capacity: int) -> Any:
        return KVCache(decoder.config, capacity, dtype=decoder.dtype, device=env.device)

    def through(tokens: list[int], cache: Any) -> torch.Tensor:
        at = cache.length
        positions = torch.arange(at, at + len(tokens), device=env.device)[None]
        return judged.forward(torch.tensor([tokens], device=env.device), positions, cache)[0]

    cache = fresh(len(ids))
    for start in range(0, len(ids), chunk):
        yield through(ids[start : start + chunk], cache).float()
    if steps:
        cache = fresh(steps)
        yield torch.cat([through([token], cache) for token in ids[:steps]]).float()
    if isinstance(generated, int):
        cache, tokens = fresh(prompt + generated), ids[:prompt]
        chosen, logits = [], []
        for _ in range(generated):
            logits.append(through(tokens, cache)[-1:].float())
            tokens = [int(logits[-1].argmax())]
            chosen += tokens
        yield torch.cat(logits)
        return chosen
    whole = ids[:prompt] + generated[:-1]
    yield through(whole, fresh(len(whole)))[prompt - 1 :].float()


def decode(
    env: Any, model: str, bits: int | None, group_size: int, past: int, tokens: list[int],
    seed: int,
) -> Iterator[Any]:  # fmt: skip
    """Timed decode steps of one sequence with a random past: logits [V] of each given token."""
    decoder = env.model(model)
    judged = quantize(env, decoder, bits, group_size)
    cache = KVCache(
        decoder.config, past + len(tokens), dtype=decoder.dtype, device=env.device
    )  # fmt: skip
    for layer, (_, k, v) in enumerate(
        random_past(decoder.config, past, seed, env.device, decoder.dtype)
    ):
        cache.append(layer, k, v)
    yield None  # ready: what follows is timed
    for token in tokens:
        ids = torch.tensor([[token]], device=env.device)
        positions = torch.tensor([[cache.length]], device=env.device)
        yield judged.forward(ids, positions, cache, [-1])[0].float()


def builds(env: Any, shapes: list[dict[str, Any]], capabilities: list[int]) -> Iterator[Any]:
    """Every kernel that `quant_matmul` launches, built for GPUs that are not here."""
    for shape in shapes:
        rows, columns, depth, group = (shape[n] for n in ("rows", "columns", "depth", "group"))
        x = torch.zeros(rows, depth, dtype=torch.bfloat16)
        values = torch.zeros(columns, depth, dtype=torch.int8)
        weight = [values, torch.zeros(columns, dtype=torch.bfloat16)]
        if shape["bits"] == 4:
            values = torch.zeros(columns, depth // 2, dtype=torch.uint8)
            step = torch.zeros(columns, depth // group, dtype=torch.bfloat16)
            weight = [values, step, step.clone()]
        with recorded_launches() as launches:
            env.solution.quant_matmul(x, *weight, group_size=group)
        for capability in capabilities:
            found = []
            for launch in launches:
                cubin, shared = build(launch, capability)
                reads = launch.reads({values.untyped_storage().data_ptr()})
                found.append({"cubin": cubin, "shared": shared, "reads_weight": reads})
            yield found
