"""What the gather needs to know of an epoch and of an index, and its tables on the device."""

from __future__ import annotations

from typing import Any, Protocol

import cupy
import numpy as np
import numpy.typing as npt

from stager.cuda import device_memory, upload
from stager.cuda.driver import CudaDriver
from stager.cuda.watch import Watch


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
