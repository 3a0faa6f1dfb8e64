"""Runs: consecutive rows of one symbol that a window may span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack

IntArray = npt.NDArray[np.int64]

_CHUNK_ROWS = 1 << 18
_DAY = 86_400_000_000_000
_NEW_SYMBOL = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Runs:
    """A table of runs in row order; together they cover all rows.

    Attributes
    ----------
    first_rows, counts : (n_runs,) int64
    """

    first_rows: IntArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.first_rows)

    @property
    def ends(self) -> IntArray:
        """(n_runs,) int64: the row after each run's last."""
        return self.first_rows + self.counts

    def firsts_of(self, first: int, stop: int) -> IntArray:
        """(stop - first,) int64: for each of these rows the first row of its run."""
        return self._spread(self.first_rows, first, stop)

    def ends_of(self, first: int, stop: int) -> IntArray:
        """(stop - first,) int64: for each of these rows the row after the last of its run."""
        return self._spread(self.ends, first, stop)

    def _spread(self, facts: IntArray, first: int, stop: int) -> IntArray:
        lo = int(np.searchsorted(self.first_rows, first, side="right")) - 1
        hi = int(np.searchsorted(self.first_rows, stop, side="left"))
        firsts, ends = self.first_rows[lo:hi], self.ends[lo:hi]
        return np.repeat(facts[lo:hi], np.minimum(ends, stop) - np.maximum(firsts, first))


@dataclass(frozen=True)
class Breaks:
    """Where consecutive rows are not consecutive bars.

    Attributes
    ----------
    rows : (n,) int64
        The rows after a break, ascending; row 0 first.
    missing : (n,) int64
        Bars missing there; the largest int64 where a symbol begins.
    """

    rows: IntArray
    missing: IntArray
    n_rows: int

    def runs(self, max_gap: int) -> Runs:
        """The runs in which at most `max_gap` bars are missing at a place."""
        first_rows = self.rows[self.missing > min(max_gap, _NEW_SYMBOL - 1)]
        return Runs(first_rows, np.diff(first_rows, append=self.n_rows))

    def whole(self) -> Runs:
        """The rows that a label may span at most: of one symbol."""
        return self.runs(_NEW_SYMBOL - 1)


def find_breaks(pack: Pack) -> Breaks:
    """Every place in the rows where a bar is missing or a symbol begins.

    Intraday, ``d // interval - 1`` bars are missing between two stamps `d` apart. For daily and longer bars the next
    bar is the next session (week, month) in which any symbol has a bar.
    """
    ticks = _ticks(pack)
    rows, missing = [pack.first_rows], [np.full(len(pack.first_rows), _NEW_SYMBOL)]
    begins = np.zeros(pack.n_rows + 1, bool)
    begins[pack.first_rows] = True
    for first in range(1, pack.n_rows, _CHUNK_ROWS):
        stop = min(first + _CHUNK_ROWS, pack.n_rows)
        steps = ticks(first - 1, stop)
        found = np.flatnonzero((steps > 1) & ~begins[first:stop])
        if found.size:
            rows.append(found + first)
            missing.append(steps[found] - 1)
    all_rows, all_missing = np.concatenate(rows), np.concatenate(missing)
    order = np.argsort(all_rows, kind="stable")
    return Breaks(all_rows[order], all_missing[order], pack.n_rows)


def _ticks(pack: Pack):  # type: ignore[no-untyped-def]
    """A function (first, stop) -> int64 steps between rows first..stop, in whole bars."""
    times, interval = pack.times, pack.interval
    if not interval.is_session:
        return lambda first, stop: np.diff(times[first:stop]) // interval.nanoseconds
    numbers = session_numbers(times, interval.text)
    low = int(numbers.min())
    seen = np.zeros(int(numbers.max()) - low + 1, np.int64)
    seen[numbers - low] = 1
    position = np.cumsum(seen)[numbers - low]
    return lambda first, stop: np.diff(position[first:stop])


def session_numbers(times: IntArray, interval: str) -> IntArray:
    """(n,) int64: number of the day, week (from Monday) or month that each stamp lies in."""
    if interval.endswith("mo"):
        return times.view("datetime64[ns]").astype("datetime64[M]").astype(np.int64)
    days = times // _DAY
    return (days + 3) // 7 if interval.endswith("w") else days
