"""Equal tables of several clients, kept once: memory files of the server, which clients map.

A client that has built a large table offers it by the hash of its bytes. The first one fills it in, and it is sealed,
so that nobody can write into it any more; others map it, compare it with their own, and drop that one. The memory lasts
as long as somebody maps it, whatever becomes of the server, and nothing of it has a name in a file system.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from stager.bars.memory import check_host
from stager.errors import ServiceError
from stager.service.protocol import DeviceHandle, Share, Shared

LEAST_NBYTES = 1 << 20
_MOST_TABLES = 32
# F_SEAL_SEAL, _SHRINK, _GROW and _WRITE, which Linux alone has; other systems can import this all the same.
SEALS = 0x1 | 0x2 | 0x4 | 0x8


@dataclass
class _Table:
    """One table: a memory file, and the attachments that hold it."""

    file: int
    nbytes: int
    filled: bool = False
    holders: set[str] = field(default_factory=set)
    on_device: tuple[Any, DeviceHandle] | None = None

    @property
    def told(self) -> Shared:
        handle = None if self.on_device is None else self.on_device[1]
        return Shared(f"/proc/{os.getpid()}/fd/{self.file}", self.filled, handle)


class Tables:
    """The tables that a service keeps. Every method may be called by several threads."""

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._tables: dict[tuple[str, int], _Table] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, each once, and once more where it is on the GPU too."""
        with self._lock:
            return sum(one.nbytes * (1 if one.on_device is None else 2) for one in self._tables.values())

    def share(self, request: Share) -> Shared:
        """Where a table lies; empty at first, and for the client to fill in and say so.

        Raises
        ------
        ServiceError
            If the client holds too many, or what was filled in is not what its hash says.
        StagingMemoryError
            If the host has not enough memory.
        """
        key = request.digest, request.nbytes
        with self._lock:
            table = self._tables.get(key)
            n_held = sum(request.id in one.holders for one in self._tables.values())
            if n_held >= _MOST_TABLES and (table is None or request.id not in table.holders):
                raise ServiceError(f"{request.id} shares {_MOST_TABLES} tables, the most that an attachment may")
            if table is None:
                if request.filled:
                    raise ServiceError(f"there is no table {request.digest} to be filled in; share it first")
                check_host(request.nbytes, "filled with tables that clients share", "use fewer targets")
                table = self._tables[key] = _Table(_memory_file(request.nbytes), request.nbytes)
            table.holders.add(request.id)
            if table.filled or not request.filled:
                return table.told
            descriptor = os.dup(table.file)
        try:
            # From here on nobody can write, so what is hashed stays.
            _seal(descriptor)
            found = _digest(descriptor, request.nbytes)
        except OSError as error:
            raise ServiceError(f"table {request.digest} can't be sealed: {error.strerror}; unmap it first") from None
        finally:
            os.close(descriptor)
        with self._lock:
            if found != request.digest:
                self._forget(key)
                raise ServiceError(f"the table that was filled in has the hash {found}, not {request.digest}")
            table.filled = True
            return table.told

    def on_device(self, request: Share, load: Callable[[Any], tuple[Any, DeviceHandle]]) -> Shared:
        """A filled table's place, on the GPU as well.

        Parameters
        ----------
        request : Share
        load : callable(values)
            Brings the values to the GPU; called once for each table.

        Raises
        ------
        ServiceError
            If there is no such table, filled and held by this client.
        StagingError
        """
        # One at a time, or a table might be there twice.
        with self._loading:
            with self._lock:
                table = self._tables.get((request.digest, request.nbytes))
                if table is None or not table.filled or request.id not in table.holders:
                    raise ServiceError(f"there is no table {request.digest} of {request.id}; share and fill it first")
                if table.on_device is not None:
                    return table.told
                descriptor = os.dup(table.file)
            try:
                values = np.frombuffer(mmap.mmap(descriptor, request.nbytes, prot=mmap.PROT_READ), np.uint8)
            finally:
                os.close(descriptor)
            loaded = load(values)
            with self._lock:
                table.on_device = loaded
                return table.told

    def leave(self, client: str) -> None:
        """An attachment has ended; tables that nobody else holds are forgotten."""
        with self._lock:
            for key, table in list(self._tables.items()):
                table.holders.discard(client)
                if not table.holders:
                    self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        table = self._tables.pop(key, None)
        if table is not None:
            os.close(table.file)


def digest_of(data: Any) -> str:
    """The hash by which equal tables are found, of all bytes, on all cores."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest(length=16)


def _memory_file(nbytes: int) -> int:
    file = os.memfd_create("stager-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file


def _seal(file: int) -> None:
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    except PermissionError:
        # Another client that filled it in as well may have been sooner.
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise


def _digest(file: int, nbytes: int) -> str:
    with mmap.mmap(file, nbytes, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        return digest_of(view)
