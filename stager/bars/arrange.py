"""Rows of all inputs in the order (symbol, time): a stable counting sort over ranges of rows, on all cores.

Bars nearly always come in the order of time, symbol after symbol or all symbols at each time. So only the symbol is
sorted by: each range is sorted in the cache by its 8 or 16 bit codes (a radix sort) and written to where its symbols'
rows belong. Then the times inside every symbol are looked at, and only symbols out of order are sorted by time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.checks import Piece
from stager.bars.threads import parallel, thread_count

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_RANGE_ROWS = 1 << 17


@dataclass
class Arranged:
    """All rows in the order (symbol, time).

    Attributes
    ----------
    times : ndarray of int64, shape (n_rows,)
    columns : list of ndarray of float64, each shape (n_rows,)
    first_rows, counts : ndarray of int64, shape (n_symbols,)
        The rows of each symbol; a symbol may have none.
    n_duplicates : int
        Identical rows that were dropped.
    """

    times: Int64
    columns: list[Float64]
    first_rows: Int64
    counts: Int64
    n_duplicates: int = 0


class Conflict(Exception):
    """Rows of one symbol and time differ: the symbol's number, the time, and the number of such pairs."""

    def __init__(self, symbol: int, time: int, n_conflicts: int) -> None:
        super().__init__(symbol, time, n_conflicts)
        self.symbol, self.time, self.n_conflicts = symbol, time, n_conflicts


def code_type(n_symbols: int) -> np.dtype[Any]:
    """The smallest unsigned type that numbers so many symbols; up to 16 bits NumPy's stable sort is a radix sort."""
    return np.min_scalar_type(max(n_symbols - 1, 0))


def arrange(
    pieces: Sequence[Piece], n_symbols: int, n_columns: int, *, done: Callable[[int, int], object] | None = None
) -> Arranged:
    """Bring rows into the order (symbol, time) and drop identical rows.

    Parameters
    ----------
    pieces : sequence of Piece
        All rows in their first order; rows of one symbol and time keep it.
    n_symbols : int
        Codes lie below it.
    n_columns : int
        Number of columns of every piece.
    done : callable, optional
        Called with (bytes moved, bytes to move).

    Raises
    ------
    Conflict
        If two rows of one symbol and time differ in a column; NaN equals NaN.
    """
    n_rows = sum(len(piece) for piece in pieces)
    rows_in_range = max(_RANGE_ROWS, n_symbols, n_rows // (8 * thread_count()))
    ranges = _cut(pieces, rows_in_range)
    by_range = np.zeros((len(ranges), n_symbols), dtype=np.int64)

    def count(number: int) -> None:
        by_range[number] = np.bincount(ranges[number].codes, minlength=n_symbols)

    parallel(count, range(len(ranges)))
    counts = by_range.sum(axis=0)
    first_rows = np.cumsum(counts) - counts
    starts = first_rows + np.cumsum(by_range, axis=0) - by_range
    times = np.empty(n_rows, dtype=np.int64)
    columns = [np.empty(n_rows, dtype=np.float64) for _ in range(n_columns)]

    def place(number: int) -> None:
        part = ranges[number]
        present = np.flatnonzero(by_range[number])
        begin, length = starts[number, present], by_range[number, present]
        order = None
        if len(present) > 1 and np.any(part.codes[1:] < part.codes[:-1]):
            order = np.argsort(part.codes, kind="stable")
        if np.all(begin[1:] == begin[:-1] + length[:-1]):
            rows = slice(int(begin[0]), int(begin[0]) + len(part))
            for target, column in zip((times, *columns), (part.times, *part.columns), strict=True):
                if order is None:
                    target[rows] = column
                else:
                    # "clip" spares a copy of the output; no number is out of range.
                    np.take(column, order, out=target[rows], mode="clip")
            return
        sorted_rows = np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(len(part))
        where = sorted_rows
        if order is not None:
            where = np.empty_like(sorted_rows)
            where[order] = sorted_rows
        for target, column in zip((times, *columns), (part.times, *part.columns), strict=True):
            target[where] = column

    def report(n_done: int, n_all: int) -> None:
        if done is not None:
            nbytes = n_rows * 8 * (n_columns + 1)
            done(nbytes * n_done // n_all, nbytes)

    parallel(place, range(len(ranges)), done=report, threads=thread_count())
    arranged = Arranged(times, columns, first_rows, counts)
    late = _not_ascending(arranged)
    if len(late):
        _sort_times(arranged, np.unique(_symbol_of(first_rows, late[times[late + 1] < times[late]])))
        _drop_duplicates(arranged)
    return arranged


def _cut(pieces: Sequence[Piece], n_rows: int) -> list[Piece]:
    """The same rows in ranges of about ``n_rows``: large pieces are cut, small ones joined."""
    ranges: list[Piece] = []
    small: list[Piece] = []
    n_small = 0

    def join() -> None:
        if len(small) == 1:
            ranges.append(small[0])
        elif small:
            columns = zip(*(piece.columns for piece in small), strict=True)
            ranges.append(
                Piece(
                    np.concatenate([piece.codes for piece in small]),
                    np.concatenate([piece.times for piece in small]),
                    tuple(np.concatenate(parts) for parts in columns),
                )
            )
        small.clear()

    for piece in pieces:
        for first in range(0, len(piece), n_rows):
            rows = slice(first, first + n_rows)
            small.append(Piece(piece.codes[rows], piece.times[rows], tuple(column[rows] for column in piece.columns)))
            n_small += len(small[-1])
            if n_small * 2 > n_rows:
                join()
                n_small = 0
    join()
    return ranges


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


def _drop_duplicates(arranged: Arranged) -> None:
    again = _not_ascending(arranged)
    if len(again) == 0:
        return
    same = np.ones(len(again), dtype=np.bool_)
    for column in arranged.columns:
        one, other = column[again], column[again + 1]
        same &= (one == other) | (np.isnan(one) & np.isnan(other))
    symbols, times = _symbol_of(arranged.first_rows, again), arranged.times[again]
    if not same.all():
        pairs = np.unique(np.stack([symbols[~same], times[~same]]), axis=1)
        raise Conflict(int(pairs[0, 0]), int(pairs[1, 0]), pairs.shape[1])
    keep = np.ones(len(arranged.times), dtype=np.bool_)
    keep[again + 1] = False
    arranged.times = arranged.times[keep]
    arranged.columns = parallel(lambda column: column[keep], arranged.columns)
    arranged.counts = arranged.counts - np.bincount(symbols, minlength=len(arranged.counts))
    arranged.first_rows = np.cumsum(arranged.counts) - arranged.counts
    arranged.n_duplicates = len(again)
