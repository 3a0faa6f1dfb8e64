"""When a session closes: a time of the clock of a market, on every date."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from stager.bars.zones import Zone
from stager.errors import ConfigError

Int64 = npt.NDArray[np.int64]

_DAY = 86_400 * 10**9
_DAY_MINUTES = 24 * 60


class SessionClose(msgspec.Struct, frozen=True):
    """A time of the day in a zone, at which the bars of a session date become available.

    Attributes
    ----------
    text : str
        ``"16:00 America/New_York"``.
    """

    text: str

    @classmethod
    def parse(cls, text: str) -> SessionClose:
        """The close meant by ``text``: hours and minutes from 00:00 to 24:00, and a zone.

        Raises
        ------
        ConfigError
            If it has another form, or there is no such zone.
        """
        minute, zone = _parts(text)
        return cls(f"{minute // 60:02d}:{minute % 60:02d} {zone.name}")

    def of(self, dates: Int64) -> Int64:
        """Instants of the close.

        Parameters
        ----------
        dates : ndarray of int64, any shape
            Session dates as 00:00 UTC, nanoseconds since 1970.

        Returns
        -------
        ndarray of int64, same shape
            Nanoseconds since 1970 UTC. Of a time that the clock shows twice, the later one; of one that it skips, the
            instant at which as much time has passed since the jump as it was skipped by.
        """
        if not dates.size:
            return dates.copy()
        days = dates // _DAY
        first, last = int(days.min()), int(days.max())
        return self._table(first, last)[days - first]

    def dates(self, instants: Int64) -> Int64:
        """The first session date whose close is at each instant or later; shapes and units as in :meth:`of`."""
        if not instants.size:
            return instants.copy()
        # A close is less than two days away from 00:00 UTC of its date.
        first, last = int(instants.min()) // _DAY - 2, int(instants.max()) // _DAY + 2
        found: Int64 = (np.searchsorted(self._table(first, last), instants) + first) * _DAY
        return found

    def _table(self, first: int, last: int) -> Int64:
        """Closes of the days from the first to the last, counted since 1970."""
        year, end = _year_of(first), _year_of(last) + 1
        closes = np.concatenate([_closes(self.text, each) for each in range(year, end)])
        skipped = first - _first_day(year)
        return closes[skipped : skipped + last - first + 1]


def _year_of(day: int) -> int:
    return int(np.datetime64(day, "D").astype("datetime64[Y]").astype(int)) + 1970


def _first_day(year: int) -> int:
    return int(np.datetime64(f"{year:04d}-01-01", "D").astype(int))


# A table of a year takes 3 KB; nanoseconds hold 585 years.
@lru_cache(maxsize=1024)
def _closes(text: str, year: int) -> Int64:
    minute, zone = _parts(text)
    days = range(_first_day(year), _first_day(year + 1))
    closes = np.array([max(zone.instant(day, minute, fold) for fold in (0, 1)) for day in days], np.int64)
    closes.setflags(write=False)
    return closes


def _parts(text: str) -> tuple[int, Zone]:
    match = re.fullmatch(r"\s*(\d{1,2}):(\d\d)\s+(\S+)\s*", text)
    if match is None or (minute := int(match[1]) * 60 + int(match[2])) > _DAY_MINUTES or int(match[2]) > 59:
        raise ConfigError(
            f"session_close is {text!r}; write a time of the day and a zone, such as '16:00 America/New_York'"
        )
    return minute, Zone.parse(match[3])
