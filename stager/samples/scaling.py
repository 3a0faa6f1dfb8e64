"""What a target is set in relation to: its own trailing volatility, or the other symbols of its instant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def trailing_volatility(prices: FloatArray, run_firsts: IntArray, first: int, window: int, kind: str) -> FloatArray:
    """The standard deviation of the last `window` one-bar moves up to each row.

    Sums run over the window of each row alone, in the order of time: what other rows hold changes no bit, as it would
    with sums from the beginning, which also lose small moves beside large ones.

    Parameters
    ----------
    prices : (n_rows,) float64
    run_firsts : (n,) int64
        The first row of the run of rows ``first : first + n``; moves don't reach back across it.
    first, window : int
    kind : str
        "difference" for moves of the price, else log returns.

    Returns
    -------
    (n,) float64
        With ``window - 1`` in the denominator; NaN without enough moves, or where one of them is none.
    """
    n = len(run_firsts)
    sigma = np.full(n, np.nan)
    # The first row with enough rows before it; moves[k] then is the oldest move of row begin + k.
    begin, stop = max(first, window), first + n
    count = stop - begin
    if count <= 0:
        return sigma
    levels = prices[begin - window : stop]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moves = np.diff(levels if kind == "difference" else np.log(levels))
        mean = np.zeros(count)
        for k in range(window):
            mean += moves[k : k + count]
        mean /= window
        squares = np.zeros(count)
        for k in range(window):
            squares += (moves[k : k + count] - mean) ** 2
        sigma[begin - first :] = np.sqrt(squares / (window - 1))
    sigma[np.arange(first, stop) - run_firsts < window] = np.nan
    return sigma


def across_symbols(values: FloatArray, instants: IntArray, how: str) -> FloatArray:
    """Values in relation to the others of the same instant.

    Parameters
    ----------
    values : (n,) float64, finite
    instants : (n,) int64
    how : {"rank", "demean"}
        ``(rank - (m + 1) / 2) / m`` among the m values of the instant, with the mean rank for equal values; or the
        value less their mean.

    Returns
    -------
    (n,) float64
    """
    order = np.lexsort((values, instants)) if how == "rank" else np.argsort(instants, kind="stable")
    groups = _edges(instants[order])
    sizes = np.diff(groups, append=len(values))
    found = np.empty(len(values))
    if how == "demean":
        means = np.add.reduceat(values[order], groups) / sizes if len(values) else np.empty(0)
        found[order] = values[order] - np.repeat(means, sizes)
        return found
    # Twice the mean rank of a stretch of equal values: its first and its last rank, counted from 1, added up.
    place = np.arange(len(values)) - np.repeat(groups, sizes)
    ties = _edges(instants[order], values[order])
    lengths = np.diff(ties, append=len(values))
    twice = np.repeat(2 * place[ties] + lengths + 1, lengths)
    sizes_of = np.repeat(sizes, sizes)
    found[order] = (twice - (sizes_of + 1)) / (2 * sizes_of)
    return found


def last_of_instant(ends: IntArray, instants: IntArray) -> IntArray:
    """(n,) int64: the last of the ends that share an instant, for each of them."""
    if not len(ends):
        return ends
    order = np.argsort(instants, kind="stable")
    groups = _edges(instants[order])
    found = np.empty(len(ends), np.int64)
    found[order] = np.repeat(np.maximum.reduceat(ends[order], groups), np.diff(groups, append=len(ends)))
    return found


def _edges(*keys: npt.NDArray[np.generic]) -> IntArray:
    """Where stretches of equal keys begin."""
    if not len(keys[0]):
        return np.empty(0, np.int64)
    changed = np.ones(len(keys[0]), bool)
    changed[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(changed)
