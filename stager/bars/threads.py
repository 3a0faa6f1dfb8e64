"""The number of threads, and a map over them. NumPy and Arrow release the GIL in all that is mapped here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def thread_count() -> int:
    """Cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def parallel(
    function: Callable[[T], R], items: Sequence[T], *, done: Callable[[int, int], None] | None = None
) -> list[R]:
    """``[function(item) for item in items]`` on all cores.

    Parameters
    ----------
    function : callable
    items : sequence
    done : callable, optional
        Called on this thread with (number of items done, number of items).

    Raises
    ------
    Exception
        Of the first item, in order, that failed; the items not yet begun are dropped.
    """
    threads = min(thread_count(), len(items))
    results: list[R] = []
    if threads <= 1:
        for item in items:
            results.append(function(item))
            if done is not None:
                done(len(results), len(items))
        return results
    pool = ThreadPoolExecutor(threads, thread_name_prefix="stager-bars")
    try:
        for future in [pool.submit(function, item) for item in items]:
            results.append(future.result())
            if done is not None:
                done(len(results), len(items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results
