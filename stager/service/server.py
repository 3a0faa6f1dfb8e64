"""The service on Arrow Flight: requests are actions, a lease is an exchange. Everything else is refused."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import flight

from stager.errors import ServiceError, StagerError
from stager.service.flights import ENDING, FORCED, Told
from stager.service.gate import Gate, unix_socket
from stager.service.places import location
from stager.service.protocol import MAX_BEAT_NBYTES, MAX_MESSAGE_NBYTES, REQUESTS, Beat, Lease, decode, encode
from stager.service.service import Service

log = logging.getLogger("stager.service")

# Requests at a time; one takes well below a millisecond.
MAX_AT_ONCE = 32
_MOST_BEATS_PER_SECOND = 20.0
_LOG_SECONDS = 5.0
# Of one call: a message and what frames it, and then signs of life.
_BURST_NBYTES, _NBYTES_PER_SECOND = 4 * MAX_MESSAGE_NBYTES, 4096


class Refusals:
    """Counts what was refused, and logs it without letting a flood fill the log."""

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, threading.Lock()
        self._next, self._quiet = 0.0, 0

    def note(self, reason: str, message: str) -> None:
        with self._lock:
            self._service.n_refused[reason] += 1
            now = time.monotonic()
            if now < self._next:
                self._quiet += 1
                return
            more, self._quiet, self._next = self._quiet, 0, now + _LOG_SECONDS
        # It may hold what a stranger sent.
        message = "".join(c if c.isprintable() else "?" for c in message[:500])
        log.warning("refused (%s): %s%s", reason, message, f"; and {more:,} more before it" if more else "")


@contextmanager
def answering(service: Service, refusals: Refusals, what: str) -> Iterator[None]:
    """Errors on purpose go to the client as they are; others are logged, and the client learns only that."""
    try:
        yield
    except StagerError as error:
        refusals.note(type(error).__name__, str(error))
        raise Told(type(error).__name__, str(error)).as_error() from None
    except flight.FlightError:
        raise
    except Exception as error:
        service.n_errors += 1
        log.exception("%s failed", what)
        message = f"the service failed ({type(error).__name__}); its log says more"
        raise Told("ServiceError", message).as_error() from None


class Server(flight.FlightServerBase):
    """Serves on the service's unix socket from the moment that it is made.

    Parameters
    ----------
    service : Service
    """

    def __init__(self, service: Service) -> None:
        self._service, self._refusals = service, Refusals(service)
        self._busy = threading.BoundedSemaphore(MAX_AT_ONCE)
        super().__init__(location(service.place.inner))
        os.chmod(service.place.inner, 0o600)
        self._gate = Gate(
            unix_socket(service.place.path),
            service.place.inner,
            self._refusals.note,
            max_connections=2 * service.max_clients,
            burst_nbytes=_BURST_NBYTES,
            nbytes_per_second=_NBYTES_PER_SECOND,
        )

    def list_actions(self, context: Any) -> Any:
        return [(name, (kind.__doc__ or "").strip()) for name, kind in REQUESTS.items()]

    def do_action(self, context: Any, action: Any) -> list[Any]:
        with answering(self._service, self._refusals, "a request"):
            kind = REQUESTS.get(action.type)
            if kind is None:
                raise ServiceError(f"there is no action {action.type[:80]!r}; there are: {', '.join(REQUESTS)}")
            body = action.body
            request = decode(b"{}" if body is None else body, kind, f"the message {action.type!r}")
            if not self._busy.acquire(blocking=False):
                raise ServiceError(f"the service answers {MAX_AT_ONCE} requests already; ask again")
            try:
                return [flight.Result(encode(self._service.answer(request)))]
            finally:
                self._busy.release()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with answering(self._service, self._refusals, "a lease"):
            name = decode(descriptor.command or b"", Lease, "the lease").id
            self._service.connect(name)
            allowance, since = _MOST_BEATS_PER_SECOND, time.monotonic()
            try:
                while True:
                    try:
                        chunk = reader.read_chunk()
                    except (StopIteration, flight.FlightError, OSError):
                        return
                    if chunk.data is not None or chunk.app_metadata is None:
                        raise ServiceError("a lease carries signs of life, no data")
                    now = time.monotonic()
                    allowance = min(_MOST_BEATS_PER_SECOND, allowance + (now - since) * _MOST_BEATS_PER_SECOND) - 1
                    since = now
                    if allowance < 0:
                        raise ServiceError(f"more than {_MOST_BEATS_PER_SECOND:.0f} signs of life a second")
                    beat = decode(chunk.app_metadata, Beat, "the sign of life", MAX_BEAT_NBYTES)
                    if self._service.beat(name, beat):
                        raise FORCED.as_error()
                    if self._service.draining:
                        # Not simply the end of the call: of that a client that writes learns nothing.
                        raise ENDING.as_error()
            finally:
                self._service.cut(name)

    def end(self, seconds: float) -> bool:
        """Stop listening; whether all calls have ended in that time. Those of stopped clients don't."""
        thread = threading.Thread(target=self.shutdown, name="stager-shutdown", daemon=True)
        thread.start()
        thread.join(seconds)
        self._gate.close()
        return not thread.is_alive()
