"""The service itself: answers requests, keeps leases, gives memory back. Knows nothing of the network."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stager.errors import ServiceError
from stager.service import protocol
from stager.service.holdings import Holding, Holdings, Progress, Shareable
from stager.service.leases import Attachment
from stager.service.places import ServerPlace, Watched
from stager.service.protocol import Answer, Beat, Grant, Pending
from stager.service.sharing import load_table
from stager.service.tables import Tables
from stager.version import __version__

log = logging.getLogger("stager.service")

BEAT_SECONDS = 1.0
MAX_CLIENTS = 256
_SWEEP_SECONDS = 0.25
# How long a release by force waits for clients that live to let go by themselves.
_FORCE_SECONDS = 5.0


class Service:
    """Holds packs and says who may use them. Every method may be called by several threads.

    Parameters
    ----------
    place : ServerPlace
    device : str
        As in :func:`stager.stage`.
    placement : {"device", "spread"}
        As there, on GPUs.
    max_clients : int
        Attachments at a time.
    """

    def __init__(
        self,
        place: ServerPlace,
        device: str = "auto",
        *,
        placement: Shareable = "device",
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self.place, self.max_clients = place, max_clients
        self.device = device
        self.holdings, self.tables = Holdings(device, placement), Tables()
        self.draining = self.ready = False
        self.started_at = time.time()
        self.n_refused: Counter[str] = Counter()
        self.n_errors = self.n_attached = 0
        self.attach_seconds = 0.0
        #: Told the seconds of each attaching.
        self.on_attach: Callable[[float], None] = lambda seconds: None
        self._lock = threading.RLock()
        self._attachments: dict[str, Attachment] = {}
        self._held: dict[str, Holding] = {}
        self._n_batches = self._n_streamed = 0
        #: Called now and then.
        self.on_sweep: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="stager-sweep", daemon=True)
        self._sweeper.start()

    # ------------------------------------------------------------------------------ requests

    def answer(self, request: protocol.Message) -> Any:
        """What a client gets for a request.

        Raises
        ------
        ServiceError, PackError, StagingError
        """
        match request:
            case protocol.ListPacks():
                return [one.tell() for one in self.holdings.all() if one.offered]
            case protocol.Describe():
                return self.holdings.current(request.name).tell()
            case protocol.Attach():
                return self._attach(request)
            case protocol.Detach():
                return self._detach(request.id)
            case protocol.Stats():
                return self.stats()
            case protocol.Stage():
                return self._stage(request)
            case protocol.Release():
                return self._release(request)
            case protocol.Share():
                return self._share(request)
        raise ServiceError(f"{type(request).__name__} is not answered")

    def add(self, name: str, path: Path, progress: Progress | None = None) -> protocol.PackInfo:
        """Stage a pack now."""
        return self.holdings.add(name, path.absolute(), progress).tell()

    def _attach(self, request: protocol.Attach) -> Answer:
        if request.protocol != protocol.PROTOCOL:
            raise ServiceError(
                f"the client speaks protocol {request.protocol}, this service {protocol.PROTOCOL} (stager "
                f"{__version__}); use the same stager for both"
            )
        self._check_admits(request)
        found = self.holdings.ready(request.name)
        if isinstance(found, Pending):
            return Answer(pending=found)
        watched = Watched(self.place.life(request.id))
        with self._lock:
            try:
                self._check_admits(request)
                self.holdings.use(found, request.id)
            except ServiceError:
                watched.close()
                raise
            self._attachments[request.id] = Attachment(
                request.id, found.name, found.version, request.process, request.on_cpu, watched
            )
            self._held[request.id] = found
            self.n_attached += 1
        log.info("process %d attached to %s, version %d", request.process.pid, found.name, found.version)
        blocks = None if request.on_cpu else found.blocks
        return Answer(grant=Grant(found.tell(), blocks, found.probes, BEAT_SECONDS))

    def _check_admits(self, request: protocol.Attach) -> None:
        with self._lock:
            if self.draining:
                raise ServiceError("the service is ending and takes no new clients; wait for the next one")
            if request.id in self._attachments:
                raise ServiceError(f"the attachment {request.id} exists; each needs an id of its own")
            if len(self._attachments) >= self.max_clients:
                raise ServiceError(
                    f"the service has {self.max_clients} clients, the most it takes (--max-clients); close some"
                )

    def _detach(self, name: str) -> None:
        with self._lock:
            if name not in self._attachments:
                raise ServiceError(f"there is no attachment {name}")
            if not self._attachments[name].watched.let_go:
                raise ServiceError(f"the attachment {name} is not let go; only its client can say so, in its file")
        self._drop(name, "let go")

    def _stage(self, request: protocol.Stage) -> Answer:
        if self.draining:
            raise ServiceError("the service is ending and stages nothing")
        found = self.holdings.begin(request.name, Path(request.path))
        return Answer(pending=found) if isinstance(found, Pending) else Answer(pack=found.tell())

    def _release(self, request: protocol.Release) -> protocol.Released:
        versions = self.holdings.all(request.name)
        if not request.force or not versions:
            holding = self.holdings.current(request.name)
            clients = self._clients_of([holding])
            return protocol.Released(True, self.holdings.withdraw(request.name), [one.tell() for one in clients])
        endangered = [one for one in self._clients_of(versions) if not one.on_cpu and not self._held[one.id].freed]
        if not request.sure:
            return protocol.Released(False, 0, [one.tell() for one in endangered])
        freed = 0
        if any(one.offered for one in versions):
            freed = self.holdings.withdraw(request.name)
        for one in endangered:
            one.forced = True
        limit = time.monotonic() + _FORCE_SECONDS
        while time.monotonic() < limit and any(one.id in self._attachments for one in endangered):
            time.sleep(0.02)
        broken = [one for one in endangered if one.id in self._attachments]
        for one in broken:
            log.warning(
                "freeing %s under process %d (%r), which has not let go: what it reads there from now on is undefined",
                one.name, one.process.pid, one.process.command,
            )  # fmt: skip
        freed += sum(self.holdings.settle(version, force=True) for version in versions)
        return protocol.Released(True, freed, [one.tell() for one in broken])

    def _share(self, request: protocol.Share) -> protocol.Shared:
        with self._lock:
            if request.id not in self._attachments:
                raise ServiceError(f"there is no attachment {request.id}; attach first")
        if request.on_device:
            told = self._on_device(request)
        else:
            told = self.tables.share(request)
        with self._lock:
            ended = request.id not in self._attachments
        if ended:
            self.tables.leave(request.id)
        return told

    def _on_device(self, request: protocol.Share) -> protocol.Shared:
        with self._lock:
            one = self._attachments[request.id]
            resident = self._held[request.id].resident
        if one.on_cpu or resident.device.index is None:
            raise ServiceError(f"the attachment {request.id} is not on a GPU")
        device, timeout = resident.device.index, resident.stall_timeout
        return self.tables.on_device(request, lambda values: load_table(values, device, timeout))

    def _clients_of(self, holdings: list[Holding]) -> list[Attachment]:
        with self._lock:
            return [one for name, one in self._attachments.items() if self._held[name] in holdings]

    def stats(self) -> protocol.StatsInfo:
        """Everything about the service."""
        with self._lock:
            packs = [one.tell() for one in self.holdings.all()]
            clients = [one.tell() for one in self._attachments.values()]
            n_batches = self._n_streamed + self._n_batches + sum(one.n_batches for one in self._attachments.values())
            return protocol.StatsInfo(
                protocol.PROTOCOL, __version__, os.getpid(), self.device, self.started_at, self.draining, packs,
                clients, sum(one.nbytes for one in packs), self.tables.nbytes, self.n_attached, n_batches,
                dict(self.n_refused), self.n_errors, round(self.attach_seconds, 6),
            )  # fmt: skip

    # -------------------------------------------------------------------------------- leases

    def connect(self, name: str) -> None:
        """The lease of an attachment begins.

        Raises
        ------
        ServiceError
        """
        with self._lock:
            if name not in self._attachments:
                raise ServiceError(f"there is no attachment {name}; attach first")
            if self._attachments[name].connected:
                raise ServiceError(f"the attachment {name} has its lease already")

    def beat(self, name: str, beat: Beat) -> bool:
        """A sign of life; whether the client must let go now.

        Raises
        ------
        ServiceError
            If it can't be true.
        """
        with self._lock:
            if name not in self._attachments:
                raise ServiceError(f"there is no attachment {name} any more")
            one = self._attachments[name]
            first = one.connected is None
            one.beat(beat)
            if first:
                self.attach_seconds += beat.attach_seconds
        if first:
            self.on_attach(beat.attach_seconds)
        return one.forced

    def count_streamed(self) -> None:
        """A batch went to a client elsewhere."""
        with self._lock:
            self._n_streamed += 1

    def cut(self, name: str) -> None:
        """The lease's connection has ended, for whatever reason."""
        with self._lock:
            if name in self._attachments:
                self._attachments[name].connected = False

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_SECONDS):
            self.on_sweep()
            with self._lock:
                doubtful = [one for one in self._attachments.values() if not one.connected]
            for one in doubtful:
                with self._lock:
                    # One that was dropped meanwhile has closed its file, whose number may be another's by now.
                    if one.id not in self._attachments or not one.has_ended:
                        continue
                    why = "let go" if one.watched.let_go else "its process has ended"
                self._drop(one.id, why)

    def _drop(self, name: str, why: str) -> None:
        with self._lock:
            one = self._attachments.pop(name, None)
            if one is None:
                return
            holding = self._held.pop(name)
            self._n_batches += one.n_batches
            one.close(self.place.life(name))
        log.info("process %d is done with %s, version %d: %s", one.process.pid, one.name, one.version, why)
        self.tables.leave(name)
        self.holdings.leave(holding, name)

    # ----------------------------------------------------------------------------------- end

    @property
    def health(self) -> str:
        """One of "staging", "serving" and "draining"."""
        return "draining" if self.draining else "serving" if self.ready else "staging"

    @property
    def is_attaching(self) -> bool:
        """Whether a client has leave to attach and has not begun its lease yet."""
        with self._lock:
            return any(one.connected is None for one in self._attachments.values())

    @property
    def n_clients(self) -> int:
        return len(self._attachments)

    def close(self) -> None:
        """Free what nobody uses, and leave the place. What clients use goes with the process, which is no danger."""
        self._closed.set()
        self._sweeper.join()
        self.holdings.close()
        with self._lock:
            for one in self._attachments.values():
                one.watched.close()
            self._attachments.clear()
        self.place.close()
