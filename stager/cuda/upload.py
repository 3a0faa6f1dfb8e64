"""From host memory to the device, by a few lanes at once, a thread and a stream each.

Two paths, chosen by what was measured on an H200 (PCIe 5, pinned ceiling 55 GB/s, a pack in the page cache):

- "pinned ring": each lane copies pieces of 3 MiB into two pinned buffers of its own in turn and sends one while it
  fills the other. 34 to 45 GB/s with 8 lanes, 30 with 4, 16 with 2; pins 48 MiB in all, which stays in the
  processor's cache (with 8 MiB a piece the rate falls to 25 GB/s).
- "registered": each lane registers 64 MiB of the source itself, sends them and unregisters them. 22 GB/s whatever the
  cores, because the driver registers one piece at a time; the better one on two cores.

Nothing here imports CuPy: the driver calls come from :class:`stager.cuda.driver.CudaDriver`, or from a fake in tests.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.config import format_nbytes
from stager.cuda.pages import PIECE_NBYTES, Piece, cut
from stager.cuda.ring import Driver, Fill, Lane, Place, RegistrationRefused, Ring
from stager.cuda.watch import Watch
from stager.errors import StagingError

RING_NBYTES = 3 << 20
N_LANES = 8
RING_CORES = 3

# How often a lane that waits for the others looks whether one of them has failed.
_LAST_LANE_SECONDS = 0.02


def copy_array(
    source: npt.NDArray[Any],
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
    fill: Fill | None = None,
    read_ahead: Callable[[int, int], None] | None = None,
    read_only: bool = False,
    n_cores: int = RING_CORES,
    piece_nbytes: int = PIECE_NBYTES,
) -> str:
    """Copy a C-contiguous array into device memory; returns when all of it has arrived.

    Parameters
    ----------
    source : array, C order
    memory : object with ``ptr``
        Device memory of at least ``source.nbytes``. The lanes hold it and the source until their copies are done,
        also when this call has given up on them.
    fill : callable(out, first), optional
        Another way to the bytes of the source from `first` on, such as to read the file that it maps.
    read_ahead : callable(first, stop), optional
        Asks the system for bytes of a mapped file before they are touched; called by one lane at a time.
    read_only : bool
        The source lies in a read-only mapping.
    n_cores : int
        Cores that may be used: below ``RING_CORES`` the source itself is registered.

    Returns
    -------
    str
        The path that ran: "pinned ring", "registered", both, or "pageable ring" where the driver pins nothing.

    Raises
    ------
    StagingError
        If a driver call fails; nothing stays registered.
    StagingStalled
    """
    flat = source.reshape(-1).view(np.uint8) if source.nbytes else np.empty(0, np.uint8)

    def copy(out: npt.NDArray[np.uint8], first: int) -> None:
        np.copyto(out, flat[first : first + len(out)])

    fill = fill or copy
    if n_cores >= RING_CORES:
        spans = [(first, min(first + RING_NBYTES, flat.nbytes)) for first in range(0, flat.nbytes, RING_NBYTES)]
        return copy_filled(spans, fill, memory, driver, watch, n_lanes=n_cores, read_ahead=read_ahead)

    paths: set[str] = set()

    def send(lane: Lane, ring: Callable[[], Ring], piece: Piece) -> None:
        nbytes = piece.stop - piece.first
        watch.enter("register")
        try:
            driver.register(piece.page_ptr, piece.page_nbytes, read_only)
        except RegistrationRefused:
            paths.add(ring().path)
            for first in range(piece.first, piece.stop, RING_NBYTES):
                ring().send(first, min(first + RING_NBYTES, piece.stop), fill)
            return
        watch.enter("copy")
        try:
            lane.copy(memory.ptr + piece.first, source.ctypes.data + piece.first, nbytes, 0)
            lane.wait(0)
        finally:
            watch.enter("unregister")
            driver.unregister(piece.page_ptr)
        paths.add("registered")
        watch.advance(nbytes)

    pieces = cut(source.ctypes.data, source.nbytes, piece_nbytes)
    _run_lanes(pieces, send, memory, driver, watch, 2, read_ahead)
    return _told(paths)


def copy_filled(
    spans: Sequence[tuple[int, int]],
    fill: Fill,
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
    n_lanes: int = N_LANES,
    read_ahead: Callable[[int, int], None] | None = None,
    place_of: Callable[[int], Place] | None = None,
) -> str:
    """Fill pinned buffers with the bytes of `spans` and send them; parameters, result and errors as :func:`copy_array`.

    Parameters
    ----------
    spans : sequence of (first, stop)
        At most ``RING_NBYTES`` each, without a gap.
    fill : callable(out, first)
        Writes the bytes from `first` on into `out`; called by several threads.
    place_of : callable(k), optional
        Where the rows that the k-th lane sends go; without it bytes go to where they are counted from.
    """
    paths: set[str] = set()

    def send(lane: Lane, ring: Callable[[], Ring], span: tuple[int, int]) -> None:
        paths.add(ring().path)
        ring().send(*span, fill)

    _run_lanes(spans, send, memory, driver, watch, min(n_lanes, N_LANES), read_ahead, place_of)
    return _told(paths)


def _run_lanes(
    parts: Sequence[Any],
    send: Callable[[Lane, Callable[[], Ring], Any], None],
    memory: Any,
    driver: Driver,
    watch: Watch,
    n_lanes: int,
    read_ahead: Callable[[int, int], None] | None,
    place_of: Callable[[int], Place] | None = None,
) -> None:
    """Have `n_lanes` threads take the parts in turn."""
    n_lanes = max(1, min(n_lanes, len(parts)))
    queue, lock, opening, numbers = iter(parts), threading.Lock(), threading.Lock(), itertools.count()
    running, all_drained = [None] * n_lanes, threading.Event()
    ring_nbytes = min(RING_NBYTES, max((stop - first for first, stop in map(_bounds, parts)), default=0))

    def take() -> Any:
        with lock:
            part = None if watch.cancelled else next(queue, None)
            if part is not None and read_ahead:
                watch.enter("read")
                read_ahead(*_bounds(part))
            return part

    def job() -> None:
        watch.enter("start")
        # One lane after the other: each begins as soon as it is open, where all at once wait for the last.
        with opening:
            lane = driver.lane()
        rings: list[Ring] = []

        def ring() -> Ring:
            if not rings:
                with opening:
                    place = None if place_of is None else place_of(next(numbers))
                    rings.append(Ring(lane, memory, driver, watch, ring_nbytes, place))
            return rings[0]

        try:
            while (part := take()) is not None:
                send(lane, ring, part)
            for used in rings:
                used.drain()
            with lock:
                running.pop()
                if not running:
                    all_drained.set()
            # Unregistering holds up every copy on the device, so no lane does it before all have arrived.
            while not (all_drained.wait(_LAST_LANE_SECONDS) or watch.cancelled):
                pass
        finally:
            for used in rings:
                used.release()

    watch.run([job] * n_lanes)


def _told(paths: set[str]) -> str:
    return " and ".join(sorted(paths, reverse=True)) or "nothing to copy"


def _bounds(part: Any) -> tuple[int, int]:
    return (part.first, part.stop) if isinstance(part, Piece) else part


class Registration:
    """Host memory that stays registered while something refers to this object; it owns a reference to the memory."""

    def __init__(self, source: npt.NDArray[Any], driver: Driver) -> None:
        self.source, self._driver = source, driver
        self._pages: list[int] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def register(self, watch: Watch, *, read_only: bool, piece_nbytes: int = 1 << 30, n_lanes: int = 2) -> None:
        """Register all of the memory.

        Raises
        ------
        StagingError
            If the driver refuses; nothing stays registered.
        """
        queue = iter(cut(self.source.ctypes.data, self.source.nbytes, piece_nbytes))

        def job() -> None:
            try:
                watch.enter("start")
                self._driver.lane()
                while True:
                    with self._lock:
                        piece = None if watch.cancelled else next(queue, None)
                    if piece is None:
                        return
                    watch.enter("register")
                    self._driver.register(piece.page_ptr, piece.page_nbytes, read_only)
                    with self._lock:
                        self._pages.append(piece.page_ptr)
                    watch.advance(piece.stop - piece.first)
            except BaseException:
                watch.cancelled = True
                raise
            finally:
                # Here, not in the caller: only the lane knows when a call that hung has returned.
                if watch.cancelled:
                    self.release()

        try:
            watch.run([job] * n_lanes)
        except RegistrationRefused as error:
            raise StagingError(
                f"the driver refuses to register {format_nbytes(self.source.nbytes)} of host memory ({error}), which "
                f"placement='host' needs; use placement='device', or raise the limit of locked memory (ulimit -l)"
            ) from None

    def release(self) -> None:
        """Unregister everything, once what is queued on the device has run; no view may be used any more."""
        with self._lock:
            pages, self._pages = self._pages, []
        try:
            if pages:
                self._driver.synchronize()
        finally:
            self._unregister(iter(pages))

    def _unregister(self, pages: Iterator[int]) -> None:
        for page in pages:
            try:
                self._driver.unregister(page)
            except StagingError:
                self._unregister(pages)  # the others all the same
                raise

    def __del__(self) -> None:
        # A forked child has no CUDA, and at exit the driver unregisters by itself.
        if self._process == os.getpid() and not sys.is_finalizing():
            self.release()
