"""Bars off the grid of their interval, prices that are not positive, and stretches without volume, symbol by symbol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.interval import Interval
from stager.bars.threads import parallel

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# A shorter stretch without volume is an ordinary quiet moment.
STRETCH_BARS = 10
_SPAN_ROWS = 1 << 18
# Summer time moves a local grid by an hour.
_HOUR = 3600 * 10**9


@dataclass(frozen=True)
class Counted:
    """Bars with some property.

    Attributes
    ----------
    of_symbols : ndarray of int64, shape (n_symbols,)
        How many bars of each symbol have it.
    first : tuple of int or None
        The first row that has it, and its time.
    """

    of_symbols: Int64
    first: tuple[int, int] | None

    @property
    def n(self) -> int:
        """How many bars have it in all."""
        return int(self.of_symbols.sum())


@dataclass(frozen=True)
class Stretches:
    """Bars without volume, and stretches of consecutive ones.

    Attributes
    ----------
    zero : Counted
        Bars whose volume is 0.
    flat : int
        Of those, bars whose four prices are equal.
    rows, times, lengths : ndarray of int64, shape (n_stretches,)
        First row, its time, and number of bars of each stretch, ascending.
    """

    zero: Counted
    flat: int
    rows: Int64
    times: Int64
    lengths: Int64


def grid_step(interval: Interval) -> int:
    """Nanoseconds between the lines of a grid; of intervals of several hours, whole hours are the grid, since local
    times shift with summer time. Of months it says nothing."""
    return math.gcd(interval.nanoseconds, _HOUR)


def off_grid(
    times: Int64, first_rows: Int64, counts: Int64, interval: Interval, phase: int | None = None
) -> Mask | None:
    """Where a bar's open does not lie on the grid of its symbol: the most frequent remainder by the interval.

    Parameters
    ----------
    times : ndarray of int64, shape (n_rows,)
    first_rows, counts : ndarray of int64, shape (n_symbols,)
    interval : Interval
    phase : int, optional
        That remainder, where these are not all bars of the only symbol.

    Returns
    -------
    ndarray of bool, shape (n_rows,), or None
        None where there is no such bar.
    """
    if interval.months or not len(times):
        return None
    step = grid_step(interval)
    if phase is not None:
        away = times % step != phase
        return away if away.any() else None
    phases_differ = np.zeros(len(first_rows), np.bool_)

    def look(first: int) -> None:
        """Mark symbols of a remainder other than that of their first bar."""
        some = times[first : first + _SPAN_ROWS]
        low = int(np.searchsorted(first_rows, first, "right")) - 1
        high = int(np.searchsorted(first_rows, first + len(some), "left"))
        remainders = some % step
        begins = np.maximum(first_rows[low:high] - first, 0)
        own = np.repeat(times[first_rows[low:high]] % step, np.diff(begins, append=len(some)))
        odd = np.flatnonzero(remainders != own)
        if len(odd):
            phases_differ[np.unique(np.searchsorted(first_rows, odd + first, "right") - 1)] = True

    parallel(look, range(0, len(times), _SPAN_ROWS))
    doubtful = np.flatnonzero(phases_differ)
    if not len(doubtful):
        return None
    off = np.zeros(len(times), np.bool_)

    def judge(symbol: np.int64) -> None:
        rows = slice(int(first_rows[symbol]), int(first_rows[symbol] + counts[symbol]))
        remainders = times[rows] % step
        values, numbers = np.unique(remainders, return_counts=True)
        off[rows] = remainders != values[np.argmax(numbers)]

    parallel(judge, list(doubtful))
    return off


def not_positive(prices: Sequence[Float64]) -> Mask | None:
    """Where a price is zero or below; None where none is."""
    if all(parallel(lambda price: bool(price.min(initial=1.0) > 0), list(prices))):
        return None
    found: Mask = prices[0] <= 0
    for price in prices[1:]:
        found |= price <= 0
    return found


def count(mask: Mask | None, first_rows: Int64, times: Int64) -> Counted:
    """How often a property holds, symbol by symbol; each symbol has a row."""
    if mask is None or not mask.any():
        return Counted(np.zeros(len(first_rows), np.int64), None)
    first = int(np.argmax(mask))
    return Counted(np.add.reduceat(mask, first_rows, dtype=np.int64), (first, int(times[first])))


def zero_volume(volume: Float64, prices: Sequence[Float64], first_rows: Int64, times: Int64) -> Stretches:
    """Look for bars whose volume is 0; a missing volume is none."""
    zero = volume == 0
    counted = count(zero, first_rows, times)
    if counted.first is None:
        nothing = np.empty(0, np.int64)
        return Stretches(counted, 0, nothing, nothing, nothing)
    begins = zero.copy()
    begins[1:] &= ~zero[:-1]
    begins[first_rows] = zero[first_rows]
    ends = zero.copy()
    ends[:-1] &= ~zero[1:]
    ends[first_rows[1:] - 1] = zero[first_rows[1:] - 1]
    rows = np.flatnonzero(begins).astype(np.int64)
    lengths = np.flatnonzero(ends) - rows + 1
    where = np.flatnonzero(zero)
    one = prices[0][where]
    flat = np.logical_and.reduce([price[where] == one for price in prices[1:]])
    return Stretches(counted, int(np.count_nonzero(flat)), rows, times[rows], lengths)
