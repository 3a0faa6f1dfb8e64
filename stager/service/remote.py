"""Batches from a service on another machine, or on this one without a mapping: gathered there, streamed here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt
from pyarrow import flight

from stager.errors import ConfigError, SampleError, ServiceError
from stager.samples.select import Select
from stager.samples.targets import Target
from stager.service.client import as_error
from stager.service.listening import OpenAnswer, is_loopback
from stager.service.protocol import Open, Opened, Selection, Serving, TargetSpec, Ticket, decode, encode

# A request is for so many bytes, and fails when it has not come in so many seconds.
_REQUEST_NBYTES = 32 << 20
_REQUEST_SECONDS = 120.0
_AHEAD = 2


@dataclass(frozen=True)
class RemoteBatch:
    """A batch that was gathered elsewhere.

    Attributes
    ----------
    epoch, number : int
    x, y, mask
        As in :class:`stager.Batch`, NumPy; None where there is none.
    sample_ids : (size,) int64
    times : (size,) datetime64[ns]
        The decisions, UTC.
    valid : (size,) bool
        False for padding.
    """

    epoch: int
    number: int
    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float32] | None
    mask: npt.NDArray[np.bool_] | None
    sample_ids: npt.NDArray[np.int64]
    times: npt.NDArray[np.datetime64]
    valid: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.x)


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
    window, batch_size, target, seed, shuffle, last, select, normalize
        As in :class:`stager.Stager`; `select` without tables of files.
    rank, n_ranks : int
        `batch_size` is of one rank; several need ``last="drop"`` or ``"pad"``.
    tls_roots : path, optional
        Certificates to trust, in PEM; default: those of the system.

    Raises
    ------
    ConfigError, SampleError
        If an argument is not allowed.
    NoServiceError, ServiceError
        If nobody answers, or the token is not the right one.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        token: str,
        window: int,
        batch_size: int,
        target: Target | list[Target] | None = None,
        seed: int = 0,
        shuffle: str | bool = "full",
        last: str = "keep",
        select: Select = Select(),  # noqa: B008 - frozen
        normalize: str = "none",
        rank: int = 0,
        n_ranks: int = 1,
        tls_roots: str | Path | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme == "grpc+tcp" and not is_loopback(parts.hostname or ""):
            raise ConfigError(f"{url!r}: plain TCP is for this machine alone; the token would travel readable")
        if parts.scheme not in ("grpc+tls", "grpc+tcp"):
            raise ConfigError(f"{url!r} is no address of a service; write grpc+tls://HOST:PORT")
        self._url, self.rank = url, rank
        try:
            self._serving = msgspec.convert(
                {
                    "name": name, "window": window, "batch_size": batch_size, "target": _told(target), "seed": seed,
                    "shuffle": shuffle or None, "last": last, "normalize": normalize, "n_ranks": n_ranks,
                    "select": _selection(select),
                },
                Serving,
            )  # fmt: skip
        except msgspec.ValidationError as error:
            raise SampleError(f"what is asked for can't be streamed: {error}") from None
        if not 0 <= rank < n_ranks:
            raise SampleError(f"rank is {rank!r}; there are ranks 0 to {n_ranks - 1}")
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

    def _open(self) -> Opened:
        while True:
            try:
                (result,) = self._client.do_action(flight.Action("open", encode(Open(self._serving))), self._options)
            except flight.FlightError as error:
                raise as_error(error, self._url) from None
            answer = decode(result.body, OpenAnswer, "the answer", 1 << 26)
            if answer.opened is not None:
                return answer.opened
            time.sleep(0.1)

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

    def batches(self, epoch: int = 0, *, start: int = 0, stop: int | None = None) -> Iterator[RemoteBatch]:
        """Batches ``start : stop`` of an epoch; fetched ahead of the consumer.

        Raises
        ------
        SampleError
            If they are out of range.
        NoServiceError, ServiceError
            If the service ends, or the pack was replaced; what came before is right.
        """
        end = len(self) if stop is None else stop
        if not 0 <= epoch < 1 << 63 or not 0 <= start <= end <= len(self):
            raise SampleError(f"batches {start} to {end} of epoch {epoch} are out of range; there are {len(self)}")
        return self._batches(epoch, start, end)

    def _batches(self, epoch: int, start: int, end: int) -> Iterator[RemoteBatch]:
        nbytes = 4 * self._serving.batch_size * int(np.prod(self._opened.x_shape))
        step = max(1, _REQUEST_NBYTES // nbytes)
        waiting: deque[Future[list[RemoteBatch]]] = deque()
        with ThreadPoolExecutor(1, "stager-remote") as pool:
            try:
                for first in range(start, end, step):
                    waiting.append(pool.submit(self._fetch, epoch, first, min(first + step, end)))
                    if len(waiting) > _AHEAD:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _fetch(self, epoch: int, first: int, stop: int) -> list[RemoteBatch]:
        ticket = Ticket(self._serving, self._opened.fingerprint, epoch, first, stop, self.rank)
        found: list[RemoteBatch] = []
        try:
            reader = self._client.do_get(flight.Ticket(encode(ticket)), self._options)
            for chunk in reader:
                found.append(self._batch(epoch, first + len(found), chunk.data))
        except flight.FlightError as error:
            raise as_error(error, self._url) from None
        if len(found) != stop - first:
            raise ServiceError(f"the service at {self._url} sent {len(found)} batches of {stop - first}")
        return found

    def _batch(self, epoch: int, number: int, record: Any) -> RemoteBatch:
        def part(name: str, shape: list[int] | None) -> Any:
            if shape is None:
                return None
            return record.column(name).flatten().to_numpy(zero_copy_only=True).reshape(len(record), *shape)

        told = self._opened
        mask = part("mask", told.mask_shape)
        return RemoteBatch(
            epoch, number, part("x", told.x_shape), part("y", told.y_shape), None if mask is None else mask.view(bool),
            record.column("sample").to_numpy(), record.column("time").to_numpy().view("datetime64[ns]"),
            record.column("valid").to_numpy().view(bool),
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> RemoteStager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(target: Target | list[Target] | None) -> Any:
    if target is None or isinstance(target, Target):
        return None if target is None else _fields(target, TargetSpec)
    return [_fields(one, TargetSpec) for one in target]


def _selection(select: Select) -> dict[str, Any]:
    for name in ("rolls", "splits", "universe"):
        if getattr(select, name) is not None:
            raise ConfigError(f"select.{name} names bars of files or tables, which a service opens for nobody else")
    told = _fields(select, Selection)
    if told["interval"] is not None:
        told["interval"] = [None if one is None else str(one) for one in told["interval"]]
    return told


def _fields(value: Any, kind: Any) -> dict[str, Any]:
    return {
        name: list(found) if isinstance(found := getattr(value, name), (list, tuple)) else found
        for name in kind.__struct_fields__
    }
