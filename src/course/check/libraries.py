"""Libraries that gates are about, and that not every system has."""

from __future__ import annotations

import importlib

WHERE = {
    "triton": "triton exists for Linux alone: in a container or a virtual machine, or in WSL 2."
}


def is_here(name: str) -> bool:
    """Whether a library can be imported: one that is installed and broken is not here either."""
    try:
        importlib.import_module(name)
    except Exception:
        return False
    return True


def where(name: str) -> str:
    """How to get a library that is not here."""
    return WHERE.get(name, f"{name} does not exist for this system, or is not installed.")
