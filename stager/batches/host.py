"""The gather on NumPy: several threads copy the batches ahead of the consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from stager.bars.threads import thread_count
from stager.errors import ClosedError
from stager.samples.index import SampleIndex
from stager.samples.order import Order

FloatArray = npt.NDArray[np.float32]
Group = tuple[FloatArray, FloatArray | None]

# A task is long enough to be worth handing to a thread, and short enough that the allocator finds its memory again
# without page faults (from 8 MiB on they came back). More threads only wait for each other.
_TASK_NBYTES = 4 << 20
_MOST_THREADS = 6
# An order is cheap only for many positions at once.
_ORDER_POSITIONS = 1 << 14


class HostGather:
    """Gathers the batches of one Stager.

    Parameters
    ----------
    rows : (n_rows, n_columns) float32, C order
    index : SampleIndex
    """

    xp = np

    def __init__(self, rows: FloatArray, index: SampleIndex) -> None:
        self._index = index
        window, n_columns = index.window, rows.shape[1]
        self._sample_shape = (window, n_columns)
        # Overlapping windows as rows of one matrix: NumPy then copies a window as one piece.
        self._windows = as_strided(
            rows.reshape(-1), (len(rows) - window + 1, window * n_columns), (4 * n_columns, 4), writeable=False
        )
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        # Another thread may close while batches are served.
        self._lock = threading.Lock()

    def batches(self, order: Order, first: int, stop: int, batch_size: int) -> Iterator[Group]:
        """The batches at positions ``first : stop`` of an epoch, in order; several share one array."""
        n_threads = min(thread_count(), _MOST_THREADS)
        ahead: deque[tuple[int, Future[Group]]] = deque()
        tasks = self._tasks(order, first, stop, batch_size)
        try:
            for decisions in tasks:
                ahead.append((len(decisions), self._submit(decisions, n_threads)))
                if len(ahead) > n_threads:
                    yield from _split(*ahead.popleft(), batch_size)
            while ahead:
                yield from _split(*ahead.popleft(), batch_size)
        finally:
            for _, future in ahead:
                future.cancel()

    def close(self) -> None:
        """Wait for gathers that a consumer left behind, and forget the rows."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._windows = self._windows[:0].copy()

    def _submit(self, decisions: npt.NDArray[np.int64], n_threads: int) -> Future[Group]:
        with self._lock:
            if self._closed:
                raise ClosedError("the rows were closed while batches were served")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(n_threads, "stager-gather")
            return self._pool.submit(self._gather, decisions)

    def _tasks(self, order: Order, first: int, stop: int, batch_size: int) -> Iterator[npt.NDArray[np.int64]]:
        """Decision rows, a task's worth of whole batches at a time."""
        nbytes = 4 * batch_size * self._windows.shape[1]
        per_task = batch_size * max(1, _TASK_NBYTES // nbytes)
        per_order = per_task * max(1, _ORDER_POSITIONS // per_task)
        for start in range(first, stop, per_order):
            decisions = self._index.rows(order.sample_ids(start, min(per_order, stop - start)))
            for offset in range(0, len(decisions), per_task):
                yield decisions[offset : offset + per_task]

    def _gather(self, decisions: npt.NDArray[np.int64]) -> Group:
        x = self._windows[decisions - (self._index.window - 1)].reshape(len(decisions), *self._sample_shape)
        return x, None if self._index.y is None else self._index.y[decisions]


def _split(count: int, future: Future[Group], batch_size: int) -> Iterator[Group]:
    x, y = future.result()
    for first in range(0, count, batch_size):
        yield x[first : first + batch_size], None if y is None else y[first : first + batch_size]
