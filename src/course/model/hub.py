"""A model from the Hugging Face hub."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from course.model.store import ModelUnavailable, require_whole
from course.model.weights import read_config

__all__ = ["from_hub", "is_hub_id"]

TIMEOUT_S = 3.0  # for the first answer; a hub that is there needs a tenth of it
# What a model needs. No pickles; no second copies in other formats or sub-folders.
WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]


def is_hub_id(name: str) -> bool:
    """Whether a name reads as ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def from_hub(repo: str, folder: Path, tell: Callable[[str], None]) -> str:
    """Download a repository's model into an empty folder; returns where it came from.

    ``COURSE_HUB=off`` and ``HF_HUB_OFFLINE=1`` forbid it.

    Raises:
        UnsupportedModel: its config.json names something that the decoder does not support.
        ModelUnavailable: it is forbidden, there is no answer, or no such model.
    """
    if os.environ.get("COURSE_HUB") == "off":
        raise ModelUnavailable("switched off by COURSE_HUB=off")
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelUnavailable("switched off by HF_HUB_OFFLINE")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    _knock(endpoint)
    import httpx
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        tell(f"downloading {repo} from the hub")
        hf_hub_download(repo, "config.json", local_dir=folder, endpoint=endpoint)
        read_config(folder)  # refuse what is not supported before gigabytes are fetched
        snapshot_download(
            repo,
            local_dir=folder,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            endpoint=endpoint,
        )
        require_whole(folder)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        cause = error.__cause__ or error  # the client wraps what happened into advice
        raise ModelUnavailable(f"{type(cause).__name__}: {_first_line(cause)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return f"Hugging Face hub, {repo}"


def _knock(endpoint: str) -> None:
    """Fail within seconds when no hub answers; its own client would try for a minute.

    Raises:
        ModelUnavailable: no answer.
    """
    import httpx

    failure = [f"no answer within {TIMEOUT_S:.0f} s"]

    def ask() -> None:
        try:
            httpx.head(endpoint, timeout=TIMEOUT_S)
            failure.clear()
        except Exception as error:  # no such host, a refused proxy, a bad certificate ...
            failure[0] = f"{type(error).__name__}: {_first_line(error)}"

    # In a thread, because looking up a host name cannot be given a time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S + 1)
    if failure:
        raise ModelUnavailable(f"{endpoint} cannot be reached ({failure[0]})")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]
