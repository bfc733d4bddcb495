"""Build an LLM inference engine in twenty measured stages."""

__version__ = "0.1.0"
