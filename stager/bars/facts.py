"""What sorted bars show, symbol by symbol; of parts of the bars, joined to what all of them show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stager.bars.cuts import Whole
from stager.bars.gaps import session_numbers
from stager.bars.interval import DAY, Interval
from stager.bars.jumps import LEVEL_BARS, Jumps, find_jumps, usual_move
from stager.bars.series import STRETCH_BARS, Counted, Stretches, count, not_positive, off_grid, zero_volume

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Weekends with holidays between two sessions are shorter.
BREAK = 5 * DAY


@dataclass(frozen=True)
class Breaks:
    """Long times between two sessions of a symbol.

    Attributes
    ----------
    rows, times, lengths : ndarray of int64, shape (n,)
        The bar before, its time, and nanoseconds to the next.
    """

    rows: Int64
    times: Int64
    lengths: Int64


@dataclass(frozen=True)
class Edge:
    """The first or last bars of a part, at most twice as many as tell the level of a price, and the usual move of their
    symbol in the part."""

    open: Float64
    close: Float64
    times: Int64
    usual: float


@dataclass(frozen=True)
class Facts:
    """What was found in sorted bars.

    Attributes
    ----------
    interval : Interval
    symbols : tuple of str
    counts : ndarray of int64, shape (n_symbols,)
        Bars of each, at least one.
    off_grid, not_positive, negative_volume : Counted
    last_times : ndarray of int64, shape (n_symbols,)
    last_is_off : ndarray of bool, shape (n_symbols,)
        Whether the symbol's last bar is off the grid.
    lowest : float
        The lowest price.
    volume : Stretches or None
        None without a column for volume.
    jumps : Jumps
    breaks : Breaks
        Of daily and longer bars.
    sessions : ndarray of int64
        Numbers of the sessions in which any symbol has a bar, ascending; none of shorter bars.
    edges : tuple of Edge
        Beginning and end.
    """

    interval: Interval
    symbols: tuple[str, ...]
    counts: Int64
    off_grid: Counted
    not_positive: Counted
    negative_volume: Counted
    last_times: Int64
    last_is_off: Mask
    lowest: float
    volume: Stretches | None
    jumps: Jumps
    breaks: Breaks
    sessions: Int64
    edges: tuple[Edge, Edge]

    @property
    def n_bars(self) -> int:
        return int(self.counts.sum())

    @property
    def first_rows(self) -> Int64:
        """Each symbol's first row, ndarray of int64, shape (n_symbols,)."""
        return np.cumsum(self.counts) - self.counts

    def symbols_of(self, rows: Int64) -> Int64:
        """The numbers of the symbols that own some rows."""
        return np.searchsorted(self.first_rows, rows, "right").astype(np.int64) - 1

    def long_breaks(self) -> tuple[Int64, Int64, Int64]:
        """Row, time and length of breaks in which no symbol has a session, longer than two intervals."""
        rows, times, lengths = _arrays(self.breaks)
        length = self.interval.nanoseconds or 31 * DAY
        before = session_numbers(times, self.interval.text)
        after = session_numbers(times + lengths, self.interval.text)
        between = np.searchsorted(self.sessions, after) - np.searchsorted(self.sessions, before, "right")
        long = (lengths > 2 * length) & (between == 0)
        return rows[long], times[long], lengths[long]

    def without_short_stretches(self) -> Facts:
        """The same without stretches that nothing is said of, unless another part may go on with them."""
        if self.volume is None:
            return self
        rows, lengths = self.volume.rows, self.volume.lengths
        some = (lengths >= STRETCH_BARS) | (rows == 0) | (rows + lengths == self.n_bars)
        stretches = replace(self.volume, rows=rows[some], times=self.volume.times[some], lengths=lengths[some])
        return replace(self, volume=stretches)

    def per_symbol(self, rows: Int64) -> Int64:
        """How many of some rows each symbol owns, ndarray of int64, shape (n_symbols,)."""
        return np.bincount(self.symbols_of(rows), minlength=len(self.symbols)).astype(np.int64)


def facts_of(
    symbols: Sequence[str],
    times: Int64,
    prices: Sequence[Float64],
    volume: Float64 | None,
    first_rows: Int64,
    counts: Int64,
    interval: Interval,
    *,
    is_cut: bool = False,
    whole: Whole | None = None,
) -> Facts:
    """Look at sorted bars.

    Parameters
    ----------
    symbols : sequence of str
        In the order of the rows; each has one.
    times : ndarray of int64, shape (n_rows,)
        Opens, ascending inside each symbol.
    prices : sequence of ndarray of float64, each shape (n_rows,)
        open, high, low, close.
    volume : ndarray of float64, shape (n_rows,), or None
    first_rows, counts : ndarray of int64, shape (n_symbols,)
    interval : Interval
    is_cut : bool
        Whether its first or last symbol has bars in another part.
    whole : Whole, optional
        Of some bars of one symbol: what all of its bars tell. Without it, grid and usual move are judged by the part.
    """
    off = off_grid(times, first_rows, counts, interval, None if whole is None else whole.phase)
    usual = None if whole is None else whole.usual
    last = first_rows + counts - 1
    low = not_positive(prices)
    negative = None if volume is None else volume < 0
    return Facts(
        interval=interval,
        symbols=tuple(symbols),
        counts=counts,
        off_grid=count(off, first_rows, times),
        not_positive=count(low, first_rows, times),
        negative_volume=count(negative, first_rows, times),
        last_times=times[last],
        last_is_off=np.zeros(len(symbols), np.bool_) if off is None else off[last],
        lowest=1.0 if low is None else min(float(price.min()) for price in prices),
        volume=None if volume is None else zero_volume(volume, prices, first_rows, times),
        jumps=find_jumps(times, prices[0], prices[3], first_rows, counts, usual=usual),
        breaks=_breaks(times, first_rows, interval),
        sessions=np.unique(session_numbers(times, interval.text)) if interval.is_session else np.empty(0, np.int64),
        edges=(
            _edge(times, prices, 0, int(counts[0]), is_cut, usual, at_end=False),
            _edge(times, prices, int(first_rows[-1]), int(counts[-1]), is_cut, usual, at_end=True),
        ),
    )


def join(parts: Sequence[Facts]) -> Facts:
    """The facts of all parts, which follow each other in the order (symbol, time).

    A symbol may go on in the next part; then what lies around the cut is looked at anew.
    """
    whole = parts[0]
    for part in parts[1:]:
        whole = _joined(whole, part)
    return whole


def _joined(one: Facts, other: Facts) -> Facts:
    shift, cut = one.n_bars, one.symbols[-1] == other.symbols[0]

    def together(mine: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of bars, symbol by symbol."""
        if not cut:
            return np.concatenate([mine, others])
        return np.concatenate([mine[:-1], [mine[-1] + others[0]], others[1:]])

    def counted(mine: Counted, others: Counted) -> Counted:
        first = mine.first
        if first is None and others.first is not None:
            first = others.first[0] + shift, others.first[1]
        return Counted(together(mine.of_symbols, others.of_symbols), first)

    volume = None
    if one.volume is not None and other.volume is not None:
        stretches = _stretches(one.volume, other.volume, shift, cut)
        volume = replace(stretches, zero=counted(one.volume.zero, other.volume.zero))
    jumps, breaks = other.jumps.shifted(shift), replace(other.breaks, rows=other.breaks.rows + shift)
    mine = one.jumps
    if cut:
        mine, jumps = _around(one, other, shift, mine, jumps)
        step = int(other.edges[0].times[0] - one.edges[1].times[-1])
        if one.interval.is_session and step > BREAK:
            at = np.array([shift - 1]), one.edges[1].times[-1:], np.array([step])
            breaks = Breaks(*(np.concatenate(pair) for pair in zip(at, _arrays(breaks), strict=True)))
    all_breaks = Breaks(*(np.concatenate(pair) for pair in zip(_arrays(one.breaks), _arrays(breaks), strict=True)))
    begin, end = one.edges[0], other.edges[1]
    if cut and len(one.symbols) == 1 and len(begin.times) < 2 * LEVEL_BARS:
        begin = _longer(begin, other.edges[0], at_end=False)
    if cut and len(other.symbols) == 1 and len(end.times) < 2 * LEVEL_BARS:
        end = _longer(one.edges[1], end, at_end=True)
    return Facts(
        interval=one.interval,
        symbols=(*one.symbols, *other.symbols[cut:]),
        counts=together(one.counts, other.counts),
        off_grid=counted(one.off_grid, other.off_grid),
        not_positive=counted(one.not_positive, other.not_positive),
        negative_volume=counted(one.negative_volume, other.negative_volume),
        last_times=np.concatenate([one.last_times[: len(one.symbols) - cut], other.last_times]),
        last_is_off=np.concatenate([one.last_is_off[: len(one.symbols) - cut], other.last_is_off]),
        lowest=min(one.lowest, other.lowest),
        volume=volume,
        jumps=mine.followed_by(jumps),
        breaks=all_breaks,
        sessions=np.union1d(one.sessions, other.sessions),
        edges=(begin, end),
    )


def _arrays(breaks: Breaks) -> tuple[Int64, Int64, Int64]:
    return breaks.rows, breaks.times, breaks.lengths


def _breaks(times: Int64, first_rows: Int64, interval: Interval) -> Breaks:
    if not interval.is_session:
        nothing = np.empty(0, np.int64)
        return Breaks(nothing, nothing, nothing)
    steps = np.diff(times)
    steps[first_rows[1:] - 1] = 0
    rows = np.flatnonzero(steps > BREAK).astype(np.int64)
    return Breaks(rows, times[rows], steps[rows])


def _edge(
    times: Int64, prices: Sequence[Float64], first: int, n: int, is_cut: bool, usual: float | None, *, at_end: bool
) -> Edge:
    """The ends of a symbol's bars, which another part may go on with."""
    if usual is None:
        usual = usual_move(prices[3][first : first + n]) if is_cut else 0.0
    few = min(n, 2 * LEVEL_BARS)
    rows = slice(first + n - few, first + n) if at_end else slice(first, first + few)
    return Edge(prices[0][rows].copy(), prices[3][rows].copy(), times[rows].copy(), usual)


def _longer(one: Edge, other: Edge, *, at_end: bool) -> Edge:
    """The end of two parts of a symbol, of which one is shorter than an edge."""
    rows = slice(-2 * LEVEL_BARS, None) if at_end else slice(0, 2 * LEVEL_BARS)
    return Edge(
        np.concatenate([one.open, other.open])[rows],
        np.concatenate([one.close, other.close])[rows],
        np.concatenate([one.times, other.times])[rows],
        max(one.usual, other.usual),
    )


def _around(one: Facts, other: Facts, shift: int, mine: Jumps, others: Jumps) -> tuple[Jumps, Jumps]:
    """The jumps of a symbol that is cut: those near the cut are looked for with the bars of both sides."""
    before, after = one.edges[1], other.edges[0]
    n_before = len(before.times)
    found = find_jumps(
        np.concatenate([before.times, after.times]),
        np.concatenate([before.open, after.open]),
        np.concatenate([before.close, after.close]),
        np.zeros(1, np.int64),
        np.array([n_before + len(after.times)]),
        usual=max(before.usual, after.usual),
    ).shifted(shift - n_before)
    # Only bars of that symbol whose level lies on both sides.
    first = shift - min(LEVEL_BARS - 1, int(one.counts[-1]))
    stop = shift + min(LEVEL_BARS, int(other.counts[0]))
    near = (found.rows >= first) & (found.rows < stop)
    return mine.where(mine.rows < first).followed_by(found.where(near)), others.where(others.rows >= stop)


def _stretches(one: Stretches, other: Stretches, shift: int, cut: bool) -> Stretches:
    """The stretches of two parts; one that is cut is one."""
    rows, times, lengths = other.rows + shift, other.times, other.lengths
    mine = one.lengths
    if cut and len(one.rows) and len(rows) and one.rows[-1] + one.lengths[-1] == rows[0] == shift:
        mine = np.append(mine[:-1], mine[-1] + lengths[0])
        rows, times, lengths = rows[1:], times[1:], lengths[1:]
    return Stretches(
        one.zero,
        one.flat + other.flat,
        np.concatenate([one.rows, rows]),
        np.concatenate([one.times, times]),
        np.concatenate([mine, lengths]),
    )
