"""Batches from a service on another machine, or on this one without a mapping: gathered there, streamed here."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt
from pyarrow import flight

from stager.batches.frameworks import Framework, check_framework, hand_out
from stager.batches.position import go_on, state_of
from stager.errors import ConfigError, SampleError, ServiceError
from stager.service.carried import asked, asked_split
from stager.service.client import as_error
from stager.service.flights import LOST, told_by
from stager.service.listening import OpenAnswer, is_loopback
from stager.service.protocol import Fold, Open, Opened, Serving, TablePart, Ticket, decode, encode

# A request is for so many bytes, and fails when it has not come in so many seconds.
_REQUEST_NBYTES = 32 << 20
_REQUEST_SECONDS = 120.0
_AHEAD = 2
_PENDING_SECONDS = 0.1
# As text of a message it has a third more.
_PART_NBYTES = 512 << 10
# Others may send so much meanwhile that what was sent gives way; not for ever.
_MOST_SENDINGS = 5


@dataclass(eq=False)
class RemoteBatch:
    """A batch that was gathered elsewhere. What is told of its samples beyond `times` is asked for when wanted.

    Attributes
    ----------
    epoch, number : int
    x, y, mask
        As in :class:`stager.Batch`, on the host; None where there is none.
    sample_ids : (size,) int64
    times : (size,) datetime64[ns]
        The decisions, UTC.
    valid : (size,) bool
        False for padding.
    y_valid : bool, or None
        As in :class:`stager.Batch`.
    """

    epoch: int
    number: int
    x: Any
    y: Any
    mask: Any
    sample_ids: npt.NDArray[np.int64]
    times: npt.NDArray[np.datetime64]
    valid: npt.NDArray[np.bool_]
    y_valid: npt.NDArray[np.bool_] | None
    _stager: RemoteStager = field(repr=False)
    _latest: bool = field(repr=False)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def symbols(self) -> list[str]:
        """As in :class:`stager.Batch`."""
        of_panel = self._stager._opened.symbols
        return list(of_panel) if of_panel is not None else self._facts.column("symbol").to_pylist()

    @property
    def label_times(self) -> npt.NDArray[np.datetime64] | None:
        """As in :class:`stager.Batch`."""
        if (shape := self._stager._opened.y_shape) is None:
            return None
        found: npt.NDArray[np.datetime64] = _part(self._facts, "label_time", shape).view("datetime64[ns]")
        return found

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """As in :class:`stager.Batch`."""
        found: npt.NDArray[np.float32] = self._facts.column("weight").to_numpy()
        return found

    @cached_property
    def _facts(self) -> Any:
        (facts,) = self._stager._read(self.epoch, self.number, self.number + 1, facts=True, latest=self._latest)
        return facts


@dataclass(frozen=True)
class RemoteFold:
    """One fold of :meth:`RemoteStager.split`.

    Attributes
    ----------
    number : int
        From 0.
    n_folds : int
    counts : dict of str to int
        As of :class:`stager.Fold`.
    """

    number: int
    n_folds: int
    counts: dict[str, int]
    _split: dict[str, Any] = field(repr=False)
    _stager: RemoteStager = field(repr=False)

    @cached_property
    def train(self) -> RemoteStager:
        """Serves the training samples; uses the connection of the one that was split."""
        return self._stager._of(Fold(self._split, self.number, "train"))

    @cached_property
    def test(self) -> RemoteStager:
        """Serves the test samples in the order of their decisions, each once."""
        return self._stager._of(Fold(self._split, self.number, "test"))


class RemoteStager:
    """Serves the batches of a pack that a service holds, bit for bit those of a :class:`stager.Stager` there.

    Parameters
    ----------
    url : str
        ``grpc+tls://HOST:PORT``, or ``grpc+tcp://127.0.0.1:PORT``: what the service listens on.
    name : str
        The pack.
    token : str
        That of the service.
    tls_roots : path, optional
        Certificates to trust, in PEM; default: those of the system.
    **arguments
        As in :class:`stager.Stager`, all but `device` and `placement`. Tables that options take are sent to the service
        once, those of files after they were read here; so are weights.

    Raises
    ------
    TypeError
        If a Stager has no such argument.
    ConfigError, SampleError
        If an argument is not allowed, or can't be sent.
    NoServiceError, ServiceError
        If nobody answers, or the token is not the right one.
    """

    def __init__(
        self, url: str, name: str, *, token: str, tls_roots: str | Path | None = None, **arguments: Any
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme == "grpc+tcp" and not is_loopback(parts.hostname or ""):
            raise ConfigError(f"{url!r}: plain TCP is for this machine alone; the token would travel readable")
        if parts.scheme not in ("grpc+tls", "grpc+tcp"):
            raise ConfigError(f"{url!r} is no address of a service; write grpc+tls://HOST:PORT")
        self._url, self._owned = url, True
        self._serving: Serving
        self._serving, self.ranks, self._tables = asked(name, arguments)
        self._bfloat16 = self._serving.batches["dtype"] == "bfloat16"
        # Arrow takes bytes, and says text.
        roots: Any = None if tls_roots is None else Path(tls_roots).read_bytes()
        self._client = flight.FlightClient(url, tls_root_certs=roots)
        headers: Any = [(b"authorization", f"Bearer {token}".encode())]
        self._options = flight.FlightCallOptions(timeout=_REQUEST_SECONDS, headers=headers)
        try:
            self._opened = self._open()
        except BaseException:
            self._client.close()
            raise

    def _open(self, split: dict[str, Any] | None = None) -> Opened:
        n_sent = 0
        while True:
            body = self._ask("open", Open(self._serving, self.ranks.rank, split))
            answer = decode(body, OpenAnswer, "the answer", 1 << 28)
            if answer.opened is not None:
                return answer.opened
            if answer.pending is not None:
                time.sleep(_PENDING_SECONDS)
            for digest in answer.missing or ():
                self._send(digest)
            n_sent += answer.missing is not None
            if n_sent > _MOST_SENDINGS:
                raise ServiceError(
                    f"the service at {self._url} has no room for the tables of this Stager, so many others send; "
                    f"try again later"
                )

    def _send(self, digest: str) -> None:
        if digest not in self._tables:
            raise ServiceError(f"the service at {self._url} asks for a table {digest[:80]!r}, which there is not")
        raw = self._tables[digest]
        for first in range(0, len(raw), _PART_NBYTES):
            self._ask("table", TablePart(digest, len(raw), first, raw[first : first + _PART_NBYTES]))

    def _ask(self, name: str, request: Any) -> Any:
        try:
            (result,) = self._client.do_action(flight.Action(name, encode(request)), self._options)
        except flight.FlightError as error:
            raise as_error(error, self._url) from None
        return result.body

    @property
    def n_samples(self) -> int:
        """Samples of an epoch, of all ranks."""
        return self._opened.n_samples

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of ``batch.x``."""
        return tuple(self._opened.columns)

    @property
    def fingerprint(self) -> str:
        """Of the data. A service with other data refuses to go on."""
        return self._opened.fingerprint

    def __len__(self) -> int:
        """Batches of an epoch, and of this rank."""
        return self._opened.n_batches

    def split(self, scheme: Any) -> list[RemoteFold]:
        """Folds over decision time, as :meth:`stager.Stager.split` makes them.

        Parameters
        ----------
        scheme : WalkForward, PurgedKFold or Combinatorial

        Returns
        -------
        list of RemoteFold
            They use the connection of this Stager, for as long as it is not closed.

        Raises
        ------
        SampleError
            If a fold has no sample to train or to test on.
        NoServiceError, ServiceError
        """
        told = asked_split(scheme)
        counts = self._open(told).folds or []
        return [RemoteFold(number, len(counts), one, told, self) for number, one in enumerate(counts)]

    def _of(self, fold: Fold) -> RemoteStager:
        made = copy.copy(self)
        made._owned, made._serving = False, msgspec.structs.replace(self._serving, fold=fold)
        made._opened = made._open()
        return made

    def batches(
        self, epoch: int = 0, *, start: int = 0, stop: int | None = None, to: Framework | None = None
    ) -> Iterator[RemoteBatch]:
        """Batches ``start : stop`` of an epoch; fetched ahead of the consumer.

        Parameters
        ----------
        epoch, start : int
        stop : int, optional
            Default: the end of the epoch.
        to : {"torch", "jax", "numpy"}, optional
            What ``x``, ``y`` and ``mask`` are; None is NumPy.

        Raises
        ------
        SampleError
            If they are out of range.
        ConfigError
            If the framework is not installed.
        NoServiceError, ServiceError
            If the service ends, or the pack was replaced; what came before is right.
        """
        check_framework(to)
        end = len(self) if stop is None else stop
        if not 0 <= epoch < 1 << 63 or not 0 <= start <= end <= len(self):
            raise SampleError(f"batches {start} to {end} of epoch {epoch} are out of range; there are {len(self)}")
        return self._batches(epoch, start, end, to)

    def latest(self, *, to: Framework | None = None) -> RemoteBatch:
        """The newest window of every symbol, as :meth:`stager.Stager.latest` gives it, of the data of this Stager: of
        bars that come later another one tells.

        Raises
        ------
        SampleError
            With a target.
        NoServiceError, ServiceError
        """
        check_framework(to)
        (record,) = self._read(0, 0, 1, latest=True)
        return self._batch(0, 0, record, to, latest=True)

    def state_dict(self, epoch: int, next_batch: int) -> dict[str, Any]:
        """Where a training is, as :meth:`stager.Stager.state_dict` tells it; either goes on from the other's."""
        return state_of(self._opened.begin, len(self), epoch, next_batch)

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Where to go on, as :meth:`stager.Stager.resume` tells it: the epoch, and its next batch."""
        return go_on(self._opened.begin, len(self), state)

    def _batches(self, epoch: int, start: int, end: int, to: Framework | None) -> Iterator[RemoteBatch]:
        nbytes = 4 * self._serving.batches["batch_size"] * int(np.prod(self._opened.x_shape))
        step = max(1, _REQUEST_NBYTES // nbytes)
        starts = iter(range(start, end, step))
        waiting: deque[tuple[int, Future[list[Any]]]] = deque()
        with ThreadPoolExecutor(1, "stager-remote") as pool:
            try:
                while True:
                    for first in islice(starts, _AHEAD + 1 - len(waiting)):
                        waiting.append((first, pool.submit(self._read, epoch, first, min(first + step, end))))
                    if not waiting:
                        return
                    first, found = waiting.popleft()
                    for number, record in enumerate(found.result(), first):
                        yield self._batch(epoch, number, record, to)
            finally:
                for _, future in waiting:
                    future.cancel()

    def _read(self, epoch: int, first: int, stop: int, *, facts: bool = False, latest: bool = False) -> list[Any]:
        """Record batches, all of those that are asked for."""
        ticket = Ticket(self._serving, self._opened.fingerprint, epoch, first, stop, self.ranks.rank, facts, latest)
        try:
            found = self._get(ticket)
        except flight.FlightError as error:
            if told_by(error) != LOST:
                raise as_error(error, self._url) from None
            self._open()
            try:
                found = self._get(ticket)
            except flight.FlightError as again:
                raise as_error(again, self._url) from None
        if len(found) != stop - first:
            raise ServiceError(f"the service at {self._url} sent {len(found)} batches of {stop - first}")
        return found

    def _get(self, ticket: Ticket) -> list[Any]:
        return [chunk.data for chunk in self._client.do_get(flight.Ticket(encode(ticket)), self._options)]

    def _batch(self, epoch: int, number: int, record: Any, to: Framework | None, latest: bool = False) -> RemoteBatch:
        told = self._opened
        x = _part(record, "x", told.x_shape)
        y = None if told.y_shape is None else _part(record, "y", told.y_shape)
        mask = None if told.mask_shape is None else _part(record, "mask", told.mask_shape).view(bool)
        return RemoteBatch(
            epoch, number, hand_out(x, to, bfloat16=self._bfloat16),
            None if y is None else hand_out(y, to), None if mask is None else hand_out(mask, to),
            record.column("sample").to_numpy(), record.column("time").to_numpy().view("datetime64[ns]"),
            record.column("valid").to_numpy().view(bool), None if y is None else ~np.isnan(y), self, latest,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection; that of a fold is the one of the Stager that was split."""
        if self._owned:
            self._client.close()

    def __enter__(self) -> RemoteStager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _part(record: Any, name: str, shape: list[int]) -> Any:
    """(n, ...) values of a column of lists: a copy, to be written to, as those of a Stager here."""
    flat = record.column(name).flatten().to_numpy(zero_copy_only=True)
    return flat.reshape(len(record), *shape).copy()
