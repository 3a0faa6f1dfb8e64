"""What a target is set in relation to: its own trailing volatility, or the other symbols of its instant."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.packs.layout import Pack
from stager.samples.instants import distinct
from stager.samples.runs import rows_of

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Values that are compared at once; their sort stays in the cache.
_PART = 1 << 17
# Values of an instant that are worth a sort of their own.
_LARGE = 256
# Symbols that a thread looks at in one go.
_SYMBOLS = 256


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


def across_symbols(
    pack: Pack,
    values: FloatArray,
    chosen: npt.NDArray[np.bool_],
    how: str,
    ends: Callable[[IntArray], IntArray],
    out: npt.NDArray[np.float32],
) -> tuple[IntArray, IntArray]:
    """Values in relation to the others of the same decision instant, and when all of an instant are known.

    Parameters
    ----------
    pack : Pack
    values : (n_rows,) float64
        Finite where chosen.
    chosen : (n_rows,) bool
        The rows that are compared.
    how : {"rank", "demean"}
        ``(rank - (m + 1) / 2) / m`` among the m values of the instant, with the mean rank for equal values; or the
        value less their mean.
    ends : callable
        Chosen rows -> when each of their values is known.
    out : (n_rows,) float32
        Written where chosen.

    Returns
    -------
    instants, known : (n_instants,) int64
        Decision instants, ascending, and the last of the ends of each.
    """

    def relate(bounds: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
        firsts, stops = bounds
        rows = rows_of(firsts, stops - firsts)
        rows = rows[chosen[rows]]
        instants = pack.available_at(rows)
        if not len(rows):
            return rows, rows
        moments = distinct(instants, pack.interval)
        codes = np.searchsorted(moments, instants)
        out[rows] = (_ranks if how == "rank" else _less_mean)(values[rows], codes, len(moments))
        known = np.full(len(moments), np.iinfo(np.int64).min)
        np.maximum.at(known, codes, ends(rows))
        return moments, known

    parts = parallel(relate, _parts(pack))
    moments, known = (np.concatenate(part) for part in zip(*parts, strict=True))
    return moments, known


def _parts(pack: Pack) -> list[tuple[IntArray, IntArray]]:
    """All rows in parts that fit the cache, by time: of each part the first row of each symbol, and the row after the
    last. Rows of one decision are in one part."""
    # Bounds take no more memory than a number a row, however many symbols there are.
    n_parts = max(1, min(pack.n_rows // _PART, pack.n_rows // len(pack.symbols)))
    some = np.sort(pack.times[:: pack.n_rows // (64 * n_parts) | 1])
    decisions = np.unique(pack.interval.available(some[len(some) // n_parts :: max(1, len(some) // n_parts)]))
    # Times that differ may lie in one month, so they are cut where a decision begins.
    edges = pack.interval.opened(decisions)
    bounds = np.empty((len(edges) + 2, len(pack.symbols)), np.int64)
    bounds[0], bounds[-1] = pack.first_rows, pack.first_rows + pack.counts

    def look(first: int) -> None:
        for symbol in range(first, min(first + _SYMBOLS, len(pack.symbols))):
            start, stop = int(bounds[0, symbol]), int(bounds[-1, symbol])
            bounds[1:-1, symbol] = np.searchsorted(pack.times[start:stop], edges)
            bounds[1:-1, symbol] += start

    parallel(look, range(0, len(pack.symbols), _SYMBOLS))
    return list(itertools.pairwise(bounds))


def _less_mean(values: FloatArray, codes: IntArray, n: int) -> FloatArray:
    # Summed in the order of rows, however the rows are cut into parts.
    means = np.bincount(codes, weights=values, minlength=n) / np.bincount(codes, minlength=n)
    return values - means[codes]


def _ranks(values: FloatArray, codes: IntArray, n: int) -> FloatArray:
    sizes = np.bincount(codes, minlength=n)
    order = _by_instant_and_value(values, codes, sizes)
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Twice the mean rank of a stretch of equal values: its first and its last rank, counted from 1, added up.
    twice = 2 * (np.arange(len(values)) - firsts) + 2
    ordered = values[order]
    ties = (ordered[1:] == ordered[:-1]) & (firsts[1:] == firsts[:-1])
    if ties.any():
        stretches = np.append(0, np.flatnonzero(~ties) + 1)
        lengths = np.diff(stretches, append=len(values))
        twice = np.repeat(twice[stretches] + lengths - 1, lengths)
    found = np.empty(len(values))
    sizes_of = np.repeat(sizes, sizes)
    found[order] = (twice - (sizes_of + 1)) / (2 * sizes_of)
    return found


def _by_instant_and_value(values: FloatArray, codes: IntArray, sizes: IntArray) -> IntArray:
    # NumPy sorts numbers of 16 bits by counting.
    short = codes.astype(np.min_scalar_type(len(sizes)))
    if len(values) < _LARGE * len(sizes):
        order = np.argsort(values)
        return order[np.argsort(short[order], kind="stable")]
    # Many values of one instant are sorted in half the time that they take among others.
    order = np.argsort(short, kind="stable")
    ordered = values[order]
    for first, stop in itertools.pairwise([0, *np.cumsum(sizes).tolist()]):
        order[first:stop] = order[first:stop][np.argsort(ordered[first:stop])]
    return order
