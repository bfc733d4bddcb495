"""The twenty parts put together: an engine that serves requests step by step."""

from course.engine.engine import Engine
from course.engine.runner import Runner

__all__ = ["Engine", "Runner"]
