"""Rows of all inputs in the order (symbol, time): a stable counting sort over ranges of rows, on all cores.

Bars nearly always come in the order of time, symbol after symbol or all symbols at each time. So only the symbol is
sorted by: each range is sorted in the cache by its 8 or 16 bit codes (a radix sort) and written to where its symbols'
rows belong. Then the times inside every symbol are looked at, and only symbols out of order are sorted by time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.checks import Piece
from stager.bars.options import Duplicates
from stager.bars.threads import parallel, thread_count

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]

_RANGE_ROWS = 1 << 17


@dataclass(frozen=True)
class Placed:
    """A range of rows, and where they go.

    Attributes
    ----------
    part : Piece
    where : slice or ndarray of int64
        The places of the rows, one after the other or each its own.
    order : ndarray of int64 or None
        With a slice: the rows in the order in which they go there; None: as they are.
    """

    part: Piece
    where: slice | Int64
    order: Int64 | None

    def put(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Write the values of the rows to their places in ``out``, of the same type."""
        if not isinstance(self.where, slice) or self.order is None:
            out[self.where] = values
        else:
            # "clip" spares a copy of the output; no number is out of range.
            np.take(values, self.order, out=out[self.where], mode="clip")


@dataclass
class Arranged:
    """All rows in the order (symbol, time).

    Attributes
    ----------
    times : ndarray of int64, shape (n_rows,)
    first_rows, counts : ndarray of int64, shape (n_symbols,)
        The rows of each symbol; a symbol may have none.
    n_columns : int
    placed : list of Placed
        All rows as they came; the columns are brought into order when asked for.
    n_duplicates : int
        Identical rows that were dropped.
    n_conflicts : int
        Rows that were dropped though they differ from the one that was kept of their symbol and time.
    conflict : tuple of int or None
        Symbol's number and time of the first of them.
    n_backward : int
        Rows that came after a later one of their symbol.
    unordered : ndarray of int64
        Numbers of the symbols that were sorted by time.
    backward : tuple of int or None
        Symbol's number and time of the first row that came too late.
    """

    times: Int64
    first_rows: Int64
    counts: Int64
    n_columns: int
    placed: list[Placed]
    n_duplicates: int = 0
    n_conflicts: int = 0
    conflict: tuple[int, int] | None = None
    n_backward: int = 0
    unordered: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    backward: tuple[int, int] | None = None
    _columns: list[Float64] | None = None
    # Several threads may ask for the columns at once.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def columns(self) -> list[Float64]:
        """Each column, ndarray of float64, shape (n_rows,); brought into order by the first who asks."""
        with self._lock:
            if self._columns is None:
                columns = [np.empty(len(self.times), dtype=np.float64) for _ in range(self.n_columns)]

                def fill(placed: Placed) -> None:
                    for values, column in zip(placed.part.columns, columns, strict=True):
                        placed.put(values, column)

                parallel(fill, self.placed, threads=thread_count())
                self._columns, self.placed = columns, []
            return self._columns

    def rows(self, cast: Callable[[int, Float64], Float32]) -> Float32:
        """The columns side by side, ndarray of float32, shape (n_rows, n_columns); without the float64 columns in order
        if nobody has asked for them.

        Parameters
        ----------
        cast : callable
            Takes the number of a column and some of its values.
        """
        out = np.empty((len(self.times), self.n_columns), dtype=np.float32)
        if not self.placed:
            columns = self.columns

            def cast_span(span: tuple[int, int]) -> None:
                part = slice(*span)
                for number, column in enumerate(columns):
                    out[part, number] = cast(number, column[part])

            parallel(cast_span, _spans(len(out)))
            return out

        def fill(placed: Placed) -> None:
            for number, values in enumerate(placed.part.columns):
                placed.put(cast(number, values), out[:, number])

        parallel(fill, self.placed, threads=thread_count())
        return out


class Conflict(Exception):
    """Rows of one symbol and time differ: the symbol's number, the time, and the number of such pairs."""

    def __init__(self, symbol: int, time: int, n_conflicts: int) -> None:
        super().__init__(symbol, time, n_conflicts)
        self.symbol, self.time, self.n_conflicts = symbol, time, n_conflicts


def code_type(n_symbols: int) -> np.dtype[Any]:
    """The smallest unsigned type that numbers so many symbols; up to 16 bits NumPy's stable sort is a radix sort."""
    return np.min_scalar_type(max(n_symbols - 1, 0))


def arrange(
    pieces: Sequence[Piece],
    n_symbols: int,
    n_columns: int,
    *,
    duplicates: Duplicates = "error",
    done: Callable[[int, int], object] | None = None,
) -> Arranged:
    """Bring rows into the order (symbol, time) and keep one row of each time.

    Parameters
    ----------
    pieces : sequence of Piece
        All rows in their first order; rows of one symbol and time keep it.
    n_symbols : int
        Codes lie below it.
    n_columns : int
        Number of columns of every piece.
    duplicates : {"error", "first", "last"}
        Which of the rows of one symbol and time is kept where they differ.
    done : callable, optional
        Called with (bytes moved, bytes to move).

    Raises
    ------
    Conflict
        If two rows of one symbol and time differ in a column and ``duplicates`` is ``"error"``; NaN equals NaN.
    """
    n_rows = sum(len(piece) for piece in pieces)
    rows_in_range = max(_RANGE_ROWS, n_symbols, n_rows // (8 * thread_count()))
    ranges = parallel(_join, _cut(pieces, rows_in_range, max(_RANGE_ROWS // 8, n_symbols)), threads=thread_count())
    by_range = np.zeros((len(ranges), n_symbols), dtype=np.int64)

    def group(number: int) -> tuple[Int64 | None, Int64, Int64]:
        """The order by symbol (None: as they are), the symbols present, and the number of rows of each."""
        codes, order = ranges[number].codes, None
        if np.any(codes[1:] < codes[:-1]):
            order = np.argsort(codes, kind="stable")
            codes = np.take(codes, order)
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        present, length = codes[starts].astype(np.int64), np.diff(starts, append=len(codes))
        by_range[number, present] = length
        return order, present, length

    groups = parallel(group, range(len(ranges)), threads=thread_count())
    counts = by_range.sum(axis=0)
    first_rows = np.cumsum(counts) - counts
    starts = first_rows + np.cumsum(by_range, axis=0) - by_range
    times = np.empty(n_rows, dtype=np.int64)

    def place(number: int) -> Placed:
        part = ranges[number]
        order, present, length = groups[number]
        begin = starts[number, present]
        if np.all(begin[1:] == begin[:-1] + length[:-1]):
            placed = Placed(part, slice(int(begin[0]), int(begin[0]) + len(part)), order)
        else:
            where = np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(len(part))
            if order is not None:
                by_symbol, where = where, np.empty_like(where)
                where[order] = by_symbol
            placed = Placed(part, where, None)
        placed.put(part.times, times)
        return placed

    def report(n_done: int, n_all: int) -> None:
        if done is not None:
            nbytes = n_rows * 8 * (n_columns + 1)
            done(nbytes * n_done // n_all, nbytes)

    placed = parallel(place, range(len(ranges)), done=report, threads=thread_count())
    arranged = Arranged(times, first_rows, counts, n_columns, placed)
    late = _not_ascending(arranged)
    if len(late):
        backward = late[times[late + 1] < times[late]] + 1
        if len(backward):
            arranged.n_backward = len(backward)
            symbols = _symbol_of(first_rows, backward)
            arranged.unordered, arranged.backward = np.unique(symbols), (int(symbols[0]), int(times[backward[0]]))
            _sort_times(arranged, arranged.unordered)
        _drop_duplicates(arranged, duplicates)
    return arranged


def _cut(pieces: Sequence[Piece], most: int, least: int) -> list[list[Piece]]:
    """The same rows in ranges of at most `most` rows, small pieces together until they have `least`."""
    ranges: list[list[Piece]] = []
    small: list[Piece] = []
    n_small = 0
    for piece in pieces:
        for first in range(0, len(piece), most):
            rows = slice(first, first + most)
            small.append(Piece(piece.codes[rows], piece.times[rows], tuple(column[rows] for column in piece.columns)))
            n_small += len(small[-1])
            if n_small >= least:
                ranges.append(small)
                small, n_small = [], 0
    return [*ranges, small] if small else ranges


def _join(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*(piece.columns for piece in pieces), strict=True)
    return Piece(
        np.concatenate([piece.codes for piece in pieces]),
        np.concatenate([piece.times for piece in pieces]),
        tuple(np.concatenate(parts) for parts in columns),
    )


def _spans(n_rows: int) -> list[tuple[int, int]]:
    step = max(_RANGE_ROWS, -(-n_rows // (4 * thread_count())))
    return [(first, min(first + step, n_rows)) for first in range(0, n_rows, step)]


def _symbol_of(first_rows: Int64, rows: Int64) -> Int64:
    return np.searchsorted(first_rows, rows, "right").astype(np.int64) - 1


def _not_ascending(arranged: Arranged) -> Int64:
    """Rows whose next row is of the same symbol and not later."""
    times = arranged.times

    def look(span: tuple[int, int]) -> Int64:
        first, last = span
        bad = times[first + 1 : last + 1] <= times[first : min(last, len(times) - 1)]
        return np.flatnonzero(bad).astype(np.int64) + first

    rows: Int64 = np.concatenate([np.empty(0, dtype=np.int64), *parallel(look, _spans(len(times)))])
    inside = _symbol_of(arranged.first_rows, rows) == _symbol_of(arranged.first_rows, rows + 1)
    return np.compress(inside, rows)


def _sort_times(arranged: Arranged, symbols: Int64) -> None:
    """Sort the rows of some symbols by time, stably."""

    def sort(symbol: np.int64) -> None:
        first = arranged.first_rows[symbol]
        rows = slice(first, first + arranged.counts[symbol])
        order = np.argsort(arranged.times[rows], kind="stable")
        for column in (arranged.times, *arranged.columns):
            column[rows] = column[rows][order]

    parallel(sort, list(symbols))


def _drop_duplicates(arranged: Arranged, duplicates: Duplicates) -> None:
    again = _not_ascending(arranged)
    if len(again) == 0:
        return
    # Pairs of neighbours that share a row are of one group, of which one row is kept.
    begins = np.append(True, again[1:] != again[:-1] + 1)
    if duplicates == "last":
        dropped, kept = again, (again + 1)[np.append(begins[1:], True)]
    else:
        dropped, kept = again + 1, again[begins]
    kept = kept[np.cumsum(begins) - 1]
    same = np.ones(len(again), dtype=np.bool_)
    for column in arranged.columns:
        one, other = column[kept], column[dropped]
        same &= (one == other) | (np.isnan(one) & np.isnan(other))
    symbols, times = _symbol_of(arranged.first_rows, again), arranged.times[again]
    if not same.all():
        pairs = np.unique(np.stack([symbols[~same], times[~same]]), axis=1)
        arranged.conflict = int(pairs[0, 0]), int(pairs[1, 0])
        if duplicates == "error":
            raise Conflict(*arranged.conflict, pairs.shape[1])
    keep = np.ones(len(arranged.times), dtype=np.bool_)
    keep[dropped] = False
    arranged.times = arranged.times[keep]
    arranged._columns = parallel(lambda column: column[keep], arranged.columns)
    arranged.counts = arranged.counts - np.bincount(symbols, minlength=len(arranged.counts))
    arranged.first_rows = np.cumsum(arranged.counts) - arranged.counts
    arranged.n_duplicates, arranged.n_conflicts = int(same.sum()), int((~same).sum())
