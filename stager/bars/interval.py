"""The bar interval: its text form, how it is inferred, and when a bar becomes available."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt

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
    """How far the bars of a symbol lie apart.

    Attributes
    ----------
    text : str
        ``"1min"``, ``"30s"``, ``"1h"``, ``"1d"``, ``"1w"``, ``"1mo"``.
    nanoseconds : int
        Length of a fixed interval; 0 for calendar months.
    months : int
        Length in calendar months; 0 for a fixed interval.
    """

    text: str
    nanoseconds: int
    months: int = 0

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

    def available(self, times: Int64) -> Int64:
        """Instants at which bars become available: their close.

        Parameters
        ----------
        times : ndarray of int64, any shape
            Opens, nanoseconds since 1970 UTC.

        Returns
        -------
        ndarray of int64, same shape
            ``times`` plus the interval; for months, 00:00 UTC of the first day after the bar's months.
        """
        if not self.months:
            return times + self.nanoseconds
        months = times.astype("datetime64[ns]").astype("datetime64[M]") + np.timedelta64(self.months, "M")
        return months.astype("datetime64[ns]").astype(np.int64)

    def opened(self, closes: Int64) -> Int64:
        """Opens of the bars that close at ``closes`` (ndarray of int64, nanoseconds since 1970 UTC)."""
        if not self.months:
            return closes - self.nanoseconds
        inside = (closes - 1).astype("datetime64[ns]").astype("datetime64[M]")
        return (inside - np.timedelta64(self.months - 1, "M")).astype("datetime64[ns]").astype(np.int64)

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
        n_steps = len(times) - len(first_rows)
        if n_steps <= 0:
            raise BarsError(f"no symbol has two bars, so nothing tells the bar interval; {_REMEDY}")
        few = _steps(times[: 1 << 16], first_rows)
        step = _most_frequent(few)[0] if len(few) else 0
        others = _other_steps(times, first_rows, step)
        n_equal = n_steps - len(others)
        if n_equal * 2 <= n_steps:
            # The first rows don't show the majority, so all steps are sorted.
            steps = _steps(times, first_rows)
            step, n_equal = _most_frequent(steps)
            others = _other_steps(times, first_rows, step)
        else:
            steps = np.empty(0, dtype=np.int64)
        if 28 * DAY <= step <= 31 * DAY:
            different = times[others + 1] - times[others]
            monthly = n_equal + int(np.count_nonzero((different >= 28 * DAY) & (different <= 31 * DAY)))
            if monthly * 2 >= n_steps and not (step == 28 * DAY and n_equal * 10 >= monthly * 9):
                return cls(text="1mo", nanoseconds=0, months=1), []
        if n_equal * 2 < n_steps:
            n_multiples = int(np.count_nonzero(steps % step == 0))
            if n_multiples * 100 < n_steps * 99:
                raise BarsError(
                    f"the bars have no common interval: the most frequent step, {cls.fixed(step).text}, is "
                    f"{n_equal} of {n_steps} steps, and {n_steps - n_multiples} are no multiple of it; {_REMEDY}"
                )
        return cls.fixed(step), _deviants(times, first_rows, counts, step, others)


def _steps(times: Int64, first_rows: Int64) -> Int64:
    """Differences inside the symbols."""
    steps = np.diff(times)
    borders = first_rows[(first_rows > 0) & (first_rows < len(times))] - 1
    return np.delete(steps, borders) if len(borders) else steps


def _most_frequent(steps: Int64) -> tuple[int, int]:
    """The most frequent step and how often it occurs; the smallest of equally frequent ones."""
    values, numbers = np.unique(steps, return_counts=True)
    best = int(np.argmax(numbers))
    return int(values[best]), int(numbers[best])


def _other_steps(times: Int64, first_rows: Int64, step: int) -> Int64:
    """Rows whose next row is of the same symbol and not ``step`` later."""

    def look(first: int) -> Int64:
        last = min(first + _SPAN_ROWS, len(times) - 1)
        return np.flatnonzero(times[first + 1 : last + 1] - times[first:last] != step).astype(np.int64) + first

    rows = np.concatenate(parallel(look, range(0, len(times) - 1, _SPAN_ROWS)))
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
