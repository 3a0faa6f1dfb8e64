"""Where requests go that the slab can't serve: a CUDA memory pool of the arena's own, one per device.

Memory is allocated and freed in the order of the stream that asked for it. The destructor of an overflow token only
appends to a queue; the frees are issued later, by the arena, outside any capture. The device's default pool and its
settings are never touched.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from stager.cuda.arena_driver import DEVICE_ERROR, Driver
from stager.cuda.arena_tokens import token_type

_PER_THREAD = 2  # cudaStreamPerThread: one handle, another stream in every thread


class OverflowMemoryError(Exception):
    """The device has no memory left, after everything was tried. The arena turns it into CuPy's error."""


class Lane:
    """A stream that overflow memory was allocated on; held by every token, so that the stream outlives them."""

    __slots__ = ("device", "stream", "thread")

    def __init__(self, stream: Any, device: int, thread: threading.Thread | None) -> None:
        self.stream, self.device, self.thread = stream, device, thread


class Overflow:
    """Memory pools of the driver, and the tokens for what they gave out.

    Parameters
    ----------
    driver : Driver
        CUDA, or a fake.
    device : int
        The arena's device; its pool is made at once, those of other devices when first needed.
    keep_nbytes : int
        Freed memory that each pool keeps for reuse rather than giving it back to the device.

    Attributes
    ----------
    n_issued, nbytes_issued, n_freed, nbytes_freed : int
        Allocations so far, and those whose free was issued.
    """

    def __init__(self, driver: Driver, device: int, keep_nbytes: int) -> None:
        self._driver, self._keep_nbytes = driver, keep_nbytes
        self._pools = {device: driver.pool_create(device, keep_nbytes)}
        # (address, rounded bytes, lane) of dead tokens, in the order of their death
        self._dead: deque[tuple[int, int, Lane]] = deque()
        self.n_issued = self.nbytes_issued = self.n_freed = self.nbytes_freed = 0
        self.forked = False
        self.token = token_type()

    def allocate(self, size: int, stream: Any, device: int, owner: object) -> Any:
        """A token over ``size`` bytes, to be used on ``stream``.

        Raises
        ------
        OverflowMemoryError
            If there is no memory, also after waiting, trimming, emptying CuPy's pool and collecting garbage.
        """
        self.drain()
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = self._driver.pool_create(device, self._keep_nbytes)
        start = self._try(size, pool, stream)
        if start is None:
            self._make_room(pool, stream)
            start = self._try(size, pool, stream)
        if start is None:
            raise OverflowMemoryError
        thread = threading.current_thread() if stream.ptr == _PER_THREAD else None
        # Each of these statements is one step under the interpreter's lock: threads can't lose an update between them.
        self.n_issued += 1
        self.nbytes_issued += size
        # The token holds the pools, its entry in the queue does not: with the last token the pools go, and drain it.
        token = self.token(start, size, (self, owner), device)
        token.__del__ = partial(self._dead.append, (start, size, Lane(stream, device, thread)))
        return token

    def _try(self, size: int, pool: int, stream: Any) -> int | None:
        try:
            return self._driver.pool_malloc(size, pool, stream)
        except DEVICE_ERROR as error:
            if self._driver.out_of_memory(error):
                return None
            raise

    def _make_room(self, pool: int, stream: Any) -> None:
        driver = self._driver
        gc.collect()
        self.drain()
        driver.synchronize(stream)
        driver.pool_trim(pool)
        driver.release_other_pools()

    def drain(self) -> None:
        """Issue the frees of dead tokens. Those of a capturing stream, or of another thread's own stream, wait."""
        dead = self._dead
        later = []
        try:
            while dead and not self.forked:
                try:
                    entry = dead.popleft()
                except IndexError:  # another thread was faster
                    break
                if not self._free(*entry):
                    later.append(entry)
        finally:
            dead.extend(later)

    def _free(self, start: int, size: int, lane: Lane) -> bool:
        driver = self._driver
        orphan = False
        if lane.thread is not None and lane.thread is not threading.current_thread():
            if lane.thread.is_alive():
                return False
            orphan = True  # the handle now means the stream of whoever asks
        elif driver.capturing(lane.stream):
            return False
        try:
            if orphan:
                driver.free_after_device(start, lane.device)
            else:
                driver.pool_free(start, lane.stream, lane.device)
        except DEVICE_ERROR:
            if orphan:
                raise
            driver.free_after_device(start, lane.device)  # a stream that its owner destroyed
        self.n_freed += 1
        self.nbytes_freed += size
        return True

    def live(self) -> tuple[int, int]:
        """Number and bytes of the overflow allocations that something points into."""
        dead = self._dead.copy()
        return (
            self.n_issued - self.n_freed - len(dead),
            self.nbytes_issued - self.nbytes_freed - sum(size for _, size, _ in dead),
        )

    def reserved_nbytes(self) -> int:
        """Device bytes the pools hold, used or kept for reuse. Asks the driver."""
        return sum(self._driver.pool_reserved(pool) for pool in self._pools.values())

    def trim(self) -> None:
        """Give unused pool memory back to the device."""
        self.drain()
        for pool in self._pools.values():
            self._driver.pool_trim(pool)

    def after_fork(self) -> None:
        """Never speak to CUDA again: this is a child of the process that owns the pools."""
        self.forked = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Reached when arena and tokens are all gone. At the end of the process the driver cleans up by itself.
        if is_finalizing() or getattr(self, "forked", True):
            return
        try:
            self.drain()
            for pool in self._pools.values():
                self._driver.pool_destroy(pool)
        except (DEVICE_ERROR, AttributeError):
            pass
