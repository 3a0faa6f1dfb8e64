"""What workers do. Every task may run again on another worker, also while the first still runs.

An input is written to a file of that attempt, and the task's result names it. Parts are written to their places in the
segment, where every attempt writes the same bytes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow.fs as pafs

from stager.bars.checks import Piece
from stager.bars.inputs import take_input
from stager.bars.options import Duplicates, ReadOptions
from stager.bars.room import Room
from stager.bars.sheets import InFile, Sheets
from stager.bars.sources import BarFile
from stager.cluster.shared import Away, Place
from stager.config import format_nbytes
from stager.errors import BarsError, PackError
from stager.packs.layout import block_checksum
from stager.packs.placing import Placing, WrittenTo
from stager.packs.scratch import Scratch
from stager.packs.usage import Budget, Usage
from stager.version import __version__

R = TypeVar("R")

# Dask moves data out of the way at 0.6 of a worker's memory, and stops giving it tasks at 0.8.
_SHARE, _MOST = 0.6, 0.8


@dataclass(frozen=True)
class Facts:
    """A worker.

    Attributes
    ----------
    version : str
        Of stager.
    n_threads : int
        Tasks that it runs at once.
    budget : Budget
    """

    version: str
    n_threads: int
    budget: Budget


def look(place: Place, dask_worker: Any) -> Facts:
    """What a worker has; raises PackError if it does not see the pack, or has too little memory."""
    place.check(dask_worker.address)
    return Facts(__version__, dask_worker.state.nthreads, _budget(place, dask_worker))


def take(place: Place, number: int, file: BarFile, options: ReadOptions, is_only: bool, dates: bool) -> Away:
    """Read an input into the shared directory.

    Raises
    ------
    BarsError
        If it can't be read as bars, or this worker does not see it as it is elsewhere.
    PackError
        If this worker does not see the pack, or the disk is too small.
    """
    from distributed import get_worker

    worker = get_worker()
    place.check(worker.address)
    _check_seen(file, worker.address)
    folder = place.folder / f"{number}-{uuid4().hex}"
    folder.mkdir()
    usage = Usage()
    try:
        with usage.measured(), closing(_Scratch(place, folder, options, worker.address)) as scratch:
            # Dask runs a task on each thread of a worker.
            room = Room(file.name, _budget(place, worker, [file]).room_nbytes, n_threads=1)
            taken = take_input(file, 0, options, scratch, lambda tell: None, is_only, dates, room, threading.Event())
            (sheets,) = scratch.sheets()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    rows = [
        (sheet.symbols, sheet.starts, (sheet.values.offset, len(sheet), sheet.values.n_columns))
        for sheet in sheets
        if isinstance(sheet.values, InFile)
    ]
    path = os.fspath(folder / "scratch")
    return Away(taken, tuple(scratch.symbols), rows, path, scratch.scratch_nbytes, usage.anonymous_nbytes)


def over(
    place: Place,
    number: int | None,
    duplicates: Duplicates,
    function: Callable[..., R],
    items: Sequence[Any],
    segment: WrittenTo | None,
) -> list[R]:
    """A method of :class:`Placing` over some items; what it writes is on the disk then.

    `number` is that of the sheets that it needs, if it needs any.
    """
    from distributed import get_worker

    address = get_worker().address
    place.check(address)
    nothing, found = Sheets([], np.empty(0, np.int32), 0), []
    placing = Placing(nothing if number is None else place.read_sheets(number), [], duplicates, 1)
    if segment is None:
        return [function(placing, item) for item in items]
    with segment.files as files:
        for item in items:
            # Nothing is written for a pack that was given up.
            place.check(address)
            found.append(function(placing, item, segment))
        files.sync()
    return found


def checksums(place: Place, file: Path, blocks: Sequence[int]) -> list[str]:
    """Of some blocks of a file of the segment."""
    from distributed import get_worker

    place.check(get_worker().address)
    return [block_checksum(file, block) for block in blocks]


class _Scratch(Scratch):
    """All rows of one input in a file; gives up when the pack is given up."""

    def __init__(self, place: Place, folder: Path, options: ReadOptions, address: str) -> None:
        super().__init__(folder, [], options, place.target, 0)
        self._place, self._address = place, address

    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Piece]) -> None:
        self._place.check(self._address)
        super().keep(number, symbols, pieces)


def _budget(place: Place, worker: Any, files: Sequence[BarFile] = ()) -> Budget:
    limit, memory = worker.memory_manager.memory_limit, place.memory_nbytes
    if limit and memory is not None and memory > _MOST * limit:
        raise PackError(
            f"memory is {format_nbytes(memory)}, and Dask lets the worker at {worker.address} take "
            f"{format_nbytes(limit)} and pauses it at {_MOST:.0%} of that; give less --memory, or start it with more "
            "--memory-limit"
        )
    if memory is None and limit:
        memory = int(_SHARE * limit)
    try:
        return Budget.of(memory, worker.state.nthreads, files)
    except PackError as error:
        raise PackError(f"the worker at {worker.address}: {error}") from None


def _check_seen(file: BarFile, address: str) -> None:
    if not isinstance(file.filesystem, (pafs.LocalFileSystem, pafs.SubTreeFileSystem)):
        # A store's client tells what it does not find.
        return
    try:
        size_nbytes = file.filesystem.get_file_info(file.path).size
    except OSError as error:
        raise BarsError(f"the worker at {address} can't open it: {error}", path=file.name) from None
    if size_nbytes != file.size_nbytes:
        sees = "no such file" if size_nbytes is None else f"a file of {size_nbytes:,} bytes"
        raise BarsError(
            f"the worker at {address} sees {sees}, and it has {file.size_nbytes:,} bytes; put it on storage that all "
            "workers share under the same path, or give a URI such as s3://bucket/bars.parquet",
            path=file.name,
        )
