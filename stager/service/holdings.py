"""What a service holds: packs by name, each staged once, new versions beside old ones that are still used."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from stager.batches.devices import choose_device
from stager.batches.resident import Resident, stage_as, staging_options
from stager.errors import PackError, ServiceError, StagerError, StagingMemoryError
from stager.packs.layout import open_pack
from stager.packs.manifest import MANIFEST, read_manifest
from stager.service.protocol import Blocks, PackInfo, Pending, Probe
from stager.service.sharing import export_rows, probes_of

log = logging.getLogger("stager.service")
Progress = Callable[[str, int, int], None]
#: Placements that CUDA shares among processes.
Shareable = Literal["device", "spread"]

_MOST_JOBS = 8
_FORGET_SECONDS = 10.0


@dataclass
class Holding:
    """One version of a pack, staged.

    Attributes
    ----------
    name : str
    version : int
        From 1, for each name.
    path : Path
    resident : Resident
    blocks : Blocks or None
        Where its rows lie; None on the CPU.
    probes : list of Probe
    offered : bool
        Whether new clients get it.
    freed : bool
        Whether its memory was given back.
    clients : set of str
        Ids of the attachments.
    """

    name: str
    version: int
    path: Path
    resident: Resident
    blocks: Blocks | None
    probes: list[Probe]
    stamp: tuple[int, ...]
    staged_at: float = field(default_factory=time.time)
    offered: bool = True
    freed: bool = False
    clients: set[str] = field(default_factory=set)

    def tell(self) -> PackInfo:
        pack = self.resident.pack
        where = "cpu"
        if self.blocks is not None:
            first, *more = (one.uuid for one in self.blocks.handles)
            where = f"{1 + len(more)} GPUs" if more else first
        return PackInfo(
            self.name, self.version, str(self.path), pack.manifest.fingerprint, pack.manifest.checksum, pack.n_rows,
            len(pack.columns), 0 if self.freed else self.resident.nbytes,
            where, self.resident.placement, self.staged_at,
            round(self.resident.seconds, 3), self.offered, len(self.clients),
        )  # fmt: skip

    @property
    def is_current(self) -> bool:
        """Whether the pack on disk is still this one.

        Raises
        ------
        PackError
            If there is none any more.
        """
        if (stamp := stamp_of(self.path)) == self.stamp:
            return True
        if read_manifest(self.path).checksum != self.resident.pack.manifest.checksum:
            return False
        self.stamp = stamp
        return True


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when a pack is replaced or appended to; raises PackError if there is none."""
    try:
        status = os.stat(path / MANIFEST)
    except OSError as error:
        raise PackError(f"{path}: the pack is gone or can't be read: {error.strerror}; pack it again") from None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def hold(name: str, version: int, path: Path, device: str, placement: Shareable, progress: Progress | None) -> Holding:
    """Stage a pack for others to use.

    Raises
    ------
    PackError, DeviceError, StagingError
        Nothing stays staged.
    """
    stamp = stamp_of(path)
    pack = open_pack(path)
    options = staging_options(device)
    on_cpu = choose_device(options.device).index is None
    if on_cpu and len(pack.parts) > 1:
        raise ServiceError(
            f"{path}: on the CPU clients map the rows where they lie, and these lie in {len(pack.parts)} segments; "
            f"merge them with `stager compact {path}`"
        )
    options = msgspec.structs.replace(options, placement="auto" if on_cpu and placement == "device" else placement)
    resident = stage_as(pack, options, progress)
    try:
        return Holding(name, version, path, resident, export_rows(resident), probes_of(resident.rows), stamp)
    except BaseException:
        resident.close()
        raise


class Holdings:
    """All that is held. Staging runs one at a time, in the background where a client waits for it.

    Parameters
    ----------
    device : str
        As in :func:`stager.stage`.
    placement : {"device", "spread"}
        As there, on GPUs.
    """

    def __init__(self, device: str, placement: Shareable = "device") -> None:
        self._device, self._placement = device, placement
        self._lock = threading.RLock()
        self._one_at_a_time = threading.Lock()
        self._current: dict[str, Holding] = {}
        self._all: list[Holding] = []
        self._jobs: dict[str, _Job] = {}
        self._versions: dict[str, int] = {}

    def all(self, name: str | None = None) -> list[Holding]:
        """Every version that is held, of one name or of all."""
        with self._lock:
            return [one for one in self._all if name in (None, one.name)]

    def current(self, name: str) -> Holding:
        """The version that new clients get.

        Raises
        ------
        ServiceError
        """
        with self._lock:
            if name not in self._current:
                names = ", ".join(sorted(self._current)) or "none"
                raise ServiceError(f"no pack {name!r} is held; there are: {names}. `stager stage PACK` adds one")
            return self._current[name]

    def ready(self, name: str) -> Holding | Pending:
        """The current version, staged anew first where the pack on disk has changed; then it is pending for a while.

        Raises
        ------
        ServiceError, PackError, StagingError
        """
        holding = self.current(name)
        with self._lock:
            if name not in self._jobs and holding.is_current:
                return holding
        found = self.begin(name, holding.path)
        return found if isinstance(found, Pending) else self.current(name)

    def begin(self, name: str, path: Path) -> Holding | Pending:
        """Stage a pack in the background: pending at first, then the result or the error, to whoever asks."""
        with self._lock:
            # What nobody came back for.
            for other, job in list(self._jobs.items()):
                if job.done.is_set() and (job.path != path or other != name) and job.age > _FORGET_SECONDS:
                    del self._jobs[other]
            found = self._jobs.get(name)
            if found is not None and found.path != path:
                if not found.done.is_set():
                    raise ServiceError(f"{found.path} is being staged as {name!r}; ask again when it is done")
                found = None
            if found is None:
                if len(self._jobs) >= _MOST_JOBS:
                    raise ServiceError(f"{_MOST_JOBS} packs wait to be staged already; ask again")
                found = self._jobs[name] = _Job(path, lambda progress: self.add(name, path, progress))
            job = found
            if not job.done.is_set():
                return job.pending
            del self._jobs[name]
        if job.error is not None:
            raise job.error
        assert job.result is not None
        return job.result

    def add(self, name: str, path: Path, progress: Progress | None = None) -> Holding:
        """Stage a pack and offer it; the version before is offered no longer.

        Raises
        ------
        PackError, DeviceError, StagingError
            What was offered before still is.
        """
        with self._one_at_a_time:
            with self._lock:
                version = self._versions.get(name, 0) + 1
            try:
                made = hold(name, version, path, self._device, self._placement, progress)
            except StagingMemoryError:
                # Without clients the old version need not wait for the new one.
                if not self._give_up_unused(name):
                    raise
                made = hold(name, version, path, self._device, self._placement, progress)
            with self._lock:
                self._versions[name] = version
                before = self._current.get(name)
                self._current[name] = made
                self._all.append(made)
        log.info("holds %s, version %d: %s, %d bytes", name, version, path, made.resident.nbytes)
        if before is not None:
            before.offered = False
            self.settle(before)
        return made

    def withdraw(self, name: str) -> int:
        """Offer a pack no longer; bytes that were freed, 0 where clients still use it."""
        with self._lock:
            holding = self.current(name)
            del self._current[name]
            holding.offered = False
        return self.settle(holding)

    def use(self, holding: Holding, client: str) -> None:
        """Note a client; the version is not freed while it is there.

        Raises
        ------
        ServiceError
            If the version is offered no longer.
        """
        with self._lock:
            if not holding.offered:
                raise ServiceError(f"{holding.name!r} was replaced or released meanwhile; attach again")
            holding.clients.add(client)

    def leave(self, holding: Holding, client: str) -> None:
        """A client has let go; the last one of a version that is offered no longer frees it."""
        with self._lock:
            holding.clients.discard(client)
        self.settle(holding)

    def settle(self, holding: Holding, *, force: bool = False) -> int:
        """Free a version that is not offered and has no clients, or in any case; how many bytes."""
        with self._lock:
            if holding.offered or (holding.clients and not force) or holding not in self._all:
                return 0
            if not holding.clients:
                self._all.remove(holding)
            if holding.freed:
                return 0
            holding.freed = True
        nbytes = holding.resident.nbytes
        holding.resident.close()
        log.info("freed %s, version %d: %d bytes", holding.name, holding.version, nbytes)
        return nbytes

    def close(self) -> None:
        """Give everything back that has no clients; what has goes with the process."""
        for holding in self.all():
            holding.offered = False
            self.settle(holding)

    def _give_up_unused(self, name: str) -> bool:
        with self._lock:
            return name in self._current and not self._current[name].clients and self.withdraw(name) > 0


class _Job:
    """Staging in the background."""

    def __init__(self, path: Path, work: Callable[[Progress], Holding]) -> None:
        self.path, self.pending, self.done = path, Pending("open", 0, 0), threading.Event()
        self.result: Holding | None = None
        self.error: StagerError | None = None
        self._ended = 0.0
        threading.Thread(target=self._run, args=(work,), name="stager-stage", daemon=True).start()

    def _run(self, work: Callable[[Progress], Holding]) -> None:
        try:
            self.result = work(self._note)
        except StagerError as error:
            self.error = error
        except Exception as error:
            log.exception("staging %s failed", self.path)
            self.error = ServiceError(f"staging {self.path} failed: {type(error).__name__}: {error}")
        finally:
            self._ended = time.monotonic()
            self.done.set()

    @property
    def age(self) -> float:
        """Seconds since it ended."""
        return time.monotonic() - self._ended

    def _note(self, phase: str, done_nbytes: int, total_nbytes: int) -> None:
        self.pending = Pending(phase, done_nbytes, total_nbytes)
