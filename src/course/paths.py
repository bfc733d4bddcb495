"""Where the course lies on disk, and where it may write."""

import contextlib
import os
from pathlib import Path

__all__ = ["course_home", "state_dir"]

MARKER = "course.toml"


def course_home() -> Path:
    """The folder that holds ``course.toml``.

    The environment variable ``COURSE_HOME`` decides when it is set. Otherwise the nearest folder
    above this file that holds ``course.toml``, then the nearest above the working directory.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if chosen := os.environ.get("COURSE_HOME"):
        home = Path(chosen).expanduser().resolve()
        if not home.is_dir():
            raise FileNotFoundError(f"COURSE_HOME is {chosen!r}, which is not a folder")
        return home
    for start in (Path(__file__).resolve(), Path.cwd() / MARKER):
        for folder in start.parents:
            if (folder / MARKER).is_file():
                return folder
    raise FileNotFoundError(
        f"no {MARKER} above {Path(__file__).parent} or {Path.cwd()}: "
        "run from inside the course's folder, or set COURSE_HOME to it"
    )


def state_dir() -> Path:
    """``<course home>/.course``: models, measurements and progress.

    Made when it is missing; where that is not allowed, whoever writes to it finds out.
    """
    folder = course_home() / ".course"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    return folder
