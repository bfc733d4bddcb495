"""Stage 01, the half that runs beside the solution."""

from generation import counted_stream, generate, stream

__all__ = ["counted_stream", "generate", "stream"]
