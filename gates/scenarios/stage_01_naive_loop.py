"""Stage 01, the half that runs beside the solution."""

from generation import generate, stream

__all__ = ["generate", "stream"]
