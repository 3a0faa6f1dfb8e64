"""Tables that clients elsewhere have sent, part by part, for the Stagers that are to serve them."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from stager.bars.memory import check_host
from stager.errors import ServiceError
from stager.service.carried import read_carried
from stager.service.protocol import TablePart

# All of them together; what was not used for the longest time gives way.
MOST_NBYTES = 1 << 30


class SentTables:
    """By the hash of their bytes. Every method may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The latest used one is the last.
        self._tables: dict[str, _Sent] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all, whole or not."""
        with self._lock:
            return sum(one.nbytes for one in self._tables.values())

    def put(self, part: TablePart) -> None:
        """Take a part of a table. Parts that are there already, as of another client, are passed over.

        Raises
        ------
        ServiceError
            If it is too large, not the next part, or the whole is not what its hash says.
        StagingMemoryError
            If the host has not enough memory.
        """
        with self._lock:
            one = self._tables.pop(part.digest, None)
            if one is None or one.nbytes != part.nbytes:
                self._make_room(part.nbytes)
                one = _Sent(part.nbytes)
            self._tables[part.digest] = one
            if one.table is not None:
                return
            if part.offset > len(one.raw) or part.offset + len(part.data) > one.nbytes:
                raise ServiceError(
                    f"a part of table {part.digest} is at {part.offset:,} and has {len(part.data):,} bytes, of "
                    f"{one.nbytes:,} in all, of which {len(one.raw):,} are there; send the parts in order"
                )
            if part.offset < len(one.raw):
                return
            one.raw += part.data
            if len(one.raw) < one.nbytes:
                return
            raw = bytes(one.raw)
            del self._tables[part.digest]
            if (found := hashlib.blake2b(raw, digest_size=16).hexdigest()) != part.digest:
                raise ServiceError(f"the table that was sent has the hash {found}, not {part.digest}")
            one.table, one.raw = read_carried(raw), bytearray()
            self._tables[part.digest] = one

    def missing(self, digests: set[str]) -> list[str]:
        """Which of the tables are not here, as one may be that has given way to others."""
        with self._lock:
            return sorted(digest for digest in digests if (self._tables.get(digest) or _Sent(0)).table is None)

    def get(self, digest: str) -> Any:
        """A table.

        Raises
        ------
        ServiceError
            If it is not here.
        """
        with self._lock:
            one = self._tables.pop(digest, None)
            if one is not None:
                self._tables[digest] = one
            if one is None or one.table is None:
                raise ServiceError(f"the table {digest[:80]} is not here; send it first")
            return one.table

    def _make_room(self, nbytes: int) -> None:
        if nbytes > MOST_NBYTES:
            raise ServiceError(
                f"a table of {nbytes:,} bytes is sent; at most {MOST_NBYTES:,} are taken. Send fewer columns or rows, "
                f"or serve on the service's machine with attach()"
            )
        while self._tables and sum(one.nbytes for one in self._tables.values()) + nbytes > MOST_NBYTES:
            del self._tables[next(iter(self._tables))]
        check_host(nbytes, "filled with a table that a client sends", "send fewer rows")


class _Sent:
    """A table, or what has come of it so far."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.raw = nbytes, bytearray()
        self.table: Any = None
