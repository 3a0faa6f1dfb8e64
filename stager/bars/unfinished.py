"""Bars that were still forming when their file was written, or that lie in the future."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from stager.bars.checks import Piece
from stager.bars.findings import Finding, Place, counted, named, stamps
from stager.bars.interval import DAY, Interval
from stager.bars.settle import Timestamps

Int64 = npt.NDArray[np.int64]

# The last of the large exchanges closes at 21:00 UTC; a session date tells no more.
_SESSION_END = 21 * 3600 * 10**9
# A bar is longer than a month by no more than this.
_MONTH = 31 * DAY


def written(name: str) -> int | None:
    """When a local file was last written, nanoseconds since 1970; None for what is no local file."""
    try:
        return os.stat(name).st_mtime_ns
    except (OSError, ValueError):
        return None


def unfinished(
    names: Sequence[str | None],
    pieces: Sequence[Iterable[Piece]],
    symbols: Sequence[str],
    interval: Interval | None,
    label: Literal["open", "close"],
    timestamps: Timestamps,
    now: int | None = None,
    *,
    n_bars: int | None = None,
    latest: Sequence[int | None] | None = None,
) -> Finding:
    """Look for bars whose close lies after their file was written, or after now.

    Parameters
    ----------
    names : sequence of str or None
        Of the inputs; None of a table.
    pieces : sequence of iterable of Piece
        The rows of each input, with the times as they were read; columns are not looked at.
    symbols : sequence of str
        By the codes of the pieces.
    interval : Interval or None
    label : {"open", "close"}
        What the times mark.
    timestamps : {"utc", "session"}
    now : int, optional
        Nanoseconds since 1970; the clock's, if not given.
    n_bars : int, optional
        Rows of all inputs; counted, if not given.
    latest : sequence of int or None, optional
        The latest time of each input; the rows of those that it tells all about are not asked for.
    """
    now = time.time_ns() if now is None else now
    future = now + (DAY if timestamps == "session" else 0)
    n_seen, n_found, n_future = 0, 0, 0
    # The earliest of each symbol.
    first: dict[int, int] = {}
    for number, (name, parts) in enumerate(zip(names, pieces, strict=True)):
        at = None if name is None else written(name)
        limit = now if at is None else min(now, at)
        if latest is not None:
            last = latest[number]
            if last is None or not _closes_after(np.array([last]), limit, interval, label, timestamps)[0]:
                continue
        for piece in parts:
            n_seen += len(piece)
            late = np.flatnonzero(_closes_after(piece.times, limit, interval, label, timestamps))
            codes, times = piece.codes[late], piece.times[late]
            n_found += len(late)
            n_future += int(np.count_nonzero(times > future))
            some, place_of = np.unique(codes, return_inverse=True)
            earliest = np.full(len(some), np.iinfo(np.int64).max)
            np.minimum.at(earliest, place_of, times)
            for code, at_time in zip(some.tolist(), earliest.tolist(), strict=True):
                first[code] = min(at_time, first.get(code, at_time))
    n_bars = n_seen if n_bars is None else n_bars
    if not n_found:
        text = "every bar had closed when its file was written"
        return Finding(check="unfinished", severity="fine", text=text, n_of=n_bars)
    late_symbols = sorted(symbols[code] for code in first)
    at_time, symbol = min((at_time, symbols[code]) for code, at_time in first.items())
    place = Place(symbol, stamps(np.array([at_time]), timestamps)[0])
    if n_future:
        text = f"{counted(n_future, 'bar')} of {named(late_symbols)} lie in the future, {place.words}"
        remedy = "the zone, the unit or the date order is wrong, or the clock of this machine"
    else:
        text = f"the last bar of {named(late_symbols)} had not closed when the file was written, {place.words}"
        remedy = "it may be unfinished: leave it out, or fetch it again"
    sure = n_future or timestamps == "utc" or (interval is not None and interval.close is not None)
    return Finding(
        check="unfinished",
        severity="warning" if sure else "note",
        text=text,
        remedy=remedy,
        n=n_found,
        n_of=n_bars,
        places=[place],
    )


def _closes_after(
    times: Int64, limit: int, interval: Interval | None, label: Literal["open", "close"], timestamps: Timestamps
) -> npt.NDArray[np.bool_]:
    """Where a bar's close lies after an instant; most pieces are told by their last time alone."""
    longest = 0 if interval is None or label == "close" else (interval.nanoseconds or interval.months * _MONTH)
    if interval is not None and interval.close is not None:
        # A market west of UTC closes on the next day of UTC.
        longest += DAY
    if not len(times) or int(times.max()) <= limit - longest:
        return np.zeros(len(times), np.bool_)
    if label == "close" or interval is None:
        return times > limit
    if timestamps == "session" and interval.nanoseconds == DAY and interval.close is None:
        return times + _SESSION_END > limit
    return interval.available(times) > limit
