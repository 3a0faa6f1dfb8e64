"""The driver calls of staging, through CuPy's runtime bindings."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from stager.cuda.upload import RegistrationRefused
from stager.errors import CaptureActiveError, DeviceError, StagingError, StagingMemoryError

_READ_ONLY = 0x08
_PORTABLE = 0x01
_LEGACY_STREAM = 1
_CAPTURE_RELAXED = 2

# invalid value, out of memory, operating system, not permitted, not supported, already registered
_REFUSALS = {1, 2, 304, 800, 801, 712}


class CudaDriver:
    """One device's driver calls.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    """

    def __init__(self, device: int) -> None:
        self.device = device

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

    def free_nbytes(self) -> int:
        with cupy.cuda.Device(self.device):
            return int(runtime.memGetInfo()[0])

    def allocate(self, nbytes: int) -> Any:
        """One ``cudaMalloc`` of exactly `nbytes`; freed when the last array that points into it dies."""
        relax_capture()
        with cupy.cuda.Device(self.device):
            try:
                return cupy.cuda.Memory(nbytes)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise StagingMemoryError(f"the GPU has no {nbytes:,} bytes in one piece: {error}") from error
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the driver could not allocate {nbytes:,} bytes: {error}") from error

    def register(self, ptr: int, nbytes: int, read_only: bool) -> None:
        flags = _PORTABLE
        if read_only:
            if not self.attribute("HostRegisterReadOnlySupported"):
                raise RegistrationRefused("this device can't register read-only memory")
            flags |= _READ_ONLY
        with cupy.cuda.Device(self.device):
            try:
                runtime.hostRegister(ptr, nbytes, flags)
            except runtime.CUDARuntimeError as error:
                if error.status in _REFUSALS:
                    raise RegistrationRefused(str(error)) from error
                raise StagingError(f"the driver failed to register {nbytes:,} bytes: {error}") from error

    def unregister(self, ptr: int) -> None:
        with cupy.cuda.Device(self.device):
            runtime.hostUnregister(ptr)

    def synchronize(self) -> None:
        with cupy.cuda.Device(self.device):
            runtime.deviceSynchronize()

    def lane(self) -> CudaLane:
        return CudaLane(self.device)


class CudaLane:
    """A non-blocking stream for the calling thread."""

    def __init__(self, device: int) -> None:
        self._device = cupy.cuda.Device(device)
        self._device.use()
        relax_capture()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned: npt.NDArray[np.uint8] | None = None

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int) -> None:
        try:
            runtime.memcpyAsync(device_ptr, host_ptr, nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        except runtime.CUDARuntimeError as error:
            raise StagingError(f"the copy of {nbytes:,} bytes to the GPU failed: {error}") from error

    def wait(self) -> None:
        try:
            self._stream.synchronize()
        except runtime.CUDARuntimeError as error:
            raise StagingError(f"a copy to the GPU failed: {error}") from error

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A pinned buffer of this lane, exactly `nbytes` long; the same one at each call."""
        if self._pinned is None:
            try:
                memory = cupy.cuda.PinnedMemory(nbytes)
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the driver gives no pinned buffer of {nbytes:,} bytes: {error}") from error
            # The buffer protocol of the pointer holds the memory for as long as the array lives.
            self._pinned = np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
        return self._pinned


def relax_capture() -> None:
    """Let this thread make driver calls while another thread captures a graph in global mode."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


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
