"""What a target is set in relation to: its own trailing volatility, or the other symbols of its instant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Values that are compared at once; their sort stays in the cache.
_PART = 1 << 17


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
    found = np.empty(len(values))

    def relate(part: IntArray) -> None:
        found[part] = _within(values[part], instants[part], how)

    parallel(relate, _parts(instants))
    return found


def last_of_instant(ends: IntArray, instants: IntArray) -> IntArray:
    """(n,) int64: the last of the ends that share an instant, for each of them."""
    found = np.empty(len(ends), np.int64)

    def look(part: IntArray) -> None:
        order = np.argsort(instants[part], kind="stable")
        groups = _edges(instants[part][order])
        last = np.maximum.reduceat(ends[part][order], groups)
        found[part[order]] = np.repeat(last, np.diff(groups, append=len(part)))

    parallel(look, _parts(instants))
    return found


def _parts(instants: IntArray) -> list[IntArray]:
    """Places, in parts that fit the cache; those of one instant in one part, each part in their order."""
    n_parts = min(len(instants) // _PART + 1, 1 << 16)
    some = np.sort(instants[:: max(1, len(instants) // (64 * n_parts))])
    edges = np.unique(some[len(some) // n_parts :: max(1, len(some) // n_parts)])
    # Sorted by radix, as its numbers are small.
    parts = np.searchsorted(edges, instants, side="right").astype(np.min_scalar_type(len(edges)))
    order = np.argsort(parts, kind="stable")
    ends = np.cumsum(np.bincount(parts, minlength=len(edges) + 1))
    return [part for part in np.split(order, ends[:-1]) if len(part)]


def _within(values: FloatArray, instants: IntArray, how: str) -> FloatArray:
    """:func:`across_symbols` of at least one value."""
    order = np.lexsort((values, instants)) if how == "rank" else np.argsort(instants, kind="stable")
    groups = _edges(instants[order])
    sizes = np.diff(groups, append=len(values))
    found = np.empty(len(values))
    if how == "demean":
        means = np.add.reduceat(values[order], groups) / sizes
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


def _edges(*keys: npt.NDArray[np.generic]) -> IntArray:
    """Where stretches of equal keys begin."""
    changed = np.ones(len(keys[0]), bool)
    changed[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(changed)
