"""Rows that may be more than memory holds: kept sorted in sheets, in memory or in a file, and arranged in parts.

A sheet is some consecutive rows of one input, sorted by (symbol, time). So the rows of any range of symbols, and of any
range of times of a symbol, lie in each sheet one after the other, and a part of all rows is put together from a
stretch of every sheet. How rows are cut into parts is decided when all of them are known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stager.bars.arrange import Arranged, Cast, settle
from stager.bars.checks import Piece
from stager.bars.options import Duplicates

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

TIMES = -1
# Times of a symbol that is cut are looked at in so many places of each sheet.
_SAMPLES = 256
# Runs of so many rows are copied one by one; of fewer, that would take longer than a place for each row.
_LONG_RUN = 128


class Values(Protocol):
    """The values of a sheet's rows."""

    def read(self, number: int, first: int, n_rows: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Values of a column (its number, or ``TIMES``) from a row on; perhaps in `out`."""

    def came(self, starts: Int64) -> Int64:
        """In what order the rows of each symbol came, as :func:`came_in` tells it; ``starts`` are the sheet's."""


@dataclass(frozen=True)
class Sheet:
    """Some rows of one input, sorted by (symbol, time); rows of one symbol and time keep their order.

    Attributes
    ----------
    symbols : ndarray of int32, shape (n_symbols,)
        Numbers of the symbols that have a row, in the order of their text; they count in what the owner says.
    starts : ndarray of int64, shape (n_symbols + 1,)
        The rows of each.
    values : Values
    """

    symbols: Int32
    starts: Int64
    values: Values

    def __len__(self) -> int:
        return int(self.starts[-1])

    def came(self) -> Int64:
        """In what order the rows of each symbol came, as :func:`came_in` tells it."""
        return self.values.came(self.starts)

    def numbers(self) -> Int32:
        """Each row's symbol, ndarray of int32, shape (n_rows,)."""
        return np.repeat(self.symbols, np.diff(self.starts))


@dataclass(frozen=True)
class InMemory:
    """Rows in memory.

    Attributes
    ----------
    times : ndarray of int64, shape (n_rows,)
    columns : tuple of ndarray of float64, each shape (n_rows,)
    order : ndarray of int64 or None
        In what order the rows of each symbol came, as :func:`came_in` tells it, if not in this one.
    rows : ndarray of int64, shape (n_rows,), or None
        Where in the columns each row lies, if they are not in this order.
    """

    times: Int64
    columns: tuple[Float64, ...]
    order: Int64 | None = None
    rows: Int64 | None = None

    def read(self, number: int, first: int, n_rows: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Views, not written to `out`, unless columns are in another order."""
        values: npt.NDArray[Any] = self.times if number == TIMES else self.columns[number]
        if number == TIMES or self.rows is None:
            return values[first : first + n_rows]
        # "clip" spares a copy of the output; no number is out of range.
        return np.take(values, self.rows[first : first + n_rows], out=out, mode="clip")

    def came(self, starts: Int64) -> Int64:
        return came_in(self.times, starts) if self.order is None else self.order


@dataclass(frozen=True)
class InFile:
    """Rows in a file: times, then a column after the other, from byte `offset` on; then in what order they came."""

    descriptor: int
    offset: int
    n_rows: int
    n_columns: int

    def read(self, number: int, first: int, n_rows: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Values in `out`, or in a new array."""
        if out is None:
            out = np.empty(n_rows, np.int64 if number == TIMES else np.float64)
        read_all(self.descriptor, out, self.offset + 8 * ((1 + number) * self.n_rows + first))
        return out

    def came(self, starts: Int64) -> Int64:
        out = np.empty((4, len(starts) - 1), np.int64)
        read_all(self.descriptor, out, self.offset + 8 * (1 + self.n_columns) * self.n_rows)
        return out


def read_all(descriptor: int, out: npt.NDArray[Any], at: int) -> None:
    """Fill `out` from byte `at` of a file on; raises OSError if it ends before."""
    left = memoryview(out.data).cast("B")
    while left:
        if not (n_read := os.preadv(descriptor, [left], at)):
            raise OSError(5, "the file of rows ends too early")
        at, left = at + n_read, left[n_read:]


def is_sorted(piece: Piece) -> bool:
    """Whether rows stand in the order (symbol, time)."""
    codes, times = piece.codes, piece.times
    if np.any(codes[1:] < codes[:-1]):
        return False
    return not np.any((times[1:] < times[:-1]) & (codes[1:] == codes[:-1]))


def came_in(times: Int64, starts: Int64) -> Int64:
    """In what order the rows of some symbols came.

    Parameters
    ----------
    times : ndarray of int64, shape (n_rows,)
        Symbol after symbol, of each symbol as they came.
    starts : ndarray of int64, shape (n_symbols + 1,)
        The rows of each, at least one.

    Returns
    -------
    ndarray of int64, shape (4, n_symbols)
        Of each symbol the times of its first and last row, how many rows came after a later one, and the time of the
        first of those, or 0.
    """
    first_rows = starts[:-1]
    backward = np.zeros(len(times), np.bool_)
    np.less(times[1:], times[:-1], out=backward[1:])
    backward[first_rows] = False
    numbers = np.add.reduceat(backward, first_rows, dtype=np.int64)
    first = np.zeros(len(first_rows), np.int64)
    rows = np.flatnonzero(backward)
    symbols, at = np.unique(np.searchsorted(starts, rows, "right") - 1, return_index=True)
    first[symbols] = times[rows[at]]
    return np.stack([times[first_rows], times[starts[1:] - 1], numbers, first])


def sort_pieces(pieces: Sequence[Piece]) -> tuple[Piece, Int64 | None]:
    """The rows of all pieces in the order (symbol, time), copied; rows of one symbol and time keep their order.

    With them is, as :func:`came_in` tells it, in what order they came; None: the rows of every symbol in the order of
    time.
    """
    codes = np.concatenate([piece.codes for piece in pieces])
    times = np.concatenate([piece.times for piece in pieces])
    by_symbol, order, came = _in_order(codes, times)
    # Each piece is written to where its rows belong, which spares bringing them together first.
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    columns: list[Float64] = []
    for parts in zip(*(piece.columns for piece in pieces), strict=True):
        column = np.empty(len(order), np.float64)
        first = 0
        for part in parts:
            column[where[first : first + len(part)]] = part
            first += len(part)
        columns.append(column)
    return Piece(by_symbol.codes, by_symbol.times, tuple(columns)), came


def _in_order(codes: npt.NDArray[Any], times: Int64) -> tuple[Piece, Int64, Int64 | None]:
    """Symbols and times sorted, where each row was, and in what order they came, as :func:`sort_pieces` tells it."""
    order = np.argsort(codes, kind="stable")
    by_symbol = Piece(np.take(codes, order), np.take(times, order), ())
    if is_sorted(by_symbol):
        return by_symbol, order, None
    came = came_in(by_symbol.times, _starts(by_symbol.codes))
    order = np.lexsort((times, codes))
    return Piece(np.take(codes, order), np.take(times, order), ()), order, came


def unsorted_sheet_of(piece: Piece, numbers: Int32) -> Sheet:
    """A piece in any order as a sheet in memory; its columns are not copied, and read in order later."""
    by_symbol, order, came = _in_order(piece.codes, piece.times)
    return sheet_of(Piece(by_symbol.codes, by_symbol.times, piece.columns), numbers, came, order)


def sheet_of(piece: Piece, numbers: Int32, came: Int64 | None = None, rows: Int64 | None = None) -> Sheet:
    """A sorted piece as a sheet in memory, not copied.

    Parameters
    ----------
    piece : Piece
    numbers : ndarray of int32
        The number of each of its codes.
    came : ndarray of int64, optional
        In what order the rows came, if not in this one, as :func:`came_in` tells it.
    rows : ndarray of int64, optional
        Where in the columns each row lies, if they alone are not sorted.
    """
    starts = _starts(piece.codes)
    symbols = numbers[piece.codes[starts[:-1]].astype(np.int64)]
    return Sheet(symbols, starts, InMemory(piece.times, piece.columns, came, rows))


def _starts(codes: npt.NDArray[Any]) -> Int64:
    """The rows of each symbol, of rows symbol after symbol."""
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    return np.append(starts, len(codes)).astype(np.int64)


@dataclass(frozen=True)
class Part:
    """A stretch of all rows in the order (symbol, time): whole symbols, or some times of one.

    Attributes
    ----------
    first, last : int
        Places of the symbols among all, sorted; the last is not in it.
    low, high : int or None
        With one symbol: only times from ``low`` on, and before ``high``.
    n_rows : int
        Rows in it before identical ones are dropped.
    """

    first: int
    last: int
    n_rows: int
    low: int | None = None
    high: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it holds some rows of a symbol and not all."""
        return self.low is not None or self.high is not None


@dataclass(frozen=True)
class _Placed:
    """Consecutive rows of a sheet, and where they go in a part: in runs, or each to its place."""

    values: Values
    first: int
    n_rows: int
    where: slice | Int64 | list[tuple[slice, slice]]
    columns: Sequence[int]

    def fill(self, number: int, out: npt.NDArray[Any], cast: Cast | None = None) -> None:
        column = TIMES if number == TIMES else self.columns[number]
        into = out[self.where] if isinstance(self.where, slice) and cast is None else None
        values = self.values.read(column, self.first, self.n_rows, into)
        if values is into:
            return
        if cast is not None:
            values = cast(number, values)
        if isinstance(self.where, list):
            for source, place in self.where:
                out[place] = values[source]
        else:
            out[self.where] = values


class Sheets:
    """All sheets, numbered alike.

    Parameters
    ----------
    sheets : sequence of (Sheet, sequence of int)
        In the order of the rows as they came, each with where in it the columns are.
    places : ndarray of int32
        The place of each symbol's number among all symbols that have a row, sorted as text.
    n_symbols : int
        Symbols that have a row.
    """

    def __init__(self, sheets: Sequence[tuple[Sheet, Sequence[int]]], places: Int32, n_symbols: int) -> None:
        self._sheets = [(sheet, columns, places[sheet.symbols]) for sheet, columns in sheets if len(sheet)]
        self.n_columns = len(self._sheets[0][1]) if self._sheets else 0
        # The first and last symbol of each, to pass over those that have nothing of a part.
        self._firsts = np.array([symbols[0] for _, _, symbols in self._sheets])
        self._lasts = np.array([symbols[-1] for _, _, symbols in self._sheets])
        self.counts = np.zeros(n_symbols, np.int64)
        for sheet, _, symbols in self._sheets:
            self.counts[symbols] += np.diff(sheet.starts)

    @property
    def is_stored(self) -> bool:
        """Whether some of the rows lie in a file."""
        return any(not isinstance(sheet.values, InMemory) for sheet, _, _ in self._sheets)

    def of_symbols(self, first: int, last: int) -> Sheets:
        """The same with the rows of some consecutive symbols alone, from place `first` on and before `last`."""
        some: list[tuple[Sheet, Sequence[int]]] = []
        for sheet, columns, symbols in self._of(first, last):
            one, stop = np.searchsorted(symbols, [first, last])
            if one < stop:
                some.append((Sheet(symbols[one:stop], sheet.starts[one : stop + 1], sheet.values), columns))
        n_symbols = len(self.counts)
        return Sheets(some, np.arange(n_symbols, dtype=np.int32), n_symbols)

    def backward(self) -> tuple[Int64, Int64]:
        """Rows that came after a later one of their symbol.

        Returns
        -------
        numbers, first : ndarray of int64, shape (n_symbols,)
            How many of each symbol, and the time of the first of them.
        """
        numbers, first = np.zeros(len(self.counts), np.int64), np.zeros(len(self.counts), np.int64)
        latest = np.full(len(self.counts), np.iinfo(np.int64).min)
        for sheet, _, symbols in self._sheets:
            begin, end, inside, at = sheet.came()
            # The first row of the sheet may come after a later one of the sheet before.
            border = begin < latest[symbols]
            new = (numbers[symbols] == 0) & (border | (inside > 0))
            first[symbols[new]] = np.where(border, begin, at)[new]
            numbers[symbols] += inside + border
            latest[symbols] = end
        return numbers, first

    def cut(self, most_rows: int) -> list[Part]:
        """Parts of at most about so many rows, together all rows in their order."""
        parts: list[Part] = []
        first, n_rows = 0, 0
        for symbol, count in enumerate(self.counts.tolist()):
            if n_rows and n_rows + count > most_rows:
                parts.append(Part(first, symbol, n_rows))
                first, n_rows = symbol, 0
            if count > most_rows:
                parts += self._cut_symbol(symbol, count, most_rows)
                first = symbol + 1
            else:
                n_rows += count
        if n_rows:
            parts.append(Part(first, len(self.counts), n_rows))
        return parts

    def _cut_symbol(self, symbol: int, count: int, most_rows: int) -> list[Part]:
        """Parts of one symbol, cut between times."""
        found: list[Int64] = []
        weights: list[Int64] = []
        step = max(1, min(most_rows // (4 * len(self._sheets)), count // _SAMPLES))
        for sheet, _, symbols in self._of(symbol, symbol + 1):
            first, stop = _rows_of(sheet, symbols, symbol, symbol + 1)
            if first == stop:
                continue
            times = sheet.values.read(TIMES, first, stop - first)
            found.append(times[::step])
            weights.append(np.diff(np.append(np.arange(0, len(times), step), len(times))))
        times, weight = np.concatenate(found), np.concatenate(weights)
        order = np.argsort(times, kind="stable")
        times, before = times[order], np.cumsum(weight[order])
        cuts = [int(times[np.searchsorted(before, at)]) for at in range(most_rows, int(before[-1]), most_rows)]
        edges: list[int | None] = [None, *sorted(set(cuts)), None]
        n_rows = [self._n_rows(symbol, low, high) for low, high in pairwise(edges)]
        return [
            Part(symbol, symbol + 1, n, low, high) for n, (low, high) in zip(n_rows, pairwise(edges), strict=True) if n
        ]

    def _n_rows(self, symbol: int, low: int | None, high: int | None) -> int:
        part = Part(symbol, symbol + 1, 0, low, high)
        return sum(stop - first for first, stop in (_range(s, p, part) for s, _, p in self._of(symbol, symbol + 1)))

    def _of(self, first: int, last: int) -> Iterator[tuple[Sheet, Sequence[int], Int32]]:
        """The sheets that may have rows of these symbols."""
        for number in np.flatnonzero((self._firsts < last) & (self._lasts >= first)):
            yield self._sheets[number]

    def arrange(self, part: Part, duplicates: Duplicates, threads: int = 1) -> Arranged:
        """The rows of a part; times at once, columns when they are asked for.

        Raises
        ------
        Conflict
            As :func:`stager.bars.arrange.arrange`; the symbol's number counts in the part.
        """
        n_symbols = part.last - part.first
        pieces: list[tuple[Sheet, Sequence[int], int, int, Int64, Int64]] = []
        counts = np.zeros(n_symbols, np.int64)
        for sheet, columns, symbols in self._of(part.first, part.last):
            first, stop = _range(sheet, symbols, part)
            if first == stop:
                continue
            if part.is_cut:
                present, lengths = np.zeros(1, np.int64), np.array([stop - first])
            else:
                one, last = np.searchsorted(symbols, [part.first, part.last])
                present, lengths = (
                    symbols[one:last].astype(np.int64) - part.first,
                    np.diff(sheet.starts[one : last + 1]),
                )
            pieces.append((sheet, columns, first, stop - first, present, lengths))
            counts[present] += lengths
        first_rows = np.cumsum(counts) - counts
        filled = first_rows.copy()
        placed: list[_Placed] = []
        for sheet, columns, first, n_rows, present, lengths in pieces:
            begin = filled[present]
            filled[present] += lengths
            where: slice | Int64 | list[tuple[slice, slice]]
            if np.all(begin[1:] == begin[:-1] + lengths[:-1]):
                where = slice(int(begin[0]), int(begin[0]) + n_rows)
            elif n_rows >= _LONG_RUN * len(lengths):
                ends = np.cumsum(lengths)
                where = [
                    (slice(end - n, end), slice(place, place + n))
                    for end, n, place in zip(ends.tolist(), lengths.tolist(), begin.tolist(), strict=True)
                ]
            else:
                where = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
                where += np.arange(n_rows)
            placed.append(_Placed(sheet.values, first, n_rows, where, columns))
        times = np.empty(int(counts.sum()), np.int64)
        for piece in placed:
            piece.fill(TIMES, times)
        arranged = Arranged(times, first_rows, counts, self.n_columns, placed, threads=threads)
        settle(arranged, duplicates)
        return arranged


def _rows_of(sheet: Sheet, symbols: Int32, first: int, last: int) -> tuple[int, int]:
    one, other = np.searchsorted(symbols, [first, last])
    return int(sheet.starts[one]), int(sheet.starts[other])


def _range(sheet: Sheet, symbols: Int32, part: Part) -> tuple[int, int]:
    """First and last row of a part in a sheet."""
    first, stop = _rows_of(sheet, symbols, part.first, part.last)
    if not part.is_cut or first == stop:
        return first, stop
    return (
        first if part.low is None else _search(sheet, first, stop, part.low),
        stop if part.high is None else _search(sheet, first, stop, part.high),
    )


def _search(sheet: Sheet, first: int, stop: int, time: int) -> int:
    """The first row from `first` on that is not before `time`."""
    while first < stop:
        middle = (first + stop) // 2
        if sheet.values.read(TIMES, middle, 1)[0] < time:
            first = middle + 1
        else:
            stop = middle
    return first
