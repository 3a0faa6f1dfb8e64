"""A client's hold on what it attached: the resident rows, the lease, and letting go in the right order.

Letting go happens when the last array over the rows has died, which may be in the garbage collector, on any thread. So
it is only handed to the lease's thread there. That closes the memory first, then says so in the client's file, then to
the service: nobody can take the memory back while something here still points into it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from pyarrow import flight

from stager.batches.devices import Device, check_cuda
from stager.batches.resident import Resident
from stager.errors import ServiceError, StagerError
from stager.packs.layout import Pack
from stager.service.flights import FORCED, told_by
from stager.service.places import Life
from stager.service.protocol import Beat, Blocks, Detach, DeviceHandle, Grant, Lease, Share, Shared, encode
from stager.service.sharing import probes_of
from stager.service.tables import LEAST_NBYTES, SEALS, digest_of

if TYPE_CHECKING:
    from stager.service.client import Connection

log = logging.getLogger("stager.service")
T = TypeVar("T")

# How long a close or the end of the process waits for the lease's thread.
_END_SECONDS = 5.0
_EXIT_SECONDS = 2.0
_LET_GO, _EXIT = "let go", "exit"


class Attached(Resident):
    """Rows that a service holds; see :func:`stager.attach`."""

    _hold: Hold

    def counted(self, batches: Iterator[T]) -> Iterator[T]:
        hold = self._hold
        for one in batches:
            hold.n_batches += 1
            yield one

    def shared(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An equal table that another client has built, or this one for others; read-only."""
        return self._hold.share(table)

    def on_device(self, table: npt.NDArray[Any]) -> Any:
        """An equal table that the service has on the GPU, where it is shared; else a copy of its own."""
        found = self._hold.share_on_device(table)
        return super().on_device(table) if found is None else found

    def close(self) -> None:
        """Let go; the service is told when no view is left. Closing twice is fine."""
        super().close()
        self._hold.wait()


class Hold:
    """One attachment of this process.

    Parameters
    ----------
    connection : Connection
        Closed with the hold, once the lease has begun.
    name : str
        Id of the attachment.

    Attributes
    ----------
    life : Life
    n_batches : int
        Served so far.
    granted : bool
        Whether the service knows of it.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.id, self.n_batches, self.granted = name, 0, False
        self.life = Life(connection.socket, name)
        self._connection, self._process = connection, os.getpid()
        self._words: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._mappings: list[Any] = []
        # Whether the rows are gathered on the GPU to which the service brings tables.
        self._tables_are_near = False
        # By address, of what is shared on the host, which lives as long as this.
        self._shared: dict[int, tuple[Share, npt.NDArray[Any]]] = {}
        self._owner: weakref.finalize[Any, Any] | None = None
        self._resident: weakref.ref[Attached] | None = None

    def map_file(self, pack: Pack, device: Device) -> Attached:
        """The pack's rows, mapped."""
        if len(pack.parts) > 1:
            raise ServiceError(
                f"{pack.path}: on the CPU the rows are mapped where they lie, and these lie in {len(pack.parts)} "
                f"segments; merge them with `stager compact {pack.path}`"
            )
        flat = np.frombuffer(pack.rows.data, np.float32)
        self._watch(flat)
        return self._made(Attached(pack, device, "host", "attached, mapped", flat.reshape(pack.rows.shape), flat))

    def open_memory(self, pack: Pack, name: str, blocks: Blocks, reader: int | None) -> Attached:
        """The rows where they lie on GPUs, for the device `reader` to gather from; default: the one of the first block.

        Raises
        ------
        DeviceError, StagingError, ServiceError
        """
        check_cuda(reader or 0)
        from stager.cuda import ipc, kernels
        from stager.cuda.spread import Layout, SpreadRows

        driver = ipc.CudaIpc()
        device = ipc.device_of(blocks.handles[0].uuid, driver) if reader is None else reader
        layout, width = Layout(pack.n_rows, blocks.base_rows, blocks.halo), len(pack.columns)
        if [4 * width * (stop - first) for first, stop in layout.spans] != [one.nbytes for one in blocks.handles]:
            raise ServiceError(f"the blocks that the service has of {name!r} are not those of its rows")
        owner, parts = _Owner(), []
        self._watch(owner)
        for (first, stop), one in zip(layout.spans, blocks.handles, strict=True):
            mapping = ipc.Mapping(_handle(one), driver, device)
            self._mappings.append(mapping)
            parts.append(ipc.array_of(mapping, one.nbytes, owner, (stop - first, width), np.float32))
        kernels.compiled(device)
        owners = [mapping.owner for mapping in self._mappings]
        self._tables_are_near = device == owners[0]
        if owners == [device]:
            ((rows, memory),) = parts
            where = Device(device, f"the service holds the pack on {blocks.handles[0].uuid}")
            return self._made(Attached(pack, where, "device", "attached", rows, memory))
        named = ", ".join(f"cuda:{one}" for one in owners)
        where = Device(device, f"the service holds the pack on {named}, which it reads")
        rows = SpreadRows(layout, [array for array, _ in parts], device)
        memories = [memory for _, memory in parts]
        return self._made(Attached(pack, where, "spread", f"attached, in blocks on {named}", rows, memories))

    def _made(self, resident: Attached) -> Attached:
        resident._hold = self
        self._resident = weakref.ref(resident)
        return resident

    def _watch(self, owner: Any) -> None:
        """Let go when `owner` dies; it must be what all arrays over the rows refer to."""
        self._owner = weakref.finalize(owner, self._words.put, _LET_GO)
        # Arrays may be used to the very end of the process; its death is what then tells the service.
        self._owner.atexit = False

    def begin(self, grant: Grant, seconds: float) -> None:
        """Start the lease."""
        self._thread = threading.Thread(
            target=self._run, args=(grant.beat_seconds, grant.pack.name, seconds), name="stager-lease", daemon=True
        )
        atexit.register(self._at_exit)
        self._thread.start()

    def share(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See :meth:`Attached.shared`. Where it can't be shared, the table as it is."""
        if table.nbytes < LEAST_NBYTES or table.ctypes.data in self._shared:
            return table
        own = np.ascontiguousarray(table)
        flat = own.reshape(-1).view(np.uint8)
        request = Share(self.id, digest_of(flat.data), own.nbytes)
        try:
            told = self._connection.ask(request, Shared)
            if not told.filled:
                # Another client may do the same, and seal it first.
                with contextlib.suppress(PermissionError), open(told.path, "r+b", buffering=0) as file:
                    left = flat.data
                    while left:
                        left = left[file.write(left) :]
                told = self._connection.ask(msgspec.structs.replace(request, filled=True), Shared)
            with open(told.path, "rb") as file:
                if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
                    raise ServiceError(f"{told.path} can be written to by others")
                mapped = np.frombuffer(mmap.mmap(file.fileno(), own.nbytes, prot=mmap.PROT_READ), np.uint8)
        except (StagerError, OSError, ValueError) as error:
            log.debug("a table of %d bytes is not shared: %s", own.nbytes, error)
            return table
        # Whatever was mapped, it is used only if it is the same.
        if not np.array_equal(mapped, flat):
            log.warning("a shared table is another than its hash says; this process keeps its own")
            return table
        kept: npt.NDArray[Any] = mapped.view(own.dtype).reshape(own.shape)
        self._shared[kept.ctypes.data] = request, kept
        return kept

    def share_on_device(self, table: npt.NDArray[Any]) -> Any:
        """See :meth:`Attached.on_device`; None where it can't be shared."""
        request, kept = self._shared.get(table.ctypes.data, (None, table))
        found = None if self._owner is None else self._owner.peek()
        if request is None or found is None or kept.nbytes != table.nbytes or not self._tables_are_near:
            return None
        from stager.cuda import ipc

        try:
            told = self._connection.ask(msgspec.structs.replace(request, on_device=True), Shared)
            if told.handle is None:
                return None
            mapping = ipc.Mapping(_handle(told.handle), ipc.CudaIpc())
        except StagerError as error:
            log.debug("a table of %d bytes is not shared on the GPU: %s", table.nbytes, error)
            return None
        self._mappings.append(mapping)
        # The rows' owner: everything is let go together, when nothing points into any of it.
        array, _ = ipc.array_of(mapping, table.nbytes, found[0], table.shape, table.dtype)
        if probes_of(array) != probes_of(table):
            log.warning("a table shared on the GPU is another than this process has, which keeps its own")
            return None
        return array

    def wait(self) -> None:
        """Until the service was told, where everything was let go; not for long."""
        thread = self._thread
        if thread is None or self._owner is None or self._owner.alive or self._process != os.getpid():
            return
        if thread is not threading.current_thread():
            thread.join(_END_SECONDS)
            if thread.is_alive():
                log.warning("the service at %s was not told yet that this process let go", self._connection.socket)

    def end(self) -> None:
        """Let go without a lease, as after a failure; the connection stays."""
        if self._owner is not None:
            self._owner.detach()
        self._let_go(connected=self.granted)

    def _run(self, beat_seconds: float, name: str, seconds: float) -> None:
        writer: Any = None
        try:
            writer, _ = self._connection.exchange(Lease(self.id))
        except flight.FlightError as error:
            self._cut_off(name, error)
        word: str | None = None
        while word is None:
            if writer is not None:
                try:
                    writer.write_metadata(encode(Beat(self.n_batches, seconds)))
                except (flight.FlightError, OSError) as error:
                    writer = None
                    self._cut_off(name, error)
            try:
                word = self._words.get(timeout=beat_seconds if writer is not None else None)
            except Empty:
                continue
        if word == _LET_GO:
            self._let_go(connected=writer is not None)
            atexit.unregister(self._at_exit)
        if writer is not None:
            # The service may end meanwhile, which changes nothing here.
            with contextlib.suppress(flight.FlightError, OSError):
                writer.close()
        self._connection.close()

    def _cut_off(self, name: str, error: Exception) -> None:
        if isinstance(error, flight.FlightError) and told_by(error) == FORCED:
            log.warning("the service at %s takes %r back by force; its rows are closed", self._connection.socket, name)
            resident = None if self._resident is None else self._resident()
            if resident is not None:
                resident.close()
            return
        log.warning(
            "the service at %s has ended; this process goes on with the rows of %r, which stay until it closes them",
            self._connection.socket, name,
        )  # fmt: skip

    def _let_go(self, connected: bool) -> None:
        try:
            for mapping in self._mappings:
                mapping.close()
        except StagerError:
            # The file stays locked, so the service keeps the memory until this process has ended.
            log.exception("the rows could not be let go")
            return
        self.life.end()
        if not connected:
            return
        try:
            self._connection.ask(Detach(self.id), type(None))
        except StagerError as error:
            # The file has told it already.
            log.debug("not told that %s was let go: %s", self.id, error)

    def _at_exit(self) -> None:
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return
        # Of mapped memory nothing depends on the service; a GPU may work on until the process is gone.
        self._words.put(_EXIT if self._mappings else _LET_GO)
        thread.join(_EXIT_SECONDS)
        self.life.remove()


def _handle(told: DeviceHandle) -> Any:
    from stager.cuda import ipc

    return ipc.Handle(told.uuid, told.handle, told.offset, told.nbytes)


class _Owner:
    """Lives as long as an array over the rows does."""

    __slots__ = ("__weakref__",)
