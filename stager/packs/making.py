"""Inputs of any size to the segment of a new pack, in the memory that there is for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from stager.bars.arrange import Conflict
from stager.bars.checks import Piece
from stager.bars.concluding import Came, conclude, conflicting
from stager.bars.inputs import take_inputs
from stager.bars.inspection import warnings_of
from stager.bars.merge import merge
from stager.bars.options import ReadOptions
from stager.bars.row_findings import Sorting
from stager.bars.series_findings import no_bars
from stager.bars.sheets import Sheet, Sheets
from stager.bars.sources import BarFile
from stager.bars.taken import Taken
from stager.errors import BarsError
from stager.packs import layout
from stager.packs.manifest import Column, Manifest, new_manifest
from stager.packs.placing import Looked, Placing, write_segment_of
from stager.packs.scratch import Scratch
from stager.packs.segment import Progress
from stager.packs.usage import Budget, Usage


def make(
    inputs: Sequence[BarFile] | pa.Table,
    options: ReadOptions,
    folder: Path,
    target: Path,
    budget: Budget,
    usage: Usage,
    resume: bool,
    progress: Progress | None,
) -> Manifest:
    """Read inputs and write them as ``segment-0`` of a partial pack.

    Parameters
    ----------
    inputs : sequence of BarFile, or pyarrow.Table
    options : ReadOptions
    folder : Path
        The partial pack; with `resume` it may hold rows of inputs that were read before.
    target : Path
        The pack, for errors.
    budget : Budget
    usage : Usage
        Is told what it took.
    resume : bool
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Returns
    -------
    Manifest
        Of the pack; it is still to be written.

    Raises
    ------
    BarsError
        If the inputs can't be read as bars, or hold none.
    PackError
        If the disk is too small.
    """
    # The rows of a table are in memory anyway.
    files, held_nbytes = ([], sys.maxsize) if isinstance(inputs, pa.Table) else (inputs, budget.held_nbytes)
    with closing(Scratch(folder, files, options, target, held_nbytes)) as scratch:
        kept = scratch.resume() if resume else None
        if kept is not None:
            usage.n_kept, usage.read_again = sum(one is not None for one in kept.taken), kept.changed
        taken = take_inputs(
            inputs,
            options,
            scratch,
            done=None if kept is None else kept.taken,
            room_nbytes=None if isinstance(inputs, pa.Table) else budget.room_nbytes,
            workers=budget.n_workers,
            progress=progress,
        )
        usage.scratch_nbytes = scratch.scratch_nbytes

        def place(sheets: Sheets) -> Placing:
            return Placing.of(sheets, options.duplicates, budget.part_nbytes, budget.n_workers)

        is_table = isinstance(inputs, pa.Table)
        return write_taken(taken, scratch, place, options, folder, target, progress, is_table=is_table)


class KeptRows(Protocol):
    """The rows of all inputs, as sheets."""

    @property
    def symbols(self) -> Mapping[str, int]:
        """The numbers that sheets count in."""

    def sheets(self) -> list[list[Sheet]]:
        """The sheets of each input, in the order of its rows."""

    def rows(self) -> list[Iterator[Piece]]:
        """The rows of each input without columns, a sheet at a time; their codes count in ``symbols``."""


def write_taken(
    taken: Sequence[Taken],
    kept: KeptRows,
    place: Callable[[Sheets], Placing],
    options: ReadOptions,
    folder: Path,
    target: Path,
    progress: Progress | None,
    *,
    is_table: bool = False,
) -> Manifest:
    """Write the rows of all inputs as ``segment-0`` of a partial pack; raises as :func:`make`.

    `kept` has the rows, and `place` cuts them into parts.
    """
    merged = merge(taken, options)
    sheets, symbols = _in_order(kept, merged.columns)
    if not symbols:
        raise nothing_packed({"null price": sum(one.n_dropped for one in taken)})
    placing = place(sheets)
    nbytes = 8 * (1 + len(merged.names)) * int(sheets.counts.sum())

    def tell(done: int, total: int) -> None:
        if progress:
            progress("sort", nbytes * done // total, nbytes)

    try:
        looked = placing.look(tell)
    except Conflict as conflict:
        path = taken[0].name if len(taken) == 1 else None
        raise conflicting(symbols[conflict.symbol], conflict.time, conflict.n_conflicts, path) from None
    sorting = _sorting(sheets, looked, symbols)
    came = Came(list(kept.symbols), kept.rows(), is_table)
    found = conclude(taken, merged, looked.times, symbols, sorting, came, options)
    segment, written = write_segment_of(
        placing, folder / "segment-0", merged.names, symbols, looked, found.opens, target, progress
    )
    assert found.opens.interval is not None  # there are rows
    return new_manifest(
        found.opens.interval,
        found.inputs,
        columns=[
            Column(name, layout.role_of(name), n) for name, n in zip(merged.names, written.n_missing, strict=True)
        ],
        timestamps=found.opens.timestamps,
        adjustment=found.adjustment,
        span=layout.span_of(*found.opens.of(np.array(looked.span)).tolist()),
        n_rows=segment.n_rows,
        n_symbols=len(symbols),
        fingerprint=written.fingerprint,
        decisions=list(merged.notes.decisions),
        dropped=found.dropped,
        warnings=[*merged.notes.warnings, *warnings_of(written.facts, found.opens.timestamps)],
        segments=[segment],
    )


def nothing_packed(dropped: dict[str, int]) -> BarsError:
    """The error of input without a single bar."""
    return BarsError(f"{no_bars(dropped)}; nothing was packed")


def _sorting(sheets: Sheets, looked: Looked, symbols: Sequence[str]) -> Sorting:
    """What became of all rows when they were brought into order."""
    n_backward, first = sheets.backward()
    unordered = np.flatnonzero(n_backward).tolist()
    return Sorting(
        n_rows=int(looked.counts.sum()),
        n_symbols=len(symbols),
        n_duplicates=looked.n_duplicates,
        n_conflicts=looked.n_conflicts,
        conflict=None if looked.conflict is None else (symbols[looked.conflict[0]], looked.conflict[1]),
        n_backward=int(n_backward.sum()),
        unordered=[symbols[number] for number in unordered],
        backward=(symbols[unordered[0]], int(first[unordered[0]])) if unordered else None,
    )


def _in_order(kept: KeptRows, columns: Sequence[Sequence[int]]) -> tuple[Sheets, tuple[str, ...]]:
    """All sheets, and the symbols that have a row, sorted as text."""
    by_input = kept.sheets()
    used = np.zeros(len(kept.symbols), np.bool_)
    for sheets in by_input:
        for sheet in sheets:
            used[sheet.symbols] = True
    names = list(kept.symbols)
    order = sorted(np.flatnonzero(used).tolist(), key=names.__getitem__)
    places = np.full(len(names), -1, np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    every = [(sheet, where) for sheets, where in zip(by_input, columns, strict=True) for sheet in sheets]
    return Sheets(every, places, len(order)), tuple(names[number] for number in order)
