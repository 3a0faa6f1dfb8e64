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
from stager.samples.sessions import check_session
from stager.samples.tables import TableSource

_MAX_STRIDE = 1 << 40


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
    session : str, optional
        Windows and labels stay inside a session, and bars outside of all sessions are left out. Hours of a day in a
        zone, ``"09:30-16:00 America/New_York"`` (``"18:00-17:00 ..."`` over midnight; ``"09:30-11:30,13:00-15:00 ..."``
        with a break, which is a gap), or the name of a calendar of the package exchange_calendars, such as ``"XNYS"``.
        A bar belongs to a session if it opens in it; hours are half-open.
    close_inclusive : bool
        Whether a bar stamped with the very close, as closing auctions are, belongs to the session.
    rolls : str, pyarrow.Table, data frame or path, optional
        Contract rolls, which end runs: a column of the pack whose value changes with the contract, or a table of
        ``symbol`` and ``time``, from which on bars are of the next contract.
    splits : pyarrow.Table, data frame or path, optional
        A table of ``symbol``, ``time`` (from which on prices are those after the split) and ``ratio`` (new shares for
        one old). They end runs, unless the pack says that its prices are adjusted for them.
    universe : pyarrow.Table, data frame or path, optional
        A table of ``symbol``, ``start`` and ``end`` (empty: still): a row ends a sample if its decision lies in one of
        the half-open stretches of its symbol. A window may begin before.
    columns : sequence of str, optional
        The columns of ``batch.x``, in this order; None for all.
    stride : int
        Decisions are those bars whose close is a multiple of so many bars since 1970 (of daily and longer bars, since
        the pack's first session), so that all symbols share them.
    min_history : int
        Bars of the symbol that must be there at the decision, its own included; filled ones don't count.
    allow_filled : bool
        Whether decision, entry and exit may be bars that were filled in.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    symbols: Sequence[str] | None = None
    interval: tuple[Any, Any] | None = None
    max_gap: int = 0
    session: str | None = None
    close_inclusive: bool = False
    rolls: TableSource = None
    splits: TableSource = None
    universe: TableSource = None
    columns: Sequence[str] | None = None
    stride: int = 1
    min_history: int = 0
    allow_filled: bool = False

    def __post_init__(self) -> None:
        for name, example in (("symbols", "AAPL"), ("columns", "close")):
            if (names := getattr(self, name)) is None:
                continue
            if isinstance(names, str):
                raise SampleError(f"{name} is the text {names!r}; give a sequence such as ({names!r},)")
            if not isinstance(names, Iterable):
                raise SampleError(f"{name} is {names!r}; give a sequence of names such as ({example!r},)")
            object.__setattr__(self, name, tuple(names))
        if self.columns is not None and (not self.columns or len(set(self.columns)) < len(self.columns)):
            raise SampleError(f"columns is {self.columns!r}; name at least one, and each once")
        if self.interval is not None:
            if not isinstance(self.interval, (tuple, list)) or len(self.interval) != 2:
                raise SampleError(f"interval is {self.interval!r}; give (start, end), half-open")
            object.__setattr__(self, "interval", tuple(self.interval))
            first, last = self.bounds
            if first >= last:
                raise SampleError(f"interval {self.interval!r} is empty; start must lie before end")
        for name, least, unit in (("max_gap", 0, "bars"), ("stride", 1, "bar"), ("min_history", 0, "bars")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise SampleError(f"{name} is {value!r}; it must be an integer of at least {least} {unit}")
        if self.stride > _MAX_STRIDE:
            raise SampleError(f"stride is {self.stride:,} bars; the largest is {_MAX_STRIDE:,}")
        for name in ("close_inclusive", "allow_filled"):
            if not isinstance(getattr(self, name), bool):
                raise SampleError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.session is not None:
            check_session(self.session)
        elif self.close_inclusive:
            raise SampleError("close_inclusive says which bars belong to a session; name the session too")

    @property
    def bounds(self) -> tuple[int, int]:
        """First decision instant served and the one after the last, nanoseconds UTC."""
        start, end = self.interval or (None, None)
        limits = np.iinfo(np.int64)
        return (
            limits.min if start is None else nanoseconds(start),
            limits.max if end is None else nanoseconds(end),
        )


def check_select(select: Any) -> None:
    """Refuse what is no selection.

    Raises
    ------
    SampleError
    """
    if not isinstance(select, Select):
        raise SampleError(f"select is {select!r:.80}; give Select(...)")


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
