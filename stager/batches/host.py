"""The gather on NumPy: several threads copy the batches ahead of the consumer."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from stager.bars.threads import thread_count
from stager.batches.stats import ServingStats
from stager.errors import ClosedError
from stager.samples.index import SampleIndex
from stager.samples.normalize import DType, apply, cast, last_there
from stager.samples.schedule import Schedule

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Group = tuple[npt.NDArray[Any], ...]
T = TypeVar("T")

# A task is long enough to be worth handing to a thread.
_TASK_NBYTES = 4 << 20
# More threads only wait for each other.
_MOST_THREADS = 4
# The largest block that makes glibc keep freed memory of its size.
_KEPT_NBYTES = 31 << 20
# An order is cheap only for many positions at once.
_ORDER_POSITIONS = 1 << 14


class HostGather:
    """Gathers the batches of one Stager.

    Parameters
    ----------
    rows : (n_rows, n_columns) float32, C order
    index : SampleIndex
    dtype : {"float32", "float16", "bfloat16"}
        What windows are cast to, after any scaling; bfloat16 as its bits, uint16.
    """

    def __init__(self, rows: FloatArray, index: SampleIndex, dtype: DType = "float32") -> None:
        self._index, self._dtype = index, dtype
        window, n_columns, step = index.window, rows.shape[1], index.dilation
        self._shape = (index.length, n_columns)
        # Overlapping windows as rows of one matrix: NumPy then copies a window as one piece.
        n_starts, flat = len(rows) - window + 1, rows.reshape(-1)
        shape: tuple[int, ...] = (n_starts, window * n_columns)
        strides: tuple[int, ...] = (4 * n_columns, 4)
        if step > 1:
            shape, strides = (n_starts, *self._shape), (4 * n_columns, 4 * n_columns * step, 4)
        self._windows = as_strided(flat, shape, strides, writeable=False)
        self._closes = rows[:, index.close_column]
        # Until it has seen a block of that size freed, glibc gives the memory of batches back to the system; the page
        # faults of the next ones took longer than the copies.
        np.empty(_KEPT_NBYTES, np.uint8)
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        # Another thread may close while batches are served.
        self._lock = threading.Lock()
        # Garbage may be collected, and an iterator closed, while it is held.
        self._counting = threading.RLock()
        self._stats = ServingStats()

    def batches(self, schedule: Schedule, first: int, stop: int) -> Iterator[Group]:
        """Windows, and targets where there are some, of batches ``first : stop``, in order; small ones share arrays."""
        per_task = max(1, _TASK_NBYTES // (4 * schedule.typical_size * math.prod(self._shape)))
        per_order = per_task * max(1, _ORDER_POSITIONS // (per_task * schedule.typical_size))
        n_ahead = min(thread_count(), _MOST_THREADS)
        orders: deque[Future[tuple[IntArray, IntArray]]] = deque()
        # With where the batches of each begin and end.
        groups: deque[tuple[Future[Group], IntArray]] = deque()
        try:
            for start in range(first, stop + per_order, per_order):
                # The order of the next positions is worked out while the last are gathered.
                is_last = start >= stop
                if not is_last:
                    orders.append(self._submit(self._decide, schedule, start, min(start + per_order, stop)))
                if orders and (is_last or len(orders) > 1):
                    decisions, offsets = orders.popleft().result()
                    for batch in range(0, len(offsets) - 1, per_task):
                        edges = offsets[batch : batch + per_task + 1]
                        part = decisions[edges[0] : edges[-1]]
                        groups.append((self._submit(self.gather, part), edges - edges[0]))
                        if len(groups) > n_ahead:
                            yield from self._hand_out(*groups.popleft())
            while groups:
                yield from self._hand_out(*groups.popleft())
        finally:
            pending: list[Future[Any]] = [*orders, *(group for group, _ in groups)]
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Wait for gathers that a consumer left behind, and forget the rows."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._windows, self._closes = self._windows[:0].copy(), self._closes[:0].copy()

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        with self._lock:
            if self._closed:
                raise ClosedError("the rows were closed while batches were served")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(thread_count(), _MOST_THREADS), "stager-gather")
            return self._pool.submit(work, *arguments)

    def _decide(self, schedule: Schedule, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """The decision rows of some batches, and where batches begin and end among them."""
        return self._index.rows(schedule.sample_ids(first, stop)), schedule.offsets(first, stop)

    def _last_closes(self, windows: FloatArray, decisions: IntArray) -> FloatArray:
        of_columns = self._index.close_columns
        if of_columns is None:
            return self._closes[decisions, None]
        # Of a panel: each symbol's, as its last bar may be missing.
        closes, places = np.unique(of_columns, return_inverse=True)
        return last_there(windows[:, :, closes])[:, places]

    @property
    def stats(self) -> ServingStats:
        """What was served so far."""
        return self._stats

    def _hand_out(self, group: Future[Group], edges: IntArray) -> Iterator[Group]:
        started = time.perf_counter()
        arrays = group.result()
        waited = time.perf_counter() - started
        n_handed = 0
        try:
            x, *y = arrays
            for first, stop in pairwise(edges.tolist()):
                n_handed += 1
                yield (x[first:stop], y[0][first:stop]) if y else (x[first:stop],)
        finally:
            n_samples = int(edges[n_handed])
            nbytes = sum(array[:n_samples].nbytes for array in arrays)
            self._count(n_batches=n_handed, n_samples=n_samples, nbytes=nbytes, consumer_waited_seconds=waited)

    def _count(self, **more: float) -> None:
        with self._counting:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def gather(self, decisions: IntArray) -> Group:
        """Windows and targets of some decision rows."""
        started = time.perf_counter()
        windows = self._windows[decisions - (self._index.window - 1)].reshape(len(decisions), *self._shape)
        x = windows if self._index.columns is None else np.take(windows, self._index.columns, axis=2)
        if self._index.methods is not None:
            apply(x, self._index.methods, self._last_closes(windows, decisions), self._index.fitted)
        x = cast(x, self._dtype)
        made = (x,) if self._index.y is None else (x, self._index.y[decisions])
        self._count(gather_seconds=time.perf_counter() - started, gather_nbytes=sum(array.nbytes for array in made))
        return made
