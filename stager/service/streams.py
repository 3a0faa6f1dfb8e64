"""Ready batches for clients elsewhere: Stagers over what is held, one for each set of arguments, a few of them kept."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from stager.batches.batch import Batch
from stager.batches.folds import Fold as StagerFold
from stager.batches.ranks import Ranks
from stager.batches.stager import Stager
from stager.config import format_nbytes
from stager.errors import ServiceError
from stager.samples.normalize import cast
from stager.service.carried import arguments_of, split_of, tables_of
from stager.service.holdings import Holding
from stager.service.protocol import Fold, Open, Opened, Pending, Serving, Ticket, encode
from stager.service.sent import SentTables
from stager.service.service import Service

# Each holds tables of about 4 bytes a row and target; its folds and ranks share them.
_MOST_STAGERS = 4
_MOST_PARTS = 64
# How long a Stager of data that is offered no longer waits for its clients to ask for more.
_IDLE_SECONDS = 60.0
# Of the windows of one batch, which are made and sent as a whole.
_MOST_BATCH_NBYTES = 1 << 30


class Streams:
    """Serves batches of a service's packs. Every method may be called by several threads.

    Parameters
    ----------
    service : Service

    Attributes
    ----------
    tables : SentTables
    """

    def __init__(self, service: Service) -> None:
        self.tables = SentTables()
        self._service, self._lock = service, threading.Lock()
        # By the bytes of a serving without its fold, and the fingerprint of the data; the latest used one is the last.
        self._served: dict[tuple[bytes, str], _Served] = {}

    def open(self, request: Open) -> Opened | Pending | list[str]:
        """What a set of arguments would serve, of the pack's current version; or hashes of tables to be sent first.

        Raises
        ------
        ServiceError, SampleError, ConfigError
        """
        found = self._service.holdings.ready(request.serving.name)
        if isinstance(found, Pending):
            return found
        served = self._find(_key(request.serving, found.resident.pack.fingerprint))
        if served is None and (missing := self.tables.missing(tables_of(request.serving))):
            return missing
        served = served or self._of(request.serving, found)
        opened = served.part(request.rank, request.serving.fold).opened
        if request.split is None:
            return opened
        return msgspec.structs.replace(opened, folds=served.counts(request.rank, request.split))

    def read(self, ticket: Ticket) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
        """The batches of a ticket, each as a record batch; None where tables that were sent are not here any more.

        Raises
        ------
        ServiceError
            If the ticket is out of range, or of data that are not held any more.
        """
        served = self._find(_key(ticket.serving, ticket.fingerprint))
        if served is None:
            current = self._service.holdings.current(ticket.serving.name)
            if current.resident.pack.fingerprint != ticket.fingerprint:
                raise ServiceError(
                    f"{ticket.serving.name!r} is another version now ({current.resident.pack.fingerprint}, the ticket "
                    f"is for {ticket.fingerprint}); open it again"
                )
            if self.tables.missing(tables_of(ticket.serving)):
                return None
            served = self._of(ticket.serving, current)
        part = served.part(ticket.rank, ticket.serving.fold)
        if ticket.latest:
            if (ticket.first, ticket.stop) != (0, 1):
                raise ServiceError(f"the ticket is for latest batches {ticket.first} to {ticket.stop}; there is one")
        elif not ticket.first < ticket.stop <= part.opened.n_batches:
            raise ServiceError(
                f"the ticket is for batches {ticket.first} to {ticket.stop}; an epoch has batches 0 to "
                f"{part.opened.n_batches - 1}"
            )
        schema = part.facts_schema if ticket.facts else part.schema
        return schema, self._batches(served, part, ticket)

    def purge(self) -> None:
        """Forget Stagers of data that are offered no longer, once nobody asks for them."""
        with self._lock:
            now = time.monotonic()
            idle = [
                key for key, one in self._served.items()
                if not one.holding.offered and not one.n_readers and now - one.used > _IDLE_SECONDS
            ]  # fmt: skip
            gone = [self._served.pop(key) for key in idle]
        self._forget(gone)

    def close(self) -> None:
        with self._lock:
            gone = list(self._served.values())
            self._served.clear()
        self._forget(gone)

    def _of(self, serving: Serving, holding: Holding) -> _Served:
        key = _key(serving, holding.resident.pack.fingerprint)
        if (found := self._find(key)) is not None:
            return found
        client = uuid.uuid4().hex
        self._service.holdings.use(holding, client)
        try:
            made = _Served(serving, holding, client, self.tables)
        except BaseException:
            self._service.holdings.leave(holding, client)
            raise
        with self._lock:
            # Another thread may have made the same meanwhile.
            gone = [made] if key in self._served else []
            made = self._served.setdefault(key, made)
            unread = [key for key, one in self._served.items() if not one.n_readers and one is not made]
            while len(self._served) > _MOST_STAGERS and unread:
                gone.append(self._served.pop(unread.pop(0)))
        self._forget(gone)
        return made

    def _find(self, key: tuple[bytes, str]) -> _Served | None:
        with self._lock:
            if key not in self._served:
                return None
            found = self._served[key] = self._served.pop(key)
            found.used = time.monotonic()
            return found

    def _forget(self, gone: list[_Served]) -> None:
        for one in gone:
            one.close()
            self._service.holdings.leave(one.holding, one.client)

    def _batches(self, served: _Served, part: _Part, ticket: Ticket) -> Iterator[pa.RecordBatch]:
        with self._lock:
            served.n_readers += 1
        try:
            if ticket.latest:
                _check_batch(part.stager, part.stager.resident.pack.manifest.n_symbols)
                batches = iter([part.stager.latest(to="numpy")])
            else:
                batches = part.stager.batches(ticket.epoch, start=ticket.first, to="numpy")
            for _, batch in zip(range(ticket.first, ticket.stop), batches, strict=False):
                if ticket.facts:
                    yield part.facts(batch)
                else:
                    yield part.as_record(batch)
                    self._service.count_streamed()
        finally:
            with self._lock:
                served.n_readers -= 1
                served.used = time.monotonic()


def _key(serving: Serving, fingerprint: str) -> tuple[bytes, str]:
    return encode(msgspec.structs.replace(serving, fold=None)), fingerprint


class _Served:
    """A Stager, and what of it is served: to whichever rank, of whichever fold."""

    def __init__(self, serving: Serving, holding: Holding, client: str, tables: SentTables) -> None:
        self.holding, self.client, self.used, self.n_readers = holding, client, time.monotonic(), 0
        pack = holding.resident.pack
        panel = pack.manifest.panel
        columns = pack.columns if panel is None else tuple(column.name for column in panel.columns)
        arguments = arguments_of(serving, columns, tables.get)
        # As bits, which take no package here: cast where the others are cast on the way, to the same.
        self._bfloat16 = arguments["dtype"] == "bfloat16"
        self.stager = Stager(holding.resident, **arguments | ({"dtype": "float32"} if self._bfloat16 else {}))
        self._n_ranks, self._lock = serving.n_ranks, threading.Lock()
        # By rank and the bytes of the fold; the latest used one is the last.
        self._parts: dict[tuple[int, bytes], _Part] = {}
        # The folds that were cut last, by rank and scheme: clients ask for one after the other.
        self._split: tuple[tuple[int, bytes] | None, list[StagerFold]] = None, []

    def part(self, rank: int, fold: Fold | None) -> _Part:
        """What one rank gets, of all samples or of a fold.

        Raises
        ------
        ServiceError, SampleError, ConfigError
            If there is no such rank or fold.
        """
        if rank >= self._n_ranks:
            raise ServiceError(f"the ticket is for rank {rank}; there are ranks 0 to {self._n_ranks - 1}")
        key = rank, encode(fold)
        with self._lock:
            part = self._parts.pop(key, None)
            if part is None:
                part = _Part(self._stager_of(rank, fold), self._bfloat16)
            self._parts[key] = part
            while len(self._parts) > _MOST_PARTS:
                # Streams of it go on: nothing is closed under them.
                del self._parts[next(iter(self._parts))]
            return part

    def _stager_of(self, rank: int, fold: Fold | None) -> Stager:
        if fold is None:
            return self._of_rank(rank)
        folds = self._folds(rank, fold.split)
        if fold.number >= len(folds):
            raise ServiceError(f"fold {fold.number} is asked for; there are folds 0 to {len(folds) - 1}")
        found = folds[fold.number]
        return found.train if fold.part == "train" else found.test

    def counts(self, rank: int, split: dict[str, Any]) -> list[dict[str, int]]:
        """Samples of the folds of a scheme."""
        with self._lock:
            return [fold.counts for fold in self._folds(rank, split)]

    def _folds(self, rank: int, split: dict[str, Any]) -> list[StagerFold]:
        key = rank, encode(split)
        if self._split[0] != key:
            self._split = key, self._of_rank(rank).split(split_of(split))
        return self._split[1]

    def _of_rank(self, rank: int) -> Stager:
        return self.stager if rank == 0 else self.stager.on_rank(Ranks(rank, self._n_ranks))

    def close(self) -> None:
        with self._lock:
            for part in self._parts.values():
                part.stager.close()
            self._parts.clear()
        self.stager.close()


class _Part:
    """A Stager, and how its batches look as record batches."""

    def __init__(self, stager: Stager, bfloat16: bool) -> None:
        self.stager, self._bfloat16 = stager, bfloat16
        pack = stager.resident.pack
        _check_batch(stager, stager.batch_size if stager.last == "pad" else min(stager.batch_size, stager.n_samples))
        batch = next(iter(stager.batches(to="numpy")))
        shapes = [None if part is None else list(part.shape[1:]) for part in (batch.x, batch.y, batch.mask)]
        panel = pack.manifest.panel
        self.opened = Opened(
            pack.fingerprint, len(stager), stager.n_samples, list(stager.plan.columns),
            shapes[0] or [], shapes[1], shapes[2], None if panel is None else batch.symbols, stager.state_dict(0, 0),
        )  # fmt: skip
        self._of_panel = panel is not None
        self.schema = self.as_record(batch).schema

    @property
    def facts_schema(self) -> pa.Schema:
        """Of :meth:`facts`, told without the work of making any."""
        fields: list[Any] = [("weight", pa.float32())]
        if not self._of_panel:
            fields.append(("symbol", pa.string()))
        if (shape := self.opened.y_shape) is not None:
            fields.append(("label_time", pa.list_(pa.field("item", pa.int64()), max(1, int(np.prod(shape))))))
        return pa.schema(fields)

    def as_record(self, batch: Batch) -> pa.RecordBatch:
        """A batch."""
        arrays: dict[str, Any] = {
            "sample": pa.array(batch.sample_ids),
            "time": pa.array(batch.times.astype(np.int64)),
            "valid": pa.array(batch.valid.astype(np.uint8)),
            "x": _fixed(cast(np.ascontiguousarray(batch.x), "bfloat16") if self._bfloat16 else batch.x),
        }
        if batch.y is not None:
            arrays["y"] = _fixed(batch.y)
        if batch.mask is not None:
            arrays["mask"] = _fixed(batch.mask.astype(np.uint8))
        return pa.RecordBatch.from_pydict(arrays)

    def facts(self, batch: Batch) -> pa.RecordBatch:
        """What a batch tells of its samples when asked."""
        arrays: dict[str, Any] = {"weight": pa.array(batch.weight)}
        if not self._of_panel:
            arrays["symbol"] = pa.array(batch.symbols, pa.string())
        if (times := batch.label_times) is not None:
            arrays["label_time"] = _fixed(times.astype(np.int64))
        return pa.RecordBatch.from_pydict(arrays)


def _check_batch(stager: Stager, size: int) -> None:
    """Refuse batches that no message should hold."""
    n_columns = stager.resident.rows.shape[1]
    if (nbytes := 4 * size * stager.window * n_columns) > _MOST_BATCH_NBYTES:
        raise ServiceError(
            f"a batch of {size:,} windows of {stager.window:,} rows has {format_nbytes(nbytes)}; at most "
            f"{format_nbytes(_MOST_BATCH_NBYTES)} are streamed: use a smaller batch_size"
        )


def _fixed(values: Any) -> pa.Array[Any]:
    """(n, ...) values as an array of n lists of one length."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, max(1, int(np.prod(values.shape[1:]))))
