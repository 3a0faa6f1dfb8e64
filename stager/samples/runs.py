"""Runs: consecutive rows of one symbol that a window may span."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.gaps import session_numbers
from stager.bars.threads import parallel
from stager.packs.layout import Pack
from stager.samples.sessions import Sessions

IntArray = npt.NDArray[np.int64]

_CHUNK_ROWS = 1 << 18
# Boundaries that no `max_gap` spans, in place of a number of missing bars; the greatest of several holds.
NEW_SYMBOL = np.iinfo(np.int64).max
JUMP = NEW_SYMBOL - 1  # a contract roll or a split: prices before and after don't compare
NEW_SESSION = NEW_SYMBOL - 2


@dataclass(frozen=True)
class Runs:
    """A table of runs in row order; together they cover all rows.

    Attributes
    ----------
    first_rows, counts : (n_runs,) int64
    missing : (n_runs,) int64
        What each begins after: bars that are missing, or NEW_SYMBOL, JUMP or NEW_SESSION.
    outside : (n_runs,) bool
        Whether its bars lie outside the session; no sample spans or ends in such a run.
    """

    first_rows: IntArray
    counts: IntArray
    missing: IntArray
    outside: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first_rows)

    @property
    def ends(self) -> IntArray:
        """(n_runs,) int64: the row after each run's last."""
        return self.first_rows + self.counts

    def firsts_of(self, first: int, stop: int) -> IntArray:
        """(stop - first,) int64: for each of these rows the first row of its run."""
        firsts, ends = self._between(first, stop)
        return np.repeat(firsts, np.minimum(ends, stop) - np.maximum(firsts, first))

    def last_rows(self, first: int, stop: int, count: int) -> IntArray:
        """(n,) int64: those of the rows ``first : stop`` that are among the last `count` of their run."""
        firsts, ends = self._between(first, stop)
        begins = np.maximum(np.maximum(firsts, ends - count), first)
        return rows_of(begins, np.maximum(np.minimum(ends, stop) - begins, 0))

    def _between(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """First rows and ends of the runs of these rows."""
        lo = int(np.searchsorted(self.first_rows, first, side="right")) - 1
        hi = int(np.searchsorted(self.first_rows, stop, side="left"))
        return self.first_rows[lo:hi], self.first_rows[lo:hi] + self.counts[lo:hi]


@dataclass(frozen=True)
class Breaks:
    """Where consecutive rows are not consecutive bars.

    Attributes
    ----------
    rows : (n,) int64
        The rows after a break, ascending; row 0 first.
    missing : (n,) int64
        Bars missing there, or NEW_SYMBOL, JUMP or NEW_SESSION.
    outside : (n,) bool
        Whether the rows from there on lie outside the session.
    """

    rows: IntArray
    missing: IntArray
    n_rows: int
    outside: npt.NDArray[np.bool_]

    def runs(self, max_gap: int) -> Runs:
        """The runs in which at most `max_gap` bars are missing at a place."""
        return self._after(self.missing > min(max_gap, NEW_SESSION - 1))

    def whole(self) -> Runs:
        """The rows that a label may span at most: of one symbol, without contract roll or split."""
        return self._after(self.missing >= JUMP)

    def _after(self, chosen: npt.NDArray[np.bool_]) -> Runs:
        first_rows = self.rows[chosen]
        counts = np.diff(first_rows, append=self.n_rows)
        return Runs(first_rows, counts, self.missing[chosen], self.outside[chosen])


def rows_of(first_rows: IntArray, counts: IntArray) -> IntArray:
    """(n,) int64: the rows of some ranges, one range after the other."""
    ends = np.cumsum(counts)
    rows: IntArray = np.arange(int(ends[-1]) if len(ends) else 0)
    rows += np.repeat(first_rows - (ends - counts), counts)
    return rows


def find_breaks(pack: Pack, sessions: Sessions | None = None, jumps: IntArray | None = None) -> Breaks:
    """Every place in the rows that a window may not span.

    Intraday, ``d // interval - 1`` bars are missing between two stamps `d` apart. For daily and longer bars the next
    bar is the next session (week, month) in which any symbol has a bar.

    Parameters
    ----------
    pack : Pack
    sessions : Sessions, optional
        Sessions end at their close, however few bars are missing until the next.
    jumps : (n,) int64, optional
        Rows of the first bars after a contract roll or a split, not the first of their symbols.
    """
    ticks = _ticks(pack)
    rows, missing = [pack.first_rows], [np.full(len(pack.first_rows), NEW_SYMBOL)]
    if jumps is not None:
        rows.append(jumps)
        missing.append(np.full(len(jumps), JUMP))
    begins = np.zeros(pack.n_rows + 1, bool)
    begins[pack.first_rows] = True

    def look(first: int) -> tuple[IntArray, IntArray]:
        stop = min(first + _CHUNK_ROWS, pack.n_rows)
        steps = ticks(first - 1, stop) - 1
        if sessions is not None:
            session = sessions.of(pack.times[first - 1 : stop])
            steps[session[1:] != session[:-1]] = NEW_SESSION
        found = np.flatnonzero((steps > 0) & ~begins[first:stop])
        return found + first, steps[found]

    for found, gaps in parallel(look, range(1, pack.n_rows, _CHUNK_ROWS)):
        rows.append(found)
        missing.append(gaps)
    all_rows, all_missing = np.concatenate(rows), np.concatenate(missing)
    order = np.lexsort((all_missing, all_rows))
    all_rows, all_missing = all_rows[order], all_missing[order]
    last = np.append(all_rows[1:] != all_rows[:-1], True)
    all_rows, all_missing = all_rows[last], all_missing[last]
    outside = np.zeros(len(all_rows), bool) if sessions is None else sessions.of(pack.times[all_rows]) < 0
    return Breaks(all_rows, all_missing, pack.n_rows, outside)


def _ticks(pack: Pack) -> Callable[[int, int], IntArray]:
    """A function (first, stop) -> int64 steps between rows first..stop, in whole bars."""
    times, interval = pack.times, pack.interval
    if not interval.is_session:
        return lambda first, stop: np.diff(times[first:stop]) // interval.nanoseconds
    position = session_positions(pack)
    return lambda first, stop: np.diff(position[first:stop])


def session_positions(pack: Pack) -> IntArray:
    """(n_rows,) int64: the place of each bar's session (week, month) among those in which any symbol has a bar."""
    numbers = session_numbers(pack.times, pack.interval.text)
    low = int(numbers.min())
    seen = np.zeros(int(numbers.max()) - low + 1, np.int64)
    seen[numbers - low] = 1
    return (np.cumsum(seen) - 1)[numbers - low]


def decision_numbers(pack: Pack) -> Callable[[int, int], IntArray]:
    """A function (first, stop) -> int64 numbers of the bars' closes in units of the interval, alike for all symbols.

    For daily and longer bars, the place of the session (week, month) among those in which any symbol has a bar.
    """
    times, interval = pack.times, pack.interval
    if interval.is_session:
        position = session_positions(pack)
        return lambda first, stop: position[first:stop]
    return lambda first, stop: interval.available(times[first:stop]) // interval.nanoseconds
