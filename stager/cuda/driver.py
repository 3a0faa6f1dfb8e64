"""The driver calls of staging, through CuPy's runtime bindings."""

from __future__ import annotations

import threading
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from stager.cuda.capture import relax_capture, relaxed
from stager.cuda.ring import RegistrationRefused, Rows
from stager.errors import CaptureActiveError, DeviceError, StagingError

_READ_ONLY = 0x08
_PORTABLE = 0x01
_LEGACY_STREAM = 1
_OUT_OF_MEMORY = 2
_PEER_ALREADY_READ = 704
_THREADS = 256
_MAX_BLOCKS = 1 << 16

# Kernels read whole loads of so many bytes, also the last one of a memory.
LOAD_NBYTES = 16
# Another process that opens a large allocation by IPC reads it many times slower unless its size is a multiple of this.
DEVICE_PAGE_NBYTES = 2 << 20
# invalid value, out of memory, operating system, not permitted, not supported, already registered
_REFUSALS = {1, 2, 304, 800, 801, 712}


class CudaDriver:
    """One device's driver calls.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    kernels : dict of str to kernel, optional
        Of :func:`stager.cuda.kernels.compiled`; lanes that scatter need them.

    Attributes
    ----------
    n_allocations : int
        Calls of ``cudaMalloc`` made.
    """

    def __init__(self, device: int, kernels: dict[str, Any] | None = None) -> None:
        self.device, self._kernels = device, kernels or {}
        self.n_allocations = 0

    def attribute(self, name: str) -> int:
        """A device attribute by its name in ``cudaDeviceAttr`` (without ``cudaDevAttr``)."""
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), self.device))

    @property
    def shares_memory(self) -> bool:
        """CPU and GPU have one memory, or the GPU reads pageable memory by itself: there is nothing to copy."""
        return bool(self.attribute("Integrated") or self.attribute("PageableMemoryAccessUsesHostPageTables"))

    @property
    def reads_registered(self) -> bool:
        """Kernels may use the host's pointer of registered memory."""
        return bool(self.attribute("CanUseHostPointerForRegisteredMem"))

    def peers(self) -> list[int]:
        """Other devices whose memory this one's kernels can read."""
        return [
            other
            for other in range(int(runtime.getDeviceCount()))
            if other != self.device and runtime.deviceCanAccessPeer(self.device, other)
        ]

    def read_peer(self, other: int) -> None:
        """Let this device's kernels read another one's memory, from now on."""
        with relaxed(), cupy.cuda.Device(self.device):
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEER_ALREADY_READ:
                    raise StagingError(f"cuda:{self.device} can't read the memory of cuda:{other}: {error}") from error

    def free_nbytes(self) -> int:
        with relaxed(), cupy.cuda.Device(self.device):
            return int(runtime.memGetInfo()[0])

    def allocate(self, nbytes: int) -> Any:
        """One ``cudaMalloc`` of `nbytes`, up to whole loads or pages; freed when the last array into it dies.

        The driver itself takes whole pages of 2 MiB for what is larger than one.
        """
        unit = DEVICE_PAGE_NBYTES if nbytes > DEVICE_PAGE_NBYTES else LOAD_NBYTES
        with relaxed(), cupy.cuda.Device(self.device):
            try:
                memory = cupy.cuda.Memory(-(-nbytes // unit) * unit)
            except runtime.CUDARuntimeError as error:
                if error.status == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from error
                raise StagingError(f"the driver could not allocate {nbytes:,} bytes: {error}") from error
        self.n_allocations += 1
        return memory

    def register(self, ptr: int, nbytes: int, read_only: bool) -> None:
        flags = _PORTABLE
        if read_only:
            if not self.attribute("HostRegisterReadOnlySupported"):
                raise RegistrationRefused("this device can't register read-only memory")
            flags |= _READ_ONLY
        with relaxed(), cupy.cuda.Device(self.device):
            try:
                runtime.hostRegister(ptr, nbytes, flags)
            except runtime.CUDARuntimeError as error:
                if error.status in _REFUSALS:
                    raise RegistrationRefused(str(error)) from error
                raise StagingError(f"the driver failed to register {nbytes:,} bytes: {error}") from error

    def unregister(self, ptr: int) -> None:
        with relaxed(), cupy.cuda.Device(self.device):
            try:
                runtime.hostUnregister(ptr)
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the driver failed to unregister host memory: {error}") from error

    def synchronize(self) -> None:
        with relaxed(), cupy.cuda.Device(self.device):
            try:
                runtime.deviceSynchronize()
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the GPU failed: {error}") from error

    def lane(self) -> CudaLane:
        return CudaLane(self.device, self._kernels)


class CudaLane:
    """A non-blocking stream for the calling thread."""

    def __init__(self, device: int, kernels: dict[str, Any]) -> None:
        self._device, self._kernels = cupy.cuda.Device(device), kernels
        self._device.use()
        relax_capture()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int, slot: int) -> None:
        try:
            runtime.memcpyAsync(device_ptr, host_ptr, nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
            self._events[slot].record(self._stream)
        except runtime.CUDARuntimeError as error:
            raise StagingError(f"the copy of {nbytes:,} bytes to the GPU failed: {error}") from error

    def scatter(self, rows: Rows, memory: Any, slot: int) -> None:
        try:
            with self._stream:
                self._kernels["scatter_rows"](
                    (min(_MAX_BLOCKS, -(-rows.count // _THREADS)),),
                    (_THREADS,),
                    (
                        np.uint64(rows.room_ptr), np.uint64(memory.ptr), np.int64(rows.first), np.int64(rows.count),
                        np.int32(rows.n_columns), np.uint64(rows.sources_ptr), np.uint64(rows.places_ptr),
                        np.int64(rows.n_pieces),
                    ),
                )  # fmt: skip
            self._events[slot].record(self._stream)
        except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise StagingError(f"{rows.count:,} rows could not be put in order on the GPU: {error}") from error

    def wait(self, slot: int) -> None:
        try:
            self._events[slot].synchronize()
        except runtime.CUDARuntimeError as error:
            raise StagingError(f"a copy to the GPU failed: {error}") from error


def refuse_capture(device: int) -> None:
    """Raise if the caller's stream or the legacy stream of `device` is capturing a graph.

    Raises
    ------
    CaptureActiveError
    """
    found: list[str] = []
    with cupy.cuda.Device(device):
        streams = {"the current stream": cupy.cuda.get_current_stream().ptr, "the legacy stream": _LEGACY_STREAM}
    # Asked on a relaxed thread: the query about the legacy stream would break a capture in global mode.
    for name, stream in streams.items():
        thread = threading.Thread(target=lambda n=name, s=stream: _probe(device, n, s, found))
        thread.start()
        thread.join()
    if found:
        raise CaptureActiveError(
            f"{found[0]} is capturing a CUDA graph; stage before the capture begins, or after it has ended"
        )


def _probe(device: int, name: str, stream: int, found: list[str]) -> None:
    relax_capture()
    with cupy.cuda.Device(device):
        try:
            capturing = runtime.streamIsCapturing(stream)
        except runtime.CUDARuntimeError:
            # The legacy stream answers with an error while a blocking stream captures.
            capturing = True
    if capturing:
        found.append(name)


def describe(device: int) -> str:
    """The device's name."""
    name: bytes = runtime.getDeviceProperties(device)["name"]
    return name.decode()


def check_device(device: int) -> None:
    """Raise if the device does not exist or does not answer.

    Raises
    ------
    DeviceError
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"the CUDA driver does not answer: {error}. See nvidia-smi; or use device='cpu'") from error
    if not 0 <= device < count:
        raise DeviceError(f"there is no device cuda:{device}; this machine has {count}: cuda:0 to cuda:{count - 1}")


def pinned_copy_gbps(device: int, nbytes: int = 1 << 28) -> float:
    """The bus ceiling: best of five copies of one pinned buffer to the device, in GB/s (10**9 bytes)."""
    with cupy.cuda.Device(device):
        host, target = cupy.cuda.PinnedMemory(nbytes), cupy.cuda.Memory(nbytes)
        stream = cupy.cuda.Stream(non_blocking=True)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        best = 0.0
        for _ in range(6):
            begin.record(stream)
            runtime.memcpyAsync(target.ptr, host.ptr, nbytes, runtime.memcpyHostToDevice, stream.ptr)
            end.record(stream)
            end.synchronize()
            best = max(best, nbytes / cupy.cuda.get_elapsed_time(begin, end) / 1e6)
        return best
