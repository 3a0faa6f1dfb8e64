"""Bars of a longer interval as columns: at each decision the values of the last one that has closed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.interval import Interval
from stager.errors import SampleError
from stager.packs.manifest import Role
from stager.samples.features import FloatArray, IntArray, Stretches
from stager.samples.sessions import Sessions


@dataclass(frozen=True)
class TimeFrame:
    """Columns of a longer interval, such as ``close_1h`` on bars of 5 minutes.

    A bar of the longer interval is visible from the decision on that is not before its close: on bars of 5 minutes,
    that of 11:00 to 12:00 at the bar stamped 11:55, which closes at 12:00. Bars begin with the session, if there is
    one, and end with it at the latest; else they begin at multiples of the interval since 1970 UTC. Where a symbol has
    no bar in a stretch, the one before stays visible.

    Parameters
    ----------
    interval : str
        ``"15min"``, ``"1h"``, ``"1d"``: a multiple of the pack's interval. With a session, ``"1d"`` is all of it.
    columns : sequence of str
        Columns of the pack. The first open, highest high, lowest low and the sum of volumes are taken, of every other
        column the last value.

    Raises
    ------
    SampleError, ConfigError
        If a value is not allowed.
    """

    interval: str
    columns: Sequence[str] = ("open", "high", "low", "close", "volume")

    def __post_init__(self) -> None:
        if isinstance(self.columns, str) or not isinstance(self.columns, Iterable):
            raise SampleError(f"columns of a time frame are {self.columns!r}; give a sequence such as ('close',)")
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise SampleError(f"columns of a time frame are {self.columns!r}; name at least one, and each once")
        if not isinstance(self.interval, str) or (self.length.months or self.length.text.endswith("w")):
            raise SampleError(f"a time frame is of {self.interval!r}; write days or less, such as '1h'")

    @property
    def length(self) -> Interval:
        return Interval.parse(self.interval)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are added."""
        return tuple(f"{column}_{self.length.text}" for column in self.columns)


def aggregate(
    frame: TimeFrame,
    interval: Interval,
    times: IntArray,
    columns: dict[str, FloatArray],
    roles: dict[str, Role],
    stretches: Stretches,
    sessions: Sessions | None,
) -> dict[str, FloatArray]:
    """The columns of a time frame, each (n_rows,) float64; NaN before the first bar of it has closed.

    Raises
    ------
    SampleError
        If the interval is no multiple of the bars', or a column is missing.
    """
    step = frame.length.nanoseconds
    if interval.is_session or step % interval.nanoseconds or step == interval.nanoseconds:
        raise SampleError(
            f"a time frame of {frame.interval} on bars of {interval.text}; it must be a multiple, of bars below a day"
        )
    if unknown := [name for name in frame.columns if name not in columns]:
        raise SampleError(f"a time frame needs column {unknown[0]!r}; there are: {', '.join(columns)}")
    decisions = interval.available(times)
    inside, begins, ends = _frames(times, decisions, step, interval.nanoseconds, sessions)
    stretch = np.zeros(len(times), np.int64)
    stretch[stretches.first_rows] = 1
    stretch = np.cumsum(stretch)
    rows = np.flatnonzero(inside)
    if not len(rows):
        return {name: np.full(len(times), np.nan) for name in frame.names}
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (np.diff(begins[rows]) != 0) | (np.diff(stretch[rows]) != 0)
    firsts = np.flatnonzero(is_new)
    lasts = np.append(firsts[1:], len(rows)) - 1
    known = ends[rows[firsts]]
    # Of each row the newest frame that has begun, or the one before it.
    visible = np.full(len(times), 0)
    visible[rows[firsts]] = 1
    visible = np.cumsum(visible) - 1
    visible -= (visible >= 0) & (known[visible] > decisions)
    there = visible >= 0
    there &= stretch[rows[firsts]][visible] == stretch
    found: dict[str, FloatArray] = {}
    for column, name in zip(frame.columns, frame.names, strict=True):
        values = _combine(column, roles[column], columns[column][rows], firsts, lasts)
        found[name] = np.where(there, values[visible], np.nan)
    return found


def _combine(column: str, role: Role, values: FloatArray, firsts: IntArray, lasts: IntArray) -> FloatArray:
    if column == "open":
        return values[firsts]
    if column in ("high", "low"):
        extreme: FloatArray = (np.maximum if column == "high" else np.minimum).reduceat(values, firsts)
        return extreme
    return np.add.reduceat(values, firsts) if role == "volume" else values[lasts]


def _frames(
    times: IntArray, decisions: IntArray, step: int, bar: int, sessions: Sessions | None
) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray]:
    """Of each row whether it belongs to a frame, and where that begins and ends.

    A bar belongs to the frame in which it closes, so that a frame is complete at its end, whatever comes later.
    """
    if sessions is None:
        begins = (decisions - 1) // step * step
        return np.ones(len(times), bool), begins, begins + step
    number = sessions.of(times)
    inside = number >= 0
    known, first = np.unique(sessions.numbers, return_index=True)
    place = np.searchsorted(known, number[inside])
    opens = sessions.opens[first][place]
    closes = sessions.closes[np.append(first[1:], len(sessions.numbers)) - 1][place]
    # The close of the last bar that opens in the session, be it there or not.
    last = opens + (-(-(closes - opens) // bar) + int(sessions.close_inclusive)) * bar
    begins, ends = np.zeros(len(times), np.int64), np.zeros(len(times), np.int64)
    begins[inside] = opens + (np.minimum(decisions[inside], closes) - 1 - opens) // step * step
    ends[inside] = np.where(begins[inside] + step < closes, begins[inside] + step, last)
    # A bar off the grid that closes later still is of no frame.
    inside[inside] = decisions[inside] <= last
    return inside, begins, ends
