"""The driver calls that staging makes, and the two pinned buffers through which a lane sends."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stager.cuda.pages import PAGE_NBYTES
from stager.cuda.watch import Watch

Fill = Callable[[npt.NDArray[np.uint8], int], None]


class RegistrationRefused(Exception):
    """The driver will not page-lock this memory; it can still be copied another way."""


class Driver(Protocol):
    """The driver calls that staging makes. `ptr` and `nbytes` are integers; a lane belongs to one thread.

    ``allocate`` raises MemoryError where the memory is not there, ``register`` RegistrationRefused.
    """

    def free_nbytes(self) -> int: ...
    def allocate(self, nbytes: int) -> Any: ...
    def register(self, ptr: int, nbytes: int, read_only: bool) -> None: ...
    def unregister(self, ptr: int) -> None: ...
    def synchronize(self) -> None: ...
    def lane(self) -> Lane: ...


class Lane(Protocol):
    """A stream of one thread, in relaxed capture mode. Copies are queued under a slot, 0 or 1, and waited for by it.

    ``scatter`` puts rows that a copy before it brought to their places in `memory`.
    """

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int, slot: int) -> None: ...
    def scatter(self, rows: Rows, memory: Any, slot: int) -> None: ...
    def wait(self, slot: int) -> None: ...


@dataclass(frozen=True)
class Rows:
    """Rows in a room on the device, and where the table of their places lies, see :mod:`stager.cuda.scatter`."""

    room_ptr: int
    first: int
    count: int
    n_columns: int
    sources_ptr: int
    places_ptr: int
    n_pieces: int


# The rows in bytes first : stop, which go through the room of a slot; of each ring its own.
Place = Callable[[int, int, int], Rows]


class Ring:
    """Two pinned buffers of one lane, filled and sent in turn.

    Attributes
    ----------
    path : str
        "pinned ring", or "pageable ring" where the driver won't pin even these: slower, the bytes are the same.
    """

    def __init__(
        self, lane: Lane, memory: Any, driver: Driver, watch: Watch, nbytes: int, place: Place | None = None
    ) -> None:
        self._lane, self._memory, self._driver, self._watch, self._place = lane, memory, driver, watch, place
        nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        # Anonymous and registered: cudaHostAlloc takes ten times as long for the same memory; in huge pages, half.
        pages = mmap.mmap(-1, 2 * nbytes)
        with contextlib.suppress(AttributeError, OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = np.frombuffer(pages, np.uint8)
        self._ptr = self._buffer.ctypes.data
        self._halves = ((self._buffer[:nbytes], self._ptr), (self._buffer[nbytes:], self._ptr + nbytes))
        self._sent = [0, 0]
        self._slot = 0
        self.path = "pinned ring"
        watch.enter("register")
        try:
            driver.register(self._ptr, self._buffer.nbytes, False)
        except RegistrationRefused:
            self.path = "pageable ring"

    def send(self, first: int, stop: int, fill: Fill) -> None:
        """Fill the next half with bytes ``first : stop`` and queue its copy."""
        if self._watch.cancelled:
            return
        slot, nbytes = self._slot, stop - first
        self._wait(slot)
        half, ptr = self._halves[slot]
        self._watch.enter("pack")
        fill(half[:nbytes], first)
        self._watch.enter("copy")
        if self._place is None:
            self._lane.copy(self._memory.ptr + first, ptr, nbytes, slot)
        else:
            rows = self._place(first, stop, slot)
            self._lane.copy(rows.room_ptr, ptr, nbytes, slot)
            self._lane.scatter(rows, self._memory, slot)
        self._sent[slot] = nbytes
        self._slot = slot ^ 1

    def drain(self) -> None:
        """Wait until everything sent has arrived."""
        self._wait(self._slot)
        self._wait(self._slot ^ 1)

    def release(self) -> None:
        """Unregister the buffers, after what still reads them."""
        try:
            self._settle(0)
        finally:
            try:
                self._settle(1)
            finally:
                if self.path == "pinned ring":
                    self._watch.enter("unregister")
                    self._driver.unregister(self._ptr)

    def _wait(self, slot: int) -> None:
        self._settle(slot)
        if self._sent[slot]:
            self._watch.advance(self._sent[slot])
            self._sent[slot] = 0

    def _settle(self, slot: int) -> None:
        self._watch.enter("copy")
        self._lane.wait(slot)
