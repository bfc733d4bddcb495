"""Where the prompts of a load come from: the course's own, or a file with one in each line."""

from __future__ import annotations

from pathlib import Path

from course.data import WORKLOADS
from course.data import prompts as workload


def prompts_of(source: str) -> list[str]:
    """The prompts of a source, each once and in order; a load takes them over and over.

    Args:
        source: a workload of the course (chat, code, revision), or a file: one prompt in each line
            that is not empty.

    Raises:
        ValueError: there is no such workload or file, or it is no text or holds no prompt.
    """
    if source in WORKLOADS:
        return list(workload(source))
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(
            f"--prompts must be {', '.join(WORKLOADS)} or a file with a prompt in each line, "
            f"got {source!r}"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--prompts: {source} is no text in UTF-8") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts: {source} holds no prompt")
    return prompts
