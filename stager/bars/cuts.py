"""A symbol whose bars are cut into parts: what only all of its bars tell, put together from what each part adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stager.bars.interval import Interval
from stager.bars.jumps import TRIMMED, moves_of
from stager.bars.series import grid_step

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Whole:
    """What all bars of a symbol tell.

    Attributes
    ----------
    usual : float
        As :func:`stager.bars.jumps.usual_move`.
    phase : int
        The most frequent remainder of its times by the step of the grid.
    """

    usual: float
    phase: int


@dataclass(frozen=True)
class Share:
    """What some consecutive bars of a symbol add to that.

    Attributes
    ----------
    first, last : float
        The first and last close.
    largest : ndarray of float64, shape (at most 3,)
        The largest moves.
    squares : float
        Sum of the squares of the others.
    n_others : int
    remainders, numbers : ndarray of int64
        Remainders of times by the step of the grid, ascending, and how often each is there.
    """

    first: float
    last: float
    largest: Float64
    squares: float
    n_others: int
    remainders: Int64
    numbers: Int64

    @classmethod
    def of(cls, times: Int64, close: Float64, interval: Interval) -> Share:
        """Of bars, at least one: opens in nanoseconds since 1970, and closes, both shape (n_rows,)."""
        remainders, numbers = np.unique(times % grid_step(interval), return_counts=True)
        largest, squares, n_others = _apart(moves_of(close))
        return cls(float(close[0]), float(close[-1]), largest, squares, n_others, remainders, numbers.astype(np.int64))


def whole_of(shares: Sequence[Share]) -> Whole:
    """What all bars of a symbol tell, from those of each of its parts, in their order."""
    borders = [moves_of(np.array([one.last, other.first])) for one, other in pairwise(shares)]
    _, squares, n_others = _apart(np.concatenate([*(share.largest for share in shares), *borders]))
    n_others += sum(share.n_others for share in shares)
    squares += sum(share.squares for share in shares)
    values, place = np.unique(np.concatenate([share.remainders for share in shares]), return_inverse=True)
    numbers = np.zeros(len(values), np.int64)
    np.add.at(numbers, place, np.concatenate([share.numbers for share in shares]))
    return Whole(float(np.sqrt(squares / n_others)) if n_others else 0.0, int(values[np.argmax(numbers)]))


def _apart(moves: Float64) -> tuple[Float64, float, int]:
    """The largest moves, and of the others the sum of squares and the number."""
    if len(moves) <= TRIMMED:
        return moves, 0.0, 0
    sorted_ = np.partition(moves, len(moves) - TRIMMED)
    others = sorted_[:-TRIMMED]
    return sorted_[-TRIMMED:], float(np.sum(np.square(others))), len(others)
