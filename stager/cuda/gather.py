"""The gather on a GPU: two kernels a group of batches, whatever the number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import cupy
import numpy as np
import numpy.typing as npt

from stager.cuda import device_memory, upload
from stager.cuda.driver import CudaDriver
from stager.cuda.order import order_parameters
from stager.cuda.watch import Watch
from stager.errors import DeviceError

DType = Literal["float32", "float16", "bfloat16"]

# Mirror structs of gather.cu and serve.cu.
COLUMN = np.dtype(
    [("source", "<i4"), ("method", "<i4"), ("close", "<i4"), ("padding", "<i4"), ("mean", "<f8"), ("deviation", "<f8")]
)
CURSOR = np.dtype([("epoch", "<i8"), ("batch", "<i8"), ("n_done", "<u4"), ("padding", "<u4")])
SAMPLES = np.dtype(
    [
        (name, "<i8")
        for name in (
            "span_ids", "span_rows", "n_spans", "bases", "base_rows", "row_nbytes", "reach", "target", "n_targets",
        )
    ]
)  # fmt: skip
NEXT = np.dtype(
    [
        *(
            (name, "<i8")
            for name in (
                "cursor", "orders", "n_orders", "n_batches", "stride", "offset", "count", "nothing", "y", "valid",
            )
        ),
        ("samples", SAMPLES),
    ]
)  # fmt: skip
WINDOWS = np.dtype([("count", "<i8"), ("window", "<i4"), ("row_floats", "<i4"), ("n_columns", "<i4"), ("step", "<i4")])
# Methods of samples/normalize.py.
_LAST, _ZSCORE, _FITTED = 1, 3, 4
_THREADS = 256
_MOST_LANES = 1024
_ROUNDS = 4
_MOST_FLOATS = 1 << 30
_NEXT_BLOCKS = 128
_MAX_BLOCKS = 1 << 16
_ALIGNMENT = 256
# A group of few large samples, as of a panel, would keep few processors busy with a block each.
_PIECE = 8 * _THREADS
_MOST_PIECES = 64

_kernels: dict[int, dict[str, Any]] = {}


def kernel_source() -> str:
    """The text that NVRTC compiles."""
    here = Path(__file__)
    return "\n".join(here.with_name(name).read_text(encoding="utf-8") for name in ("order.cu", "gather.cu", "serve.cu"))


def kernels(device: int) -> dict[str, Any]:
    """The compiled kernels of a device; compiled once, while staging, so that no batch waits for NVRTC.

    Raises
    ------
    DeviceError
        If NVRTC is missing or refuses the source.
    """
    if device not in _kernels:
        source = kernel_source()
        copies = [f"{act}_windows_{kind}" for act in ("copy", "next") for kind in ("16", "8", "4", "shifted")]
        kinds = ["", *(f"{wide}_{kind}" for wide in (4, 8) for kind in ("", "whole_", "scaled_", "whole_scaled_"))]
        serves = [f"serve_{kind}{dtype}" for kind in kinds for dtype in ("float32", "float16", "bfloat16")]
        names = ("resolve", "resolve_next", *copies, *serves, "window_stats", "scatter_rows")
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
    def stride(self) -> int: ...
    @property
    def typical_size(self) -> int: ...
    def first_position(self, batch: int) -> int: ...
    def offsets(self, first: int, stop: int) -> npt.NDArray[np.int64]: ...
    def blocks(self, first: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None: ...


class Tables(Protocol):
    """What the gather needs of a sample index, see :class:`stager.samples.index.SampleIndex`."""

    @property
    def window(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def dilation(self) -> int: ...
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
    def close_columns(self) -> npt.NDArray[np.int64] | None: ...
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


@dataclass(frozen=True)
class Field:
    """What each sample has of one array.

    Parameters
    ----------
    shape : tuple of int
    dtype : {"float32", "float16", "bfloat16", "bool"}
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * {"float32": 4, "bool": 1}.get(self.dtype, 2)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where pieces of so many bytes begin one after the other, aligned for any load; the bytes of all."""
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    return [0, *ends[:-1]], ends[-1]


class WindowGather:
    """Gathers windows, and targets, of the samples of one index into memory that it is given.

    Parameters
    ----------
    rows : (n_rows, n_columns) float32 device array
        On the device, or registered host memory that the device reads. Only its address is kept.
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
        device = rows.data.device_id
        self._kernels = kernels(device)
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
        bases = np.array([rows.data.ptr], np.uint64)
        tables = [bring(index.span_ids), bring(index.span_rows), load(bases, device, stall_timeout)]
        span_ids, span_rows, base = (table.data.ptr for table in tables)
        self._samples = np.zeros((), SAMPLES)
        self._samples["span_ids"], self._samples["span_rows"] = span_ids, span_rows
        self._samples["n_spans"], self._samples["bases"], self._samples["base_rows"] = len(tables[1]), base, len(rows)
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
            width, n = _copying(rows.data.ptr, index.window, n_columns)
            kernel, self._next = f"copy_windows_{width}", self._kernels[f"next_windows_{width}"]
            self._lanes = min(_THREADS, max(8, 1 << (n - 1).bit_length()))
        else:
            columns = _columns(index, n_columns)
            self._has_stats = bool((columns["method"] == _ZSCORE).any()) or (
                index.close_columns is not None and bool((columns["method"] == _LAST).any())
            )
            columns_on_device = load(columns.view(np.uint8), device, stall_timeout)
            kernel, n, self._lanes = _serving(rows.data.ptr, index, n_columns, n_served)
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
            order = _packed(self.parameters(schedule.order, schedule.batch_size, schedule.stride))
            self._order = schedule, order
        self._kernels["resolve"](
            (min(_MAX_BLOCKS, -(-count // _THREADS)),),
            (_THREADS,),
            (
                order, _packed(self._samples), np.int64(schedule.first_position(first)), np.int64(count),
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
            self._next((-(-count // n_together),), block, (_packed(batch), np.uint64(x), np.int32(self._n)))
            return
        grid = (min(_MAX_BLOCKS, -(-count // _THREADS)),)
        self._kernels["resolve_next"](grid, (_THREADS,), (_packed(batch), np.uint64(scratch)))
        self.copy(x, scratch, count)

    def parameters(self, order: Any, batch_size: int = 1, stride: int = 1) -> npt.NDArray[np.void]:
        """The kernel's struct Order, see :func:`stager.cuda.order.order_parameters`."""
        return order_parameters(order, batch_size, stride, 0 if self._draws is None else self._draws.data.ptr)

    def copy(self, x: int, scratch: int, count: int) -> None:
        """Queue what follows resolving: the windows of `count` addresses at `scratch`."""
        n_together = max(1, _THREADS // self._lanes)
        grid, block = (min(_MAX_BLOCKS, -(-count // n_together)), self._pieces), (self._lanes, n_together)
        if not self._columns:
            self._kernel(grid, block, (np.uint64(scratch), np.uint64(x), np.int64(count), np.int32(self._n)))
            return
        windows = self._windows.copy()  # other threads may serve too
        windows["count"] = count
        windows = _packed(windows)
        stats = scratch + _addresses_nbytes(count) if self._has_stats else 0
        if stats:
            n_series = count * self._n_served
            self._kernels["window_stats"](
                (min(_MAX_BLOCKS, -(-n_series // _THREADS)),),
                (_THREADS,),
                (np.uint64(scratch), windows, np.uint64(self._columns), np.uint64(stats)),
            )
        self._kernel(
            grid, block, (np.uint64(scratch), np.uint64(x), windows, np.uint64(self._columns), np.uint64(stats))
        )

    def close(self) -> None:
        """Give back the tables."""
        self._y, self._draws, self._host_y, self.held = None, None, None, []
        self._order = None, None


def _copying(pointer: int, window: int, n_columns: int) -> tuple[str, int]:
    """The widest loads that copy whole windows, and how many of them one takes."""
    n = window * n_columns
    vector = next(size for size in (4, 2, 1) if (n | n_columns | pointer // 4) % size == 0)
    if vector < 4 and n % 4 == 0 and pointer % 16 == 0:
        return "shifted", n // 4
    return str(4 * vector), n // vector


def _serving(pointer: int, index: Tables, n_columns: int, n_served: int) -> tuple[str, int, int]:
    """The kernel that serves columns, but for its type; the stores that a window takes, and by how many lanes."""
    n = index.length * n_served
    divided = index.methods is not None and bool(np.isin(index.methods, (_ZSCORE, _FITTED)).any())
    wide = 8 if n % 8 == 0 and not divided and _one_close(index, n_served, 8) else 4
    period = n_served // math.gcd(n_served, wide)
    too_long = period > _MOST_LANES or index.window * n_columns > _MOST_FLOATS
    if n % wide or too_long or not _one_close(index, n_served, wide):
        return "serve_", n, min(_THREADS, max(8, 1 << (n - 1).bit_length()))
    whole = index.columns is None and n_columns % wide == 0 and pointer % 16 == 0
    kernel = f"serve_{wide}_{'whole_' if whole else ''}{'' if index.methods is None else 'scaled_'}"
    # Some rounds for each lane, which looks up its columns before the first.
    wanted = min(_THREADS, max(8, n // wide // _ROUNDS))
    return kernel, n // wide, min(-(-wanted // period) * period, _MOST_LANES // period * period)


def _one_close(index: Tables, n_served: int, wide: int) -> bool:
    """Whether so many values in a row, from anywhere that a lane begins, are scaled by one close."""
    if index.close_columns is None or index.methods is None:
        return True
    closes = np.tile(np.where(index.methods == _LAST, index.close_columns, -1), wide // math.gcd(n_served, wide))
    closes = closes.reshape(-1, wide)
    first = closes.max(axis=1, keepdims=True)
    return bool(((closes == first) | (closes < 0)).all())


def _addresses_nbytes(count: int) -> int:
    """Bytes of so many addresses, a multiple of 16."""
    return -(-count // 2) * 16


def _packed(parameters: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """A struct without its fields: CuPy takes ten times as long to pass an array that has some."""
    return parameters.view(np.dtype((np.void, parameters.itemsize)))


def _columns(index: Tables, n_columns: int) -> npt.NDArray[np.void]:
    """The kernel's struct Column of each served column."""
    sources = np.arange(n_columns) if index.columns is None else index.columns
    columns = np.zeros(len(sources), COLUMN)
    columns["source"] = sources
    if index.methods is not None:
        columns["method"] = index.methods
    columns["close"] = index.close_column if index.close_columns is None else index.close_columns
    if index.fitted is not None:
        columns["mean"], columns["deviation"] = index.fitted
    return columns
