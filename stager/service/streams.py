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
from stager.batches.stager import Stager
from stager.errors import ServiceError
from stager.samples.select import Select
from stager.samples.targets import Target
from stager.service.holdings import Holding
from stager.service.protocol import Opened, Pending, Serving, TargetSpec, Ticket, encode
from stager.service.service import Service

# Each holds tables of about 4 bytes a row and target.
_MOST_STAGERS = 4
# How long a Stager of data that is offered no longer waits for its clients to ask for more.
_IDLE_SECONDS = 60.0


class Streams:
    """Serves batches of a service's packs. Every method may be called by several threads.

    Parameters
    ----------
    service : Service
    """

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, threading.Lock()
        # By the bytes of a serving and the fingerprint of the data; the latest used one is the last.
        self._served: dict[tuple[bytes, str], _Served] = {}

    def open(self, serving: Serving) -> Opened | Pending:
        """What a set of arguments would serve, of the pack's current version.

        Raises
        ------
        ServiceError, SampleError, ConfigError
        """
        found = self._service.holdings.ready(serving.name)
        return found if isinstance(found, Pending) else self._of(serving, found).opened

    def read(self, ticket: Ticket) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The batches of a ticket, each as a record batch.

        Raises
        ------
        ServiceError
            If the ticket is out of range, or of data that are not held any more.
        """
        served = self._find((encode(ticket.serving), ticket.fingerprint))
        if served is None:
            current = self._service.holdings.current(ticket.serving.name)
            if current.resident.pack.fingerprint != ticket.fingerprint:
                raise ServiceError(
                    f"{ticket.serving.name!r} is another version now ({current.resident.pack.fingerprint}, the ticket "
                    f"is for {ticket.fingerprint}); open it again"
                )
            served = self._of(ticket.serving, current)
        n_batches, n_ranks = served.opened.n_batches, ticket.serving.n_ranks
        if not ticket.first < ticket.stop <= n_batches:
            raise ServiceError(
                f"the ticket is for batches {ticket.first} to {ticket.stop}; an epoch has batches 0 to {n_batches - 1}"
            )
        if ticket.rank >= n_ranks:
            raise ServiceError(f"the ticket is for rank {ticket.rank}; there are ranks 0 to {n_ranks - 1}")
        return served.schema, self._batches(served, ticket)

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
        key = encode(serving), holding.resident.pack.fingerprint
        if (found := self._find(key)) is not None:
            return found
        client = uuid.uuid4().hex
        self._service.holdings.use(holding, client)
        try:
            made = _Served(serving, holding, client)
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
            one.stager.close()
            self._service.holdings.leave(one.holding, one.client)

    def _batches(self, served: _Served, ticket: Ticket) -> Iterator[pa.RecordBatch]:
        with self._lock:
            served.n_readers += 1
        try:
            batches = served.stager.batches(ticket.epoch, start=ticket.first, to="numpy")
            for _, batch in zip(range(ticket.first, ticket.stop), batches, strict=False):
                yield served.as_record(batch, ticket.rank)
                self._service.count_streamed()
        finally:
            with self._lock:
                served.n_readers -= 1
                served.used = time.monotonic()


class _Served:
    """A Stager, and how its batches look as record batches."""

    def __init__(self, serving: Serving, holding: Holding, client: str) -> None:
        self.holding, self.client, self.used, self.n_readers = holding, client, time.monotonic(), 0
        if serving.n_ranks > 1 and (serving.last == "keep" or serving.shuffle == "time"):
            raise ServiceError(
                f"{serving.n_ranks} ranks need last='drop' or 'pad', and samples that are shuffled singly or not at "
                f"all: every rank gets as many batches, all of one size"
            )
        self._batch_size = serving.batch_size
        # As Ranks has it: the batches of all ranks side by side are one batch. One Stager does for all of them.
        self.stager = Stager(
            holding.resident,
            window=serving.window,
            target=_targets(serving.target),
            batch_size=serving.batch_size * serving.n_ranks,
            seed=serving.seed,
            shuffle=serving.shuffle or False,
            last=serving.last,
            select=Select(**{name: getattr(serving.select, name) for name in serving.select.__struct_fields__}),
            normalize=serving.normalize,
        )
        batch = next(iter(self.stager.batches(to="numpy")))
        shapes = [None if part is None else list(part.shape[1:]) for part in (batch.x, batch.y, batch.mask)]
        columns = serving.select.columns or list(holding.resident.pack.columns)
        self.opened = Opened(
            holding.resident.pack.fingerprint, len(self.stager), self.stager.n_samples, list(columns),
            shapes[0] or [], shapes[1], shapes[2],
        )  # fmt: skip
        self.schema = self.as_record(batch, 0).schema

    def as_record(self, batch: Batch, rank: int) -> pa.RecordBatch:
        """One rank's part of a batch."""
        part = slice(rank * self._batch_size, (rank + 1) * self._batch_size)
        if self.stager.batch_size == self._batch_size:
            part = slice(None)
        arrays = {
            "sample": pa.array(batch.sample_ids[part]),
            "time": pa.array(batch.times[part].astype(np.int64)),
            "valid": pa.array(batch.valid[part].astype(np.uint8)),
            "x": _fixed(batch.x[part]),
        }
        if batch.y is not None:
            arrays["y"] = _fixed(batch.y[part])
        if batch.mask is not None:
            arrays["mask"] = _fixed(batch.mask[part].astype(np.uint8))
        return pa.RecordBatch.from_pydict(arrays)


def _targets(told: TargetSpec | list[TargetSpec] | None) -> Any:
    if told is None or isinstance(told, TargetSpec):
        return None if told is None else Target(**msgspec.structs.asdict(told))
    return [Target(**msgspec.structs.asdict(one)) for one in told]


def _fixed(values: Any) -> pa.Array[Any]:
    """(n, ...) values as an array of n lists of one length."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, max(1, int(np.prod(values.shape[1:]))))
