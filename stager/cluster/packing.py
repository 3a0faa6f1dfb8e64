"""Packing on a cluster: the same pack as on one machine, from inputs and to a directory that all workers share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs

from stager.bars.inputs import find_inputs, take_inputs
from stager.bars.options import ReadOptions
from stager.bars.read import Source
from stager.bars.sheets import Sheets
from stager.bars.sources import BarFile
from stager.bars.taken import Taken
from stager.cluster import tasks
from stager.cluster.connection import Cluster, connected
from stager.cluster.shared import Away, Gathered, Place
from stager.errors import PackError
from stager.packs.layout import Pack, blocks_of
from stager.packs.making import write_taken
from stager.packs.manifest import MARK, SHARED, Manifest
from stager.packs.packing import Progress, put, take_over, target_of
from stager.packs.placing import Placing, WrittenTo
from stager.packs.publish import check_target, refusing
from stager.packs.usage import Usage
from stager.version import __version__

R = TypeVar("R")

# Tasks for each thread of the workers; of more, one that is lost costs less, and all read where the rows lie.
_TASKS = 4


def pack_on(
    cluster: Any,
    source: Source,
    out: str | Path | None = None,
    *,
    read: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    overwrite: bool = False,
    progress: Progress | None = None,
    memory_nbytes: int | None = None,
    workers: int | None = None,
    usage: Usage | None = None,
) -> Pack:
    """Pack bars on a Dask cluster; the pack is that of :func:`stager.pack`, byte for byte.

    Workers read an input each, and then put a part of all rows in order and write it to its place. What a worker had
    begun when it was lost is done again by another. Inputs and `out` must be seen by this process and all workers under
    the same path: on a shared file system, and inputs also in object storage. Nothing but metadata comes through the
    scheduler.

    Parameters
    ----------
    cluster : str or distributed.Client
        A scheduler's address such as ``"tcp://scheduler:8786"``, or ``"local"`` for processes on this machine.
    source, out, read, overwrite, progress : as in :func:`stager.pack`
        Not a table, which is in this process.
    memory_nbytes : int, optional
        Memory that each worker may take; by default 0.6 of what Dask allows it.
    workers : int, optional
        Processes, with "local" only; by default as many as there are cores.
    usage : Usage, optional
        Is told what it took, memory as the most that a worker took.

    Returns
    -------
    Pack
        Opened.

    Raises
    ------
    ConfigError
        If Dask is not installed.
    BarsError, PackError
        As :func:`stager.pack`; and if the scheduler is lost, no worker is left, or one does not see an input or `out`.
        Nothing half written stays.
    """
    found = find_inputs(source)
    if isinstance(found, pa.Table):
        raise PackError("a table is in this process, and workers don't see it; write it to Parquet, or pack it here")
    # Workers have other working directories.
    target = Path(os.path.abspath(target_of(source, out)))
    with refusing(target):
        check_target(target, overwrite)
    inputs = [_for_workers(file) for file in found]
    usage = Usage() if usage is None else usage
    with connected(cluster, workers) as made_of:
        made = partial(_make, made_of, inputs, read, target, memory_nbytes, usage, progress)
        return put(target, overwrite, usage, partial(take_over, False, read), made)


def _for_workers(file: BarFile) -> BarFile:
    """The same file, found from any working directory."""
    if file.filesystem is not None:
        return file
    # Not mapped, as Dask counts that as memory of the worker; and by the same path, which may tell the symbol.
    local = pafs.LocalFileSystem()
    if os.path.isabs(file.path):
        return replace(file, filesystem=local)
    return replace(file, filesystem=pafs.SubTreeFileSystem(os.getcwd(), local))


def _make(
    cluster: Cluster,
    inputs: Sequence[BarFile],
    options: ReadOptions,
    target: Path,
    memory_nbytes: int | None,
    usage: Usage,
    progress: Progress | None,
    folder: Path,
) -> Manifest:
    """As :func:`stager.packs.making.make`."""
    place = Place(folder / SHARED, uuid4().hex, target, memory_nbytes)
    place.folder.mkdir()
    (place.folder / MARK).write_text(place.mark)
    try:
        facts = cluster.on_each(tasks.look, place)
        for address, one in facts.items():
            if one.version != __version__:
                raise PackError(
                    f"the worker at {address} has stager {one.version}, and this is {__version__}; install the same"
                )
        usage.n_processes, usage.n_workers = len(facts), sum(one.n_threads for one in facts.values())
        usage.memory_nbytes = max(one.budget.memory_nbytes for one in facts.values())
        part_nbytes = min(one.budget.part_nbytes for one in facts.values())
        found: dict[int, Away] = {}

        def elsewhere(number: int, dates: bool) -> Future[Taken]:
            away = cluster.submit(
                inputs[number].name, tasks.take, place, number, inputs[number], options, len(inputs) == 1, dates
            )
            taken: Future[Taken] = Future()

            def settle(done: Future[Away]) -> None:
                if (error := done.exception()) is not None:
                    taken.set_exception(error)
                else:
                    found[number] = one = done.result()
                    taken.set_result(one.taken)

            away.add_done_callback(settle)
            return taken

        def place_all(sheets: Sheets) -> Placing:
            placing = _Placing.of(sheets, options.duplicates, part_nbytes, usage.n_workers)
            placing.cluster, placing.place = cluster, place
            placing.share()
            return placing

        taken = take_inputs(inputs, options, _Nowhere(), progress=progress, elsewhere=elsewhere)
        kept = Gathered.of([found[number] for number in range(len(inputs))])
        usage.scratch_nbytes = sum(one.nbytes for one in found.values())
        usage.anonymous_nbytes = max(usage.anonymous_nbytes, *(one.memory_nbytes for one in found.values()))
        try:
            return write_taken(taken, kept, place_all, options, folder, target, progress)
        finally:
            kept.files.close()
    except BaseException:
        # Workers that still write see that it was given up; then all of it can be removed.
        with suppress(OSError):
            (place.folder / MARK).unlink()
        shutil.rmtree(place.folder, ignore_errors=True)
        raise


class _Nowhere:
    """A keeper to which no rows come, as workers have them."""

    def begin(self, number: int) -> None: ...
    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Any]) -> None: ...
    def end(self, number: int, taken: Taken) -> None: ...


@dataclass
class _Placing(Placing):
    """Rows whose parts are placed by the workers of a cluster."""

    cluster: Cluster | None = None
    place: Place | None = None

    def share(self) -> None:
        """Tell the workers where the rows of parts lie, of each task's apart."""
        assert self.place is not None
        for number, some in enumerate(self._shares(self.parts)):
            self.place.write_sheets(number, self.sheets.of_symbols(some[0].first, some[-1].last))

    def checksums(self, file: Path) -> list[str]:
        assert self.cluster is not None
        futures = [
            self.cluster.submit(f"checksums of {file}", tasks.checksums, self.place, file, blocks)
            for blocks in self._shares(blocks_of(file))
        ]
        found = self.cluster.results(futures, lambda done, total: None)
        return [checksum for some in found for checksum in some]

    def _over(
        self,
        function: Callable[..., R],
        items: Sequence[Any],
        progress: Callable[[int, int], None],
        segment: WrittenTo | None = None,
    ) -> list[R]:
        assert self.cluster is not None
        assert self.place is not None
        what, duplicates = f"{self.place.target}: parts of its rows", self.duplicates
        by_part = function in (Placing._look_first, Placing._write)
        futures: list[Future[list[R]]] = [
            self.cluster.submit(
                what, tasks.over, self.place, number if by_part else None, duplicates, function, some, segment
            )
            for number, some in enumerate(self._shares(items))
        ]
        return [one for some in self.cluster.results(futures, progress) for one in some]

    def _shares(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Some items for each task."""
        n = max(1, -(-len(items) // (_TASKS * self.n_workers)))
        return [items[first : first + n] for first in range(0, len(items), n)]
