"""What a measurement on a GPU needs: the ceiling of a copy, and waiting for the end of what was queued."""

from __future__ import annotations

from collections.abc import Callable

import cupy
from cupy.cuda import runtime

from stager.cuda.exports import Framework, WholeDevice, export_to

_COPY_NBYTES = 1 << 28
_LEAST_NBYTES = 1 << 20
_COPIES = 10


def copy_nbytes(device: int) -> int:
    """Bytes to copy that are more than the device's cache holds; fewer where its memory is short."""
    with cupy.cuda.Device(device):
        return min(_COPY_NBYTES, max(int(runtime.memGetInfo()[0]) // 4, _LEAST_NBYTES))


def device_copy_gbps(device: int, nbytes: int) -> float:
    """The ceiling of a gather: best of ten copies on the device, in GB written a second (10**9 bytes)."""
    with cupy.cuda.Device(device):
        source, target = cupy.cuda.Memory(nbytes), cupy.cuda.Memory(nbytes)
        stream = cupy.cuda.Stream(non_blocking=True)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        best = 0.0
        for _ in range(1 + _COPIES):
            begin.record(stream)
            runtime.memcpyAsync(target.ptr, source.ptr, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
            end.record(stream)
            end.synchronize()
            best = max(best, nbytes / cupy.cuda.get_elapsed_time(begin, end) / 1e6)
        return best


def consumer_wait(device: int, to: Framework | None) -> Callable[[], None]:
    """Waits for what the current stream has queued, of CuPy or torch; of JAX, for the whole device.

    So batches that were handed out are waited for, and those that are gathered ahead are not.

    Raises
    ------
    ConfigError
        If the framework can't be imported, or sees no GPU.
    """
    on_device = cupy.cuda.Device(device)
    export = export_to(to, device, None)

    def wait() -> None:
        with on_device:
            stream = export.stream()
            if isinstance(stream, WholeDevice):
                on_device.synchronize()
            else:
                stream.synchronize()

    return wait
