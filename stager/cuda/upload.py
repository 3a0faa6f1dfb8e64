"""From host memory to the device: pieces are registered, copied and unregistered by a few lanes at once.

Nothing here imports CuPy: the driver calls come from :class:`stager.cuda.driver.CudaDriver`, or from a fake in tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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
RING_NBYTES = 16 << 20
N_LANES = 4

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
    """A stream of one thread, in relaxed capture mode."""

    def copy(self, device_ptr: int, host_ptr: int, nbytes: int) -> None: ...
    def wait(self) -> None: ...
    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]: ...


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
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
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


def copy_to_device(
    source: npt.NDArray[Any],
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
    before: Callable[[int, int], None] | None = None,
    read_only: bool = False,
    n_lanes: int = N_LANES,
    piece_nbytes: int = PIECE_NBYTES,
) -> str:
    """Copy a C-contiguous array into device memory; returns when all of it has arrived.

    Parameters
    ----------
    source : array, C order
    memory : object with ``ptr``
        Device memory of at least ``source.nbytes``. The lanes hold it and the source until their copies are done,
        also when this call has given up on them.
    before : callable(first, stop), optional
        Called for each piece in turn, one at a time, before it is touched: makes the bytes ready.
    read_only : bool
        The source lies in a read-only mapping.

    Returns
    -------
    str
        The path that ran: "registered", "pinned ring", or both.

    Raises
    ------
    StagingError
        If a driver call fails; nothing stays registered.
    StagingStalled
    """
    pieces = cut(source.ctypes.data, source.nbytes, piece_nbytes)
    n_lanes = max(1, min(n_lanes, len(pieces)))
    queue = iter(pieces)
    lock = threading.Lock()
    paths: set[str] = set()
    flat = source.reshape(-1).view(np.uint8) if source.nbytes else np.empty(0, np.uint8)

    def take() -> Piece | None:
        with lock:
            piece = None if watch.cancelled else next(queue, None)
            if piece and before:
                with watch.phase("pack"):
                    before(piece.first, piece.stop)
            return piece

    def send(lane: Lane, piece: Piece) -> str:
        try:
            with watch.phase("register"):
                driver.register(piece.page_ptr, piece.page_nbytes, read_only)
        except RegistrationRefused:
            return through_ring(lane, piece)
        try:
            with watch.phase("copy"):
                lane.copy(memory.ptr + piece.first, source.ctypes.data + piece.first, piece.stop - piece.first)
                lane.wait()
        finally:
            with watch.phase("unregister"):
                driver.unregister(piece.page_ptr)
        watch.advance(piece.stop - piece.first)
        return "registered"

    def through_ring(lane: Lane, piece: Piece) -> str:
        buffer = lane.pinned(RING_NBYTES)
        for first in range(piece.first, piece.stop, RING_NBYTES):
            if watch.cancelled:
                break
            part = flat[first : min(first + RING_NBYTES, piece.stop)]
            with watch.phase("copy"):
                np.copyto(buffer[: part.nbytes], part)
                lane.copy(memory.ptr + first, buffer.ctypes.data, part.nbytes)
                lane.wait()
            watch.advance(part.nbytes)
        return "pinned ring"

    def job() -> None:
        lane = driver.lane()
        while (piece := take()) is not None:
            paths.add(send(lane, piece))

    watch.run([job] * n_lanes)
    return " and ".join(sorted(paths, reverse=True)) or "nothing to copy"


class Registration:
    """Host memory that stays registered while something refers to this object; it owns a reference to the memory."""

    def __init__(self, source: npt.NDArray[Any], driver: Driver) -> None:
        self.source, self._driver = source, driver
        self._pages: list[int] = []
        self._lock = threading.Lock()

    def register(self, watch: Watch, *, read_only: bool, piece_nbytes: int = 1 << 30, n_lanes: int = N_LANES) -> None:
        """Register all of the memory.

        Raises
        ------
        StagingError
            If the driver refuses; nothing stays registered.
        """
        queue = iter(cut(self.source.ctypes.data, self.source.nbytes, piece_nbytes))

        def job() -> None:
            try:
                self._driver.lane()
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
