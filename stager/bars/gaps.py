"""Missing bars: by the interval, and of daily and longer bars by the sessions in which any symbol has a bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.interval import DAY, Interval
from stager.bars.threads import parallel

Int64 = npt.NDArray[np.int64]

_SPAN_ROWS = 1 << 18
# So many places of the clock are marked one by one, the rest is sorted.
_MOST_MARKS = 1 << 28


@dataclass(frozen=True)
class Gaps:
    """Every place inside a symbol where bars are missing.

    Attributes
    ----------
    rows, times, until : ndarray of int64, shape (n_gaps,)
        The rows before the gaps, ascending, their times, and those of the rows after.
    n_missing, n_elsewhere : ndarray of int64, shape (n_gaps,)
        Bars missing, and how many of those places have a bar of another symbol.
    """

    rows: Int64
    times: Int64
    until: Int64
    n_missing: Int64
    n_elsewhere: Int64

    def __len__(self) -> int:
        return len(self.rows)


def session_numbers(times: Int64, interval: str) -> Int64:
    """Numbers of the days, weeks (from Monday) or months that some stamps lie in; ndarray of int64, shape (n,)."""
    if interval.endswith("mo"):
        return times.view("datetime64[ns]").astype("datetime64[M]").astype(np.int64)
    days = times // DAY
    return (days + 3) // 7 if interval.endswith("w") else days


def find_gaps(times: Int64, first_rows: Int64, interval: Interval) -> Gaps:
    """Look for missing bars.

    Parameters
    ----------
    times : ndarray of int64, shape (n_rows,)
        Opens, ascending inside each symbol.
    first_rows : ndarray of int64, shape (n_symbols,)
        Each symbol has a row.
    interval : Interval
    """

    def numbers(some: Int64) -> Int64:
        return session_numbers(some, interval.text) if interval.is_session else some // interval.nanoseconds

    def look(first: int) -> Int64:
        some = times[first : first + _SPAN_ROWS + 1]
        if interval.is_session:
            steps = np.diff(numbers(some))
        else:
            steps = np.diff(some) // interval.nanoseconds
        return np.flatnonzero(steps > 1).astype(np.int64) + first

    found = parallel(look, range(0, max(0, len(times) - 1), _SPAN_ROWS))
    rows = np.concatenate([np.empty(0, np.int64), *found])
    rows = np.setdiff1d(rows, first_rows[1:] - 1, assume_unique=True)
    if not len(rows):
        return Gaps(rows, rows, rows, rows, rows)
    seen = _seen(times, numbers)
    before, after = numbers(times[rows]), numbers(times[rows + 1])
    n_elsewhere = np.searchsorted(seen, after, "left") - np.searchsorted(seen, before, "right")
    if interval.is_session:
        n_missing = n_elsewhere.astype(np.int64)
    else:
        n_missing = (times[rows + 1] - times[rows]) // interval.nanoseconds - 1
        # Bars off the grid may count twice in a place.
        n_elsewhere = np.minimum(n_elsewhere, n_missing)
    real = n_missing > 0
    rows, n_missing, n_elsewhere = rows[real], n_missing[real], n_elsewhere[real].astype(np.int64)
    return Gaps(rows, times[rows], times[rows + 1], n_missing, n_elsewhere)


def _seen(times: Int64, numbers: Callable[[Int64], Int64]) -> Int64:
    """The places of the clock in which any symbol has a bar, ascending."""
    low, high = int(numbers(times.min()[None])[0]), int(numbers(times.max()[None])[0])
    if high - low >= _MOST_MARKS:
        return np.unique(numbers(times))
    marks = np.zeros(high - low + 1, np.bool_)

    def mark(first: int) -> None:
        marks[numbers(times[first : first + _SPAN_ROWS]) - low] = True

    parallel(mark, range(0, len(times), _SPAN_ROWS))
    return np.flatnonzero(marks).astype(np.int64) + low
