"""The client: asks a service, and attaches to what it holds."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import flight

from stager import errors
from stager.batches.devices import Device, choose_device, count_devices
from stager.batches.resident import Resident
from stager.errors import NoServiceError, ServiceError, StagerError
from stager.packs.layout import Pack, open_pack
from stager.service import protocol
from stager.service.attached import Hold
from stager.service.flights import told_by
from stager.service.places import check_service, location, socket_path, start_of
from stager.service.protocol import REQUESTS, Answer, Grant, decode, encode
from stager.service.sharing import check_probes

T = TypeVar("T")

CALL_SECONDS = 10.0
_PENDING_SECONDS = 0.05
_ATTEMPTS = 3
_TYPES = {kind: name for name, kind in REQUESTS.items()}


class Connection:
    """Asks a service on a unix socket. Every call ends within `CALL_SECONDS`.

    Parameters
    ----------
    socket : str or Path, optional
        Default: ``STAGER_SERVICE_SOCKET``, else the user's own place.

    Raises
    ------
    NoServiceError
        If there is no socket.
    ServiceError
        If others could enter its directory.
    """

    def __init__(self, socket: str | Path | None = None) -> None:
        self.socket = socket_path(socket)
        check_service(self.socket)
        self._client = flight.FlightClient(location(self.socket))

    def ask(self, request: protocol.Message, kind: type[T]) -> T:
        """The service's answer.

        Raises
        ------
        StagerError
            As the service raised it.
        NoServiceError
            If nobody answers.
        """
        action = flight.Action(_TYPES[type(request)], encode(request))
        try:
            (result,) = self._client.do_action(action, flight.FlightCallOptions(timeout=CALL_SECONDS))
        except flight.FlightError as error:
            raise as_error(error, self.socket) from None
        return decode(result.body.to_pybytes(), kind, "the answer", 1 << 26)

    def exchange(self, lease: protocol.Lease) -> tuple[Any, Any]:
        """Writer and reader of a lease."""
        return self._client.do_exchange(flight.FlightDescriptor.for_command(encode(lease)))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_error(error: flight.FlightError, where: Any) -> StagerError:
    """The service's error as it was raised there, or one that tells that nobody answers."""
    told = told_by(error)
    if told is None:
        if isinstance(error, (flight.FlightUnavailableError, flight.FlightTimedOutError)):
            why = "does not answer" if isinstance(error, flight.FlightTimedOutError) else "is gone"
            return NoServiceError(f"the service at {where} {why}; see its log, or start one with `stager serve PACK`")
        return ServiceError(f"the service at {where} failed: {error}")
    kind = getattr(errors, told.error, ServiceError)
    fits = isinstance(kind, type) and issubclass(kind, StagerError) and kind is not errors.TimelineError
    return kind(told.message) if fits else ServiceError(told.message)


def attach(name: str, *, socket: str | Path | None = None, device: str = "auto") -> Resident:
    """Use a pack that a service of this user holds, without a copy: ``Stager(attach("prices"), ...)``.

    Parameters
    ----------
    name : str
        As the service calls it: of ``prices.pack``, "prices".
    socket : str or Path, optional
        Of the service; default ``STAGER_SERVICE_SOCKET``, else ``$XDG_RUNTIME_DIR/stager/service.sock`` or
        ``/tmp/stager-UID/service.sock``.
    device : str
        "auto" is where the service holds the rows: on its GPU, found by UUID, and on the CPU where this machine shows
        no GPU. "cuda:N" gathers on another GPU, which reads the service's memory over NVLink or PCIe, as ranks do of
        rows in blocks on all of them. With "cpu" the pack's file is mapped, and all processes share the page cache.

    Returns
    -------
    Resident
        Owned by the caller. The service keeps the rows until it is closed and the last view of them has died. They are
        shared: do not write. If the service ends, they stay, and one warning says so.

    Raises
    ------
    NoServiceError
        If no service answers.
    ServiceError
        If it refuses, or if what it holds can't be used here.
    PackError, DeviceError, StagingError
        If the pack's files, or the GPU's memory, can't be opened here.
    """
    started = time.perf_counter()
    reader = None if device == "auto" else choose_device(device).index
    on_cpu = reader is None and (device == "cpu" or count_devices() == 0)
    connection = Connection(socket)
    try:
        for attempt in range(_ATTEMPTS):
            hold = Hold(connection, uuid.uuid4().hex)
            try:
                grant = _granted(connection, hold.id, name, on_cpu)
                hold.granted = True
                pack = open_pack(grant.pack.path)
                if pack.manifest.checksum == grant.pack.checksum:
                    return _open(hold, grant, pack, reader, started)
                if attempt == _ATTEMPTS - 1:
                    raise ServiceError(f"{grant.pack.path} is replaced again and again; attach when it is settled")
            except BaseException:
                hold.end()
                raise
            # The pack was replaced since the service looked; it will stage the new one.
            hold.end()
    except BaseException:
        connection.close()
        raise
    raise AssertionError


def _granted(connection: Connection, name: str, pack: str, on_cpu: bool) -> Grant:
    process = this_process()
    while True:
        answer = connection.ask(protocol.Attach(name, pack, process, protocol=protocol.PROTOCOL, on_cpu=on_cpu), Answer)
        if answer.grant is not None:
            return answer.grant
        time.sleep(_PENDING_SECONDS)


def _open(hold: Hold, grant: Grant, pack: Pack, reader: int | None, started: float) -> Resident:
    if grant.blocks is not None:
        resident = hold.open_memory(pack, grant.pack.name, grant.blocks, reader)
    elif reader is not None:
        raise ServiceError(
            f"the service holds {grant.pack.name!r} on the CPU, and cuda:{reader} can't read that; attach with "
            f"device='cpu', or serve it on a GPU"
        )
    else:
        why = "the service holds the pack on the CPU" if grant.pack.device == "cpu" else "attached without a GPU"
        resident = hold.map_file(pack, Device(None, why))
    check_probes(resident.rows, grant.probes, grant.pack.name)
    hold.begin(grant, time.perf_counter() - started)
    return resident


def this_process() -> protocol.Process:
    """What this process tells of itself."""
    command = " ".join(part for part in sys.argv if part) or Path(sys.executable).name
    shown = "".join(c for c in command if c.isprintable())[:400]
    return protocol.Process(os.getpid(), start_of(os.getpid()) or 0, shown)
