"""Python objects that pile up: what some work leaves behind once it has been done before."""

import gc
import tracemalloc
from collections.abc import Callable

__all__ = ["grown_by"]


def grown_by(work: Callable[[], object], *, after: Callable[[], object]) -> int:
    """Bytes of Python objects by which this process grows during `work`.

    after: comes first and is not counted: what is filled once, such as a cache, is filled then.
    """
    tracemalloc.start()
    try:
        after()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
