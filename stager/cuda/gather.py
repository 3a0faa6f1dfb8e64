"""The gather on a GPU: two kernels a group of batches, whatever the number of samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from stager.cuda import device_memory, upload
from stager.cuda.driver import CudaDriver
from stager.cuda.order import order_parameters
from stager.cuda.watch import Watch
from stager.errors import DeviceError

_THREADS = 256
_MAX_BLOCKS = 1 << 16
_GROUP_NBYTES = 64 << 20
# A group of few large samples, as of a panel, would keep few processors busy with a block each.
_PIECE = 8 * _THREADS
_MOST_PIECES = 64

_kernels: dict[int, dict[str, Any]] = {}


def kernel_source() -> str:
    """The text that NVRTC compiles."""
    here = Path(__file__)
    return "\n".join(here.with_name(name).read_text(encoding="utf-8") for name in ("order.cu", "gather.cu"))


def kernels(device: int) -> dict[str, Any]:
    """The compiled kernels of a device; compiled once, while staging, so that no batch waits for NVRTC.

    Raises
    ------
    DeviceError
        If NVRTC is missing or refuses the source.
    """
    if device not in _kernels:
        source = kernel_source()
        copies = ("copy_windows_16", "copy_windows_8", "copy_windows_4", "copy_columns")
        names = ("resolve", *copies, "normalize", "scatter_rows")
        with cupy.cuda.Device(device):
            try:
                module = cupy.RawModule(code=source, options=("--std=c++17",))
                _kernels[device] = {name: module.get_function(name) for name in names}
            except (ImportError, OSError, RuntimeError) as error:
                if "nvrtc" not in str(error).lower():
                    raise
                raise DeviceError(
                    f"NVRTC, CUDA's run-time compiler, can't be loaded: {error}. It comes with the extra: "
                    f"pip install 'stager[cuda12]' (or [cuda13])"
                ) from error
    return _kernels[device]


class Schedule(Protocol):
    """What the gather needs of an epoch, see :class:`stager.samples.schedule.Schedule`."""

    @property
    def order(self) -> Any: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def typical_size(self) -> int: ...
    def offsets(self, first: int, stop: int) -> npt.NDArray[np.int64]: ...
    def blocks(self, first: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None: ...


class Tables(Protocol):
    """What the gather needs of a sample index, see :class:`stager.samples.index.SampleIndex`."""

    @property
    def window(self) -> int: ...
    @property
    def span_rows(self) -> npt.NDArray[np.int64]: ...
    @property
    def span_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def columns(self) -> npt.NDArray[np.int64] | None: ...
    @property
    def methods(self) -> npt.NDArray[np.int32] | None: ...
    @property
    def close_column(self) -> int: ...
    @property
    def fitted(self) -> npt.NDArray[np.float64] | None: ...
    @property
    def y(self) -> npt.NDArray[np.float32] | None: ...


def load(table: npt.NDArray[Any], device: int, stall_timeout: float) -> Any:
    """A table on the device, in an allocation of its own."""
    driver = CudaDriver(device)
    watch = Watch(table.nbytes, stall_timeout)

    def copy(memory: Any) -> str:
        return upload.copy_array(table, memory, driver, watch)

    memory, _ = device_memory.load(driver, table.nbytes, watch, "free some, or serve fewer samples", copy)
    return cupy.ndarray(table.shape, table.dtype, cupy.cuda.MemoryPointer(memory, 0))


class CudaGather:
    """Gathers groups of samples of one Stager on the caller's stream.

    Memory comes from a pool of its own, never from the user's arena.

    Parameters
    ----------
    rows : (n_rows, n_columns) float32 device array
        On the device, or registered host memory that the device reads. Only its address is kept.
    index : SampleIndex
        Its tables are copied to the device.
    stall_timeout : float
        Seconds, for that copy.
    like : CudaGather, optional
        Another one over the same rows; memory for groups is shared with it, and the targets where they are the same.
    """

    def __init__(self, rows: Any, index: Tables, stall_timeout: float, like: CudaGather | None = None) -> None:
        device = rows.data.device_id
        self._device = cupy.cuda.Device(device)
        self._kernels = kernels(device)
        self._window = index.window
        # One pool for all, or every fold would keep groups of its own.
        self._pool: Any = cupy.cuda.MemoryPool() if like is None else like._pool
        self._events: dict[tuple[int, int], Any] = {}
        n_columns = rows.shape[1]
        self._columns = None if index.columns is None else load(index.columns.astype(np.int32), device, stall_timeout)
        self._methods = None if index.methods is None else load(index.methods, device, stall_timeout)
        self._fitted = None if index.fitted is None else load(index.fitted, device, stall_timeout)
        # Of a window's first value, the value that prices are normalised by.
        self._last_close = (index.window - 1) * n_columns + index.close_column
        self._sample_shape = (index.window, n_columns if index.columns is None else len(index.columns))
        self._row_nbytes = 4 * n_columns
        self._tables = [load(table, device, stall_timeout) for table in (index.span_ids, index.span_rows)]
        self._host_y = index.y
        self._y: Any = like._y if like is not None and like._host_y is index.y else None
        if self._y is None and index.y is not None:
            self._y = load(index.y, device, stall_timeout)
        self._y_shape = () if index.y is None else index.y.shape[1:]
        self._bases = load(np.array([rows.data.ptr], np.uint64), device, stall_timeout)
        self._base_rows = len(rows)
        n = index.window * n_columns
        alignment = n | n_columns | (rows.data.ptr // 4)
        self._vector = next(size for size in (4, 2, 1) if alignment % size == 0)
        if self._columns is not None:
            n, self._vector = index.window * self._sample_shape[1], 1
        self._lanes = min(_THREADS, max(8, 1 << (n // self._vector - 1).bit_length()))
        self._pieces = min(_MOST_PIECES, max(1, n // self._vector // _PIECE))

    def batches(self, schedule: Schedule, first: int, stop: int) -> Iterator[tuple[Any, Any]]:
        """Batches ``first : stop`` of an epoch, in order, as views of groups.

        A group is gathered on the stream that is current when it is asked for, and its memory is used again, on that
        stream, after its last view has died.
        """
        sample_nbytes = 4 * self._sample_shape[0] * self._sample_shape[1]
        per_group = max(1, _GROUP_NBYTES // (schedule.typical_size * sample_nbytes))
        for start in range(first, stop, per_group):
            end = min(start + per_group, stop)
            edges = schedule.offsets(start, end).tolist()
            x, y = self._group(schedule, start, end, edges[-1])
            for offset, after in pairwise(edges):
                size = after - offset
                yield _view(x, offset, size), None if y is None else _view(y, offset, size)

    def _group(self, schedule: Schedule, first: int, stop: int, count: int) -> tuple[Any, Any]:
        """x (count, window, n_columns) and y (count[, n_targets]) float32 or None, on the current stream."""
        blocks = schedule.blocks(first, stop)
        with self._device:
            stream = cupy.cuda.get_current_stream()
            with cupy.cuda.using_allocator(self._pool.malloc):
                x = cupy.empty((count, *self._sample_shape), cupy.float32)
                y = None if self._y is None else cupy.empty((count, *self._y_shape), cupy.float32)
                addresses = cupy.empty(count, cupy.uint64)
                # CuPy copies this on the stream, by way of pinned memory that it keeps until the copy is done.
                chosen = None if blocks is None else cupy.asarray(np.stack(blocks))
            places, samples, n_blocks = (
                (0, 0, 0) if chosen is None else (*(part.data.ptr for part in chosen), len(chosen[0]))
            )
            target, labels = (0, 0) if self._y is None or y is None else (self._y.data.ptr, y.data.ptr)
            self._kernels["resolve"](
                (min(_MAX_BLOCKS, -(-count // _THREADS)),),
                (_THREADS,),
                (
                    order_parameters(schedule.order), np.int64(first * schedule.batch_size), np.int64(count),
                    np.uint64(places), np.uint64(samples), np.int64(n_blocks),
                    np.int64(self._window), np.int64(self._row_nbytes),
                    *self._tables, np.int64(len(self._tables[1])),
                    self._bases, np.int64(self._base_rows), np.uint64(target),
                    np.int32(self._y_shape[0] if self._y_shape else 1), addresses, np.uint64(labels),
                ),
            )  # fmt: skip
            n_together = _THREADS // self._lanes
            grid, block = (min(_MAX_BLOCKS, -(-count // n_together)), self._pieces), (self._lanes, n_together)
            if self._columns is None:
                self._kernels[f"copy_windows_{4 * self._vector}"](
                    grid, block, (addresses, x, np.int64(count), np.int32(x[0].size // self._vector))
                )
            else:
                shape = (np.int32(self._sample_shape[1]), np.int32(self._row_nbytes // 4))
                self._kernels["copy_columns"](
                    grid, block, (addresses, x, np.int64(count), np.int32(x[0].size), self._columns, *shape)
                )
            if self._methods is not None:
                n_series = count * self._sample_shape[1]
                self._kernels["normalize"](
                    (min(_MAX_BLOCKS, -(-n_series // _THREADS)),),
                    (_THREADS,),
                    (
                        addresses, x, np.int64(n_series), np.int32(self._window), np.int32(self._sample_shape[1]),
                        self._methods, np.int64(self._last_close),
                        np.uint64(0) if self._fitted is None else self._fitted,
                    ),
                )  # fmt: skip
            # The per-thread default stream is another one in each thread, under the same pointer.
            key = (stream.ptr, threading.get_ident() if stream.ptr == runtime.streamPerThread else 0)
            if key not in self._events:
                self._events[key] = (cupy.cuda.Event(disable_timing=True), stream)
            self._events[key][0].record(stream)
        return x, y

    def close(self) -> None:
        """Wait until every gather queued so far has read its rows, and give back the tables."""
        with self._device:
            for event, _ in list(self._events.values()):
                event.synchronize()
            self._tables, self._bases, self._y, self._columns, self._methods = [], None, None, None, None
            self._fitted = None
            # Free blocks now; those under batches that are still referred to return with them.
            self._pool.free_all_blocks()


def _view(array: Any, first: int, count: int) -> Any:
    """Entries ``first : first + count`` without a copy; built directly, in half the time of a slice."""
    return cupy.ndarray((count, *array.shape[1:]), array.dtype, array.data + first * array.strides[0])
