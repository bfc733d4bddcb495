"""The roofline of this machine: how fast it reads memory, copies it and multiplies matrices.

A step that moves B bytes and does F floating-point operations takes at least
``max(B / bandwidth, F / flops)``. Which of the two it is depends on F / B, its *intensity*: below
the *ridge*, ``flops / bandwidth``, memory decides. (S. Williams, A. Waterman, D. Patterson,
"Roofline: an insightful visual performance model for multicore architectures", CACM 52(4), 2009.)

A roofline is what the machine *can* do, so of several runs the fastest counts; noise only ever
makes a run slower. Every array is larger than the last-level cache by a factor of four, or it
would be the cache that is measured.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.measure.clock import now, timed
from course.measure.machine import fingerprint, last_level_cache_bytes
from course.measure.store import load_record, save_record

__all__ = [
    "Probe",
    "Rate",
    "Roofline",
    "cache_bytes",
    "copy_bandwidth",
    "copy_probe",
    "matmul_flops",
    "matmul_probe",
    "probe",
    "probe_bytes",
    "read_bandwidth",
    "read_probe",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

_CACHES_PER_ARRAY = 4
_SMALLEST_ARRAY = {"cpu": 64 << 20, "cuda": 1 << 30}  # a GPU's kernel must outlast its launch
_BUDGET_S = 0.7  # for one figure: long enough to meet a quiet moment on a machine in use
_BUSY_SHARE = 0.1  # of all processor time, used by others: the figures may be too low
_PROBES_WHEN_BUSY = 3


@dataclass(frozen=True)
class Rate:
    """Work per second over several runs of a probe."""

    best: float
    median: float
    runs: int


@dataclass(frozen=True)
class Probe:
    """A piece of work of known size, to be run and timed again and again."""

    work: float  # bytes or floating-point operations of one run
    device: torch.device
    run: Callable[[], object]

    def seconds(self) -> float:
        """Run once; seconds by the device's clock."""
        return timed(self.run, self.device)[1]

    def rate(self, budget_s: float = _BUDGET_S, *, least_runs: int = 5) -> Rate:
        """Run for about ``budget_s`` seconds, and at least ``least_runs`` times, after warm-up."""
        if least_runs < 1:
            raise ValueError(f"least_runs must be at least 1, got {least_runs}")
        for _ in range(2):
            self.run()
        taken: list[float] = []
        stop = now() + budget_s
        while len(taken) < least_runs or now() < stop:
            taken.append(self.seconds())
        return Rate(self.work / min(taken), self.work / statistics.median(taken), len(taken))


def cache_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes of the last-level cache: the CPU's, or a GPU's L2."""
    device = _checked(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


def probe_bytes(device: torch.device | str = "cpu") -> int:
    """Size of the arrays that the bandwidth probes use: four caches, or more where those are small.

    At most an eighth of the memory that is free.
    """
    device = _checked(device)
    wanted = max(_CACHES_PER_ARRAY * cache_bytes(device), _SMALLEST_ARRAY[device.type])
    return min(wanted, _free_bytes(device) // 8)


def read_probe(device: torch.device | str = "cpu", nbytes: int | None = None) -> Probe:
    """Read ``nbytes`` (default :func:`probe_bytes`) once.

    On a CPU by adding up 64-bit integers; on a GPU by the fastest of three reductions. Which
    operation reads fastest was found by experiment, on a CPU with AVX-512 (Zen 4, two
    cores, 256 MiB, best of 80 runs each, GB/s with one and with two threads; a C loop read 29.7
    and 50.5): sum and amax of int64 32 and 58, count_nonzero 31 and 56, dot of float64 30 and 54,
    sum of bfloat16 32 and 50, amax of float32 30 and 46, sum of float32 29 and 42, norm 30 and 27.
    Products of a matrix and a vector, the very thing that decoding does, stay at 20 to 24 with
    any number of threads: they cannot serve as the measure of what the memory could do.

    Raises ValueError for a device that is neither cpu nor cuda, or an ``nbytes`` below 8.
    """
    device = _checked(device)
    words = _words(device, nbytes)
    array = torch.ones(words, dtype=torch.int64, device=device)
    if int(array.sum()) != words:  # every element is read, or the sum is wrong
        raise RuntimeError(f"sum of {words} ones on {device} is wrong: the memory or torch is")
    reads: list[Callable[[], Tensor]] = [array.sum]
    if device.type == "cuda":  # which of them is fastest differs between generations of GPUs
        floats = array.view(torch.float32)
        reads += [floats.sum, floats.amax]
    run = reads[0] if len(reads) == 1 else min(reads, key=lambda read: _typical(read, device))
    return Probe(8.0 * words, device, run)


def _typical(run: Callable[[], Tensor], device: torch.device) -> float:
    """Median seconds of a few runs, after one for warm-up."""
    run()
    return statistics.median(timed(run, device)[1] for _ in range(5))


def copy_probe(device: torch.device | str = "cpu", nbytes: int | None = None) -> Probe:
    """Copy ``nbytes`` to another array. Its work is twice that: every byte is read and written.

    A CPU also reads each line before it writes it, unless the copy bypasses the cache; that
    traffic is not counted, as in STREAM (J. D. McCalpin, 1995).
    """
    device = _checked(device)
    words = _words(device, nbytes)
    source = torch.ones(words, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    return Probe(16.0 * words, device, lambda: target.copy_(source))


def matmul_probe(device: torch.device | str, dtype: torch.dtype, n: int) -> Probe:
    """Multiply two random n x n matrices: 2 n^3 operations. int8 accumulates in int32.

    Raises RuntimeError (or NotImplementedError) where torch has no such product on the device.
    """
    device = _checked(device)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    run: Callable[[], Tensor]
    # Random values, not zeros: a chip that draws less power on zeros runs at a higher clock.
    if dtype == torch.int8:
        a, b = (torch.randint(-128, 128, (n, n), dtype=dtype, device=device) for _ in range(2))
        # The second one column by column: the layout that int8 hardware wants, and that a linear
        # layer's weight has.
        run = lambda: torch._int_mm(a, b.t())  # noqa: E731
    else:
        x, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        run = lambda: torch.mm(x, y.t(), out=out)  # noqa: E731
    return Probe(2.0 * n**3, device, run)


def read_bandwidth(device: torch.device | str = "cpu", nbytes: int | None = None) -> float:
    """Bytes per second at which memory is read, best of several runs; see :func:`read_probe`."""
    return read_probe(device, nbytes).rate().best


def copy_bandwidth(device: torch.device | str = "cpu", nbytes: int | None = None) -> float:
    """Bytes read and written per second by a copy, best of several runs."""
    return copy_probe(device, nbytes).rate().best


def matmul_flops(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, n: int | None = None
) -> float:
    """Operations per second of a square matrix product, best of several runs.

    ``n`` is found when it is not given: it is doubled until a product takes a hundredth of a
    second on a CPU, or a thousandth on a GPU, at most 4,096 and 8,192.
    """
    device = _checked(device)
    if n is not None:
        return matmul_probe(device, dtype, n).rate().best
    long_enough, largest = (1e-3, 8192) if device.type == "cuda" else (1e-2, 4096)
    # Small at first: a type without an instruction of its own can be a thousand times slower.
    size = 1024 if device.type == "cuda" else 128
    while True:
        product = matmul_probe(device, dtype, size)
        product.run()
        if product.seconds() >= long_enough or size >= largest:
            return product.rate(_BUDGET_S / 2, least_runs=3).best
        size *= 2


@dataclass(frozen=True)
class Roofline:
    """What one device reached. Bytes per second, operations per second, bytes."""

    device: str  # "cpu", or such as "cuda:0 NVIDIA H200"
    threads: int  # that torch computes with
    torch_version: str
    array_bytes: int  # size of the arrays read and copied
    cache_bytes: int
    read_bandwidth: float
    copy_bandwidth: float
    flops: dict[str, float]  # by dtype name, such as "float32"; what torch cannot do is absent
    tried: tuple[str, ...]  # dtype names that were asked for, in order
    busy: bool  # other programs ran meanwhile: the figures may be too low
    probes: int = 1  # how many times it was measured, the best kept

    def ridge(self, dtype: torch.dtype | str) -> float:
        """FLOP per byte from which arithmetic, and no longer memory, decides.

        Raises ValueError for a dtype that was not measured here.
        """
        name = _dtype_name(dtype)
        if name not in self.flops:
            raise ValueError(f"dtype {name} was not measured here; known: {sorted(self.flops)}")
        return self.flops[name] / self.read_bandwidth

    def better_of(self, other: Roofline) -> Roofline:
        """Figure by figure the larger of two measurements of the same device."""
        names = self.flops.keys() | other.flops.keys()
        return replace(
            self,
            read_bandwidth=max(self.read_bandwidth, other.read_bandwidth),
            copy_bandwidth=max(self.copy_bandwidth, other.copy_bandwidth),
            flops={n: max(self.flops.get(n, 0.0), other.flops.get(n, 0.0)) for n in sorted(names)},
            tried=tuple(dict.fromkeys(self.tried + other.tried)),
            busy=self.busy and other.busy,
            probes=self.probes + other.probes,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tried": list(self.tried)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Roofline:
        """Read what :meth:`as_dict` gave.

        Raises ValueError when a figure is missing, or is not what can be measured.
        """
        try:
            roofline = cls(**{**record, "tried": tuple(record["tried"])})
            figures = [roofline.read_bandwidth, roofline.copy_bandwidth, *roofline.flops.values()]
            sound = all(math.isfinite(figure) and figure > 0 for figure in figures)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a roofline: {error}") from error
        if not sound:
            raise ValueError("not a roofline: a figure is not finite and positive")
        return roofline


def probe(
    device: torch.device | str = "cpu",
    *,
    dtypes: Iterable[torch.dtype] = DTYPES,
    refresh: bool = False,
    cache: Path | None = None,
) -> Roofline:
    """Measure the device's roofline, or take it from the last time on this machine.

    Takes about three seconds on a CPU. The result is kept in ``cache`` (default ``machine.json``
    in the course's state folder) under the machine, the device, the number of threads and the
    version of torch. It is measured again with ``refresh``, when the stored record is damaged or
    a wanted dtype was never tried, and up to three times when other programs were running
    meanwhile; then the better figures are kept, since noise can only lower them.

    Raises ValueError for a device that is neither cpu nor cuda; RuntimeError for a cuda device
    that torch cannot use.
    """
    device = _checked(device)
    wanted = tuple(dtypes)
    path = _default_cache() if cache is None else cache
    key = (
        f"{fingerprint().key} {_label(device)} {torch.get_num_threads()} threads "
        f"torch {torch.__version__}"
    )
    known = None if refresh or path is None else _stored(path, key)
    if known is not None:
        settled = not known.busy or known.probes >= _PROBES_WHEN_BUSY
        if settled and {_dtype_name(dtype) for dtype in wanted} <= set(known.tried):
            return known
    measured = _measure(device, wanted)
    if known is not None:
        measured = measured.better_of(known)
    if path is not None:
        save_record(path, key, measured.as_dict())
    return measured


def probe_now(device: torch.device | str, dtypes: Iterable[torch.dtype]) -> Roofline:
    """Measure the device's roofline as it is at this moment; no record is taken or kept.

    Raises ValueError for a device that is neither cpu nor cuda.
    """
    return _measure(_checked(device), tuple(dtypes))


def _measure(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Roofline:
    others = _OthersWatch()
    read = read_bandwidth(device)
    copy = copy_bandwidth(device)
    flops: dict[str, float] = {}
    for dtype in dtypes:
        try:
            flops[_dtype_name(dtype)] = matmul_flops(device, dtype)
        except (NotImplementedError, RuntimeError):
            continue  # what cannot be measured is absent, not 0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # whoever measures free memory next must not miss these arrays
    return Roofline(
        device=_label(device),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        array_bytes=probe_bytes(device),
        cache_bytes=cache_bytes(device),
        read_bandwidth=read,
        copy_bandwidth=copy,
        flops=flops,
        tried=tuple(_dtype_name(dtype) for dtype in dtypes),
        busy=others.share() > _BUSY_SHARE,
    )


class _OthersWatch:
    """Share of the machine's processor time that other processes have used since it was made."""

    def __init__(self) -> None:
        self._start = self._times()

    def share(self) -> float:
        busy, own, total = (b - a for a, b in zip(self._start, self._times(), strict=True))
        return max(0.0, busy - own) / total if total > 0 else 0.0

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Processor seconds: of everybody, of this process, and all that there were."""
        import psutil

        machine = psutil.cpu_times()._asdict()
        # A guest's time is part of the user's already.
        total = sum(value for name, value in machine.items() if not name.startswith("guest"))
        idle = machine["idle"] + machine.get("iowait", 0.0)
        own = os.times()
        return total - idle, own.user + own.system, total


def _stored(path: Path, key: str) -> Roofline | None:
    record = load_record(path, key)
    if record is None:
        return None
    try:
        return Roofline.from_dict(record)
    except ValueError:  # of another version of this class
        return None


def _default_cache() -> Path | None:
    """``machine.json`` in the course's state folder; None outside of a course."""
    from course.paths import state_dir

    try:
        return state_dir() / "machine.json"
    except OSError:
        return None


def _checked(device: torch.device | str) -> torch.device:
    checked = torch.device(device)
    if checked.type not in _SMALLEST_ARRAY:
        raise ValueError(f"device must be cpu or cuda, got {checked}")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {checked} cannot be used: torch sees no CUDA GPU here")
    if str(checked) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return checked


def _label(device: torch.device) -> str:
    """Name of a device that says which one it is on a machine with several kinds of GPU."""
    if device.type == "cuda":
        return f"cuda:{device.index} {torch.cuda.get_device_name(device)}"
    return device.type


def _words(device: torch.device, nbytes: int | None) -> int:
    """Number of 64-bit integers in an array of ``nbytes``."""
    size = probe_bytes(device) if nbytes is None else nbytes
    if size < 8:
        raise ValueError(f"nbytes must be at least 8, got {size}")
    return size // 8


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
