"""Staging: rows where training reads them, with a reference to what they came from."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.inputs import DataFrame
from stager.bars.memory import check_host
from stager.bars.threads import thread_count
from stager.batches.devices import Device, choose_device
from stager.batches.placements import choose_placement
from stager.batches.read_ahead import read_ahead
from stager.config import resolve
from stager.errors import ClosedError, ConfigError, StagingError
from stager.packs.held import Joined
from stager.packs.layout import MANIFEST, Pack, open_pack
from stager.packs.packing import pack_in_memory
from stager.packs.sharding import shard_of

Placement = Literal["auto", "device", "spread", "host"]
T = TypeVar("T")
# A pack, its path, or bars: a file, a table or a data frame in memory.
PackSource = str | Path | pa.Table | DataFrame | Pack


class StagingOptions(msgspec.Struct, frozen=True):
    """Table ``[staging]``. `stall_timeout` is in seconds."""

    device: str = "auto"
    placement: Placement = "auto"
    stall_timeout: float = 60.0


class Resident:
    """Staged rows. Made by :func:`stage`; several Stagers may borrow one.

    On the CPU the rows are NumPy arrays, on a GPU CuPy's. ``close()`` refuses new use, waits for queued reads, and
    gives the memory back; views that are still alive keep it until they die, and a warning counts them.

    Attributes
    ----------
    pack : Pack
        What the rows came from.
    device : Device
    placement : {"device", "spread", "host"}
        "host" on the CPU, where there is only one.
    path : str
        How the rows came to their place: "mapped" or "in memory" (as are several segments) on the CPU, "pinned ring" or
        "registered" where they were copied to GPUs, "registered in place" for placement "host"; and why there, where
        placement "auto" had to choose.
    seconds : float
        Time that staging took, opening and parsing excluded.
    n_allocations : int
        Device allocations made for the rows.
    stall_timeout : float
        Seconds without progress after which uploads to the same device give up.
    """

    def __init__(
        self,
        pack: Pack,
        device: Device,
        placement: str,
        path: str,
        rows: Any,
        memory: Any,
        *,
        seconds: float = 0.0,
        n_allocations: int = 0,
        stall_timeout: float = 60.0,
    ) -> None:
        self.pack, self.device, self.placement, self.path = pack, device, placement, path
        self.seconds, self.n_allocations, self.stall_timeout = seconds, n_allocations, stall_timeout
        self._rows, self._memory = rows, memory
        self._closers: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def rows(self) -> Any:
        """(n_rows, n_columns) float32, C order; NumPy or CuPy. A view without a copy: do not write.

        Raises
        ------
        ClosedError
        """
        if self._rows is None:
            raise ClosedError("the resident rows were closed; stage the pack again")
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.pack.rows_nbytes

    @property
    def closed(self) -> bool:
        return self._rows is None

    def on_close(self, method: Callable[[], None]) -> None:
        """Name a bound method, held weakly, that waits for queued reads and forgets the rows; ``close()`` calls it."""
        self._closers = [closer for closer in self._closers if closer() is not None]
        self._closers.append(weakref.WeakMethod(method))

    def counted(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches that a Stager serves from these rows, as they are; rows that tell somebody count them."""
        return batches

    def shared(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A table on the host as it is to be kept; rows that are shared may share equal tables, too."""
        return table

    def on_device(self, table: npt.NDArray[Any]) -> Any:
        """A table on the rows' GPU; rows that are shared may share equal tables there, too."""
        from stager.cuda.tables import load

        assert self.device.index is not None
        return load(table, self.device.index, self.stall_timeout)

    def close(self) -> None:
        """Give the memory back; closing twice is fine."""
        if self._rows is None:
            return
        if self.device.index is None:
            views = self._let_go()
        else:
            from stager.cuda.capture import relaxed

            # Giving memory back must not break a capture that another thread has begun.
            with relaxed():
                views = self._let_go()
        if views:
            warnings.warn(
                f"{views} views of the closed rows are still alive; the memory returns with the last of them",
                ResourceWarning,
                stacklevel=2,
            )

    def _let_go(self) -> int:
        """Wait for queued reads and drop the rows; how many views of them are alive."""
        for closer in self._closers:
            if (method := closer()) is not None:
                method()
        rows, memory, self._rows, self._memory = self._rows, self._memory, None, None
        # CuPy's views refer to the rows as their base, and both to the memory; NumPy's refer to the memory alone.
        views = rows.let_go(live_views) if hasattr(rows, "let_go") else live_views(rows)
        del rows
        return max(views, live_views(memory) - (views > 0))

    def __enter__(self) -> Resident:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"on {self.device}, placement {self.placement}"
        return f"<Resident {self.pack!r} {state}>"


def stage(
    source: PackSource,
    *,
    device: str = "auto",
    placement: Placement = "auto",
    shard: tuple[int, int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Resident:
    """Stage rows: one allocation, one transfer.

    Parameters
    ----------
    source : path of a pack, Pack, bar file, pyarrow.Table or data frame
        Bars of a file, table or data frame are staged from memory; no pack is written.
    device : str
        "auto" (a GPU where one is usable), "cpu", "cuda" or "cuda:N".
    placement : {"auto", "device", "spread", "host"}
        GPU memory; that of this GPU and of all whose memory it reads, a block each; or registered host memory that the
        GPU reads over the bus. "auto" is the first of these that the rows fit, and "host" where CPU and GPU share one
        memory; the plan says which, and why.
    shard : (int, int), optional
        ``(i, n)``: part i of n of a pack, where a node cannot hold all of it: whole segments of a pack that has
        several, else a group of symbols. Only its samples are served, shuffled among themselves; parts differ in the
        number of samples, see docs/scale.md.
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Returns
    -------
    Resident
        Owned by the caller; close it, or use it as a context manager.

    Raises
    ------
    BarsError, PackError
        If the source can't be read.
    ConfigError
        If there is no such shard.
    DeviceError, StagingError
        See :mod:`stager.errors`. After any failure nothing stays allocated or registered, but for what a driver call
        that never returned still uses.
    """
    return stage_as(source, staging_options(device, placement), progress, shard)


def staging_options(device: str = "auto", placement: str = "auto") -> StagingOptions:
    """The options in force; "auto" leaves a place to the environment."""
    arguments = {"device": device, "placement": placement}
    return resolve(
        StagingOptions,
        "staging",
        arguments={name: None if value == "auto" else value for name, value in arguments.items()},
    )


def stage_as(
    source: PackSource,
    options: StagingOptions,
    progress: Callable[[str, int, int], None] | None = None,
    shard: tuple[int, int] | None = None,
) -> Resident:
    """:func:`stage` with resolved options."""
    chosen = choose_device(options.device)
    if chosen.index is None and options.placement in ("device", "spread"):
        raise ConfigError(
            f"placement={options.placement!r} needs a GPU; on device='cpu' there is only placement='host'"
        )
    pack = as_pack(source, progress)
    if shard is not None:
        if not isinstance(shard, Sequence) or len(shard) != 2:
            raise ConfigError(f"shard is {shard!r}; give the shard's number and how many there are, such as (0, 4)")
        pack = shard_of(pack, *shard)
    if chosen.index is None:
        if len(pack.parts) > 1:
            check_host(pack.rows_nbytes, "filled with the rows of all segments", "map one segment: `stager compact`")
        # Over a buffer: NumPy makes this array the base of every view, so that views can be counted.
        flat = np.frombuffer(pack.rows.data, np.float32)
        path = "mapped" if len(pack.parts) == 1 else "in memory"
        rows = flat.reshape(pack.rows.shape)
        return Resident(pack, chosen, "host", path, rows, flat, stall_timeout=options.stall_timeout)
    return _stage_on_gpu(pack, chosen, chosen.index, options, progress)


def check_in_place(pack: Pack) -> None:
    """Raise unless the rows lie in order where they are.

    Raises
    ------
    StagingError
    """
    if len(pack.parts) > 1:
        raise StagingError(
            f"this placement takes rows as they lie, and those of {pack.path} lie in {len(pack.parts)} segments; "
            f"merge them with `stager compact {pack.path}`, or use placement='device'"
        )


def as_pack(source: PackSource, progress: Callable[[str, int, int], None] | None = None) -> Pack:
    """The pack that `source` is, names, or holds the bars of."""
    if isinstance(source, Pack):
        return source
    if isinstance(source, (str, Path)):
        path = Path(source)
        if (path / MANIFEST).is_file() or path.suffix == ".pack":
            return open_pack(path)
    return pack_in_memory(source, progress=progress)


def live_views(memory: Any) -> int:
    """How many arrays still refer to `memory`, when one variable of the caller refers to it and is passed in."""
    return _references(memory) - _UNVIEWED


def _references(memory: Any) -> int:
    return sys.getrefcount(memory)


def _unviewed() -> int:
    """References that such a call itself takes; versions of Python differ."""
    memory = object()
    return _through_a_call(memory)


def _through_a_call(memory: Any) -> int:
    return _references(memory)


_UNVIEWED = _unviewed()


def _stage_on_gpu(
    pack: Pack,
    device: Device,
    index: int,
    options: StagingOptions,
    progress: Callable[[str, int, int], None] | None,
) -> Resident:
    from stager.cuda import staging
    from stager.cuda.watch import Watch

    held = pack.held
    sources, places = held.pieces.by_source() if isinstance(held, Joined) else (np.empty(0, np.int64),) * 2
    watch = Watch(pack.rows_nbytes + sources.nbytes + places.nbytes, options.stall_timeout, progress)
    driver = staging.prepare(index, watch)
    mapped = pack.path is not None
    placement, why = str(options.placement), ""
    if placement == "auto":
        placement, why = choose_placement(
            pack.rows_nbytes,
            watch.run([driver.free_nbytes])[0],
            lambda: watch.run([lambda: staging.free_on_peers(driver)])[0],
            lambda n_blocks: staging.block_nbytes(pack.n_rows, len(pack.columns), n_blocks),
            shares_memory=driver.shares_memory,
            in_place=len(pack.parts) <= 1,
        )
    started = time.perf_counter()
    ahead, remedy = read_ahead(pack) if mapped else None, "use placement='host', or select fewer rows"
    if placement != "device":
        check_in_place(pack)
    if placement == "host":
        check_host(pack.rows_nbytes)
        array, memory, path = staging.in_place(np.asarray(pack.rows), driver, watch, read_only=mapped)
    elif isinstance(held, Joined) and placement == "device":
        shape = pack.n_rows, len(pack.columns)
        array, memory, path = staging.to_device_in_order(
            held.read, shape, sources, places, driver, watch, read_ahead=ahead, n_cores=thread_count(), remedy=remedy
        )
    else:
        array, memory, path = (staging.spread if placement == "spread" else staging.to_device)(
            np.asarray(pack.rows),
            driver,
            watch,
            fill=pack.parts[0].file.read if pack.parts else None,
            read_ahead=ahead,
            read_only=mapped,
            n_cores=thread_count(),
            remedy=remedy,
        )
    return Resident(
        pack,
        device,
        placement,
        f"{path}; {why}" if why else path,
        array,
        memory,
        seconds=time.perf_counter() - started,
        n_allocations=driver.n_allocations,
        stall_timeout=options.stall_timeout,
    )
