"""The gather on a GPU: two kernels a group of batches, whatever the number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import cupy
import numpy as np
import numpy.typing as npt

from stager.cuda.fields import Field
from stager.cuda.kernels import NEXT, SAMPLES, WINDOWS, compiled, packed
from stager.cuda.order import order_parameters
from stager.cuda.spread import SpreadRows
from stager.cuda.tables import Schedule, Tables, load
from stager.cuda.widths import LAST, THREADS, ZSCORE, columns_of, copying, serving

DType = Literal["float32", "float16", "bfloat16"]

_NEXT_BLOCKS = 128
_MAX_BLOCKS = 1 << 16
# A group of few large samples, as of a panel, would keep few processors busy with a block each.
_PIECE = 8 * THREADS
_MOST_PIECES = 64


class WindowGather:
    """Gathers windows, and targets, of the samples of one index into memory that it is given.

    Parameters
    ----------
    rows : (n_rows, n_columns) float32 device array, or SpreadRows
        On the device, in registered host memory that it reads, or over several. Only addresses are kept.
    index : SampleIndex
        Its tables are copied to the device.
    stall_timeout : float
        Seconds, for that copy.
    like : WindowGather, optional
        Another one over the same rows; the targets are shared with it where they are the same.
    dtype : {"float32", "float16", "bfloat16"}
        What windows are cast to, after any scaling.
    draws : Draws, optional
        Where samples are drawn by weight, see :class:`stager.samples.sampling.Draws`; copied to the device.
    on_device : callable(table), optional
        Gives a table on the device; default: :func:`load`.

    Attributes
    ----------
    fields : tuple of Field
        What a sample has: its window, and its targets where there are some.
    """

    def __init__(
        self,
        rows: Any,
        index: Tables,
        stall_timeout: float,
        like: WindowGather | None = None,
        dtype: DType = "float32",
        draws: Any = None,
        on_device: Callable[[npt.NDArray[Any]], Any] | None = None,
    ) -> None:
        device, pointers, base_rows = where(rows)
        if isinstance(rows, SpreadRows):
            rows.layout.check_reach(index.window)
        self._kernels = compiled(device)
        # Not the user's arena, nor a pool that others empty.
        self._pool: Any = cupy.cuda.MemoryPool() if like is None else like._pool
        n_columns = rows.shape[1]
        n_served = n_columns if index.columns is None else len(index.columns)
        self._n_served = n_served
        self._host_y = index.y
        bring = on_device or (lambda table: load(table, device, stall_timeout))
        self._y: Any = like._y if like is not None and like._host_y is index.y else None
        if self._y is None and index.y is not None:
            self._y = bring(index.y)
        self._draws: Any = None if draws is None else bring(draws.table)
        bases = np.array(pointers, np.uint64)
        tables = [bring(index.span_ids), bring(index.span_rows), load(bases, device, stall_timeout)]
        span_ids, span_rows, base = (table.data.ptr for table in tables)
        self._samples = np.zeros((), SAMPLES)
        self._samples["span_ids"], self._samples["span_rows"] = span_ids, span_rows
        self._samples["n_spans"], self._samples["bases"], self._samples["base_rows"] = len(tables[1]), base, base_rows
        self._samples["row_nbytes"], self._samples["reach"] = 4 * n_columns, index.window
        if index.y is not None:
            self._samples["target"] = self._y.data.ptr
            self._samples["n_targets"] = np.prod(index.y.shape[1:], dtype=np.int64)
        #: The schedule that was served last, and its order as the kernels take it.
        self._order: tuple[Any, Any] = None, None
        self._windows = np.zeros((), WINDOWS)
        self._windows["window"], self._windows["step"] = index.length, index.dilation
        self._windows["row_floats"], self._windows["n_columns"] = n_columns, n_served
        window = Field((index.length, n_served), dtype)
        #: Bytes from the begin of a window's first row to the end of its last.
        self.reach_nbytes = 4 * index.window * n_columns
        self.fields = (window,) if index.y is None else (window, Field(index.y.shape[1:]))
        columns_on_device, self._has_stats, self._next = None, False, None
        if index.columns is None and index.methods is None and dtype == "float32" and index.dilation == 1:
            width, n = copying(pointers[0], index.window, n_columns)
            kernel, self._next = f"copy_windows_{width}", self._kernels[f"next_windows_{width}"]
            self._lanes = min(THREADS, max(8, 1 << (n - 1).bit_length()))
        else:
            columns = columns_of(index, n_columns)
            self._has_stats = bool((columns["method"] == ZSCORE).any()) or (
                index.close_columns is not None and bool((columns["method"] == LAST).any())
            )
            columns_on_device = load(columns.view(np.uint8), device, stall_timeout)
            kernel, n, self._lanes = serving(pointers[0], index, n_columns, n_served)
            kernel += dtype
        self._kernel, self._n = self._kernels[kernel], n
        self._pieces = min(_MOST_PIECES, max(1, n // _PIECE))
        # An address, so that a graph's batch, which holds what lies there, may be gathered after close() too.
        self._columns = 0 if columns_on_device is None else columns_on_device.data.ptr
        #: What the kernels read, beside the rows.
        self.held: list[Any] = [*tables, self._y, self._draws, columns_on_device]

    @property
    def n_fields(self) -> int:
        return len(self.fields)

    def scratch_nbytes(self, count: int) -> int:
        """Bytes that the gather of `count` samples needs beside its fields: addresses, and statistics of windows."""
        return _addresses_nbytes(count) + (16 * count * self._n_served if self._has_stats else 0)

    def fill(
        self, pointers: Sequence[int], scratch: int, schedule: Schedule, first: int, stop: int, count: int
    ) -> None:
        """Queue the gather of batches ``first : stop`` on the current stream and device.

        Parameters
        ----------
        pointers : sequence of int
            Where each of the fields begins.
        scratch : int
            Where :meth:`scratch_nbytes` begin.
        schedule : Schedule
        first, stop, count : int
            Samples of these batches.
        """
        blocks = schedule.blocks(first, stop)
        with cupy.cuda.using_allocator(self._pool.malloc):
            # CuPy copies this on the stream, by way of pinned memory that it keeps until the copy is done.
            chosen = None if blocks is None else cupy.asarray(np.stack(blocks))
        places, samples, n_blocks = (0, 0, 0) if chosen is None else (*(p.data.ptr for p in chosen), len(chosen[0]))
        served, order = self._order
        if served is not schedule:
            order = packed(self.parameters(schedule.order, schedule.batch_size, schedule.stride))
            self._order = schedule, order
        self._kernels["resolve"](
            (min(_MAX_BLOCKS, -(-count // THREADS)),),
            (THREADS,),
            (
                order, packed(self._samples), np.int64(schedule.first_position(first)), np.int64(count),
                np.uint64(places), np.uint64(samples), np.int64(n_blocks),
                np.uint64(scratch), np.uint64(pointers[-1]),
            ),
        )  # fmt: skip
        self.copy(pointers[0], scratch, count)

    def next_batch(self, **places: int) -> npt.NDArray[np.void]:
        """The kernel's struct Next, of all of its other fields by name."""
        made = np.zeros((), NEXT)
        made["samples"] = self._samples
        for name, value in places.items():
            made[name] = value
        return made

    def fill_next(self, x: int, scratch: int, batch: npt.NDArray[np.void]) -> None:
        """Queue the gather of the batch at a cursor, which goes on by one.

        Parameters
        ----------
        x : int
            Where windows are written.
        scratch : int
        batch : struct Next
        """
        count = int(batch["count"])
        # Some windows a block: blocks tell one another that they are done one after the other.
        n_together = min(-(-count // _NEXT_BLOCKS), 1024 // self._lanes, 32)
        if self._next is not None and n_together * _NEXT_BLOCKS >= count:
            block = (self._lanes, n_together)
            self._next((-(-count // n_together),), block, (packed(batch), np.uint64(x), np.int32(self._n)))
            return
        grid = (min(_MAX_BLOCKS, -(-count // THREADS)),)
        self._kernels["resolve_next"](grid, (THREADS,), (packed(batch), np.uint64(scratch)))
        self.copy(x, scratch, count)

    def parameters(self, order: Any, batch_size: int = 1, stride: int = 1) -> npt.NDArray[np.void]:
        """The kernel's struct Order, see :func:`stager.cuda.order.order_parameters`."""
        return order_parameters(order, batch_size, stride, 0 if self._draws is None else self._draws.data.ptr)

    def copy(self, x: int, scratch: int, count: int) -> None:
        """Queue what follows resolving: the windows of `count` addresses at `scratch`."""
        n_together = max(1, THREADS // self._lanes)
        grid, block = (min(_MAX_BLOCKS, -(-count // n_together)), self._pieces), (self._lanes, n_together)
        if not self._columns:
            self._kernel(grid, block, (np.uint64(scratch), np.uint64(x), np.int64(count), np.int32(self._n)))
            return
        windows = self._windows.copy()  # other threads may serve too
        windows["count"] = count
        windows = packed(windows)
        stats = scratch + _addresses_nbytes(count) if self._has_stats else 0
        if stats:
            n_series = count * self._n_served
            self._kernels["window_stats"](
                (min(_MAX_BLOCKS, -(-n_series // THREADS)),),
                (THREADS,),
                (np.uint64(scratch), windows, np.uint64(self._columns), np.uint64(stats)),
            )
        self._kernel(
            grid, block, (np.uint64(scratch), np.uint64(x), windows, np.uint64(self._columns), np.uint64(stats))
        )

    def close(self) -> None:
        """Give back the tables."""
        self._y, self._draws, self._host_y, self.held = None, None, None, []
        self._order = None, None


def where(rows: Any) -> tuple[int, list[int], int]:
    """The device that gathers, where each stretch of rows begins, and how many rows a stretch has."""
    if isinstance(rows, SpreadRows):
        return rows.device_id, rows.pointers, rows.layout.base_rows
    return rows.data.device_id, [rows.data.ptr], len(rows)


def _addresses_nbytes(count: int) -> int:
    """Bytes of so many addresses, a multiple of 16."""
    return -(-count // 2) * 16
