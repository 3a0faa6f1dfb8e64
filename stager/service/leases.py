"""Who uses what: attachments, their leases, and when memory may be taken back.

A lease that is late, or whose connection has ended, is only marked. An attachment ends when its client says so, or when
the system says that its process has ended; a process that is stopped, or sits in a debugger, has not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from stager.errors import ServiceError
from stager.service.places import Watched, start_of
from stager.service.protocol import Beat, ClientInfo, Process

LATE_SECONDS = 5.0
# After its files are closed, among them those of the GPU's driver, a process may take a moment to be gone. Of one in
# another namespace nothing is known but that its lock is free.
_SETTLE_SECONDS = 0.5
_RATE_SECONDS = 10.0


@dataclass
class Attachment:
    """One client's use of one version of a pack. Not for several threads: the service has the lock.

    Attributes
    ----------
    id, name : str
    version : int
    process : Process
    on_cpu : bool
        It maps the file, so that nothing on a GPU depends on it.
    connected : bool or None
        Whether the exchange that is the lease runs; None before it has begun.
    forced : bool
        The memory is to be freed whatever the client does.
    """

    id: str
    name: str
    version: int
    process: Process
    on_cpu: bool
    watched: Watched
    attached_at: float = field(default_factory=time.time)
    connected: bool | None = None
    forced: bool = False
    n_batches: int = 0
    _heard: float = field(default_factory=time.monotonic)
    _unlocked: float | None = None
    _rate: float = 0.0
    _counted: tuple[float, int] = (0.0, 0)

    def beat(self, beat: Beat) -> None:
        """Note a sign of life.

        Raises
        ------
        ServiceError
            If the client unsays batches.
        """
        if beat.n_batches < self.n_batches:
            raise ServiceError(f"a beat says {beat.n_batches:,} batches, the one before said {self.n_batches:,}")
        now = time.monotonic()
        since, before = self._counted
        if self.connected is None or not since:
            self._counted = now, beat.n_batches
        elif now > since:
            rate = (beat.n_batches - before) / (now - since)
            # Over some seconds, or what is shown would jump with every group of batches.
            weight = min(1.0, (now - since) / _RATE_SECONDS * 5)
            self._rate += weight * (rate - self._rate)
            self._counted = now, beat.n_batches
        self._heard, self.n_batches, self.connected = now, beat.n_batches, True

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard

    @property
    def state(self) -> str:
        """As in :class:`ClientInfo`."""
        if self.connected is None:
            return "attaching"
        if not self.connected:
            return "cut off"
        return "late" if self.silent_seconds > LATE_SECONDS else "live"

    @property
    def has_ended(self) -> bool:
        """Whether the client has let go or its process has ended; asks the system."""
        if self.watched.is_locked:
            self._unlocked = None
            return False
        if self.watched.let_go:
            return True
        now = time.monotonic()
        self._unlocked = self._unlocked or now
        return start_of(self.process.pid) != self.process.started and now - self._unlocked >= _SETTLE_SECONDS

    def tell(self) -> ClientInfo:
        live = self.state == "live"
        return ClientInfo(
            self.id, self.name, self.version, self.process.pid, self.process.command, self.state, self.on_cpu,
            self.attached_at, round(self.silent_seconds, 3), self.n_batches, round(self._rate, 1) if live else 0.0,
        )  # fmt: skip

    def close(self, file: Path) -> None:
        """Forget the client's file, and remove what a killed client left of it."""
        self.watched.close()
        file.unlink(missing_ok=True)
