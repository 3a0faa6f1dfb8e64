"""What a service tells of itself over HTTP: ``/metrics`` for Prometheus, ``/healthz`` for probes."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stager.errors import ConfigError, ServiceError
from stager.service.service import Service

log = logging.getLogger("stager.service")

_MOST_AT_ONCE = 16
_REQUEST_SECONDS = 5.0
_STATES = ("attaching", "live", "late", "cut off")
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)


class Endpoint:
    """Answers from a thread of its own.

    Parameters
    ----------
    address : str
        ``PORT`` or ``HOST:PORT``; a port alone is on 127.0.0.1. Port 0 takes a free one.
    service : Service

    Attributes
    ----------
    port : int

    Raises
    ------
    ConfigError
        If prometheus-client is not installed, or the address is none.
    ServiceError
        If the address can't be listened on.
    """

    def __init__(self, address: str, service: Service) -> None:
        match = re.fullmatch(r"(?:(\[[0-9a-fA-F:]+\]|[^\[\]:]*):)?([0-9]{1,5})", address)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"metrics is {address!r}; write a port such as 9464, or HOST:PORT")
        host = (match[1] or "127.0.0.1").strip("[]")
        render = _renderer(service)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS
            server_version = "stager"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    body, kind = render()
                    self._send(200, body, kind)
                elif path == "/healthz":
                    state = service.health
                    self._send(
                        200 if state == "serving" else 503, json.dumps({"status": state}).encode(), "application/json"
                    )
                else:
                    self._send(404, b"there are /metrics and /healthz\n", "text/plain")

            def _send(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = _BoundedServer((host, int(match[2])), Handler)
        except OSError as error:
            raise ServiceError(f"metrics can't listen on {host}:{match[2]}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        log.info("metrics on %s:%d", match[1] or host, self.port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="stager-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    """A thread a request, so many at a time; others are turned away."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away or was too slow


def _renderer(service: Service) -> Any:
    try:
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise ConfigError(f"metrics need prometheus-client ({error}): pip install 'stager[serve]'") from error
    registry = prometheus.CollectorRegistry()
    attaching = prometheus.Histogram(
        "stager_attach_seconds", "Time from asking for a pack to having its rows.", buckets=_SECONDS, registry=registry
    )
    service.on_attach = attaching.observe

    class Collector:
        def collect(self) -> Iterator[Any]:
            told = service.stats()
            resident = GaugeMetricFamily("stager_resident_bytes", "Bytes of rows held.", labels=("pack", "version"))
            for pack in told.packs:
                resident.add_metric((pack.name, str(pack.version)), pack.nbytes)
            yield resident
            yield GaugeMetricFamily("stager_table_bytes", "Bytes of tables shared by clients.", told.table_nbytes)
            states = Counter(client.state for client in told.clients)
            clients = GaugeMetricFamily("stager_clients", "Clients by the state of their lease.", labels=("state",))
            for state in _STATES:
                clients.add_metric((state,), states[state])
            yield clients
            yield CounterMetricFamily("stager_attached", "Clients that have attached.", told.n_attached)
            yield CounterMetricFamily("stager_batches", "Batches that clients have served.", told.n_batches)
            refused = CounterMetricFamily("stager_refused", "Requests that were refused.", labels=("reason",))
            for reason, count in told.n_refused.items():
                refused.add_metric((reason,), count)
            yield refused
            yield CounterMetricFamily("stager_errors", "Requests that failed inside the service.", told.n_errors)
            yield GaugeMetricFamily("stager_draining", "1 while the service ends.", int(told.draining))

    registry.register(Collector())
    return lambda: (prometheus.generate_latest(registry), prometheus.CONTENT_TYPE_LATEST)
