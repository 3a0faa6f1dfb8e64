"""A driver of staging over ordinary memory, which notices what a GPU would only sometimes punish."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from stager.cuda.pages import PAGE_NBYTES
from stager.cuda.ring import RegistrationRefused, Rows


class FakeMemory:
    """A device allocation."""

    def __init__(self, nbytes: int) -> None:
        # Never zero, so that bytes that did not arrive show.
        self.data = np.full(nbytes, 0xA5, np.uint8)
        self.ptr, self.size = self.data.ctypes.data, nbytes


class FakeDriver:
    """Implements ``ring.Driver``; a copy happens as late as its lane may wait for it.

    Attributes
    ----------
    before : dict of str to callable(k)
        Called before the k-th call (from 0) of "free", "allocate", "register", "unregister", "synchronize", "lane",
        "copy", "scatter" or "wait": raise there, or block.
    calls : Counter
    registered : dict of int to int
        Address to bytes.
    faults : list of str
        What a driver's user must not do.
    """

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free
        self.before: dict[str, Callable[[int], None]] = {}
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self.read_only: list[bool] = []
        self.faults: list[str] = []
        self.pageable_nbytes = 0
        self.most_registered_nbytes = 0
        self.memories: weakref.WeakSet[FakeMemory] = weakref.WeakSet()
        self.lanes: weakref.WeakSet[FakeLane] = weakref.WeakSet()
        self.lock = threading.RLock()

    def call(self, name: str) -> None:
        with self.lock:
            number = self.calls[name]
            self.calls[name] += 1
        if name in self.before:
            self.before[name](number)

    def free_nbytes(self) -> int:
        self.call("free")
        return self.free

    def allocate(self, nbytes: int) -> FakeMemory:
        self.call("allocate")
        memory = FakeMemory(nbytes)
        self.memories.add(memory)
        return memory

    def register(self, ptr: int, nbytes: int, read_only: bool) -> None:
        self.call("register")
        with self.lock:
            if ptr % PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes <= 0:
                self.faults.append(f"registered {nbytes} bytes at {ptr:#x}: no whole pages")
            if any(ptr < other + size and other < ptr + nbytes for other, size in self.registered.items()):
                self.faults.append(f"registered {ptr:#x} twice")
            self.registered[ptr] = nbytes
            self.read_only.append(read_only)
            self.most_registered_nbytes = max(self.most_registered_nbytes, sum(self.registered.values()))

    def unregister(self, ptr: int) -> None:
        self.call("unregister")
        with self.lock:
            nbytes = self.registered.pop(ptr, None)
            if nbytes is None:
                self.faults.append(f"unregistered {ptr:#x}, which is not registered")
            elif any(lane.reads(ptr, ptr + nbytes) for lane in self.lanes):
                self.faults.append(f"unregistered {ptr:#x} under a copy that reads it")

    def synchronize(self) -> None:
        self.call("synchronize")

    def lane(self) -> FakeLane:
        self.call("lane")
        lane = FakeLane(self)
        with self.lock:
            self.lanes.add(lane)
        return lane

    def memory_at(self, ptr: int, nbytes: int) -> FakeMemory | None:
        return next((m for m in self.memories if m.ptr <= ptr and ptr + nbytes <= m.ptr + m.size), None)

    def check(self, n_memories: int = 0) -> None:
        """Nothing was done wrong, nothing is registered, and so many allocations live; without collecting garbage."""
        assert not self.faults, self.faults
        assert not self.registered
        assert len(self.memories) == n_memories


class FakeLane:
    """Implements ``ring.Lane``."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.thread = driver, threading.get_ident()
        # (slot, device address, host address, bytes), as queued; and rows to scatter, which read no host memory
        self.queue: list[tuple[int, int, int, int] | tuple[int, Rows, int, int]] = []

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int, slot: int) -> None:
        driver = self.driver
        driver.call("copy")
        with driver.lock:
            if threading.get_ident() != self.thread:
                driver.faults.append("a lane was used by two threads")
            if driver.memory_at(device_ptr, nbytes) is None:
                driver.faults.append("a copy goes beyond the allocation")
            touched = [
                (ptr, size)
                for ptr, size in driver.registered.items()
                if ptr < host_ptr + nbytes and host_ptr < ptr + size
            ]
            if not touched:
                driver.pageable_nbytes += nbytes
            elif len(touched) > 1 or host_ptr < touched[0][0] or host_ptr + nbytes > sum(touched[0]):
                driver.faults.append("a copy straddles the edge of a registration")
            self.queue.append((slot, device_ptr, host_ptr, nbytes))

    def scatter(self, rows: Rows, memory: Any, slot: int) -> None:
        driver = self.driver
        driver.call("scatter")
        with driver.lock:
            if threading.get_ident() != self.thread:
                driver.faults.append("a lane was used by two threads")
            own = driver.memory_at(memory.ptr, 1)
            for ptr, nbytes in (
                (rows.room_ptr, 4 * rows.count * rows.n_columns),
                (rows.sources_ptr, 8 * rows.n_pieces),
                (rows.places_ptr, 8 * rows.n_pieces),
            ):
                if own is None or driver.memory_at(ptr, nbytes) is not own:
                    driver.faults.append("rows or tables to scatter lie beyond the allocation")
            self.queue.append((slot, rows, memory.ptr, 0))

    def wait(self, slot: int) -> None:
        try:
            self.driver.call("wait")
        except BaseException:
            # A wait that reports an error reports the end of the copy, too.
            self.queue.clear()
            raise
        with self.driver.lock:
            last = max((i for i, entry in enumerate(self.queue) if entry[0] == slot), default=-1)
            for _, device_ptr, host_ptr, nbytes in self.queue[: last + 1]:
                if isinstance(device_ptr, Rows):
                    self.put_in_order(device_ptr, host_ptr)
                elif self.driver.memory_at(device_ptr, nbytes) is None:
                    self.driver.faults.append("the allocation died under a copy")
                else:
                    ctypes.memmove(device_ptr, host_ptr, nbytes)
            del self.queue[: last + 1]

    def put_in_order(self, rows: Rows, ptr: int) -> None:
        memory = self.driver.memory_at(ptr, 1)
        if memory is None:
            self.driver.faults.append("the allocation died under a kernel")
            return

        def at(where: int, dtype: type, count: int) -> np.ndarray:
            return np.frombuffer(memory.data, dtype, count, where - memory.ptr)

        sources, places = (at(p, np.int64, rows.n_pieces) for p in (rows.sources_ptr, rows.places_ptr))
        came = at(rows.room_ptr, np.uint32, rows.count * rows.n_columns).reshape(-1, rows.n_columns)
        numbers = rows.first + np.arange(rows.count)
        piece = np.searchsorted(sources, numbers, "right") - 1
        go = places[piece] + numbers - sources[piece]
        stop = 4 * rows.n_columns * (int(go.max()) + 1)
        if ptr + stop > min(rows.sources_ptr, rows.room_ptr):
            self.driver.faults.append("rows go beyond the rows")
            return
        memory.data[:stop].view(np.uint32).reshape(-1, rows.n_columns)[go] = came

    def reads(self, first: int, stop: int) -> bool:
        return any(host_ptr < stop and first < host_ptr + nbytes for _, _, host_ptr, nbytes in self.queue)


def at(k: int, error: BaseException) -> Callable[[int], None]:
    """Raises `error` at the k-th call."""

    def raise_at(number: int) -> None:
        if number == k:
            raise error

    return raise_at


def refuse(k: int, stop: int | None = None) -> Callable[[int], None]:
    """Refuses the registrations from the k-th on, before `stop`."""

    def refuse_at(number: int) -> None:
        if number >= k and (stop is None or number < stop):
            raise RegistrationRefused("the fake refuses")

    return refuse_at


class Gate:
    """Blocks the k-th call until it is opened."""

    def __init__(self, k: int = 0) -> None:
        self.k, self.reached, self.opened = k, threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        if number == self.k:
            self.reached.set()
            assert self.opened.wait(30)


def lanes_end(seconds: float = 10.0) -> None:
    """Wait until no thread of staging runs."""
    for thread in threading.enumerate():
        if thread.name.startswith("stager-") and not thread.name.startswith("stager-gather"):
            thread.join(seconds)
            assert not thread.is_alive()


def without_collector(function: Callable[[], Any]) -> Any:
    """Call with the garbage collector off, so that only counting references frees memory."""
    gc.collect()
    gc.disable()
    try:
        return function()
    finally:
        gc.enable()
