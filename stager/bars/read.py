"""Bar files, tables and URIs to bars: the one entry of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.arrange import Arranged, Conflict, arrange, code_type
from stager.bars.checks import Piece, all_finite
from stager.bars.columns import to_float32
from stager.bars.concluding import Came, InputFile, conclude, conflicting
from stager.bars.detect import Decision
from stager.bars.findings import Finding
from stager.bars.inputs import Progress, Source, find_inputs, take_inputs
from stager.bars.interval import Interval
from stager.bars.merge import merge
from stager.bars.options import ReadOptions
from stager.bars.row_findings import Sorting
from stager.bars.settle import SortedTimes, Timestamps
from stager.bars.taken import Taken
from stager.bars.threads import parallel

__all__ = ["Bars", "Decision", "InputFile", "Interval", "ReadOptions", "Source", "read"]

# Symbols, and the pieces whose codes count in them.
_Pieces: TypeAlias = tuple[tuple[str, ...], list[Piece]]
_DEFAULTS = ReadOptions()
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bars:
    """Bars of all symbols, sorted and unique.

    Attributes
    ----------
    arranged : Arranged
        Times, and the columns in the order of ``names``.
    names : tuple of str
        ``open``, ``high``, ``low``, ``close``, ``volume`` if there is one, and further columns by their names.
    table : pyarrow.Table
        ``symbol`` dictionary<int32, string>; ``time`` timestamp[ns, UTC], the bar's open; then float64 ``open``,
        ``high``, ``low``, ``close``, ``volume`` if there is one, and further columns by their names. Sorted by (symbol
        as text, time), unique, one chunk a column, no nulls: a missing value of a further column is NaN.
    symbols : tuple of str
        Sorted; entry i owns rows ``first_rows[i]`` to ``first_rows[i] + counts[i]``, without the last.
    first_rows, counts : ndarray of int64, shape (n_symbols,)
    interval : Interval or None
        None only if there are no rows and it was not told.
    timestamps : {"utc", "session"}
        ``"session"``: ``time`` holds dates of daily or longer bars, kept as 00:00 UTC.
    adjustment : {"raw", "split", "total", "unknown"}
    decisions : tuple of Decision
        What was decided, and from what.
    inputs : tuple of InputFile
    dropped : dict of str to int
        Rows that became no bar, by reason: ``"null price"``, ``"duplicate"``, ``"conflicting duplicate"``.
    warnings : tuple of str
        Sentences about what a user should know.
    roles : dict of str to str
        What further columns are: "price", "volume" or "other", which is the default.
    empty : tuple of str
        Columns that were left out because they hold no value.
    findings : tuple of Finding
        What was found in the rows as they were read; those that are warnings stand in ``warnings`` too.
    """

    arranged: Arranged
    names: tuple[str, ...]
    symbols: tuple[str, ...]
    first_rows: Int64
    counts: Int64
    interval: Interval | None
    timestamps: Timestamps
    adjustment: Literal["raw", "split", "total", "unknown"]
    decisions: tuple[Decision, ...]
    inputs: tuple[InputFile, ...]
    dropped: dict[str, int]
    warnings: tuple[str, ...]
    roles: dict[str, Literal["price", "volume", "other"]] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @cached_property
    def table(self) -> pa.Table:
        return _table(self.arranged, self.symbols, self.names)

    def rows(self) -> tuple[npt.NDArray[np.float32], list[int]]:
        """The columns side by side, without building ``table``.

        Returns
        -------
        rows : ndarray of float32, shape (n_rows, n_columns)
        n_missing : list of int
            Values of each column that are NaN or infinite.

        Raises
        ------
        BarsError
            If a value is too large for float32.
        """
        # Appended to by several threads.
        missing: list[tuple[int, int]] = []

        def cast(number: int, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
            if not all_finite(values):
                missing.append((number, int(np.count_nonzero(~np.isfinite(values)))))
            return to_float32(values, self.names[number])

        rows = self.arranged.rows(cast)
        n_missing = [0] * len(self.names)
        for number, n in missing:
            n_missing[number] += n
        return rows, n_missing


def read(source: Source, options: ReadOptions = _DEFAULTS, *, progress: Progress | None = None) -> Bars:
    """Read bars.

    Parameters
    ----------
    source : path, URI, glob, directory, sequence of those, pyarrow.Table or data frame
        A data frame is one with Arrow's stream interface, such as of pandas and Polars. Of a directory: its bar files
        by name, without subdirectories.
    options : ReadOptions, optional
        What the files don't tell.
    progress : callable, optional
        Called on this thread with (phase, bytes done, bytes in all); phases are ``"parse"`` and ``"sort"``.

    Returns
    -------
    Bars
        Owned by the caller.

    Raises
    ------
    BarsError
        If the input can't be read as bars, naming file, line, column, value and remedy.
    """
    kept = _InMemory()
    inputs = find_inputs(source)
    taken = take_inputs(inputs, options, kept, progress=progress)
    merged = merge(taken, options)
    path = taken[0].name if len(taken) == 1 else None
    came = Came(*_numbered(kept.rows(), merged.columns), isinstance(inputs, pa.Table))
    symbols = came.symbols
    try:
        arranged = arrange(
            [piece for pieces in came.inputs for piece in pieces],
            len(symbols),
            len(merged.names),
            duplicates=options.duplicates,
            done=None if progress is None else lambda done, total: progress("sort", done, total),
        )
    except Conflict as conflict:
        raise conflicting(symbols[conflict.symbol], conflict.time, conflict.n_conflicts, path) from None
    sorting = Sorting.of(arranged, symbols)
    has_rows = arranged.counts > 0
    arranged.first_rows, arranged.counts = arranged.first_rows[has_rows], arranged.counts[has_rows]
    symbols = tuple(symbol for symbol, has in zip(symbols, has_rows, strict=True) if has)
    found = conclude(taken, merged, SortedTimes.of(arranged), symbols, sorting, came, options)
    arranged.times = found.opens.of(arranged.times)
    return Bars(
        arranged=arranged,
        names=tuple(merged.names),
        symbols=symbols,
        first_rows=arranged.first_rows,
        counts=arranged.counts,
        interval=found.opens.interval,
        timestamps=found.opens.timestamps,
        adjustment=found.adjustment,
        decisions=tuple(merged.notes.decisions),
        inputs=tuple(found.inputs),
        dropped=found.dropped,
        warnings=tuple(merged.notes.warnings),
        empty=tuple(merged.empty),
        findings=found.findings,
    )


class _InMemory:
    """Keeps all rows; the Keeper of inputs that fit into memory."""

    def __init__(self) -> None:
        self._rows: dict[int, list[_Pieces]] = {}

    def begin(self, number: int) -> None:
        self._rows[number] = []

    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Piece]) -> None:
        self._rows[number].append((symbols, pieces))

    def end(self, number: int, taken: Taken) -> None:
        pass

    def rows(self) -> list[_Pieces]:
        """Those of each input."""
        return [part for number in sorted(self._rows) for part in self._rows[number]]


def _numbered(rows: Sequence[_Pieces], columns: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], list[list[Piece]]]:
    """All symbols, sorted as text, and the rows of each input with codes that count in them and the wanted columns."""
    symbols = rows[0][0]
    if any(other != symbols for other, _ in rows):
        symbols = tuple(sorted({symbol for some, _ in rows for symbol in some}))
    place = {symbol: code for code, symbol in enumerate(symbols)}
    kind = code_type(len(symbols))
    inputs: list[list[Piece]] = []
    for (some, parts), wanted in zip(rows, columns, strict=True):
        table = None if some == symbols else np.array([place[symbol] for symbol in some], kind)
        inputs.append([])
        for part in parts:
            codes = part.codes if table is None else table[part.codes]
            inputs[-1].append(Piece(codes, part.times, tuple(part.columns[number] for number in wanted)))
    return symbols, inputs


def _table(arranged: Arranged, symbols: Sequence[str], names: Sequence[str]) -> pa.Table:
    """The arrays as a table, without copying them."""
    n_rows = len(arranged.times)

    def wrap(array: npt.NDArray[Any], kind: pa.DataType) -> pa.Array[Any]:
        return pa.Array.from_buffers(kind, n_rows, [None, pa.py_buffer(cast(Any, array))])

    numbers = np.empty(n_rows, dtype=np.int32)

    def fill(first: int) -> None:
        some = slice(first, first + 64)
        counts = arranged.counts[some]
        rows = slice(int(arranged.first_rows[first]), int(arranged.first_rows[first] + counts.sum()))
        numbers[rows] = np.repeat(np.arange(first, first + len(counts), dtype=np.int32), counts)

    parallel(fill, range(0, len(symbols), 64))
    symbol = pa.DictionaryArray.from_arrays(wrap(numbers, pa.int32()), pa.array(symbols, pa.string()))
    columns = [wrap(column, pa.float64()) for column in arranged.columns]
    return pa.table(
        [symbol, wrap(arranged.times, pa.timestamp("ns", "UTC")), *columns], names=["symbol", "time", *names]
    )
