"""The device that serves, seen from outside."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
from harness import measure, row

MIB = 1 << 20


class Machine:
    """The device that serves: when it is idle, how much of its memory is taken, and how fast it copies."""

    def __init__(self, device: str) -> None:
        self.device = device
        #: Bytes read and written a second by a copy on the device, and bytes a second that come over the bus.
        self.copy_rate = self.bus_rate = 0.0

    def wait(self) -> None:
        if self.device == "cuda":
            import cupy

            cupy.cuda.Device().synchronize()

    def empty_pools(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import cupy

            self.wait()
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()

    def taken(self) -> int:
        """Bytes of device memory that are in use or kept in pools, by anybody."""
        if self.device == "cpu":
            return 0
        from cupy.cuda import runtime

        free, total = runtime.memGetInfo()
        return int(total - free)

    def measure_ceilings(self) -> list[dict[str, Any]]:
        """A copy on the device and one over the bus, of random bits."""
        import cupy
        from cupy.cuda import runtime

        n, n_pinned, stream = 2 << 30, 256 * MIB, cupy.cuda.Stream(non_blocking=True)
        source = cupy.arange(n // 4, dtype=cupy.uint32) * cupy.uint32(2_654_435_761)
        target, pinned = cupy.empty_like(source), cupy.cuda.alloc_pinned_memory(n_pinned)
        np.frombuffer(pinned, np.uint8, n_pinned)[:] = np.random.default_rng(1).integers(1, 256, n_pinned, np.uint8)
        self.wait()

        def on_device() -> None:
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, n, runtime.memcpyDeviceToDevice, stream.ptr)
            stream.synchronize()

        def over_bus() -> None:
            runtime.memcpyAsync(target.data.ptr, pinned.ptr, n_pinned, runtime.memcpyHostToDevice, stream.ptr)
            stream.synchronize()

        copy, bus = measure(on_device, repeats=10), measure(over_bus, repeats=10)
        self.copy_rate, self.bus_rate = 2 * n / copy["seconds"], n_pinned / bus["seconds"]
        return [
            row("copy on the device, 2 GiB, bytes read and written", copy, nbytes=2 * n),
            row("pinned copy to the device, 256 MiB", bus, nbytes=n_pinned),
        ]
