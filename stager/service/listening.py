"""The listener for other machines: streams ready batches to whoever has the token, over TLS. It controls nothing."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pyarrow import flight

from stager.errors import ConfigError, ServiceError
from stager.service.flights import LOST
from stager.service.gate import Gate
from stager.service.places import location
from stager.service.protocol import ListPacks, Open, Opened, Pending, TablePart, Ticket, decode, encode
from stager.service.server import Refusals, answering
from stager.service.service import Service
from stager.service.streams import Streams

log = logging.getLogger("stager.service")

# Streams at a time; each has a thread and a group of batches.
MAX_STREAMS = 16
_LEAST_TOKEN = 16
_TICKET_NBYTES = 1 << 20
_MOST_CONNECTIONS = 64
_ACTIONS: dict[str, type[msgspec.Struct]] = {"list": ListPacks, "open": Open, "table": TablePart}
_NBYTES_PER_SECOND = 4096


class OpenAnswer(msgspec.Struct, frozen=True):
    """What came of an ``open``: one of the three. `missing` are hashes of tables to be sent first."""

    pending: Pending | None = None
    opened: Opened | None = None
    missing: list[str] | None = None


@dataclass(frozen=True)
class Listen:
    """Where to listen, checked.

    Attributes
    ----------
    url, host : str
    port : int
    token : str
    tls : ssl.SSLContext or None
        None on the loopback.
    """

    url: str
    host: str
    port: int
    token: str
    tls: ssl.SSLContext | None = None


def read_listen(
    url: str,
    token_file: str | Path | None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> Listen:
    """Check an address to listen on and read its secrets.

    Parameters
    ----------
    url : str
        ``grpc+tls://HOST:PORT``, or ``grpc+tcp://HOST:PORT`` where the host is the loopback.
    token_file, certificate, key : path
        The token that clients must show; certificate and key of the server in PEM.

    Raises
    ------
    ConfigError
        Saying what is missing, or not allowed.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"listen is {url!r}: {error}") from None
    if parts.scheme not in ("grpc+tls", "grpc+tcp") or not host or port is None or parts.path.strip("/"):
        raise ConfigError(
            f"listen is {url!r}; write grpc+tls://HOST:PORT, or grpc+tcp://127.0.0.1:PORT on this machine"
        )
    if token_file is None:
        raise ConfigError(
            "listen needs a token, which clients show: write at least 16 characters into a file of mode 0600 and give "
            "--token-file (python -c 'import secrets; print(secrets.token_urlsafe())')"
        )
    token = read_token(token_file)
    if parts.scheme == "grpc+tcp":
        if not is_loopback(host):
            raise ConfigError(
                f"listen is {url!r}: plain TCP is for this machine alone (127.0.0.1, ::1), where nobody else reads "
                f"along; use grpc+tls:// with --tls-cert and --tls-key"
            )
        if certificate is not None or key is not None:
            raise ConfigError(f"listen is {url!r}, plain TCP, which takes no certificate; use grpc+tls://")
        return Listen(url, host, port, token)
    if certificate is None or key is None:
        raise ConfigError(f"listen is {url!r}; TLS needs --tls-cert and --tls-key, files in PEM")
    for path in (certificate, key):
        _read(path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.set_alpn_protocols(["h2"])
    try:
        tls.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate}, {key}: no certificate in PEM and its key: {error.reason or error}") from None
    return Listen(url, host, port, token, tls)


def read_token(path: str | Path) -> str:
    """The token in a file that nobody else may read.

    Raises
    ------
    ConfigError
    """
    token = _read(path).decode("utf-8", "replace").strip()
    if Path(path).stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others may read the token; chmod 600 {path}")
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{path}: a token has at least {_LEAST_TOKEN} printable ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether a host names this machine alone, without asking anybody."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}") from None


class _Token(flight.ServerMiddlewareFactory):
    """Lets calls with the token through."""

    def __init__(self, token: str, refusals: Refusals) -> None:
        self._expected, self._refusals = f"Bearer {token}".encode(), refusals

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        shown = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(shown.encode() if isinstance(shown, str) else bytes(shown), self._expected):
            self._refusals.note("no token", "a call without the right token")
            raise flight.FlightUnauthenticatedError("the service wants its token; see its --token-file")


class Listener(flight.FlightServerBase):
    """Serves from the moment that it is made.

    Parameters
    ----------
    service : Service
    listen : Listen

    Raises
    ------
    ServiceError
        If the address can't be listened on.
    """

    def __init__(self, service: Service, listen: Listen) -> None:
        self._service, self._refusals = service, Refusals(service)
        self._streams = Streams(service)
        service.on_sweep = self._streams.purge
        self._places, self._busy = (threading.BoundedSemaphore(MAX_STREAMS) for _ in range(2))
        try:
            outer = socket.create_server((listen.host, listen.port), family=_family(listen.host))
        except OSError as error:
            raise ServiceError(f"can't listen on {listen.url}: {error.strerror or error}") from None
        super().__init__(location(service.place.stream), middleware={"token": _Token(listen.token, self._refusals)})
        os.chmod(service.place.stream, 0o600)
        self._gate = Gate(
            outer,
            service.place.stream,
            self._refusals.note,
            tls=listen.tls,
            max_connections=_MOST_CONNECTIONS,
            burst_nbytes=2 * _TICKET_NBYTES,
            nbytes_per_second=_NBYTES_PER_SECOND,
        )
        self.outer_port: int = outer.getsockname()[1]
        log.info("streams batches on port %d", self.outer_port)

    def list_actions(self, context: Any) -> Any:
        return [(name, (kind.__doc__ or "").strip()) for name, kind in _ACTIONS.items()]

    def do_action(self, context: Any, action: Any) -> list[Any]:
        with answering(self._service, self._refusals, "a request"):
            kind = _ACTIONS.get(action.type)
            if kind is None:
                raise ServiceError(f"there is no action {action.type[:80]!r}; there are: {', '.join(_ACTIONS)}")
            body = b"{}" if action.body is None else action.body
            # Dearer than requests on the socket: one may make the tables of a Stager.
            if not self._busy.acquire(blocking=False):
                raise ServiceError(f"the service answers {MAX_STREAMS} requests already; ask again")
            try:
                return [
                    flight.Result(
                        encode(self._answer(decode(body, kind, f"the message {action.type!r}", _TICKET_NBYTES)))
                    )
                ]
            finally:
                self._busy.release()

    def _answer(self, request: Any) -> Any:
        match request:
            case ListPacks():
                return self._service.answer(request)
            case TablePart():
                return self._streams.tables.put(request)
        found = self._streams.open(request)
        if isinstance(found, Pending):
            return OpenAnswer(pending=found)
        return OpenAnswer(missing=found) if isinstance(found, list) else OpenAnswer(opened=found)

    def do_get(self, context: Any, ticket: Any) -> Any:
        with answering(self._service, self._refusals, "a stream"):
            if self._service.draining:
                raise ServiceError("the service is ending and begins no streams")
            told = decode(ticket.ticket, Ticket, "the ticket", _TICKET_NBYTES)
            if (found := self._streams.read(told)) is None:
                raise LOST.as_error()
            schema, batches = found
            return flight.GeneratorStream(schema, self._until_the_end(batches))

    def _until_the_end(self, batches: Any) -> Any:
        with answering(self._service, self._refusals, "a stream"):
            # Here, because a stream whose client has gone is never begun.
            if not self._places.acquire(blocking=False):
                raise ServiceError(f"the service streams to {MAX_STREAMS} clients already; ask again")
            try:
                yield from batches
            finally:
                self._places.release()

    def end(self, seconds: float) -> bool:
        """Stop listening; whether all streams have ended in that time."""
        thread = threading.Thread(target=self.shutdown, name="stager-shutdown", daemon=True)
        thread.start()
        thread.join(seconds)
        self._gate.close()
        if not thread.is_alive():
            self._streams.close()
        return not thread.is_alive()
