"""What machine this is: a key for results that must not be mixed, and the size of its cache.

Nothing in here imports torch: the key is needed by commands that should answer at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT_CACHE_BYTES", "Machine", "fingerprint", "last_level_cache_bytes"]

DEFAULT_CACHE_BYTES = 32 << 20
"""Taken for the last-level cache where the system does not tell."""

_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Machine:
    """A machine and the software on it.

    ``key`` is a short hash of the hardware and the system's name: what decides whether two figures
    may be compared. Versions are recorded beside it but are not part of it, and neither is the
    memory size, which virtual machines change as they run.
    """

    key: str
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int
    gpus: tuple[str, ...]
    os: str  # such as "Linux x86_64"
    python: str
    torch: str | None  # None where it is not installed
    cuda: str | None  # of the torch build; None for a CPU build

    def name(self, device: str) -> str:
        """What people call it: its first GPU for "cuda", its CPU and cores for "cpu"."""
        if device == "cuda" and self.gpus:
            return self.gpus[0]
        return f"{self.cpu}, {self.cores} cores"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "gpus": list(self.gpus)}


@lru_cache(maxsize=1)
def fingerprint() -> Machine:
    """Describe this machine. The same in every process with the same processors and GPUs."""
    cpu, cores, gpus = _cpu_model(), _usable_cores(), _gpus()
    system = f"{platform.system()} {platform.machine()}"
    identity = "\n".join([cpu, str(cores), *gpus, system])
    torch_version = _version("torch")
    return Machine(
        key=hashlib.sha256(identity.encode()).hexdigest()[:12],
        cpu=cpu,
        cores=cores,
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        os=system,
        python=platform.python_version(),
        torch=torch_version,
        cuda=_cuda_of(torch_version),
    )


def last_level_cache_bytes() -> int:
    """Bytes of the CPU's last-level caches that the usable cores can reach, all together.

    Cores that share a cache count it once; chips with one cache per group of cores have their
    groups added up, since an array spread over the cores is spread over those caches too.
    ``DEFAULT_CACHE_BYTES`` where the system does not tell.
    """
    if sys.platform == "linux":
        size = _linux_cache_bytes(_CPU_FOLDER, _usable_cpus())
    elif sys.platform == "darwin":
        # Apple's chips have no level 3 that the system reports; level 2 is per cluster.
        names = ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize")
        size = next((value for value in map(_sysctl_int, names) if value), 0)
    else:
        size = 0
    return size or DEFAULT_CACHE_BYTES


def _linux_cache_bytes(folder: Path, cpus: set[int] | None) -> int:
    """Sum of the highest-level data caches below ``folder``; 0 when it tells nothing.

    ``cpus``: only those whose number is in it; None for all.
    """
    found: dict[tuple[int, str], int] = {}  # (level, CPUs that share it) -> bytes
    for index in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        number = int(index.parent.parent.name.removeprefix("cpu"))
        if cpus is not None and number not in cpus:
            continue
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            found[level, shared] = _parse_size((index / "size").read_text())
        except (OSError, ValueError):  # some virtual machines have the folder and not the files
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    if match is None:
        raise ValueError(f"not a cache size: {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _usable_cpus() -> set[int] | None:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return None


def _usable_cores() -> int:
    cpus = _usable_cpus()
    return len(cpus) if cpus else os.cpu_count() or 1


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", described, flags=re.MULTILINE))
    if name := fields.get("model name"):
        return str(name).strip()
    # Arm has no name here, but numbers that mean the same.
    part = " ".join(fields.get(key, "") for key in ("CPU implementer", "CPU part")).strip()
    return f"{platform.machine()} {part}".strip()


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may see, in order."""
    listed = _output("nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader")
    rows = [line.split(", ", 1) for line in listed.splitlines() if ", " in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(name for _, name in rows)
    chosen = []
    for wanted in visible.split(","):
        wanted = wanted.strip()
        matches = [name for uuid, name in rows if wanted and uuid.startswith(wanted)]
        if wanted.isdigit() and int(wanted) < len(rows):
            matches = [rows[int(wanted)][1]]
        if not matches:
            break  # CUDA, too, ignores what follows an entry that does not exist
        chosen.append(matches[0])
    return tuple(chosen)


def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing when it is absent, fails or hangs."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _sysctl_int(name: str) -> int:
    """A number that macOS keeps under ``name``; 0 where it does not."""
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    library = ctypes.CDLL(None)
    failed = library.sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return 0 if failed else int(value.value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of(torch_version: str | None) -> str | None:
    """The CUDA version that torch was built for.

    Its version ends in it, as in 2.11.0+cu128; builds from PyPI leave that out, and only
    ``torch/version.py`` knows. That file is read rather than imported.
    """
    if torch_version is None:
        return None
    if match := re.search(r"\+cu(\d+)(\d)$", torch_version):
        return f"{match[1]}.{match[2]}"
    try:
        text = importlib.metadata.distribution("torch").locate_file("torch/version.py").read_text()
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    match = re.search(r"^cuda(?::[^=]+)?\s*=\s*'([^']+)'", text, flags=re.MULTILINE)
    return match[1] if match else None
