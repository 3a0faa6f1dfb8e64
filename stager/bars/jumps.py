"""Changes of price from one bar to the next that look like a split, another price unit, or a wrong bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_SPAN_ROWS = 1 << 18
# Old prices over new ones of splits as they happen; powers of ten may be another unit as well.
_RATIOS = (1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 40, 50, 100, *(10.0**n for n in range(3, 10)))
_NAMES = ("3/2", "2", "5/2", *(f"{ratio:.0f}" for ratio in _RATIOS[3:]))
_LOGS = np.log(np.array(_RATIOS))
# What a market moves besides, from close to close or close to open.
_NEAR = np.log(1.06)
_NEAR_SMALL = np.log(1.03)
# A smaller change is none.
_LEAST = np.log(1.4)
# It is so many times the usual move of the symbol.
_UNUSUAL = 5.0
# The level before and after is the median of so many closes.
LEVEL_BARS = 5
# The largest moves of a symbol don't tell what is usual.
TRIMMED = 3

SPLIT, SCALE, SPIKE = 0, 1, 2


@dataclass(frozen=True)
class Jumps:
    """Places of unusual change.

    Attributes
    ----------
    rows, times : ndarray of int64, shape (n,)
        The first bar of the new price, ascending, and its time.
    ratios : ndarray of float64, shape (n,)
        New price over old.
    near : list of str
        The ratio it is close to; empty for a spike.
    kinds : ndarray of int64, shape (n,)
        SPLIT, SCALE (a power of ten) or SPIKE (the old price comes back within five bars).
    """

    rows: Int64
    times: Int64
    ratios: Float64
    near: list[str]
    kinds: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def shifted(self, n_rows: int) -> Jumps:
        """The same jumps so many rows further on."""
        return replace(self, rows=self.rows + n_rows)

    def where(self, mask: npt.NDArray[np.bool_]) -> Jumps:
        """Some of the jumps."""
        near = [name for name, wanted in zip(self.near, mask.tolist(), strict=True) if wanted]
        return Jumps(self.rows[mask], self.times[mask], self.ratios[mask], near, self.kinds[mask])

    def followed_by(self, later: Jumps) -> Jumps:
        """These jumps and later ones."""
        return Jumps(
            np.concatenate([self.rows, later.rows]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.ratios, later.ratios]),
            self.near + later.near,
            np.concatenate([self.kinds, later.kinds]),
        )


def find_jumps(
    times: Int64, open_: Float64, close: Float64, first_rows: Int64, counts: Int64, *, usual: float | None = None
) -> Jumps:
    """Look for jumps.

    A jump lies near one of some ratios, is at least five times the usual move of its symbol, and the median of five
    closes goes with it. Where one of them is not positive, ratios say nothing, and nothing is found.

    Parameters
    ----------
    times : ndarray of int64, shape (n_rows,)
    open_, close : ndarray of float64, shape (n_rows,)
    first_rows, counts : ndarray of int64, shape (n_symbols,)
        The rows of each symbol; each has one.
    usual : float, optional
        The usual move, as :func:`usual_move` gives it, where the rows are too few to tell.
    """
    rows = _candidates(close, first_rows)
    symbols = np.searchsorted(first_rows, rows, "right") - 1
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # Differences of logarithms, since ratios of the largest and smallest numbers overflow.
        before = np.log(close[rows - 1])
        by_close, by_open = np.log(close[rows]) - before, np.log(open_[rows]) - before
    by_open = np.where(np.isfinite(by_open), by_open, by_close)
    moves = _usual(close, first_rows, counts, symbols) if usual is None else np.full(len(rows), usual)
    strong = np.abs(by_close) > _UNUSUAL * moves
    rows, symbols, by_close, by_open = rows[strong], symbols[strong], by_close[strong], by_open[strong]
    level = _level(close, rows, symbols, first_rows, counts)

    of_close, of_open = _nearest(by_close), _nearest(by_open)
    off_close, off_open = _off(by_close, of_close), _off(by_open, of_open)
    use_open = off_open < off_close
    nearest, off = np.where(use_open, of_open, of_close), np.where(use_open, off_open, off_close)
    moved = np.where(use_open, by_open, by_close)
    near = _LOGS[nearest]
    stays = np.abs(level - np.sign(moved) * near) < np.minimum(np.log(1.25), near / 2)
    is_jump = (off <= np.where(near < np.log(2) - 1e-9, _NEAR_SMALL, _NEAR)) & stays
    is_spike = ~is_jump & (np.abs(by_close) > np.log(2) - _NEAR) & (np.abs(level) < np.abs(by_close) / 4)
    is_spike &= ~_returns(rows, symbols, by_close)
    chosen = np.flatnonzero(is_jump | is_spike)
    is_ten = np.isclose(np.log10(np.array(_RATIOS)) % 1, 0)
    kinds = np.where(is_spike, SPIKE, np.where(is_ten[nearest], SCALE, SPLIT))[chosen]
    moved = np.where(is_spike, by_close, moved)[chosen]
    names = [
        "" if kind == SPIKE else _NAMES[number] if move > 0 else _inverse(_NAMES[number])
        for kind, number, move in zip(kinds.tolist(), nearest[chosen].tolist(), moved.tolist(), strict=True)
    ]
    return Jumps(rows[chosen], times[rows[chosen]], np.exp(np.clip(moved, -700, 700)), names, kinds.astype(np.int64))


def _candidates(close: Float64, first_rows: Int64) -> Int64:
    """Rows whose close is far from that of the row before, both positive."""
    up, down = float(np.exp(_LEAST - _NEAR)), float(np.exp(_NEAR - _LEAST))

    def look(first: int) -> Int64:
        some = close[first : first + _SPAN_ROWS + 1]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = some[1:] / some[:-1]
        found = np.flatnonzero((ratios > up) | (ratios < down))
        return found[(some[found] > 0) & (some[found + 1] > 0)].astype(np.int64) + first + 1

    found = parallel(look, range(0, max(0, len(close) - 1), _SPAN_ROWS))
    return np.setdiff1d(np.concatenate([np.empty(0, np.int64), *found]), first_rows, assume_unique=True)


def usual_move(close: Float64) -> float:
    """How far a symbol's price usually moves from bar to bar: the root of the mean square of logarithms, without the
    three largest."""
    moves = moves_of(close)
    if len(moves) <= TRIMMED:
        return 0.0
    return float(np.sqrt(np.mean(np.square(np.partition(moves, len(moves) - TRIMMED)[:-TRIMMED]))))


def moves_of(close: Float64) -> Float64:
    """Absolute differences of the logarithms of consecutive closes, where both are above zero."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moves: Float64 = np.abs(np.diff(np.log(close)))
    return moves[np.isfinite(moves)]


def _usual(close: Float64, first_rows: Int64, counts: Int64, symbols: Int64) -> Float64:
    """The usual move of the symbol of each candidate."""
    wanted, place = np.unique(symbols, return_inverse=True)
    moves = parallel(lambda one: usual_move(close[first_rows[one] : first_rows[one] + counts[one]]), list(wanted))
    return np.array(moves, np.float64)[place] if len(wanted) else np.empty(0)


def _level(close: Float64, rows: Int64, symbols: Int64, first_rows: Int64, counts: Int64) -> Float64:
    """Logarithm of the median close from the row on over the median close before it; NaN where one is not positive."""
    steps = np.arange(LEVEL_BARS)

    def median(at: Int64, first: Int64, stop: Int64) -> Float64:
        values = close[np.clip(at, 0, len(close) - 1)]
        inside = (at >= first[:, None]) & (at < stop[:, None])
        # Sorted with what lies outside at the end, the middle of the rest is found by its number.
        values = np.sort(np.where(inside, values, np.inf), axis=1)
        n, each = np.maximum(inside.sum(axis=1), 1), np.arange(len(values))
        middle = values[each, (n - 1) // 2] / 2 + values[each, n // 2] / 2
        # Ratios around zero say nothing.
        return np.where(values[:, 0] > 0, middle, np.nan)

    def look(begin: int) -> Float64:
        some = slice(begin, begin + _SPAN_ROWS)
        at, first = rows[some][:, None], first_rows[symbols[some]]
        stop = first + counts[symbols[some]]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            after, before = median(at + steps, first, stop), median(at - 1 - steps, first, stop)
            level: Float64 = np.log(after) - np.log(before)
        return level

    return np.concatenate([np.empty(0), *parallel(look, range(0, len(rows), _SPAN_ROWS))])


def _nearest(moves: Float64) -> Int64:
    """The number of the ratio that is nearest to each move."""
    middles = (_LOGS[1:] + _LOGS[:-1]) / 2
    return np.searchsorted(middles, np.abs(moves)).astype(np.int64)


def _off(moves: Float64, nearest: Int64) -> Float64:
    off: Float64 = np.abs(np.abs(moves) - _LOGS[nearest])
    return off


def _returns(rows: Int64, symbols: Int64, moves: Float64) -> npt.NDArray[np.bool_]:
    """Whether a move takes back the one before it, of the same symbol and a few bars ago."""
    back = np.zeros(len(rows), np.bool_)
    close_by = (rows[1:] - rows[:-1] < LEVEL_BARS) & (symbols[1:] == symbols[:-1])
    back[1:] = close_by & (np.abs(moves[1:] + moves[:-1]) < np.abs(moves[1:]) / 4)
    return back


def _inverse(name: str) -> str:
    over, _, under = name.partition("/")
    return f"{under or 1}/{over}"


def describe(kinds: Sequence[int]) -> str:
    """How many there are of each kind."""
    words = {
        SPLIT: ("that looks like a split", "that look like splits"),
        SCALE: ("by a power of ten", "by powers of ten"),
        SPIKE: ("that is taken back within five bars", "that are taken back within five bars"),
    }
    return ", ".join(f"{n:,} {words[kind][n > 1]}" for kind in words if (n := kinds.count(kind)))
