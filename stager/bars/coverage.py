"""Bars of every symbol in equal stretches of time, for pictures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.interval import DAY, Interval
from stager.bars.threads import parallel

Int64 = npt.NDArray[np.int64]

_MOST = 400
_HOUR = 3600 * 10**9
# 1970 began on a Thursday; stretches of weeks begin on Mondays.
_MONDAY = 4 * DAY


@dataclass(frozen=True)
class Coverage:
    """How many bars lie in each stretch.

    Attributes
    ----------
    edges : list of int
        Beginnings of the stretches, and the end of the last one; nanoseconds since 1970.
    counts : ndarray of int32, shape (n_symbols, n_stretches)
    full : ndarray of int32, shape (n_symbols, n_stretches) or (n_symbols, 1)
        What is full: of daily and longer bars the sessions of any symbol, else the most that the symbol has in a
        stretch.
    """

    edges: list[int]
    counts: npt.NDArray[np.int32]
    full: npt.NDArray[np.int32]


def cover(times: Int64, first_rows: Int64, counts: Int64, interval: Interval) -> Coverage:
    """Count the bars of every symbol in at most 400 stretches.

    Parameters
    ----------
    times : ndarray of int64, shape (n_rows,)
        Ascending inside each symbol; not empty.
    first_rows, counts : ndarray of int64, shape (n_symbols,)
    interval : Interval
    """
    low, high = int(times.min()), int(times.max())
    width = _width(high - low, interval)
    start = (low - _MONDAY) // width * width + _MONDAY
    edges = list(range(start, high + width, width))
    edges = edges if edges[-1] > high else [*edges, edges[-1] + width]
    found = np.empty((len(first_rows), len(edges) - 1), np.int32)
    # The last end may lie beyond int64, and no time does.
    cuts = np.array(edges[:-1], np.int64)

    def look(symbol: int) -> None:
        first = int(first_rows[symbol])
        some = times[first : first + int(counts[symbol])]
        found[symbol] = np.diff(np.searchsorted(some, cuts), append=len(some))

    parallel(look, range(len(first_rows)))
    if interval.is_session:
        sessions = np.unique(times)
        full = np.diff(np.searchsorted(sessions, cuts), append=len(sessions)).astype(np.int32)[None]
    else:
        full = found.max(axis=1, keepdims=True)
    return Coverage(edges, found, full)


def _width(span: int, interval: Interval) -> int:
    """A stretch of which at most 400 make up the span, and which holds whole bars, days or weeks."""
    bar = interval.nanoseconds or 28 * DAY
    if span < _MOST * _HOUR and bar < _HOUR:
        return max(bar, -(-span // (_MOST * bar)) * bar)
    for hours in (1, 2, 3, 4, 6, 8, 12, 24):
        if (width := hours * _HOUR) >= bar and span < _MOST * width:
            return width
    weeks = 1
    while span >= _MOST * weeks * 7 * DAY or bar > weeks * 7 * DAY:
        weeks *= 2
    return weeks * 7 * DAY
