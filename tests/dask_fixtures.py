"""A Dask scheduler and workers, as processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class DaskProcesses:
    """Started by :func:`dask_cluster`."""

    folder: Path
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start_scheduler(self, **environ: str) -> subprocess.Popen[bytes]:
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"]
        process = self._start("scheduler", *options, **environ)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.05)
        raise AssertionError("the scheduler did not start")

    def start_worker(self, memory: str = "2GiB", **environ: str) -> subprocess.Popen[bytes]:
        options = ["--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--nthreads", "1", "--memory-limit", memory]
        options += ["--preload", "dask_worker_faults", "--local-directory", str(self.folder)]
        return self._start("worker", self.address, *options, **environ)

    def _start(self, what: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        # In other folders than the tests, whose relative paths are not theirs.
        self.folder.mkdir(exist_ok=True)
        there = {"PYTHONPATH": str(Path(__file__).parent)}
        with (self.folder / f"{what}-{len(self.processes)}.log").open("wb") as log:
            command = [sys.executable, "-m", "distributed.cli.dask_" + what, *options]
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | there | environ, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def dask_cluster(folder: Path, n_workers: int = 2, **environ: str) -> Iterator[DaskProcesses]:
    """A scheduler and workers of one thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made = DaskProcesses(folder, free.getsockname()[1])
    try:
        made.start_scheduler(**environ)
        for _ in range(n_workers):
            made.start_worker(**environ)
        yield made
    finally:
        made.end()
