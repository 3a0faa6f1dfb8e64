"""Which decisions are served."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stager.bars.options import FIRST_YEAR, LAST_YEAR
from stager.errors import SampleError


@dataclass(frozen=True)
class Select:
    """Filters of samples; they add or reorder no rows.

    Parameters
    ----------
    symbols : sequence of str, optional
        Only these; None for all.
    interval : (start, end), optional
        Half-open interval of decision instants. ISO 8601 text, ``datetime``, ``date`` (its first instant) or
        ``numpy.datetime64``; without a zone it is UTC. None at either end leaves it open. A window may begin before
        `start`.
    max_gap : int
        Missing bars that a window (and a label) may span at one place.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    symbols: Sequence[str] | None = None
    interval: tuple[Any, Any] | None = None
    max_gap: int = 0

    def __post_init__(self) -> None:
        if self.symbols is not None:
            if isinstance(self.symbols, str):
                raise SampleError(f"symbols is the text {self.symbols!r}; give a sequence such as ({self.symbols!r},)")
            if not isinstance(self.symbols, Iterable):
                raise SampleError(f"symbols is {self.symbols!r}; give a sequence of names")
            object.__setattr__(self, "symbols", tuple(self.symbols))
        if self.interval is not None:
            if not isinstance(self.interval, (tuple, list)) or len(self.interval) != 2:
                raise SampleError(f"interval is {self.interval!r}; give (start, end), half-open")
            object.__setattr__(self, "interval", tuple(self.interval))
            first, last = self.bounds
            if first >= last:
                raise SampleError(f"interval {self.interval!r} is empty; start must lie before end")
        if isinstance(self.max_gap, bool) or not isinstance(self.max_gap, (int, np.integer)) or self.max_gap < 0:
            raise SampleError(f"max_gap is {self.max_gap!r}; it must be an integer of at least 0 bars")

    @property
    def bounds(self) -> tuple[int, int]:
        """First decision instant served and the one after the last, nanoseconds UTC."""
        start, end = self.interval or (None, None)
        limits = np.iinfo(np.int64)
        return (
            limits.min if start is None else nanoseconds(start),
            limits.max if end is None else nanoseconds(end),
        )


def nanoseconds(instant: Any) -> int:
    """Nanoseconds since 1970 UTC of an instant written as in :class:`Select`; raises SampleError if it is none."""
    try:
        moment = dt.datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    except ValueError:
        moment = None
    if isinstance(moment, np.datetime64):
        moment = moment.astype("datetime64[us]").item()
    if isinstance(moment, dt.date) and not isinstance(moment, dt.datetime):
        moment = dt.datetime(moment.year, moment.month, moment.day)
    if not isinstance(moment, dt.datetime):
        raise SampleError(f"{instant!r} is no instant; write ISO 8601 such as 2024-01-31T15:30Z")
    # NumPy would wrap instants beyond int64 nanoseconds without a word.
    if not FIRST_YEAR <= moment.year <= LAST_YEAR:
        raise SampleError(f"{instant!r} lies outside the years {FIRST_YEAR} to {LAST_YEAR}; None leaves an end open")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return int(np.datetime64(moment.astimezone(dt.UTC).replace(tzinfo=None), "ns").astype(np.int64)) + _below(instant)


def _below(instant: Any) -> int:
    """The nanoseconds of an instant below its microseconds, which datetime does not know."""
    if isinstance(instant, np.datetime64):
        return int((instant - instant.astype("datetime64[us]")) / np.timedelta64(1, "ns"))
    if isinstance(instant, str):
        digits = re.search(r"[.,]\d{6}(\d{1,3})", instant)
        return int(digits[1].ljust(3, "0")) if digits else 0
    # pandas has it.
    return int(getattr(instant, "nanosecond", 0))
