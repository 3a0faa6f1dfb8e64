"""Host arrays to arrays that kernels read: copied into one allocation, or registered where they lie."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from stager.cuda import device_memory, kernels, scatter, upload
from stager.cuda.capture import relax_capture
from stager.cuda.driver import CudaDriver, check_device, refuse_capture
from stager.cuda.ring import Fill
from stager.cuda.spread import Layout, SpreadRows, copy_blocks
from stager.cuda.watch import Watch, forget
from stager.errors import StagingError

# The C library may put arrays below this size on one page with others, and a page can be registered only once.
_OWN_PAGES_NBYTES = 32 << 20


def prepare(device: int, watch: Watch) -> CudaDriver:
    """The driver calls of a device that staging may use now; its kernels are compiled.

    Raises
    ------
    DeviceError, CaptureActiveError, StagingStalled
    """
    check_device(device)
    refuse_capture(device)

    def compile_kernels() -> Any:
        relax_capture()
        watch.enter("compile")
        return kernels.compiled(device)

    return CudaDriver(device, watch.run([compile_kernels])[0])


def to_device(
    source: npt.NDArray[Any],
    driver: CudaDriver,
    watch: Watch,
    *,
    fill: Fill | None = None,
    read_ahead: Callable[[int, int], None] | None = None,
    read_only: bool = False,
    n_cores: int,
    remedy: str = "free some, or stage less",
) -> tuple[Any, Any, str]:
    """Copy an array to the device; arguments as :func:`stager.cuda.upload.copy_array`.

    Returns
    -------
    array : device array, shape and dtype of `source`
    memory : the one allocation, which lives as long as an array points into it
    path : str
    """

    def copy(memory: Any) -> str:
        return upload.copy_array(
            source, memory, driver, watch, fill=fill, read_ahead=read_ahead, read_only=read_only, n_cores=n_cores
        )

    memory, path = device_memory.load(driver, source.nbytes, watch, remedy, copy)
    return _array(source, memory), memory, path


def to_device_in_order(
    fill: Fill,
    shape: tuple[int, int],
    sources: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    driver: CudaDriver,
    watch: Watch,
    *,
    read_ahead: Callable[[int, int], None] | None = None,
    n_cores: int,
    remedy: str,
) -> tuple[Any, Any, str]:
    """Copy float32 rows that lie in pieces to the device and put them in order there.

    One allocation, for the rows, the table of pieces, and the room in which rows arrive.

    Parameters
    ----------
    fill : callable(out, first)
        Writes the bytes of the rows as they lie, from `first` on, into `out`; called by several threads.
    shape : (n_rows, n_columns)
    sources, places : (n_pieces,) int64
        Row ``sources[i] + k`` of those that lie goes to ``places[i] + k``; `sources` ascends from 0.

    Returns
    -------
    As :func:`to_device`.
    """
    scattered = scatter.Scattered(shape[0], 4 * shape[1], sources, places, n_cores)

    def copy(memory: Any) -> str:
        return scatter.copy_scattered(scattered, fill, memory, driver, watch, read_ahead=read_ahead)

    memory, path = device_memory.load(driver, scattered.nbytes, watch, remedy, copy)
    return array_at(memory, 0, shape, np.float32), memory, path


def spread(
    source: npt.NDArray[np.float32],
    driver: CudaDriver,
    watch: Watch,
    *,
    fill: Fill | None = None,
    read_ahead: Callable[[int, int], None] | None = None,
    read_only: bool = False,
    n_cores: int,
    remedy: str,
) -> tuple[SpreadRows, list[Any], str]:
    """Copy rows in blocks to this device and to all whose memory it reads; arguments as :func:`to_device`.

    Returns
    -------
    rows : SpreadRows
    memories : list
        One allocation on each device.
    path : str

    Raises
    ------
    StagingError
        If it reads no other's memory, or as :func:`to_device`.
    """
    peers = driver.peers()
    if not peers:
        raise StagingError(
            f"cuda:{driver.device} reads no other GPU's memory (peer access), so rows can't be spread; use "
            "placement='host'"
        )
    layout = Layout.of(len(source), 1 + len(peers))
    devices = [driver.device, *peers][: len(layout.spans)]
    drivers = [driver, *(CudaDriver(peer) for peer in devices[1:])]

    def read_peers() -> None:
        relax_capture()
        watch.enter("peers")
        for peer in devices[1:]:
            driver.read_peer(peer)

    watch.run([read_peers])
    memories, path = copy_blocks(
        source, layout, drivers, watch, fill=fill, read_ahead=read_ahead, read_only=read_only, n_cores=n_cores,
        remedy=remedy,
    )  # fmt: skip
    blocks = [
        array_at(memory, 0, (stop - first, source.shape[1]), np.float32)
        for memory, (first, stop) in zip(memories, layout.spans, strict=True)
    ]
    named = ", ".join(f"cuda:{device}" for device in devices)
    return SpreadRows(layout, blocks, driver.device), memories, f"{path}, in blocks on {named}"


def free_on_peers(driver: CudaDriver) -> list[int]:
    """Free bytes on each other device whose memory this one reads."""
    relax_capture()
    return [CudaDriver(peer).free_nbytes() for peer in driver.peers()]


def block_nbytes(n_rows: int, n_columns: int, n_blocks: int) -> int:
    """The most that a device holds of rows that are spread over so many."""
    return max(4 * n_columns * (stop - first) for first, stop in Layout.of(n_rows, n_blocks).spans)


def in_place(source: npt.NDArray[Any], driver: CudaDriver, watch: Watch, *, read_only: bool) -> tuple[Any, Any, str]:
    """Register an array where it lies, for kernels to read over the bus; returns as :func:`to_device`.

    Raises
    ------
    StagingError
        If this GPU can't read registered memory by its host address, or registering is refused.
    """
    if not driver.reads_registered:
        raise StagingError("this GPU can't read registered host memory by its host address; use placement='device'")
    if not read_only and source.nbytes < _OWN_PAGES_NBYTES:
        source = _on_own_pages(source)
    registration = upload.Registration(source, driver)
    try:
        registration.register(watch, read_only=read_only)
    except BaseException as error:
        del registration
        forget(error)
        raise
    memory = cupy.cuda.UnownedMemory(source.ctypes.data, source.nbytes, registration, driver.device)
    return _array(source, memory), memory, "registered in place"


def _on_own_pages(source: npt.NDArray[Any]) -> npt.NDArray[Any]:
    own = np.frombuffer(mmap.mmap(-1, max(1, source.nbytes)), source.dtype, source.size).reshape(source.shape)
    np.copyto(own, source)
    return own


def array_at(memory: Any, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """A device array in `memory`, `offset` bytes from its start; keeps the memory alive."""
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset))


def _array(source: npt.NDArray[Any], memory: Any) -> Any:
    return array_at(memory, 0, source.shape, source.dtype)
