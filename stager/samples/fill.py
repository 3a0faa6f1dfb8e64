"""Missing bars filled in causally: what is added after a bar depends on that bar and on the clock alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack
from stager.packs.manifest import Role
from stager.samples.runs import session_positions
from stager.samples.sessions import Sessions

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Rows and how many bars after each -> times.
Stamps: TypeAlias = Callable[[IntArray, IntArray], IntArray]

FILLED = "is_filled"


@dataclass(frozen=True)
class Filling:
    """Rows of a pack with filled bars between them.

    Attributes
    ----------
    source : (n,) int64
        The row of the pack that each row is, or was filled after.
    times : (n,) int64
    filled : (n,) bool
    counts : (n_symbols,) int64
        Rows of each symbol.
    """

    source: IntArray
    times: IntArray
    filled: npt.NDArray[np.bool_]
    counts: IntArray

    def column(self, values: FloatArray, close: FloatArray, name: str, role: Role, keep: Sequence[str]) -> FloatArray:
        """A column of the pack with its filled values: prices are the last close, volume 0, others kept or NaN."""
        out = values[self.source]
        if role == "price":
            out[self.filled] = close[self.source[self.filled]]
        elif role == "volume":
            out[self.filled] = 0.0
        elif name not in keep:
            out[self.filled] = np.nan
        return out


def fill_bars(pack: Pack, cap: int, sessions: Sessions | None) -> Filling:
    """Fill the first `cap` missing bars after every bar, whatever follows, up to the last instant of the pack.

    Parameters
    ----------
    pack : Pack
    cap : int
    sessions : Sessions, optional
        Bars are filled only inside the session of the bar before.
    """
    n_fill, stamps = _sessions_missing(pack, cap) if pack.interval.is_session else _bars_missing(pack, cap, sessions)
    repeats = n_fill + 1
    source = np.repeat(np.arange(pack.n_rows), repeats)
    firsts = np.cumsum(repeats) - repeats
    offset = np.arange(len(source)) - firsts[source]
    times = pack.times[source]
    filled = offset > 0
    times[filled] = stamps(source[filled], offset[filled])
    return Filling(source, times, filled, np.add.reduceat(repeats, pack.first_rows))


def _bars_missing(pack: Pack, cap: int, sessions: Sessions | None) -> tuple[IntArray, Stamps]:
    """How many bars are filled after each, and the stamps of such bars."""
    times, step = pack.times, pack.interval.nanoseconds
    last = int(times[pack.first_rows + pack.counts - 1].max())
    following = np.append(times[1:], 0)
    # After a symbol's last bar the clock goes on; the last instant of all symbols may itself be filled.
    following[pack.first_rows + pack.counts - 1] = last + step
    room = (following - times) // step - 1
    if sessions is not None:
        room = np.minimum(room, (sessions.closes_of(times) - 1 - times) // step)
    return np.clip(room, 0, cap), lambda rows, offset: times[rows] + offset * step


def _sessions_missing(pack: Pack, cap: int) -> tuple[IntArray, Stamps]:
    """The same for daily and longer bars, by the calendar of sessions in which any symbol has a bar."""
    position = session_positions(pack)
    n_sessions = int(position.max()) + 1
    stamp = np.full(n_sessions, np.iinfo(np.int64).max)
    np.minimum.at(stamp, position, pack.times)
    following = np.append(position[1:], 0)
    following[pack.first_rows + pack.counts - 1] = n_sessions
    return np.clip(following - position - 1, 0, cap), lambda rows, offset: stamp[position[rows] + offset]
