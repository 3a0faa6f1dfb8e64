"""The allocator itself: a short fast path, and a slow path for everything else.

A request that came before and finds a free block in its bin takes it, and that is all. *Everything* else goes the slow
way: fresh slab, merging, overflow, another stream or device, capture, tracing, poison, a forked child. Modes that must
see every request close the gate, so that the fast path needs one comparison for all of them.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from cupy.cuda import MemoryPointer, UnownedMemory
from cupy.cuda.memory import OutOfMemoryError

from stager.cuda import arena_facts as facts
from stager.cuda.arena_driver import DEVICE_ERROR, Driver
from stager.cuda.arena_tokens import (
    CLOSED,
    ArenaOutOfMemoryError,
    Gate,
    Malloc,
    Owner,
    Visit,
    calling_line,
    check_size,
    give_back_told,
    token_type,
)
from stager.cuda.blocks import Block, Blocks, round_up
from stager.cuda.overflow import Overflow, OverflowMemoryError
from stager.cuda.report import ArenaStats, fitting
from stager.errors import ArenaError

_PER_THREAD = 2  # cudaStreamPerThread
_MOST_REQUESTS = 4096


def _after_fork(reference: weakref.ref[Pool]) -> None:
    pool = reference()
    if pool is not None:
        pool.after_fork()


class Pool:
    """The arena's memory: slab, blocks, overflow and counters. See :class:`stager.Arena` for what users call."""

    epoch = -1
    merges_before = 0
    # Counters of the epoch. Each update is one step under the interpreter's lock, so threads lose none.
    largest = carved = unfit = spilled = steps = escaped_blocks = 0
    overflows = refused = foreign_requests = overflow_peak = needed = 0
    reported = foreign_reported = escape_reported = False

    def __init__(self, driver: Driver, capacity: int, *, mode: str, trace: bool, poison: bool, keep: int) -> None:
        self.driver, self.capacity, self.mode, self.trace, self.poison = driver, capacity, mode, trace, poison
        self.device = driver.device()
        self.overflow = Overflow(driver, self.device, keep) if mode == "pool" else None
        self.blocks = Blocks(0, 0)
        self.slab = self._open_slab()
        self.blocks = Blocks(self.slab.ptr, capacity)
        # What takes a block out of its bin, by the request itself: spares the rounding of sizes that recur.
        self.pops: dict[int, Callable[[], Block]] = {}
        self.owner = Owner(self.slab, 0)
        self.gate = Gate()
        self.recorder: Any = None
        self.stream: Any = None  # bound at the first entry
        self.thread: threading.Thread | None = None  # of a per-thread default stream
        self.local = threading.local()
        self.visitors = self.captures = 0
        self.forked = False
        self.captured_blocks = 0
        self._step_number = 0
        self.open_steps: set[int] = set()
        self.lock = threading.RLock()
        self._busy = self._can_capture = False
        self.reset()
        self.token = token_type()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _after_fork(reference))

    def _open_slab(self) -> Any:
        driver = self.driver
        try:
            return driver.slab(self.capacity)
        except (OutOfMemoryError, DEVICE_ERROR) as error:
            if isinstance(error, DEVICE_ERROR) and not driver.out_of_memory(error):
                raise
            driver.release_other_pools()
            gc.collect()
        try:
            return driver.slab(self.capacity)
        except (OutOfMemoryError, DEVICE_ERROR):
            free, total = driver.memory()
            raise ArenaOutOfMemoryError(
                f"the arena needs {self.capacity:,} bytes, but device {self.device} has {free:,} of {total:,} bytes "
                f"free; other pools of this process hold {_listed(driver.other_pools())}; give a smaller size",
                size=self.capacity,
            ) from None

    # Entering and leaving

    def visit(self) -> Visit:
        """This thread's visit.

        Raises
        ------
        ArenaError
            If the thread is not inside ``with arena:``, or is a forked child.
        """
        self.check_alive()
        visit: Visit | None = getattr(self.local, "visit", None)
        if visit is None:
            raise ArenaError("this thread is not inside the arena; write it inside `with arena:`")
        return visit

    def check_alive(self) -> None:
        """Raise ArenaError in a forked child."""
        if self.forked:
            raise ArenaError("CUDA does not survive fork: make the arena in the child, or start it with 'spawn'")

    def bind(self) -> Visit:
        """A visit for the calling thread; the first one binds the arena to its stream."""
        driver = self.driver
        stream, device = driver.stream(), driver.device()
        with self.lock:
            if self.stream is None:
                self._bind_to(stream)
            elif self.visitors == 0 and device == self.device and not self._is_here(stream, device):
                self._move_to(stream)
            self.visitors += 1
        visit = Visit(self.owner, None)
        foreign = self.thread is not None and self.thread is not threading.current_thread()
        visit.malloc = self._fast(visit, (lambda: None) if foreign else driver.lookup(self.stream, self.device))
        return visit

    def _move_to(self, stream: Any) -> None:
        if self.blocks.live()[0]:
            return  # arrays that live may still be used on the stream the arena is bound to
        # Free blocks may still be read by work that is queued there.
        try:
            if self.thread is None and stream.ptr != _PER_THREAD:
                self.driver.order(self.stream, stream)
            else:
                self.driver.synchronize()
        except DEVICE_ERROR:  # the old stream was destroyed by its owner
            self.driver.synchronize()
        self._bind_to(stream)

    def _bind_to(self, stream: Any) -> None:
        self.stream = stream
        self._can_capture = stream.ptr not in (0, 1)  # the legacy stream can't
        self.thread = threading.current_thread() if stream.ptr == _PER_THREAD else None
        self.regate()

    def leave(self) -> None:
        """End of a visit."""
        with self.lock:
            self.visitors -= 1
        if self.overflow is not None:
            self.overflow.drain()

    def regate(self) -> None:
        """Open the fast path unless something has to see every request."""
        closed = self.trace or self.poison or self.forked or self.captures or self.recorder is not None
        self.gate.stream = CLOSED if closed else self.stream

    def _is_here(self, stream: Any, device: int) -> bool:
        """Whether memory of the slab may be used under this stream and device."""
        return (
            device == self.device
            and (stream is self.stream or stream.ptr == self.stream.ptr)
            and (self.thread is None or self.thread is threading.current_thread())
        )

    def new_owner(self) -> Owner:
        """The owner of a new step's tokens."""
        with self.lock:
            self._step_number += 1
            self.steps += 1
            self.open_steps.add(self._step_number)
            return Owner(self.slab, self._step_number)

    # Allocating

    def _fast(self, visit: Visit, current: Callable[[], object]) -> Malloc:
        gate, pops, token, pointer = self.gate, self.pops, self.token, MemoryPointer
        device, slow, miss = self.device, self._slow, self._miss

        def malloc(nbytes: int) -> Any:
            try:
                here = current()
            except DEVICE_ERROR:  # a forked child, which the slow path tells
                return slow(nbytes, visit)
            if here is gate.stream and type(nbytes) is int:
                try:
                    start, size, give_back = pops[nbytes]()
                except LookupError:
                    pass
                else:
                    gate.allocations += 1
                    memory = token(start, size, visit.owner, device)
                    memory.__del__ = give_back
                    return pointer(memory, 0)
                return miss(nbytes, visit)
            return slow(nbytes, visit)

        return malloc

    def _miss(self, nbytes: int, visit: Visit) -> Any:
        """A request that did not come before, or whose bin is empty, while the gate was open."""
        size = (nbytes + 511) & -512
        block = self._binned(nbytes, size) if self.blocks.bins.get(size) else None
        if block is None:
            if size <= 0 or (self._can_capture and self.driver.capturing(self.stream)):
                return self._slow(nbytes, visit)
            block = self._carve(size)
            if block is None:
                return self._slow(nbytes, visit)
            if type(block) is tuple:
                self.carved += 1
            if size > self.largest:
                self.largest = size
        self.gate.allocations += 1
        memory = self.token(block[0], size, visit.owner, self.device)
        memory.__del__ = block[2]
        return MemoryPointer(memory, 0)

    def _slow(self, nbytes: Any, visit: Visit) -> Any:
        nbytes = check_size(nbytes)
        self.check_alive()
        driver = self.driver
        stream, device = driver.stream(), driver.device()
        if nbytes == 0:
            return MemoryPointer(UnownedMemory(0, 0, self.owner, device), 0)
        size = round_up(nbytes)
        if not self._is_here(stream, device):
            return self._spill(nbytes, size, visit, stream, device, foreign=True)
        block = self._binned(nbytes, size)
        if block is None:
            if visit.capture is None and driver.capturing(stream):
                self._refuse_capture(nbytes, size, bare=True)
            block = self._carve(size)
            if block is None:
                self.unfit += 1
                return self._spill(nbytes, size, visit, stream, device, foreign=False)
            self.largest = max(self.largest, size)
        start, _, give_back = block
        owner: Any = visit.owner
        recorder = self.recorder
        if self.trace or recorder is not None:
            site = calling_line()
            owner = (owner, site)
            if recorder is not None:
                give_back = partial(give_back_told, give_back, recorder.freed, (size, site))
                recorder.allocated(size, site)
        memory = self.token(start, size, owner, device)
        memory.__del__ = give_back
        if self.poison and visit.capture is None:
            driver.fill(start, size, stream)
        self.gate.allocations += 1
        if type(block) is tuple:
            self.carved += 1
        if visit.capture is not None:
            visit.capture.hold(memory)
        return MemoryPointer(memory, 0)

    def _binned(self, nbytes: int, size: int) -> Block | None:
        """A free block of that size, if there is one; then the request is known from now on."""
        stack = self.blocks.bins.get(size)
        if not stack:
            return None
        try:
            block = stack.pop()
        except IndexError:  # another thread took the last one
            return None
        if len(self.pops) >= _MOST_REQUESTS:
            self.pops.clear()
        self.pops[nbytes] = stack.pop
        return block

    def _carve(self, size: int) -> Block | None:
        with self.lock:
            # A finalizer that garbage collection runs in here may allocate; it must not see half a change, so it gets
            # overflow memory.
            if self._busy:
                return None
            self._busy = True
            try:
                return self.blocks.take(size)
            finally:
                self._busy = False

    def _spill(self, nbytes: int, size: int, visit: Visit, stream: Any, device: int, *, foreign: bool) -> Any:
        driver = self.driver
        if visit.capture is not None or driver.capturing(stream):
            self._refuse_capture(nbytes, size, bare=visit.capture is None)
        if foreign:
            self.foreign_requests += 1
            first, self.foreign_reported = not self.foreign_reported, True
        else:
            self.overflows += 1
            first, self.reported = not self.reported, True
        if first:  # before anything else can go wrong
            path = "pool" if self.overflow is not None else "refused"
            facts.announce(self, nbytes, size, path, facts.words(self, size, foreign, stream, device))
        if self.overflow is None:
            self.refused += 1
            raise facts.failure(
                self, nbytes, size, f"overflow='raise': {facts.words(self, size, foreign, stream, device)}"
            )
        try:
            memory = self.overflow.allocate(size, stream, device, visit.owner.outside)
        except OverflowMemoryError:
            self.refused += 1
            free, total = driver.memory()
            raise facts.failure(
                self,
                nbytes,
                size,
                f"the device has no room either: {free:,} of {total:,} bytes are free, the overflow pool holds "
                f"{self.overflow.reserved_nbytes():,}, other pools hold {_listed(driver.other_pools())}; "
                f"{facts.words(self, size, foreign, stream, device)}",
            ) from None
        self.spilled += 1
        self.largest = max(self.largest, size)
        self.gate.allocations += 1
        outside = self.overflow.live()[1]
        if outside > self.overflow_peak:
            self.overflow_peak = outside
            if not foreign:
                self.needed = max(self.needed, self.blocks.live()[1] + outside)
        if self.recorder is not None:
            self.recorder.overflowed(size, calling_line())
        return MemoryPointer(memory, 0)

    def _refuse_capture(self, nbytes: int, size: int, *, bare: bool) -> None:
        self.refused += 1
        stats = self.stats()
        if bare:
            words = (
                "the stream is capturing a graph that the arena doesn't know of, so it could not keep the memory that "
                "the graph will use; capture with `with arena.capture(stream) as c:`"
            )
        else:
            words = (
                f"the arena is full while a graph is captured, and overflow memory must not become part of one; run "
                f"the step once before capturing it, or give the arena at least {fitting(stats.used_nbytes + size)}"
            )
        first, self.reported = not self.reported, True
        if first:
            facts.announce(self, nbytes, size, "capture-refused", words)
        raise facts.failure(self, nbytes, size, words)

    def stats(self) -> ArenaStats:
        """One snapshot; no driver call."""
        return facts.snapshot(self)

    def reset(self) -> None:
        """Start an epoch: counters at zero, the line armed again, free blocks merged. What lives stays."""
        with self.lock:
            blocks = self.blocks
            busy, self._busy = self._busy, True
            if not busy:
                blocks.merge()
            self._busy = busy
            blocks.high = blocks.top
            self.merges_before = blocks.merges
            self.gate.allocations = 0
            self.largest = self.carved = self.unfit = self.spilled = self.steps = self.escaped_blocks = 0
            self.overflows = self.refused = self.foreign_requests = self.overflow_peak = self.needed = 0
            self.reported = self.foreign_reported = self.escape_reported = False
            self.epoch += 1

    def after_fork(self) -> None:
        """In a forked child: refuse every request, and forget what CUDA holds. Destructors only ever append."""
        self.forked = True
        self.gate.stream = CLOSED
        self.slab.ptr = 0
        if self.overflow is not None:
            self.overflow.after_fork()


def _listed(pools: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:,} bytes" for name, nbytes in pools.items())
