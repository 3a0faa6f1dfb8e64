"""From host memory to the device, by a few lanes at once, a thread and a stream each.

Two paths, chosen by what was measured on an H200 (PCIe 5, pinned ceiling 55 GB/s, a pack in the page cache):

- "pinned ring": each lane copies pieces of 4 MiB into two pinned buffers of its own in turn and sends one while it
  fills the other. 45 GB/s with 8 lanes, 30 with 4, 16 with 2; pins 64 MiB in all.
- "registered": each lane registers 64 MiB of the source itself, sends them and unregisters them. 22 GB/s whatever the
  cores, because the driver registers one piece at a time; the better one on two cores.

Nothing here imports CuPy: the driver calls come from :class:`stager.cuda.driver.CudaDriver`, or from a fake in tests.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from stager.config import format_nbytes
from stager.errors import StagingError, StagingMemoryError, StagingStalled

Progress = Callable[[str, int, int], None]
T = TypeVar("T")

PAGE_NBYTES = 4096
PIECE_NBYTES = 64 << 20
RING_NBYTES = 4 << 20
N_LANES = 8
RING_CORES = 3

# How long a failed or interrupted upload waits for its lanes; a piece takes milliseconds.
_GRACE_SECONDS = 10.0


class RegistrationRefused(Exception):
    """The driver will not page-lock this memory; it can still be copied through a pinned buffer."""


class Driver(Protocol):
    """The driver calls that staging makes. `ptr` and `nbytes` are integers; a lane belongs to one thread."""

    def free_nbytes(self) -> int: ...
    def allocate(self, nbytes: int) -> Any: ...
    def register(self, ptr: int, nbytes: int, read_only: bool) -> None: ...
    def unregister(self, ptr: int) -> None: ...
    def synchronize(self) -> None: ...
    def lane(self) -> Lane: ...


class Lane(Protocol):
    """A stream of one thread, in relaxed capture mode. Copies are queued under a slot, 0 or 1, and waited for by it."""

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int, slot: int) -> None: ...
    def wait(self, slot: int) -> None: ...


@dataclass(frozen=True)
class Piece:
    """Bytes ``first : stop`` of a source, and the whole pages ``page_ptr : page_ptr + page_nbytes`` around them."""

    first: int
    stop: int
    page_ptr: int
    page_nbytes: int


def cut(ptr: int, nbytes: int, piece_nbytes: int = PIECE_NBYTES) -> list[Piece]:
    """Cut a buffer at page boundaries, so that no two pieces share a page and no copy straddles two."""
    base, end = ptr - ptr % PAGE_NBYTES, ptr + nbytes
    pieces = []
    for page in range(base, end, piece_nbytes):
        stop = min(page + piece_nbytes, -(-end // PAGE_NBYTES) * PAGE_NBYTES)
        pieces.append(Piece(max(page, ptr) - ptr, min(stop, end) - ptr, page, stop - page))
    return pieces


@dataclass
class Watch:
    """Runs work on threads of its own and notices when nothing moves.

    Parameters
    ----------
    total_nbytes : int
    stall_timeout : float
        Seconds without progress after which :class:`StagingStalled` is raised.
    progress : callable(phase, done_nbytes, total_nbytes), optional
        Called on the waiting thread.
    """

    total_nbytes: int
    stall_timeout: float
    progress: Progress | None = None
    done_nbytes: int = 0
    cancelled: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _beat: float = field(default_factory=time.monotonic)
    _phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this thread is doing, for the report of a stall."""
        me = threading.get_ident()
        self._phases[me] = (name, time.monotonic())
        try:
            yield
        finally:
            del self._phases[me]
            self._beat = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count bytes that arrived."""
        with self._changed:
            self.done_nbytes += nbytes
            self._beat = time.monotonic()
            self._changed.notify_all()

    def run(self, jobs: list[Callable[[], T]]) -> list[T]:
        """Run `jobs`, a thread each; the first error stops the others and is raised.

        Raises
        ------
        StagingStalled
            The threads keep what they use until their driver call returns.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        self._beat = time.monotonic()

        def work(index: int, job: Callable[[], T]) -> None:
            try:
                results[index] = job()
            except BaseException as error:
                errors.append(error)
                self.cancelled = True
            finally:
                with self._changed:
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=work, args=(index, job), name=f"stager-{index}", daemon=True)
            for index, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(threads, errors)
        except BaseException:
            self.cancelled = True
            self._settle(threads)
            raise
        if errors:
            self._settle(threads)
            raise errors[0]
        return [results[index] for index in range(len(jobs))]

    def _wait(self, threads: list[threading.Thread], errors: list[BaseException]) -> None:
        while not errors and any(thread.is_alive() for thread in threads):
            with self._changed:
                self._changed.wait(0.05)
            if self.progress:
                self.progress(self._oldest()[0], self.done_nbytes, self.total_nbytes)
            if (age := time.monotonic() - self._beat) > self.stall_timeout:
                phase, since = self._oldest()
                raise StagingStalled(
                    f"no progress for {age:.1f} s in phase {phase!r} (in it for {time.monotonic() - since:.1f} s), "
                    f"{self.done_nbytes:,} of {self.total_nbytes:,} bytes done; the driver call has not returned, so "
                    f"its buffers stay until it does. Look at the GPU (nvidia-smi, dmesg), or raise stall_timeout "
                    f"({self.stall_timeout:g} s)"
                )

    def _oldest(self) -> tuple[str, float]:
        return min(list(self._phases.values()), key=lambda item: item[1], default=("wait", time.monotonic()))

    def _settle(self, threads: list[threading.Thread]) -> None:
        limit = time.monotonic() + min(_GRACE_SECONDS, self.stall_timeout)
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))


def allocate(driver: Driver, nbytes: int, watch: Watch, remedy: str) -> Any:
    """One device allocation of exactly `nbytes`, checked against free memory first.

    Raises
    ------
    StagingMemoryError
        With needed and free bytes, and the remedy.
    """

    def job() -> Any:
        with watch.phase("allocate"):
            free = driver.free_nbytes()
            if nbytes > free:
                raise StagingMemoryError(
                    f"{format_nbytes(nbytes)} ({nbytes:,} bytes) are needed on the GPU, {format_nbytes(free)} are "
                    f"free; {remedy}"
                )
            return driver.allocate(nbytes)

    return watch.run([job])[0]


Fill = Callable[[npt.NDArray[np.uint8], int], None]


def copy_array(
    source: npt.NDArray[Any],
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
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
    read_ahead : callable(first, stop), optional
        Asks the system for bytes of a mapped file before they are touched; called by one lane at a time.
    read_only : bool
        The source lies in a read-only mapping.
    n_cores : int
        Cores that may be used: below ``RING_CORES`` the source itself is registered.

    Returns
    -------
    str
        The path that ran: "pinned ring", "registered", or both where registering was refused on the way.

    Raises
    ------
    StagingError
        If a driver call fails; nothing stays registered.
    StagingStalled
    """
    flat = source.reshape(-1).view(np.uint8) if source.nbytes else np.empty(0, np.uint8)

    def fill(out: npt.NDArray[np.uint8], first: int) -> None:
        np.copyto(out, flat[first : first + len(out)])

    if n_cores >= RING_CORES:
        spans = [(first, min(first + RING_NBYTES, flat.nbytes)) for first in range(0, flat.nbytes, RING_NBYTES)]
        copy_filled(spans, fill, memory, driver, watch, n_lanes=n_cores, read_ahead=read_ahead)
        return "pinned ring"

    paths: set[str] = set()

    def send(lane: Lane, ring: Callable[[], Ring], piece: Piece) -> None:
        nbytes = piece.stop - piece.first
        try:
            with watch.phase("register"):
                driver.register(piece.page_ptr, piece.page_nbytes, read_only)
        except RegistrationRefused:
            paths.add("pinned ring")
            for first in range(piece.first, piece.stop, RING_NBYTES):
                ring().send(first, min(first + RING_NBYTES, piece.stop), fill)
            return
        try:
            with watch.phase("copy"):
                lane.copy(memory.ptr + piece.first, source.ctypes.data + piece.first, nbytes, 0)
                lane.wait(0)
        finally:
            with watch.phase("unregister"):
                driver.unregister(piece.page_ptr)
        paths.add("registered")
        watch.advance(nbytes)

    pieces = cut(source.ctypes.data, source.nbytes, piece_nbytes)
    _run_lanes(pieces, send, memory, driver, watch, 2, read_ahead)
    return " and ".join(sorted(paths, reverse=True)) or "nothing to copy"


def copy_filled(
    spans: Sequence[tuple[int, int]],
    fill: Fill,
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
    n_lanes: int = N_LANES,
    read_ahead: Callable[[int, int], None] | None = None,
) -> None:
    """Fill pinned buffers with the bytes of `spans` and send them; the parameters and errors of :func:`copy_array`.

    Parameters
    ----------
    spans : sequence of (first, stop)
        At most ``RING_NBYTES`` each, without a gap.
    fill : callable(out, first)
        Writes the bytes from `first` on into `out`; called by several threads.
    """

    def send(lane: Lane, ring: Callable[[], Ring], span: tuple[int, int]) -> None:
        ring().send(*span, fill)

    _run_lanes(spans, send, memory, driver, watch, min(n_lanes, N_LANES), read_ahead)


def _run_lanes(
    parts: Sequence[Any],
    send: Callable[[Lane, Callable[[], Ring], Any], None],
    memory: Any,
    driver: Driver,
    watch: Watch,
    n_lanes: int,
    read_ahead: Callable[[int, int], None] | None,
) -> None:
    """Have `n_lanes` threads take the parts in turn."""
    queue, lock = iter(parts), threading.Lock()
    largest = max((stop - first for first, stop in map(_bounds, parts)), default=0)

    def take() -> Any:
        with lock:
            part = None if watch.cancelled else next(queue, None)
            if part is not None and read_ahead:
                with watch.phase("read"):
                    read_ahead(*_bounds(part))
            return part

    def job() -> None:
        lane = driver.lane()
        rings: list[Ring] = []

        def ring() -> Ring:
            if not rings:
                rings.append(Ring(lane, memory, driver, watch, min(RING_NBYTES, largest)))
            return rings[0]

        try:
            while (part := take()) is not None:
                send(lane, ring, part)
            for used in rings:
                used.drain()
        finally:
            for used in rings:
                used.release()

    watch.run([job] * max(1, min(n_lanes, len(parts))))


def _bounds(part: Any) -> tuple[int, int]:
    return (part.first, part.stop) if isinstance(part, Piece) else part


class Ring:
    """Two pinned buffers of one lane, filled and sent in turn."""

    def __init__(self, lane: Lane, memory: Any, driver: Driver, watch: Watch, nbytes: int) -> None:
        self._lane, self._memory, self._driver, self._watch = lane, memory, driver, watch
        nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        # Anonymous and registered: cudaHostAlloc takes ten times as long for the same memory.
        self._buffer = np.frombuffer(mmap.mmap(-1, 2 * nbytes), np.uint8)
        self._halves = (self._buffer[:nbytes], self._buffer[nbytes:])
        self._sent = [0, 0]
        self._slot = 0
        with watch.phase("register"):
            driver.register(self._buffer.ctypes.data, self._buffer.nbytes, False)

    def send(self, first: int, stop: int, fill: Fill) -> None:
        """Fill the next half with bytes ``first : stop`` and queue its copy."""
        if self._watch.cancelled:
            return
        self._wait(self._slot)
        half = self._halves[self._slot][: stop - first]
        with self._watch.phase("pack"):
            fill(half, first)
        self._lane.copy(self._memory.ptr + first, half.ctypes.data, half.nbytes, self._slot)
        self._sent[self._slot] = half.nbytes
        self._slot ^= 1

    def drain(self) -> None:
        """Wait until everything sent has arrived."""
        self._wait(self._slot)
        self._wait(self._slot ^ 1)

    def release(self) -> None:
        """Unregister the buffers, after what still reads them."""
        for slot in (0, 1):
            self._lane.wait(slot)
        with self._watch.phase("unregister"):
            self._driver.unregister(self._buffer.ctypes.data)

    def _wait(self, slot: int) -> None:
        with self._watch.phase("copy"):
            self._lane.wait(slot)
        if self._sent[slot]:
            self._watch.advance(self._sent[slot])
            self._sent[slot] = 0


class Registration:
    """Host memory that stays registered while something refers to this object; it owns a reference to the memory."""

    def __init__(self, source: npt.NDArray[Any], driver: Driver) -> None:
        self.source, self._driver = source, driver
        self._pages: list[int] = []
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
            self._driver.lane()
            try:
                while True:
                    with self._lock:
                        piece = None if watch.cancelled else next(queue, None)
                    if piece is None:
                        return
                    with watch.phase("register"):
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
            ) from error

    def release(self) -> None:
        """Unregister everything, once what is queued on the device has run; no view may be used any more."""
        with self._lock:
            pages, self._pages = self._pages, []
        if pages:
            self._driver.synchronize()
        for page in pages:
            self._driver.unregister(page)

    def __del__(self) -> None:
        self.release()
