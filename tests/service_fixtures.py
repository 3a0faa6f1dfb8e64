"""Services on sockets of their own, in this process and in others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bars_fixtures import bar_table

import stager
from stager.service import protocol
from stager.service.client import Connection
from stager.service.places import ServerPlace
from stager.service.server import Server
from stager.service.service import Service


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short private directory: a socket's path has little room."""
    folder = Path(tempfile.mkdtemp(prefix="stg-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pack_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "prices.pack"
    stager.pack(bar_table({"A": range(3000), "B": range(2000)}), path)
    return path


@contextmanager
def serving(run_dir: Path, *packs: Path, **options: object) -> Iterator[Service]:
    """A service in this process."""
    service = Service(ServerPlace(run_dir / "s.sock"), "cpu", **options)  # type: ignore[arg-type]
    for pack in packs:
        service.add(pack.stem, pack)
    server = Server(service)
    try:
        yield service
    finally:
        service.draining = True
        assert server.end(20)
        service.close()


@pytest.fixture
def service(run_dir: Path, pack_path: Path) -> Iterator[Service]:
    with serving(run_dir, pack_path) as made:
        yield made


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something to come true."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come true"
        time.sleep(0.02)


class Served:
    """``stager serve`` in a process of its own."""

    def __init__(self, run_dir: Path, *arguments: object) -> None:
        self.socket, self.log = run_dir / "s.sock", run_dir / f"serve{len(list(run_dir.glob('*.log')))}.log"
        with self.log.open("xb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stager.cli", "serve", *map(str, arguments), "--socket", str(self.socket),
                 "--device", "cpu"],
                stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: "serving on" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def stats(self) -> protocol.StatsInfo:
        with Connection(self.socket) as connection:
            return connection.ask(protocol.Stats(), protocol.StatsInfo)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


class Client:
    """A Python process that runs a script and answers lines with lines."""

    def __init__(self, script: str, socket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=os.environ | {"STAGER_SERVICE_SOCKET": str(socket)},
        )  # fmt: skip

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise AssertionError(self.process.communicate(timeout=10)[1])
        return line

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on standard error."""
        _, told = self.process.communicate(timeout=30)
        return self.process.returncode, told


@pytest.fixture
def processes() -> Iterator[list[Served | Client]]:
    """Put those here that must not outlive the test."""
    started: list[Served | Client] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(10)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            if stream is not None:
                stream.close()
