"""Trading sessions: which session a bar belongs to, from hours in a zone or from an exchange's calendar."""

from __future__ import annotations

import datetime as dt
import importlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.zones import Zone
from stager.errors import SampleError

IntArray = npt.NDArray[np.int64]

_HOURS = re.compile(r"(\d\d:\d\d-\d\d:\d\d(?:,\d\d:\d\d-\d\d:\d\d)*)\s+(\S+)")
_DAY_MINUTES = 24 * 60
_EPOCH = dt.date(1970, 1, 1)
_DAY = 86_400 * 10**9


@dataclass(frozen=True)
class Sessions:
    """Half-open stretches of time in which a market is open.

    Attributes
    ----------
    opens, closes : (n,) int64
        Ascending, without overlap, nanoseconds UTC.
    numbers : (n,) int64
        The session of each stretch; stretches around a break have the same.
    close_inclusive : bool
        Whether a bar that opens exactly at a close, as closing auctions are stamped, still belongs to it.
    """

    opens: IntArray
    closes: IntArray
    numbers: IntArray
    close_inclusive: bool = False

    def of(self, times: IntArray) -> IntArray:
        """The session in which each bar opens, int64, shape of `times`; -1 outside of all."""
        if not len(self.opens):
            return np.full(times.shape, -1)
        place = np.searchsorted(self.opens, times, side="right") - 1
        closes = self.closes[place]
        inside = (place >= 0) & ((times <= closes) if self.close_inclusive else (times < closes))
        return np.where(inside, self.numbers[place], -1)

    def closes_of(self, times: IntArray) -> IntArray:
        """The close of the stretch in which each bar opens, int64, shape of `times`; the bar's own open outside."""
        closes = times.copy()
        inside = np.flatnonzero(self.of(times) >= 0)
        closes[inside] = self.closes[np.searchsorted(self.opens, times[inside], side="right") - 1]
        return closes


@dataclass(frozen=True)
class Hours:
    """Hours of a day in a zone: minutes after midnight, of which ends may lie on the next day."""

    parts: tuple[tuple[int, int], ...]
    zone: Zone

    @classmethod
    def parse(cls, text: str) -> Hours | None:
        """The hours meant by ``"09:30-16:00 America/New_York"``; None if it has another form.

        An end that is not after its start lies on the next day; parts around a break are separated by commas.

        Raises
        ------
        SampleError
            If a time does not exist, or the parts overlap.
        ConfigError
            If there is no such zone.
        """
        match = _HOURS.fullmatch(text.strip())
        if match is None:
            return None
        parts = []
        for part in match[1].split(","):
            first, last = (_minutes(clock, text) for clock in part.split("-"))
            parts.append((first, last if last > first else last + _DAY_MINUTES))
        ends = [*(start for start, _ in parts[1:]), parts[0][0] + _DAY_MINUTES]
        if any(part[0] >= _DAY_MINUTES or part[1] > end for part, end in zip(parts, ends, strict=True)):
            raise SampleError(f"session is {text!r}; its parts must follow each other within 24 hours")
        return cls(tuple(parts), Zone.parse(match[2]))

    def sessions(self, first: int, last: int, close_inclusive: bool) -> Sessions:
        """The sessions of all days around two instants; the clock's jumps are taken from the zone."""
        days = range(first // _DAY - 2, last // _DAY + 3)
        edges = np.array(
            [[self.zone.instant(day, minute) for minute in part] for day in days for part in self.parts], np.int64
        ).reshape(-1, 2)
        numbers = np.repeat(np.array(days, np.int64), len(self.parts))
        # Where the clock jumps over a whole part, there is none.
        real = edges[:, 1] > edges[:, 0]
        return Sessions(edges[real, 0].copy(), edges[real, 1].copy(), numbers[real], close_inclusive)


def _minutes(clock: str, text: str) -> int:
    hours, minutes = map(int, clock.split(":"))
    if minutes > 59 or hours * 60 + minutes > _DAY_MINUTES:
        raise SampleError(f"session is {text!r}; {clock} is no time of a day")
    return hours * 60 + minutes


def check_session(session: Any) -> None:
    """Refuse what can't be a session, without looking for calendars.

    Raises
    ------
    SampleError, ConfigError
    """
    if not isinstance(session, str) or (Hours.parse(session) is None and not re.fullmatch(r"[\w/.]+", session.strip())):
        raise SampleError(
            f"session is {session!r}; write hours such as '09:30-16:00 America/New_York', or the name of a calendar of "
            f"exchange_calendars such as 'XNYS'"
        )


def make_sessions(session: str, first: int, last: int, close_inclusive: bool = False) -> Sessions:
    """The sessions around two instants.

    Parameters
    ----------
    session : str
        ``"09:30-16:00 America/New_York"``, or the name of a calendar.
    first, last : int
        Nanoseconds UTC.
    close_inclusive : bool

    Raises
    ------
    SampleError
        If there is no such calendar, or it does not reach so far.
    """
    hours = Hours.parse(session)
    return (
        _calendar(session.strip(), first, last, close_inclusive)
        if hours is None
        else hours.sessions(first, last, close_inclusive)
    )


def _calendar(name: str, first: int, last: int, close_inclusive: bool) -> Sessions:
    try:
        calendars: Any = importlib.import_module("exchange_calendars")
    except ImportError:
        raise SampleError(
            f"session is {name!r}, a calendar of the package exchange_calendars, which is not installed: "
            f"pip install 'stager[calendars]'; or write hours such as '09:30-16:00 America/New_York'"
        ) from None
    start, end = (_EPOCH + dt.timedelta(days=instant // _DAY + shift) for instant, shift in ((first, -7), (last, 8)))
    try:
        schedule = calendars.get_calendar(name, start=start.isoformat(), end=end.isoformat()).schedule
    except (calendars.errors.CalendarError, ValueError) as error:
        raise SampleError(f"session is {name!r}: exchange_calendars has no such sessions: {error}") from error
    edges = {column: schedule[column].to_numpy("datetime64[ns]") for column in schedule.columns}
    numbers = np.arange(len(schedule))
    # A break, where there is one, makes two stretches of a session.
    breaks = ~np.isnat(edges["break_start"])
    opens = np.concatenate([edges["open"], edges["break_end"][breaks]]).astype(np.int64)
    closes = np.concatenate([np.where(breaks, edges["break_start"], edges["close"]), edges["close"][breaks]]).astype(
        np.int64
    )
    order = np.argsort(opens)
    return Sessions(opens[order], closes[order], np.concatenate([numbers, numbers[breaks]])[order], close_inclusive)
