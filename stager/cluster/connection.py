"""The cluster: tasks as futures that always end, by a result or one clear error."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from stager.bars.threads import thread_count
from stager.errors import ConfigError, PackError, StagerError

R = TypeVar("R")

_CONNECT_SECONDS = 15.0
# Without a single worker for so long, nothing is waited for any more.
_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 1.0


class Cluster:
    """Tasks on the workers of a Dask cluster.

    Parameters
    ----------
    client : distributed.Client
    name : str
        Its address, for errors.
    """

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name
        self._pending: dict[Future[Any], Any] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._failed: PackError | None = None
        self._watcher = threading.Thread(target=self._watch, name="stager-cluster", daemon=True)

    def __enter__(self) -> Cluster:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._lock:
            futures, self._pending = list(self._pending.values()), {}
        with suppress(Exception):
            if futures and self._client.status == "running":
                self._client.cancel(futures, force=True)
        self._watcher.join(_LOOK_SECONDS + 2)

    def on_each(self, function: Callable[..., R], *args: Any) -> dict[str, R]:
        """The function on each worker, by its address; waits until there is one.

        Raises
        ------
        PackError
            If there is none, or one failed.
        """
        from distributed import TimeoutError

        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE_SECONDS)
            found: dict[str, Any] = self._client.run(function, *args, on_error="return")
        except TimeoutError:
            raise self._none() from None
        except OSError:
            raise self._lost() from None
        for address, one in found.items():
            if isinstance(one, BaseException):
                raise self._told(f"the worker at {address}", one) from None
        if not found:
            raise self._none()
        return found

    def submit(self, what: str, function: Callable[..., R], *args: Any) -> Future[R]:
        """Begin a task; `what` names it in errors. It runs again where its worker is lost."""
        done: Future[R] = Future()
        done.set_running_or_notify_cancel()
        try:
            future = self._client.submit(function, *args, pure=False)
        except Exception as error:
            done.set_exception(self._told(what, error))
            return done
        with self._lock:
            self._pending[done] = future
            failed = self._failed
        if failed is not None:
            self._end(done, error=failed)
        future.add_done_callback(partial(self._settle, what, done))
        return done

    def results(self, futures: Sequence[Future[R]], progress: Callable[[int, int], None]) -> list[R]:
        """The results in order, when all tasks are done; or the first error."""
        pending: set[Future[R]] = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
            progress(len(futures) - len(pending), len(futures))
        return [future.result() for future in futures]

    def _settle(self, what: str, done: Future[Any], future: Any) -> None:
        try:
            if future.status == "finished":
                # Of a worker that was lost since, it is made again.
                self._end(done, result=future.result())
            elif future.status == "error":
                self._end(done, error=self._told(what, future.exception()))
            else:
                self._end(done, error=self._lost())
        except BaseException as error:
            self._end(done, error=self._told(what, error))

    def _end(self, done: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._pending.pop(done, None) is None:
                return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _watch(self) -> None:
        """End all tasks when no worker is left to do them."""
        alone = 0.0
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                n_workers = len(self._client.nthreads())
            except Exception:  # the scheduler is away; the client tells its futures when it is lost
                n_workers = 0
            alone = 0.0 if n_workers else alone + _LOOK_SECONDS
            if self._client.status in ("closed", "closing"):
                error = self._lost()
            elif alone >= _PATIENCE_SECONDS:
                error = self._none()
            else:
                continue
            with self._lock:
                self._failed, pending = error, list(self._pending)
            for done in pending:
                self._end(done, error=error)
            return

    def _told(self, what: str, error: BaseException) -> BaseException:
        """The error of a task as this process tells it."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm import CommClosedError

        if isinstance(error, StagerError):
            return error
        if isinstance(error, KilledWorker):
            return PackError(
                f"{what}: {error.allowed_failures + 1} workers died on it, the last at {error.last_worker.address}; "
                "their logs may tell why. If it was memory, give workers more, or pack with less --memory"
            )
        if isinstance(error, (CancelledError, CommClosedError)):
            return self._lost()
        if isinstance(error, ImportError):
            return PackError(f"{what}: {error}; install the same stager for the workers of {self._name}")
        if isinstance(error, MemoryError):
            return PackError(f"{what}: a worker ran out of memory; give workers more, or pack with less --memory")
        if isinstance(error, (OSError, pa.ArrowException)):
            return PackError(f"{what}: {error}")
        return error

    def _lost(self) -> PackError:
        return PackError(
            f"the scheduler at {self._name} is gone, or was started again, and all tasks with it; nothing was packed. "
            "Pack again when it runs"
        )

    def _none(self) -> PackError:
        return PackError(
            f"no worker of the cluster at {self._name} for {_PATIENCE_SECONDS:.0f} s; start some with "
            f"`dask worker {self._name}`, and pack again"
        )


@contextmanager
def connected(cluster: Any, n_workers: int | None = None) -> Iterator[Cluster]:
    """The cluster at an address, of a client, or for "local" of `n_workers` processes on this machine.

    Raises
    ------
    ConfigError
        If Dask is not installed, or `cluster` is none of these.
    PackError
        If nobody answers there.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ConfigError("cluster needs Dask; pip install 'stager[dask]'") from None
    if cluster != "local" and n_workers is not None:
        raise ConfigError("workers is the number of processes with cluster='local'; other clusters have theirs already")
    if not isinstance(cluster, (str, Client)):
        raise ConfigError(f"cluster is {cluster!r}; give an address such as tcp://scheduler:8786, 'local', or a Client")
    with _quiet():
        if isinstance(cluster, Client):
            if cluster.status != "running":
                raise ConfigError(f"cluster is a Client that is {cluster.status}; give one that is connected")
            with Cluster(cluster, cluster.scheduler.address) as made:
                yield made
        elif cluster == "local":
            n_workers = thread_count() if n_workers is None else n_workers
            with _uninterrupted():
                started = LocalCluster(
                    n_workers=n_workers, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL
                )
            with started as local, Client(local) as client, Cluster(client, "local") as made:
                yield made
        else:
            try:
                client = Client(cluster, timeout=_CONNECT_SECONDS, set_as_default=False)
            except (OSError, ValueError) as error:
                told = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise PackError(
                    f"no scheduler answers at {cluster} ({told}); start one with `dask scheduler`, or correct the "
                    "address"
                ) from None
            try:
                with Cluster(client, cluster) as made:
                    yield made
            finally:
                with suppress(Exception):
                    client.close(timeout=2)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that are started meanwhile leave Ctrl-C to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """What Dask logs of lost connections is told as one error."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
