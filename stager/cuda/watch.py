"""Work on threads of its own, watched: progress, stalls, Ctrl-C and the first error come back to the caller."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from stager.errors import StagerError, StagingStalled

Progress = Callable[[str, int, int], None]
T = TypeVar("T")

# How long the threads of a failed run are waited for, and of one that was interrupted or has stalled; a piece takes
# milliseconds. They clean up after themselves in any case.
_GRACE_SECONDS = 10.0
_PROMPT_SECONDS = 0.5
_PROGRESS_SECONDS = 0.05


def forget(error: BaseException) -> None:
    """Drop the variables of the functions that an error left, so that a kept traceback keeps no memory alive."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)


def _leave_thread(error: BaseException) -> BaseException:
    """The error without the frames of its thread, whose closures would keep memory; as text where it is unexpected."""
    if not isinstance(error, StagerError):
        error.add_note("".join(traceback.format_exception(error)))
    for link in _chain(error):
        link.__traceback__ = None
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    cancelled: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _beat: float = field(default_factory=time.monotonic)
    # By thread, so that counting and naming take no lock: lanes do it several times a piece.
    _phases: dict[int, tuple[str, float]] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _last_phase: str = "start"

    @property
    def done_nbytes(self) -> int:
        """Bytes that have arrived."""
        return sum(list(self._done.values()))

    def enter(self, phase: str) -> None:
        """Name what this thread does from here on, for the progress and for the report of a stall."""
        now = time.monotonic()
        self._phases[threading.get_ident()] = (phase, now)
        self._last_phase, self._beat = phase, now

    def advance(self, nbytes: int) -> None:
        """Count bytes that arrived."""
        me = threading.get_ident()
        self._done[me] = self._done.get(me, 0) + nbytes
        self._beat = time.monotonic()

    def run(self, jobs: list[Callable[[], T]]) -> list[T]:
        """Run `jobs`, a thread each; the first error stops the others and is raised.

        Raises
        ------
        StagingStalled
            The threads keep what they use until their driver call returns.
        """
        waiting = dict(enumerate(jobs))
        n_jobs = len(jobs)
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        self._beat = time.monotonic()

        def work(index: int) -> None:
            try:
                results[index] = waiting.pop(index)()
            except BaseException as error:
                self.cancelled = True
                errors.append(_leave_thread(error))
            finally:
                self._phases.pop(threading.get_ident(), None)
                with self._changed:
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=work, args=(index,), name=f"stager-{index}", daemon=True) for index in range(n_jobs)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                started.append(thread)
                thread.start()
            self._wait(lambda: bool(errors) or len(results) == n_jobs)
            _join(started, _GRACE_SECONDS)
        except BaseException:
            self.cancelled = True
            _join(started, min(_PROMPT_SECONDS, self.stall_timeout))
            raise
        if errors:
            raise errors[0]
        self._report()
        return [results[index] for index in range(n_jobs)]

    def _wait(self, finished: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(finished, _PROGRESS_SECONDS):
                    return
            self._report()
            if (age := time.monotonic() - self._beat) > self.stall_timeout:
                phase, since = self._oldest()
                raise StagingStalled(
                    f"no progress for {age:.1f} s in phase {phase!r} (in it for {time.monotonic() - since:.1f} s), "
                    f"{self.done_nbytes:,} of {self.total_nbytes:,} bytes done; the driver call has not returned, so "
                    f"its buffers stay until it does. Look at the GPU (nvidia-smi, dmesg), or raise stall_timeout "
                    f"({self.stall_timeout:g} s)"
                )

    def _report(self) -> None:
        if self.progress:
            self.progress(self._oldest()[0], self.done_nbytes, self.total_nbytes)

    def _oldest(self) -> tuple[str, float]:
        return min(list(self._phases.values()), key=lambda item: item[1], default=(self._last_phase, time.monotonic()))


def _join(threads: list[threading.Thread], seconds: float) -> None:
    limit = time.monotonic() + seconds
    for thread in threads:
        # One whose start was interrupted can't be joined before it runs.
        while thread.ident is None and time.monotonic() < limit:
            time.sleep(0.001)
        if thread.ident is not None:
            thread.join(max(0.0, limit - time.monotonic()))
