"""The arena: a CuPy allocator over one slab that takes memory back when the last array pointing into it dies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import cupy
import msgspec

from stager.config import parse_nbytes, read_toml, resolve
from stager.cuda import arena_driver
from stager.cuda.arena_facts import holders, tokens
from stager.cuda.arena_pool import Pool
from stager.cuda.arena_scopes import Capture, Measure, Step
from stager.cuda.arena_tokens import ArenaOutOfMemoryError
from stager.cuda.blocks import UNIT
from stager.cuda.report import ArenaStats, picture
from stager.cuda.timeline import Recorder
from stager.errors import ArenaError, ConfigError, DeviceError

__all__ = ["Arena", "ArenaOptions", "ArenaOutOfMemoryError", "ArenaStats"]


class ArenaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table ``[arena]`` of the configuration; ``STAGER_ARENA_SIZE`` and so on in the environment.

    Attributes
    ----------
    size : str or int, optional
        Bytes of the slab: ``"512MiB"``, ``1048576``, or a share of the device's memory, ``"40%"``.
    overflow : {"pool", "raise"}
        What becomes of requests that don't fit.
    on_escape : {"keep", "warn", "raise"}
        What happens when memory of a step outlives it.
    trace : bool
        Remember the line that made each allocation.
    poison : bool
        Fill memory with 0xFF bytes, NaN in every float type, whenever it is given out.
    """

    size: str | int | None = None
    overflow: Literal["pool", "raise"] = "pool"
    on_escape: Literal["keep", "warn", "raise"] = "keep"
    trace: bool = False
    poison: bool = False


class OverflowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table ``[overflow]``; ``STAGER_OVERFLOW_RETAIN`` in the environment.

    Attributes
    ----------
    retain : str or int, optional
        Freed bytes the overflow pool keeps for reuse. Default: the arena's capacity.
    """

    retain: str | int | None = None


class Arena:
    """A CuPy memory pool over one slab of device memory.

    Memory returns when the last array, view or other holder of an allocation is gone, never by a promise, so nothing is
    handed out while something points into it, and a loop runs in the memory of its peak rather than of its sum.

    Parameters
    ----------
    capacity : str or int, optional
        Bytes of the slab, such as ``"512MiB"``, or a share of the device, ``"40%"``. Default: ``STAGER_ARENA_SIZE``.
    overflow : {"pool", "raise"}, default "pool"
        Serve what doesn't fit from a CUDA memory pool of the arena's own, or raise.
    on_escape : {"keep", "warn", "raise"}, default "keep"
        When memory of a step is still alive as the next step begins: count it; log it, once per epoch; raise
        ArenaEscapeError. What escaped stays valid in any case.
    trace : bool, default False
        Remember the line that made each allocation, for reports. Costs about a microsecond an allocation.

    Raises
    ------
    ConfigError
        If the capacity is missing, unusable, or larger than the device.
    ArenaOutOfMemoryError
        If the device can't give the slab.
    DeviceError
        On a free-threaded Python, or a device without memory pools.

    Notes
    -----
    ``with arena:`` makes it CuPy's allocator for the calling thread and binds it to the current device and stream;
    requests under another stream or device are served from the overflow pool, counted, and reported once. Several
    threads may be inside at once. Arrays may outlive the scope, the arena, and the thread. After ``fork`` every method
    raises in the child.

    Examples
    --------
    >>> with Arena("512MiB") as arena:
    ...     for batch in batches:
    ...         with arena.step():
    ...             train(batch)
    """

    def __init__(
        self,
        capacity: str | int | None = None,
        *,
        overflow: Literal["pool", "raise"] | None = None,
        on_escape: Literal["keep", "warn", "raise"] | None = None,
        trace: bool | None = None,
    ) -> None:
        given = {"size": capacity, "overflow": overflow, "on_escape": on_escape, "trace": trace}
        self._open(resolve(ArenaOptions, "arena", arguments=given), resolve(OverflowOptions, "overflow"))

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> Arena:
        """An arena as the tables ``[arena]`` and ``[overflow]`` of a TOML file say.

        Parameters
        ----------
        path : str or Path
            The file.
        **overrides
            Options of ArenaOptions that win over file and environment.
        """
        tables = read_toml(path)
        arena = cls.__new__(cls)
        arena._open(
            resolve(ArenaOptions, "arena", toml=tables.get("arena"), arguments=overrides),
            resolve(OverflowOptions, "overflow", toml=tables.get("overflow")),
        )
        return arena

    def _open(self, options: ArenaOptions, overflow: OverflowOptions) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise DeviceError("the arena counts on the interpreter's lock; run Python with it (PYTHON_GIL=1)")
        driver = arena_driver.Driver()
        if options.size is None:
            raise ConfigError(
                "the arena has no size: give Arena('512MiB'), size in [arena] of the configuration, or "
                "STAGER_ARENA_SIZE"
            )
        try:
            _, total = driver.memory()
        except arena_driver.DEVICE_ERROR as error:
            raise DeviceError(f"the arena needs a GPU: {error}") from error
        capacity = parse_nbytes(options.size, total=total, name="the arena's size") // UNIT * UNIT
        if not UNIT <= capacity <= total:
            raise ConfigError(
                f"the arena's size is {options.size!r}, {capacity:,} bytes; it must be {UNIT} at least, and at most "
                f"what the device has, {total:,}"
            )
        retain = capacity if overflow.retain is None else parse_nbytes(
            overflow.retain, total=total, name="STAGER_OVERFLOW_RETAIN"
        )  # fmt: skip
        self._on_escape = options.on_escape
        try:
            self._pool = Pool(
                driver,
                capacity,
                mode=options.overflow,
                trace=options.trace,
                poison=options.poison,
                keep=retain,
            )
        except arena_driver.DEVICE_ERROR as error:
            raise DeviceError(f"the device has no memory pools ({error}); use Arena(..., overflow='raise')") from error

    def __enter__(self) -> Arena:
        pool = self._pool
        pool.check_alive()
        visit = getattr(pool.local, "visit", None)
        if visit is None:
            previous = cupy.cuda.get_allocator()
            visit = pool.bind()
            visit.previous = previous
            pool.local.visit = visit
        scope = cupy.cuda.using_allocator(visit.malloc)
        scope.__enter__()
        visit.scopes.append(scope)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pool = self._pool
        visit = getattr(pool.local, "visit", None)
        if visit is None:
            raise ArenaError("this thread is not inside the arena; leave it in the thread that entered it")
        visit.scopes.pop().__exit__(None, None, None)
        if not visit.scopes:
            # The allocator and its visit hold each other and the pool; the slab must not wait for garbage collection.
            del pool.local.visit, visit.malloc
            if not pool.forked:
                pool.leave()

    def step(self) -> Step:
        """A scope for one training step, to understand what outlives it; safety never depends on it.

        Returns
        -------
        Step
            A context manager. Steps nest, and belong to their thread.
        """
        self._pool.check_alive()
        return Step(self._pool, self._on_escape)

    def capture(self, stream: Any) -> Capture:
        """A scope that captures ``stream`` into a CUDA graph and keeps its memory until ``release()``.

        Parameters
        ----------
        stream : cupy.cuda.Stream
            The stream the arena is bound to; not a default stream.
        """
        self._pool.check_alive()
        return Capture(self._pool, stream)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A scope in which the allocator from before ``with arena:`` is CuPy's again, in this thread."""
        with cupy.cuda.using_allocator(self._pool.visit().previous):
            yield

    def measure(self) -> Measure:
        """A scope without a limit that tells the capacity its requests need."""
        self._pool.check_alive()
        return Measure(self._pool)

    @contextmanager
    def record(self, path: str | Path) -> Iterator[Recorder]:
        """A scope that writes a timeline of the arena to ``path``, for ``stager arena-report``.

        Parameters
        ----------
        path : str or Path
            A file of JSON lines; replaced if it exists.
        """
        pool = self._pool
        pool.check_alive()
        if pool.recorder is not None:
            raise ArenaError("the arena is being recorded already")
        with Recorder(path, pool) as recorder:
            pool.recorder = recorder
            pool.regate()
            try:
                yield recorder
            finally:
                pool.recorder = None
                pool.regate()

    def stats(self) -> ArenaStats:
        """One consistent snapshot of integers, units in their names. Makes no driver call."""
        self._pool.check_alive()
        return self._pool.stats()

    def report(self) -> str:
        """An occupancy picture: where blocks lie in the slab, and how many of each size are live and free."""
        pool = self._pool
        pool.check_alive()
        if pool.overflow is not None:
            pool.overflow.drain()
        live = {token.ptr: token.size for token in tokens(pool) if type(token) is pool.token}
        return picture(pool.stats(), pool.blocks.base, live, pool.blocks.free_blocks(), holders(pool))

    def reset(self) -> None:
        """Begin an epoch: counters restart, the overflow line is armed again. Nothing that lives is freed."""
        self._pool.check_alive()
        if self._pool.overflow is not None:
            self._pool.overflow.drain()
        self._pool.reset()
