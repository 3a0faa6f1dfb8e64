"""How open, high, low and close of a bar lie to each other, and which columns are swapped where they don't fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.options import PRICES

Float64 = npt.NDArray[np.float64]

# What may be wrong, as the numbers of two columns: the first lies above the second and must not.
FAULTS = ((0, 1), (3, 1), (2, 0), (2, 3), (2, 1))
# Which column holds the highest and which the lowest price.
PAIRS = tuple(permutations(range(4), 2))
_TOLD = PAIRS.index((1, 2))
# Adjusted prices are rounded, each by itself.
_ROUNDING = 1e-6
# Of so many bars the columns must hold highest and lowest to be called swapped.
_SWAPPED = 0.99


@dataclass(frozen=True)
class Relation:
    """Bars whose high lies below, or low above, open or close.

    Attributes
    ----------
    n_bars, n_violations : int
    n_gross : int
        Violations by more than a millionth.
    faults : tuple of int
        How often each of ``FAULTS`` holds.
    fits : tuple of int
        In how many bars each of ``PAIRS`` holds the highest and the lowest price.
    first : tuple of int or None
        Number of the symbol and time of the first violation.
    """

    n_bars: int = 0
    n_violations: int = 0
    n_gross: int = 0
    faults: tuple[int, ...] = field(default=(0,) * len(FAULTS))
    fits: tuple[int, ...] = field(default=(0,) * len(PAIRS))
    first: tuple[int, int] | None = None

    def __add__(self, other: Relation) -> Relation:
        return Relation(
            self.n_bars + other.n_bars,
            self.n_violations + other.n_violations,
            self.n_gross + other.n_gross,
            tuple(map(sum, zip(self.faults, other.faults, strict=True))),
            tuple(map(sum, zip(self.fits, other.fits, strict=True))),
            self.first or other.first,
        )

    @property
    def swapped(self) -> tuple[int, int] | None:
        """Numbers of the columns that hold the highest and the lowest price of nearly all bars, if they are others than
        high and low."""
        best = int(np.argmax(self.fits))
        rivals = sum(count == self.fits[best] for count in self.fits)
        is_rounding = 2 * self.n_gross < self.n_violations or self.n_violations == 0
        if is_rounding or rivals > 1 or best == _TOLD or self.fits[best] < _SWAPPED * self.n_bars:
            return None
        return PAIRS[best]

    @property
    def worst(self) -> str:
        """The most frequent faults, in words."""
        some = sorted(zip(self.faults, FAULTS, strict=True), key=lambda fault: -fault[0])[:2]
        return ", ".join(f"{PRICES[above]} above {PRICES[below]} in {n:,}" for n, (above, below) in some if n)


def relation(
    codes: npt.NDArray[np.unsignedinteger[Any]], times: npt.NDArray[np.int64], prices: Sequence[Float64]
) -> Relation:
    """Look at bars.

    Parameters
    ----------
    codes, times : ndarray, shape (n_bars,)
        Numbers of the symbols, and instants.
    prices : sequence of ndarray of float64, each shape (n_bars,)
        open, high, low, close; no NaN.
    """
    n_bars = len(times)
    open_, high, low, close = prices
    above, below = np.maximum(open_, close), np.minimum(open_, close)
    violated = (high < above) | (low > below)
    if not violated.any():
        return Relation(n_bars, fits=tuple(n_bars if pair == PAIRS[_TOLD] else 0 for pair in PAIRS))
    rows = np.flatnonzero(violated)
    with np.errstate(over="ignore"):
        excess = np.maximum(above[rows] - high[rows], low[rows] - below[rows])
    gross = excess > _ROUNDING * np.maximum(np.abs(above[rows]), np.abs(below[rows]))
    highest, lowest = np.maximum(above, np.maximum(high, low)), np.minimum(below, np.minimum(high, low))
    is_highest, is_lowest = [price == highest for price in prices], [price == lowest for price in prices]
    return Relation(
        n_bars,
        len(rows),
        int(np.count_nonzero(gross)),
        tuple(int(np.count_nonzero(prices[a] > prices[b])) for a, b in FAULTS),
        tuple(int(np.count_nonzero(is_highest[a] & is_lowest[b])) for a, b in PAIRS),
        (int(codes[rows[0]]), int(times[rows[0]])),
    )
