"""Every question and order that the arena has for CUDA, in one place, so that tests can put a fake there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import runtime

from stager.cuda.capture import relaxed

DEVICE_ERROR: type[Exception] = runtime.CUDARuntimeError
_PINNED, _NO_HANDLE, _ON_DEVICE = 1, 0, 1  # cudaMemAllocationType, cudaMemHandleType, cudaMemLocationType
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Driver:
    """The CUDA calls of the arena."""

    def device(self) -> int:
        """Index of the calling thread's device."""
        return int(runtime.getDevice())

    def stream(self) -> Any:
        """The calling thread's current stream."""
        return cupy.cuda.get_current_stream()

    def lookup(self, stream: Any, device: int) -> Callable[[], object]:
        """A function that returns ``stream`` itself as long as stream and device are the current ones.

        The stream object tells the device too, except for the default streams, which all devices share.
        """
        current: Callable[[], object] = cupy.cuda.get_current_stream
        if getattr(stream, "device_id", -1) >= 0 or runtime.getDeviceCount() == 1:
            return current
        get_device = runtime.getDevice
        return lambda: current() if get_device() == device else None

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        with relaxed():
            free, total = runtime.memGetInfo()
        return int(free), int(total)

    def slab(self, nbytes: int) -> Any:
        """Device memory of that size; freed with its last reference."""
        return cupy.cuda.Memory(nbytes)

    def fill(self, start: int, nbytes: int, stream: Any) -> None:
        """Queue ``nbytes`` of 0xFF on ``stream``."""
        runtime.memsetAsync(start, 0xFF, nbytes, stream.ptr)

    def capturing(self, stream: Any) -> bool:
        """Whether ``stream`` is capturing a graph."""
        if stream.ptr in (0, 1):  # the legacy stream can't, and asking would disturb the capture of another one
            return False
        return bool(runtime.streamIsCapturing(stream.ptr))

    def order(self, before: Any, after: Any) -> None:
        """Let future work on ``after`` wait for what is queued on ``before``."""
        after.wait_event(before.record(cupy.cuda.Event(disable_timing=True)))

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, or for the current device."""
        if stream is None:
            runtime.deviceSynchronize()
        else:
            runtime.streamSynchronize(stream.ptr)

    def pool_create(self, device: int, keep_nbytes: int) -> int:
        """A memory pool of our own that keeps up to ``keep_nbytes`` of freed memory."""
        with relaxed():
            pool: int = runtime.memPoolCreate(runtime.MemPoolProps(_PINNED, _NO_HANDLE, _ON_DEVICE, device))
            runtime.memPoolSetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold, keep_nbytes)
            return pool

    def pool_malloc(self, nbytes: int, pool: int, stream: Any) -> int:
        """Address of ``nbytes`` that may be used on ``stream`` from here on."""
        with relaxed():
            return int(runtime.mallocFromPoolAsync(nbytes, pool, stream.ptr))

    def pool_free(self, start: int, stream: Any, device: int) -> None:
        """Free in the order of ``stream``."""
        current = runtime.getDevice()
        with relaxed():
            if current == device:
                runtime.freeAsync(start, stream.ptr)
                return
            runtime.setDevice(device)
            try:
                runtime.freeAsync(start, stream.ptr)
            finally:
                runtime.setDevice(current)

    def free_after_device(self, start: int, device: int) -> None:
        """Free what has lost its stream, once the device is idle."""
        with cupy.cuda.Device(device):
            runtime.deviceSynchronize()
            runtime.free(start)

    def pool_trim(self, pool: int) -> None:
        """Give the pool's unused memory back."""
        with relaxed():
            runtime.memPoolTrimTo(pool, 0)

    def pool_reserved(self, pool: int) -> int:
        """Bytes that the pool holds on the device, used or not."""
        return int(runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReservedMemCurrent))

    def pool_destroy(self, pool: int) -> None:
        """Destroy the pool; the driver keeps it until the last of its memory is freed."""
        runtime.memPoolDestroy(pool)

    def out_of_memory(self, error: Exception) -> bool:
        """Whether a CUDA error means that the device has no memory left."""
        return getattr(error, "status", None) == _OUT_OF_MEMORY

    def release_other_pools(self) -> None:
        """Free what CuPy's default pool holds unused on the current device."""
        cupy.get_default_memory_pool().free_all_blocks()

    def other_pools(self) -> dict[str, int]:
        """Bytes that other pools of this process hold on the current device, by name."""
        held = {"cupy": int(cupy.get_default_memory_pool().total_bytes())}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            held["torch"] = int(torch.cuda.memory_reserved())
        return held
