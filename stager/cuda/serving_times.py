"""What was served, how long gathers took on the device, and who waited for whom, by events on both streams."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import cupy

# Groups whose events may not be done yet; beyond, the oldest are not told of.
_MOST_PENDING = 64


class GroupEvents:
    """Attributes
    ----------
    queued, begun, ready : cupy.cuda.Event
        On the gather's stream: before it waits for the slot, and before and after it gathers.
    asked, got : cupy.cuda.Event or None
        On the consumer's stream: before and after it waits for the group.
    waited_seconds : float or None
        How long the host waited, for a consumer whose stream is not known.
    """

    def __init__(self) -> None:
        self.queued, self.begun, self.ready = (cupy.cuda.Event() for _ in range(3))
        self.asked: cupy.cuda.Event | None = None
        self.got: cupy.cuda.Event | None = None
        self.waited_seconds: float | None = None

    @property
    def is_handed(self) -> bool:
        """The group was handed to a consumer."""
        return self.got is not None or self.waited_seconds is not None


@dataclass
class ServingTimes:
    """Attributes
    ----------
    n_batches, n_samples, nbytes : int
        What was handed out.
    n_copied : int
        Batches that were handed out as copies, because a few batches held many groups.
    timed_nbytes : int
        Bytes of the groups that the times are of: those that are done, and not looked at too late.
    gather_seconds : float
        From the begin of gathers to their end.
    consumer_waited_seconds : float
        Consumers' streams were idle until a gather was done.
    gather_waited_seconds : float
        The gather's stream was idle until consumers had done with a slot.
    """

    n_batches: int = 0
    n_samples: int = 0
    nbytes: int = 0
    n_copied: int = 0
    timed_nbytes: int = 0
    gather_seconds: float = 0.0
    consumer_waited_seconds: float = 0.0
    gather_waited_seconds: float = 0.0
    _pending: deque[tuple[GroupEvents, int]] = field(default_factory=lambda: deque(maxlen=_MOST_PENDING), repr=False)
    # Threads may serve batches of the same Stager; and garbage may be collected, and an iterator closed, inside.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def add(self, n_batches: int, n_samples: int, nbytes: int, n_copied: int, events: GroupEvents) -> None:
        """Count a group that was handed out, or a part of it; its events are looked at later."""
        with self._lock:
            self.n_batches += n_batches
            self.n_samples += n_samples
            self.nbytes += nbytes
            self.n_copied += n_copied
            if events.is_handed:
                self._pending.append((events, nbytes))
            if len(self._pending) == _MOST_PENDING:
                self._look()

    def look(self) -> ServingTimes:
        """Add what the events tell that are done by now; returns itself."""
        with self._lock:
            self._look()
        return self

    def _look(self) -> None:
        while self._pending:
            events, nbytes = self._pending[0]
            asked, got, elapsed = events.asked, events.got, cupy.cuda.get_elapsed_time
            if not events.ready.done or not (got is None or got.done):
                return
            self._pending.popleft()
            self.timed_nbytes += nbytes
            self.gather_waited_seconds += elapsed(events.queued, events.begun) / 1e3
            self.gather_seconds += elapsed(events.begun, events.ready) / 1e3
            if asked is not None and got is not None:
                self.consumer_waited_seconds += elapsed(asked, got) / 1e3
            self.consumer_waited_seconds += events.waited_seconds or 0.0
