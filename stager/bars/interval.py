"""The bar interval: its text form, how it is inferred, and when a bar becomes available."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from stager.bars.session_close import SessionClose
from stager.bars.threads import parallel
from stager.errors import BarsError, ConfigError

Int64 = npt.NDArray[np.int64]

DAY = 86_400 * 10**9
_UNITS = {
    "w": 7 * DAY,
    "d": DAY,
    "h": 3600 * 10**9,
    "min": 60 * 10**9,
    "s": 10**9,
    "ms": 10**6,
    "us": 10**3,
    "ns": 1,
}
_SPAN_ROWS = 1 << 18
_REMEDY = "say the bar interval with --interval, for example --interval 1min"


class Interval(msgspec.Struct, frozen=True):
    """How far the bars of a symbol lie apart, and when they close.

    Attributes
    ----------
    text : str
        ``"1min"``, ``"30s"``, ``"1h"``, ``"1d"``, ``"1w"``, ``"1mo"``.
    nanoseconds : int
        Length of a fixed interval; 0 for calendar months.
    months : int
        Length in calendar months; 0 for a fixed interval.
    close : SessionClose or None
        Of bars whose times are session dates: the declared close of the sessions, if there is one.
    """

    text: str
    nanoseconds: int
    months: int = 0
    close: SessionClose | None = None

    @classmethod
    def parse(cls, text: str) -> Interval:
        """The interval meant by ``text``: a whole number and one of ns, us, ms, s, min, h, d, w, mo.

        Raises
        ------
        ConfigError
            If the text is no interval, or zero.
        """
        match = re.fullmatch(r"\s*(\d{1,18})\s*([a-z]+)\s*", text.lower())
        if match is not None and int(match[1]) > 0:
            number, unit = int(match[1]), match[2]
            if unit == "mo" and number <= 1200:
                return cls(text=f"{number}mo", nanoseconds=0, months=number)
            if unit in _UNITS and number * _UNITS[unit] < 2**62:
                return cls.fixed(number * _UNITS[unit])
        raise ConfigError(f"interval is {text!r}; write a number and one of {', '.join(_UNITS)}, mo, such as 1min")

    @classmethod
    def fixed(cls, nanoseconds: int) -> Interval:
        """The interval of so many nanoseconds, written with the largest unit that divides it."""
        unit = next(unit for unit, size in _UNITS.items() if nanoseconds % size == 0)
        return cls(text=f"{nanoseconds // _UNITS[unit]}{unit}", nanoseconds=nanoseconds)

    @property
    def is_session(self) -> bool:
        """Whether it is a day or longer: consecutive then means the next session of the observed calendar."""
        return self.months > 0 or self.nanoseconds >= DAY

    @property
    def close_text(self) -> str | None:
        """The declared close of the sessions; None if there is none."""
        return None if self.close is None else self.close.text

    def available(self, times: Int64) -> Int64:
        """Instants at which bars become available: their close.

        Parameters
        ----------
        times : ndarray of int64, any shape
            Opens, nanoseconds since 1970 UTC.

        Returns
        -------
        ndarray of int64, same shape
            The declared close on the last date of the bar; without one, :meth:`ends`.
        """
        ends = self.ends(times)
        return ends if self.close is None else self.close.of(ends - DAY)

    def opened(self, available: Int64) -> Int64:
        """Opens of the first bars that are available at these instants or later (int64, nanoseconds since 1970)."""
        return self.begins(available if self.close is None else self.close.dates(available) + DAY)

    def ends(self, times: Int64) -> Int64:
        """``times`` plus the interval; for months, 00:00 UTC of the first day after the bar's months."""
        if not self.months:
            return times + self.nanoseconds
        months = times.astype("datetime64[ns]").astype("datetime64[M]") + np.timedelta64(self.months, "M")
        return months.astype("datetime64[ns]").astype(np.int64)

    def begins(self, ends: Int64) -> Int64:
        """Opens of the bars that end there, as :meth:`ends` says it."""
        if not self.months:
            return ends - self.nanoseconds
        inside = (ends - 1).astype("datetime64[ns]").astype("datetime64[M]")
        return (inside - np.timedelta64(self.months - 1, "M")).astype("datetime64[ns]").astype(np.int64)

    def closing(self, close: str | None) -> Interval:
        """The same with a declared close of the sessions; raises as :meth:`SessionClose.parse`."""
        return self if close is None else msgspec.structs.replace(self, close=SessionClose.parse(close))

    @classmethod
    def infer(
        cls,
        times: Int64,
        first_rows: Int64,
        counts: Int64,
    ) -> tuple[Interval, list[tuple[int, int]]]:
        """The most frequent step inside the symbols, over all symbols.

        Parameters
        ----------
        times : ndarray of int64, shape (n_rows,)
            Nanoseconds since 1970, ascending inside each symbol.
        first_rows, counts : ndarray of int64, shape (n_symbols,)
            The rows of each symbol.

        Returns
        -------
        interval : Interval
        deviants : list of (int, int)
            Symbol number and its own most frequent step in nanoseconds, where that differs.

        Raises
        ------
        BarsError
            If no symbol has two bars, or if the steps have no common interval.
        """
        steps = Steps.of(times, first_rows, counts)
        interval = steps.interval()
        return interval, steps.deviants(interval, lambda step: Steps.of(times, first_rows, counts, step).own)


@dataclass(frozen=True)
class Steps:
    """How often which step stands between neighbouring bars of a symbol.

    Attributes
    ----------
    values, numbers : ndarray of int64
        Each step in nanoseconds, ascending, and how often it occurs.
    usual : int
        The step that the symbols' own steps were compared with.
    own : dict of int to int
        The most frequent step of symbols whose most frequent step is not the usual one, by the symbols' numbers.
    """

    values: Int64
    numbers: Int64
    usual: int
    own: dict[int, int]

    @classmethod
    def of(cls, times: Int64, first_rows: Int64, counts: Int64, usual: int | None = None) -> Steps:
        """The steps of rows as in :meth:`Interval.infer`; by default the usual step is that of the first rows."""
        if usual is None:
            few = _steps(times[: 1 << 16], first_rows)
            usual = _most_frequent(*np.unique(few, return_counts=True)) if len(few) else 0
        others = _other_steps(times, first_rows, usual)
        values, numbers = np.unique(times[others + 1] - times[others], return_counts=True)
        n_steps: int = len(times) - int(np.count_nonzero(counts))
        n_usual = n_steps - len(others)
        if n_usual:
            at = int(np.searchsorted(values, usual))
            values, numbers = np.insert(values, at, usual), np.insert(numbers, at, n_usual)
        own = dict(_deviants(times, first_rows, counts, usual, others))
        return cls(values.astype(np.int64), numbers.astype(np.int64), usual, own)

    @classmethod
    def together(cls, parts: Sequence[Steps]) -> Steps:
        """The steps of all parts; ``own`` is right where the usual step of all is that of each."""
        found: Int64 = np.concatenate([np.empty(0, np.int64), *(part.values for part in parts)])
        values, where = np.unique(found, return_inverse=True)
        numbers = np.zeros(len(values), np.int64)
        np.add.at(numbers, where, np.concatenate([np.empty(0, np.int64), *(part.numbers for part in parts)]))
        own = {symbol: step for part in parts for symbol, step in part.own.items()}
        return cls(values, numbers, parts[0].usual if parts else 0, own)

    def interval(self) -> Interval:
        """The interval that they show; raises as :meth:`Interval.infer`."""
        n_steps = int(self.numbers.sum())
        if n_steps <= 0:
            raise BarsError(f"no symbol has two bars, so nothing tells the bar interval; {_REMEDY}")
        step = _most_frequent(self.values, self.numbers)
        n_equal = int(self.numbers.max())

        def n_of(which: npt.NDArray[np.bool_]) -> int:
            return int(self.numbers[which].sum())

        if 28 * DAY <= step <= 31 * DAY:
            monthly = n_of((self.values >= 28 * DAY) & (self.values <= 31 * DAY))
            if monthly * 2 >= n_steps and not (step == 28 * DAY and n_equal * 10 >= monthly * 9):
                return Interval(text="1mo", nanoseconds=0, months=1)
        if n_equal * 2 < n_steps:
            n_multiples = n_of(self.values % step == 0)
            if n_multiples * 100 < n_steps * 99:
                raise BarsError(
                    f"the bars have no common interval: the most frequent step, {Interval.fixed(step).text}, is "
                    f"{n_equal} of {n_steps} steps, and {n_steps - n_multiples} are no multiple of it; {_REMEDY}"
                )
        return Interval.fixed(step)

    def deviants(self, interval: Interval, own: Callable[[int], dict[int, int]]) -> list[tuple[int, int]]:
        """Symbols whose own most frequent step is another, and that step.

        Parameters
        ----------
        interval : Interval
            Of all.
        own : callable
            Gives the symbols' own steps, compared with a step; called only if that is not ``usual``.
        """
        if interval.months:
            return []
        found = self.own if interval.nanoseconds == self.usual else own(interval.nanoseconds)
        return sorted(found.items())


def _steps(times: Int64, first_rows: Int64) -> Int64:
    """Differences inside the symbols."""
    steps = np.diff(times)
    borders = first_rows[(first_rows > 0) & (first_rows < len(times))] - 1
    return np.delete(steps, borders) if len(borders) else steps


def _most_frequent(values: Int64, numbers: Int64) -> int:
    """The most frequent of some steps; the smallest of equally frequent ones."""
    return int(values[np.argmax(numbers)])


def _other_steps(times: Int64, first_rows: Int64, step: int) -> Int64:
    """Rows whose next row is of the same symbol and not ``step`` later."""

    def look(first: int) -> Int64:
        last = min(first + _SPAN_ROWS, len(times) - 1)
        return np.flatnonzero(times[first + 1 : last + 1] - times[first:last] != step).astype(np.int64) + first

    rows = np.concatenate([np.empty(0, np.int64), *parallel(look, range(0, len(times) - 1, _SPAN_ROWS))])
    # Every symbol's last row but the very last one's is a border; it is removed wherever it was found.
    return np.setdiff1d(rows, first_rows[1:] - 1, assume_unique=True)


def _deviants(times: Int64, first_rows: Int64, counts: Int64, step: int, others: Int64) -> list[tuple[int, int]]:
    """Symbols whose own most frequent step is another one."""
    n_others = np.bincount(np.searchsorted(first_rows, others, "right") - 1, minlength=len(first_rows))
    doubtful = np.flatnonzero((counts > 1) & (n_others * 2 >= counts - 1))

    def own(symbol: np.int64) -> tuple[int, int]:
        first = first_rows[symbol]
        values, numbers = np.unique(np.diff(times[first : first + counts[symbol]]), return_counts=True)
        frequent = values[numbers == numbers.max()]
        return int(symbol), step if step in frequent else int(frequent[0])

    return [(symbol, other) for symbol, other in parallel(own, list(doubtful)) if other != step]
