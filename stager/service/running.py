"""Running a service: stage, listen, and end in order when a signal says so."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from stager.errors import ConfigError
from stager.service.holdings import Progress, Shareable
from stager.service.listening import Listen, Listener
from stager.service.metrics import Endpoint
from stager.service.places import ServerPlace, socket_path
from stager.service.server import Server
from stager.service.service import MAX_CLIENTS, Service

log = logging.getLogger("stager.service")

# For clients between the leave to attach and their lease, and for calls; what attached goes on without the service.
_ATTACHING_SECONDS = 5.0
_CALLS_SECONDS = 3.0
_STREAMS_SECONDS = 20.0
# After which a process that should have ended tells where it hangs, and ends all the same.
_END_SECONDS = 45.0
_WAKE_SECONDS = 0.5


def name_packs(texts: Sequence[str]) -> dict[str, Path]:
    """Name to path of packs given as ``PATH`` or ``NAME=PATH``; the name of ``a/prices.pack`` is "prices".

    Raises
    ------
    ConfigError
        If two have one name, or a name is none.
    """
    packs: dict[str, Path] = {}
    for text in texts:
        head, sign, tail = text.partition("=")
        # A path that exists is taken for one, whatever is in it.
        name, path = (
            (head, Path(tail)) if sign and not Path(text).exists() else (Path(text).absolute().stem, Path(text))
        )
        if not re.fullmatch(r"[^/\x00-\x1f\x7f]{1,200}", name):
            raise ConfigError(
                f"{name!r} is no name of a pack; write NAME=PATH with a name of 1 to 200 characters, no /"
            )
        if name in packs:
            raise ConfigError(f"two packs would be called {name!r}: {packs[name]} and {path}; name one: other={path}")
        packs[name] = path
    return packs


def serve(
    packs: dict[str, Path],
    *,
    device: str = "auto",
    placement: Shareable = "device",
    socket: str | Path | None = None,
    metrics: str | None = None,
    listen: Listen | None = None,
    max_clients: int = MAX_CLIENTS,
    progress: Progress | None = None,
    ready: Callable[[Service], None] = lambda service: None,
) -> bool:
    """Hold packs for clients until SIGTERM or SIGINT. Runs in the main thread.

    Parameters
    ----------
    packs : dict of str to Path
    device : str
        As in :func:`stager.stage`.
    placement : {"device", "spread"}
        As there, on GPUs.
    socket : str or Path, optional
    metrics : str, optional
        ``PORT`` or ``HOST:PORT`` of the metrics and health endpoint; a port alone is on 127.0.0.1.
    listen : Listen, optional
        Where batches are streamed to clients elsewhere.
    max_clients : int
    progress : callable(phase, done_nbytes, total_nbytes), optional
    ready : callable(service)
        Called once when clients are served.

    Returns
    -------
    bool
        Whether every call has ended. If not, a stopped client holds one, and the process must be ended without waiting
        for its threads.

    Raises
    ------
    ServiceError
        If another service has the socket, or others could reach it.
    PackError, DeviceError, StagingError, ConfigError
        Nothing stays staged.
    """
    with _Signals() as signals:
        place = ServerPlace(socket_path(socket))
        service = Service(place, device, placement=placement, max_clients=max_clients)
        endpoint: Endpoint | None = None
        try:
            if metrics is not None:
                endpoint = Endpoint(metrics, service)
            for name, path in packs.items():
                service.add(name, path, progress)
            server = Server(service)
            listener = None if listen is None else Listener(service, listen)
            service.ready = True
            signals.raises = False
            ready(service)
            told = signals.wait()
            faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
            log.warning("%s: the service takes no new clients and ends", told)
            return _drain(service, server, listener, signals)
        finally:
            if endpoint is not None:
                endpoint.close()
            service.close()
            faulthandler.cancel_dump_traceback_later()


def leave(clean: bool) -> None:
    """End the process, also where threads are stuck in calls of stopped clients."""
    if not clean:
        logging.shutdown()
        os._exit(0)


def _drain(service: Service, server: Server, listener: Listener | None, signals: _Signals) -> bool:
    service.draining = True
    ended = listener is None or listener.end(0.1 if signals.again else _STREAMS_SECONDS)
    limit = time.monotonic() + _ATTACHING_SECONDS
    while service.is_attaching and time.monotonic() < limit and not signals.again:
        time.sleep(0.02)
    if n := service.n_clients:
        log.warning("%d clients go on with what they have attached", n)
    return server.end(0.1 if signals.again else _CALLS_SECONDS) and ended


class _Signals:
    """SIGTERM and SIGINT: raise KeyboardInterrupt while staging, and are waited for later."""

    def __init__(self) -> None:
        self.raises = True
        self._told: SimpleQueue[str] = SimpleQueue()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._handle) for one in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            raise KeyboardInterrupt
        # A queue made for it: an event's lock may be held by the very code that was interrupted.
        self._told.put(signal.Signals(number).name)

    def wait(self) -> str:
        while True:
            # A handler runs when the main thread wakes, and a signal that another thread received does not wake it.
            with contextlib.suppress(Empty):
                return self._told.get(timeout=_WAKE_SECONDS)

    @property
    def again(self) -> bool:
        """Whether a second signal came."""
        return not self._told.empty()
