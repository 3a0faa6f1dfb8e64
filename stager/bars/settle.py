"""What all inputs together mean: UTC or session dates, the interval, and what a time stamp marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.bars.arrange import Arranged
from stager.bars.clock import time_text
from stager.bars.columns import Decoded
from stager.bars.detect import Decision
from stager.bars.interval import Interval
from stager.bars.options import ReadOptions
from stager.bars.symbols import Codes
from stager.bars.taken import Taken
from stager.bars.times import Times
from stager.bars.zones import Zone, to_utc
from stager.errors import BarsError

Timestamps: TypeAlias = Literal["utc", "session"]
Int64 = npt.NDArray[np.int64]


@dataclass
class Notes:
    """Decisions and warnings, each once."""

    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def decide(self, what: str, value: str, source: str) -> None:
        if not any(decision.what == what and decision.value == value for decision in self.decisions):
            self.decisions.append(Decision(what, value, source))


class ZoneMissing(BarsError):
    """Wall-clock times need a zone, and none was told; ``has_clock`` tells whether one of them is not at 00:00."""

    has_clock = True


def localise(
    one: Decoded, times: Times, codes: Sequence[Codes], options: ReadOptions, notes: Notes, dates: bool
) -> bool:
    """Bring the wall-clock times of an input to UTC, in place; ``codes`` are its symbols' numbers.

    Returns
    -------
    bool
        Whether ``dates`` allowed to keep them, because they are nothing but dates.

    Raises
    ------
    ZoneMissing
    BarsError
        If the zone contradicts the times.
    """
    if not one.n_rows or times.form == "instant":
        return False
    if dates and times.all_midnight and _may_be_dates(options):
        return True
    zone = None if options.zone is None else Zone.parse(options.zone)
    described = one.layout.format
    if zone is None and described is not None and described.time.zone is not None:
        source = f"the format {described.name}"
        times.parts = _localise(one, times, codes, Zone.parse(described.time.zone), source, notes)
    else:
        times.parts = _localise(one, times, codes, zone, "as told", notes)
    return False


def _may_be_dates(options: ReadOptions) -> bool:
    return options.interval is None or Interval.parse(options.interval).is_session


def settle_zone(inputs: Sequence[Taken], options: ReadOptions, notes: Notes) -> Timestamps:
    """Tell what the times of all inputs are: instants, or session dates.

    Raises
    ------
    BarsError
        If inputs of both kinds are mixed, or the zone told contradicts them.
    """
    read = [one for one in inputs if one.n_rows]
    naive = [one for one in read if one.form == "naive"]
    aware = [one for one in read if one.form == "instant"]
    if naive and aware:
        raise naive[0].error(mixed_forms(aware[0].name), naive[0].time_name)
    zone = None if options.zone is None else Zone.parse(options.zone)
    if aware:
        if zone is not None and not zone.is_utc:
            raise aware[0].error(
                f"the zone {zone.name} was given, but the times are instants or carry their own zone; leave out --zone",
                aware[0].time_name,
            )
        notes.decide("zone", "UTC", "the times are instants or carry their own zone")
        return "utc"
    if naive and all(one.is_dates for one in naive):
        if options.label == "close":
            raise naive[0].error(
                "the times are dates, and a date marks its whole session; leave out --label close", naive[0].time_name
            )
        if zone is not None and not zone.is_utc:
            notes.warnings.append(f"the zone {zone.name} is not used: the times are dates, and stay dates")
        notes.decide("timestamps", "session dates", "no time has a clock other than 00:00")
        return "session"
    for one in inputs:
        for decision in one.zone:
            notes.decide(decision.what, decision.value, decision.source)
    return "utc"


def _localise(
    one: Decoded, times: Times, codes: Sequence[Codes], zone: Zone | None, source: str, notes: Notes
) -> list[Int64]:
    name = one.layout.names[one.layout.roles["time"]]
    if one.layout.zone_in_name:
        if zone is not None and not zone.is_utc:
            raise one.error(
                f"the zone {zone.name} was given, but the column's name says UTC; leave out --zone", None, "time"
            )
        notes.decide("zone", "UTC", f"the column is named {name!r}")
        return times.parts
    if zone is None:
        starts = np.cumsum([0, *(len(part) for part in times.parts)])
        part = int(np.searchsorted(starts, times.first_clock_row, "right")) - 1
        value = times.parts[part][times.first_clock_row - starts[part]]
        error = one.error(no_zone(int(value)), times.first_clock_row, "time")
        missing = ZoneMissing(error.message, path=error.path, line=error.line, column=error.column)
        missing.has_clock = not times.all_midnight
        raise missing
    notes.decide("zone", zone.name, source)
    if zone.is_utc:
        return times.parts

    def numbers() -> npt.NDArray[np.int32]:
        return np.concatenate([part.astype(np.int32) for part in codes])

    return to_utc(times.parts, numbers, zone, lambda text, row: one.error(text, row, "time"), is_part=one.is_part)


def no_zone(time: int) -> str:
    """The message about a wall-clock time without a zone."""
    return (
        f"the time {time_text(time)} has no zone; say which with --zone, for example --zone America/New_York or "
        "--zone UTC"
    )


def mixed_forms(other: str) -> str:
    """The message about an input whose times have no zone, where those of another have one."""
    return f"its times have no zone, and those of {other} have one; write all of them in one form"


@dataclass(frozen=True)
class Opens:
    """How the instants of bars' opens follow from sorted times; ``shift`` is added, and ``interval`` then taken off.

    Attributes
    ----------
    interval : Interval or None
        None only if there are no rows and it was not told.
    shift : int or None
        Nanoseconds; None: the times are opens.
    timestamps : {"utc", "session"}
    """

    interval: Interval | None
    shift: int | None
    timestamps: Timestamps

    def of(self, times: Int64) -> Int64:
        """Opens of bars with these times, nanoseconds since 1970."""
        if self.shift is None or self.interval is None:
            return times
        return self.interval.begins(times + self.shift)


@dataclass(frozen=True)
class SortedTimes:
    """What the times of all rows show, in the order (symbol, time).

    Attributes
    ----------
    n_rows : int
    first : int
        The time of the first row.
    missing : int
        What all times lack to a full second, where they end in .999, .999999 or .999999999; else 0.
    infer : callable
        Gives the interval and the symbols that deviate, as :meth:`Interval.infer`.
    """

    n_rows: int
    first: int
    missing: int
    infer: Callable[[], tuple[Interval, list[tuple[int, int]]]]

    @classmethod
    def of(cls, arranged: Arranged) -> SortedTimes:
        """Of rows in memory, of symbols that all have one."""
        times = arranged.times
        return cls(
            len(times),
            int(times[0]) if len(times) else 0,
            max(lacks_to_the_close(times), default=0),
            lambda: Interval.infer(times, arranged.first_rows, arranged.counts),
        )


def settle_interval(
    times: SortedTimes,
    symbols: Sequence[str],
    timestamps: Timestamps,
    all_midnight: bool,
    options: ReadOptions,
    label: tuple[Literal["open", "close"], str],
    notes: Notes,
    path: str | None,
) -> Opens:
    """The interval, told or inferred, and what times are then.

    Raises
    ------
    BarsError
        If the interval can't be inferred, or times seem to mark the end of bars and nobody said so.
    """
    interval: Interval | None = None
    if options.interval is not None:
        interval = Interval.parse(options.interval)
        notes.decide("interval", interval.text, "as told")
    elif times.n_rows:
        try:
            interval, deviants = times.infer()
        except BarsError as error:
            raise BarsError(error.message, path=path) from None
        notes.decide("interval", interval.text, "the most frequent step inside the symbols")
        if deviants:
            shown = ", ".join(f"{symbols[number]} ({Interval.fixed(step).text})" for number, step in deviants[:10])
            more = f" and {len(deviants) - 10} more" if len(deviants) > 10 else ""
            notes.warnings.append(f"the most frequent step of some symbols is not {interval.text}: {shown}{more}")
    value, source = label
    shift: int | None = None
    if value == "close" and interval is not None:
        shift = times.missing
        notes.decide("label", "close", f"{source}; shifted back by {interval.text} to the open")
    else:
        if options.label is None and times.missing:
            raise BarsError(
                f"every time ends just before a second is full, as in {time_text(times.first)}, so it seems "
                "to mark the end of its bar; say so with --label close, or --label open",
                path=path,
            )
        notes.decide("label", value, source)
        if timestamps == "utc" and all_midnight and interval is not None and interval.is_session:
            notes.decide("timestamps", "session dates", "all times are at 00:00 UTC, a day or more apart")
            timestamps = "session"
    if interval is not None:
        interval = _closing(interval, timestamps, options.session_close, notes, path)
    return Opens(interval, shift, timestamps)


def _closing(interval: Interval, timestamps: Timestamps, close: str | None, notes: Notes, path: str | None) -> Interval:
    """The interval with the close of the sessions, where times are their dates."""
    if timestamps == "session" and interval.is_session:
        closing = interval.closing(close)
        if closing.close is None:
            notes.decide("session close", "the next 00:00 UTC", "not told; --session-close tells it")
        else:
            notes.decide("session close", closing.close.text, "as told")
        return closing
    if close is not None:
        raise BarsError(
            f"the times are instants, the opens of bars of {interval.text}, which close where they end; a close of "
            f"sessions, {close}, is for session dates: leave --session-close out",
            path=path,
        )
    return interval


def lacks_to_the_close(times: Int64) -> set[int]:
    """What all times may lack to a full second, (1 ms, 1 us, 1 ns); of no times, nothing."""
    # Nearly always the first time tells that there is nothing.
    steps = [step for step in (10**6, 10**3, 1) if len(times) and (int(times[0]) + step) % 10**9 == 0]
    return {step for step in steps if not np.any((times + step) % 10**9)}


def settle_label(inputs: Sequence[Taken], options: ReadOptions) -> tuple[Literal["open", "close"], str]:
    """What a time marks, and from what that is known.

    Raises
    ------
    BarsError
        If the formats of two inputs differ in it.
    """
    if options.label is not None:
        return options.label, "as told"
    labels = ["open" if one.label is None else one.label for one in inputs]
    if labels.count("close") not in (0, len(labels)):
        odd = labels.index("close" if labels[0] == "open" else "open")
        raise inputs[odd].error(
            f"its times mark the {labels[odd]} of a bar, and those of {inputs[0].name} don't; read them apart"
        )
    if "close" in labels:
        return "close", f"the format {inputs[0].format}"
    return "open", "not told; assumed" if inputs[0].format is None else f"the format {inputs[0].format}"


def settle_adjustment(
    inputs: Sequence[Taken], options: ReadOptions, notes: Notes
) -> Literal["raw", "split", "total", "unknown"]:
    """What prices are adjusted for: as told, else as the formats of all inputs say."""
    if options.adjustment != "unknown":
        notes.decide("adjustment", options.adjustment, "as told")
        return options.adjustment
    known = {one.adjustment for one in inputs}
    if len(known) == 1 and known != {"unknown"}:
        value = known.pop()
        notes.decide("adjustment", value, "the format")
        return value
    notes.decide("adjustment", "unknown", "not told")
    return "unknown"
