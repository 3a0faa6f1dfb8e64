"""Device memory of one process, read by another: CUDA IPC handles.

A handle names a whole allocation of ``cudaMalloc``, so it travels with the offset into it. Devices are matched by UUID:
what is ``cuda:1`` here may be ``cuda:0`` there. Whoever opens a handle must close it before the owner frees the memory;
an owner that *dies* is no danger, the driver keeps the memory until the last user has closed it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import cupy
from cupy.cuda import runtime

from stager.cuda.capture import relaxed
from stager.errors import DeviceError, StagingError

# invalid value, invalid context, mapping failed, invalid handle, not supported, peer access unsupported
_UNUSABLE = {1, 201, 205, 217, 400, 801}


@dataclass(frozen=True)
class Handle:
    """Memory that another process may open.

    Attributes
    ----------
    uuid : str
        Of the device.
    handle : bytes
        Of the allocation, 64 bytes.
    offset : int
        Bytes from the allocation's start.
    nbytes : int
    """

    uuid: str
    handle: bytes
    offset: int
    nbytes: int


class Driver(Protocol):
    """The driver calls of sharing; :class:`CudaIpc`, or a fake."""

    def uuids(self) -> list[str]: ...
    def reads(self, device: int, other: int) -> bool: ...
    def synchronize(self, device: int) -> None: ...
    def address_range(self, device: int, ptr: int) -> tuple[int, int]: ...
    def get_handle(self, device: int, ptr: int) -> bytes: ...
    def open_handle(self, device: int, handle: bytes) -> int: ...
    def close_handle(self, device: int, ptr: int) -> None: ...


_LIBRARY = "libcuda.so.1"
_int_p = ctypes.POINTER(ctypes.c_int)
# What the driver's calls take; each gives a CUresult, an int. Devices are ints, device pointers 64 bits.
_TAKES = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetCount": [_int_p],
    "cuDeviceGet": [_int_p, ctypes.c_int],
    "cuDeviceGetUuid_v2": [ctypes.c_char_p, ctypes.c_int],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64],
}


def _library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DeviceError("the NVIDIA driver (libcuda.so.1) is missing; attach with device='cpu'") from error
    for name, takes in _TAKES.items():
        call = getattr(library, name)
        call.argtypes, call.restype = takes, ctypes.c_int
    return library


class CudaIpc:
    """CUDA's calls, through CuPy's runtime bindings; what these lack, from the driver itself."""

    def uuids(self) -> list[str]:
        """UUIDs of the devices that this process sees, by ordinal, as nvidia-smi tells them; makes no context."""
        # Of the driver itself: CuPy takes the 16 bytes for text, which ends at the first zero.
        library, count, device, found = _library(), ctypes.c_int(0), ctypes.c_int(0), ctypes.create_string_buffer(16)
        uuids = []
        status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        for ordinal in range(count.value):
            status = status or library.cuDeviceGet(ctypes.byref(device), ordinal)
            status = status or library.cuDeviceGetUuid_v2(found, device)
            uuids.append(f"GPU-{uuid.UUID(bytes=found.raw)}")
        if status:
            raise DeviceError(
                f"the CUDA driver does not tell which GPUs there are (CUDA error {status}); see nvidia-smi"
            )
        return uuids

    def reads(self, device: int, other: int) -> bool:
        """Whether a device's kernels can read the memory of another one."""
        return device == other or bool(runtime.deviceCanAccessPeer(device, other))

    def synchronize(self, device: int) -> None:
        """Wait for what is queued on the device."""
        with relaxed(), cupy.cuda.Device(device):
            try:
                runtime.deviceSynchronize()
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the GPU failed: {error}") from error

    def address_range(self, device: int, ptr: int) -> tuple[int, int]:
        """Start and bytes of the allocation that `ptr` points into."""
        base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        with relaxed(), cupy.cuda.Device(device):
            # The driver wants the thread to have a context, which the runtime gives it with its first call.
            runtime.free(0)
            status = _library().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ptr)
        if status:
            raise StagingError(f"the driver knows no allocation at {ptr:#x} (CUDA error {status})")
        return base.value, size.value

    def get_handle(self, device: int, ptr: int) -> bytes:
        with relaxed(), cupy.cuda.Device(device):
            try:
                return bytes(runtime.ipcGetMemHandle(ptr))
            except runtime.CUDARuntimeError as error:
                raise StagingError(
                    f"the driver gives no handle for other processes ({error}); only memory of cudaMalloc can be "
                    f"shared, not managed memory nor that of a CUDA memory pool"
                ) from error

    def open_handle(self, device: int, handle: bytes) -> int:
        """The allocation's address for kernels of the device, which may be another one than it lies on."""
        with relaxed(), cupy.cuda.Device(device):
            try:
                return int(runtime.ipcOpenMemHandle(handle))
            except runtime.CUDARuntimeError as error:
                if error.status not in _UNUSABLE:
                    raise StagingError(f"the GPU failed: {error}") from error
                raise StagingError(
                    f"the driver does not open the service's memory here ({error}). The service must be another "
                    f"process that lives; in containers both need one PID and one IPC namespace"
                ) from error

    def close_handle(self, device: int, ptr: int) -> None:
        with relaxed(), cupy.cuda.Device(device):
            try:
                runtime.ipcCloseMemHandle(ptr)
            except runtime.CUDARuntimeError as error:
                raise StagingError(f"the driver failed to close shared memory: {error}") from error


def export(ptr: int, nbytes: int, device: int, driver: Driver) -> Handle:
    """A handle for `nbytes` at `ptr`, once everything queued on the device, uploads among it, has run.

    Raises
    ------
    StagingError
        If the memory can't be shared.
    """
    driver.synchronize(device)
    base, size = driver.address_range(device, ptr)
    offset = ptr - base
    if offset < 0 or offset + nbytes > size:
        raise StagingError(f"{nbytes:,} bytes at {ptr:#x} are not inside the allocation of {size:,} bytes at {base:#x}")
    return Handle(driver.uuids()[device], driver.get_handle(device, base), offset, nbytes)


def device_of(wanted: str, driver: Driver) -> int:
    """The ordinal that the device of this UUID has in this process.

    Raises
    ------
    DeviceError
        If this process does not see it.
    """
    seen = driver.uuids()
    if wanted not in seen:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise DeviceError(
            f"the rows lie on {wanted}, and this process sees {', '.join(seen) or 'none'}{hidden}; let it see "
            f"that one, or attach with device='cpu'"
        )
    return seen.index(wanted)


class Mapping:
    """Memory of another process, opened. Closed by :meth:`close`, once; nothing may point into it then.

    Parameters
    ----------
    handle : Handle
    driver : Driver
    reader : int, optional
        The device whose kernels are to read it; default: the one that it lies on.

    Attributes
    ----------
    device, owner : int
        Ordinals in this process of the device that reads it, and of the one that it lies on.
    ptr : int
        Where the memory begins here.

    Raises
    ------
    DeviceError, StagingError
    """

    def __init__(self, handle: Handle, driver: Driver, reader: int | None = None) -> None:
        self._driver, self._process = driver, os.getpid()
        self._lock = threading.Lock()
        self.owner = device_of(handle.uuid, driver)
        self.device = self.owner if reader is None else reader
        if not driver.reads(self.device, self.owner):
            raise DeviceError(
                f"cuda:{self.device} can't read the memory of cuda:{self.owner} (no peer access), where the service "
                f"has rows; attach on that GPU, or with device='cpu'"
            )
        self._base: int | None = driver.open_handle(self.device, handle.handle)
        self.ptr = self._base + handle.offset

    def close(self) -> None:
        """Wait for what is queued on the device, and give the mapping up; a forked child has none."""
        with self._lock:
            base, self._base = self._base, None
        if base is None or self._process != os.getpid():
            return
        try:
            self._driver.synchronize(self.device)
        finally:
            self._driver.close_handle(self.device, base)


def array_of(mapping: Mapping, nbytes: int, owner: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """A device array over a mapping, and its memory, which holds `owner` until the last array over it has died."""
    memory = cupy.cuda.UnownedMemory(mapping.ptr, nbytes, owner, mapping.device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0)), memory
