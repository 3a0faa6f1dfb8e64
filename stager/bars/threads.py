"""The number of threads, and a map over them. NumPy and Arrow release the GIL in all that is mapped here."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 8


def thread_count() -> int:
    """Cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def parallel(
    function: Callable[[T], R],
    items: Sequence[T],
    *,
    done: Callable[[int, int], None] | None = None,
    threads: int = _MOST_THREADS,
) -> list[R]:
    """``[function(item) for item in items]`` on several cores, this thread included.

    Parameters
    ----------
    function : callable
    items : sequence
    done : callable, optional
        Called on this thread with (number of items done, number of items).
    threads : int
        At most so many. The default is for work that is bound by memory, where more only wait for each other.

    Raises
    ------
    Exception
        Of the first item, in order, that failed; the items not yet begun are dropped.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    # A deque hands out each number once without a lock, also where there is no GIL.
    numbers = deque(range(len(items)))

    def work(report: Callable[[int, int], None] | None = None) -> None:
        while True:
            try:
                number = numbers.popleft()
            except IndexError:
                return
            try:
                results[number] = function(items[number])
            except Exception as error:
                errors[number] = error
                numbers.clear()
            if report is not None:
                report(len(results), len(items))

    helpers = [
        threading.Thread(target=work, name="stager-bars", daemon=True)
        for _ in range(min(thread_count(), threads, len(items)) - 1)
    ]
    for helper in helpers:
        helper.start()
    try:
        work(done)
    finally:
        numbers.clear()
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[min(errors)]
    if done is not None and items:
        done(len(items), len(items))
    return [results[number] for number in range(len(items))]
