"""Bar files, tables and URIs to bars: the one entry of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.arrange import Arranged, Conflict, arrange
from stager.bars.checks import all_finite
from stager.bars.clock import time_text
from stager.bars.columns import to_float32
from stager.bars.decode import Decoded, decode, decode_table
from stager.bars.detect import Decision
from stager.bars.findings import Finding
from stager.bars.interval import Interval
from stager.bars.merge import merge
from stager.bars.options import ReadOptions
from stager.bars.row_findings import InputRelation, duplicates_found, order_found, relation_found
from stager.bars.settle import Timestamps, settle_adjustment, settle_interval, settle_label
from stager.bars.sources import BarFile, PathLike, find
from stager.bars.threads import parallel, thread_count
from stager.bars.unfinished import unfinished
from stager.errors import BarsError

__all__ = ["Bars", "Decision", "InputFile", "Interval", "ReadOptions", "Source", "read"]

# A path, URI, glob or directory, a sequence of those, or a table in memory.
Source: TypeAlias = PathLike | Sequence[PathLike] | pa.Table
Progress: TypeAlias = Callable[[str, int, int], object]
_DEFAULTS = ReadOptions()
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InputFile:
    """One input that was read.

    Attributes
    ----------
    name : str
        Path or URI as given; ``"table"`` for a table.
    size_nbytes : int
        Size on disk (of a table: in memory).
    n_rows : int
        Rows in it.
    n_dropped : int
        Rows of it without a price, which are no bars.
    """

    name: str
    size_nbytes: int
    n_rows: int
    n_dropped: int


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
    source : path, URI, glob, directory, sequence of those, or pyarrow.Table
        CSV (plain, gzip, zstd) and Parquet. Of a directory: its bar files by name, without subdirectories.
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
    inputs = [decode_table(source, options)] if isinstance(source, pa.Table) else decode_all(source, options, progress)
    path = inputs[0].name if len(inputs) == 1 else None
    merged = merge(inputs, options)
    pieces = [part.piece for parts in merged.checked for part in parts]
    n_dropped = [sum(part.n_dropped for part in parts) for parts in merged.checked]
    try:
        arranged = arrange(
            pieces,
            len(merged.symbols),
            len(merged.names),
            duplicates=options.duplicates,
            done=None if progress is None else lambda done, total: progress("sort", done, total),
        )
    except Conflict as conflict:
        raise BarsError(
            f"symbol {merged.symbols[conflict.symbol]!r} has rows of the same time {time_text(conflict.time)} that "
            f"differ; {conflict.n_conflicts} pairs of symbol and time are like that; keep one row of each, or say "
            "which with --duplicates first or --duplicates last",
            path=path,
        ) from None
    notes, label = merged.notes, settle_label(inputs, options)
    order = order_found(arranged, merged.symbols, merged.timestamps)
    if arranged.n_backward:
        notes.decide("order", "sorted by time", order.text.removesuffix("; sorted"))
    has_rows = arranged.counts > 0
    arranged.first_rows, arranged.counts = arranged.first_rows[has_rows], arranged.counts[has_rows]
    symbols = tuple(symbol for symbol, has in zip(merged.symbols, has_rows, strict=True) if has)
    interval, timestamps = settle_interval(
        arranged, symbols, merged.timestamps, merged.all_midnight, options, label, notes, path
    )
    findings = (
        duplicates_found(arranged, merged.symbols, timestamps, options.duplicates),
        order,
        *relation_found(
            [InputRelation.of(one, parts, merged.symbols) for one, parts in zip(inputs, merged.checked, strict=True)],
            timestamps,
        ),
        unfinished(
            [None if isinstance(source, pa.Table) else one.name for one in inputs],
            [[part.piece for part in parts] for parts in merged.checked],
            merged.symbols,
            interval,
            label[0],
            timestamps,
        ),
    )
    adjustment = settle_adjustment(inputs, options, notes)
    return Bars(
        arranged=arranged,
        names=tuple(merged.names),
        symbols=symbols,
        first_rows=arranged.first_rows,
        counts=arranged.counts,
        interval=interval,
        timestamps=timestamps,
        adjustment=adjustment,
        decisions=tuple(notes.decisions),
        inputs=tuple(
            InputFile(one.name, one.size_nbytes, one.n_rows, n) for one, n in zip(inputs, n_dropped, strict=True)
        ),
        dropped={
            "null price": sum(n_dropped),
            "duplicate": arranged.n_duplicates,
            **({"conflicting duplicate": arranged.n_conflicts} if arranged.n_conflicts else {}),
        },
        warnings=(*notes.warnings, *(one.sentence for one in findings if one.severity == "warning")),
        empty=tuple(merged.empty),
        findings=findings,
    )


def decode_all(source: Any, options: ReadOptions, progress: Progress | None = None) -> list[Decoded]:
    """The columns of every file meant by ``source``, in their order; raises as :func:`read`."""
    sources = find(source)
    if len(sources) == 1 and progress is None:
        return [decode(sources[0], options, lambda tell: None)]
    tells: dict[int, Callable[[], int]] = {}

    def one(number: int) -> Decoded:
        decoded = decode(sources[number], options, lambda tell: tells.__setitem__(number, tell))
        tells[number] = lambda: sources[number].size_nbytes
        return decoded

    pool = ThreadPoolExecutor(min(len(sources), thread_count()), thread_name_prefix="stager-bars")
    try:
        futures = [pool.submit(one, number) for number in range(len(sources))]
        _watch(futures, sources, tells, progress)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _watch(
    futures: Sequence[Future[Decoded]],
    sources: Sequence[BarFile],
    tells: dict[int, Callable[[], int]],
    progress: Progress | None,
) -> None:
    """Report how far the files are read until all are, or one failed."""
    total = sum(source.size_nbytes for source in sources)
    pending: set[Future[Decoded]] = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
        if any(future.exception() is not None for future in done):
            return
        if progress is not None:
            progress("parse", min(total, sum(_told(tell) for tell in list(tells.values()))), total)


def _told(tell: Callable[[], int]) -> int:
    try:
        return tell()
    except ValueError:  # the stream was closed a moment ago
        return 0


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
