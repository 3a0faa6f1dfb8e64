"""What all inputs together mean: UTC or session dates, the interval, and what a time stamp marks."""

from __future__ import annotations

from collections.abc import Sequence
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


def settle_zone(
    inputs: Sequence[Decoded],
    times: Sequence[Times],
    codes: Sequence[Sequence[Codes]],
    options: ReadOptions,
    notes: Notes,
) -> Timestamps:
    """Bring wall-clock times to UTC, in place, unless they are dates.

    Raises
    ------
    BarsError
        If inputs of both kinds are mixed, a zone is missing, or it contradicts the times.
    """
    read = [(one, each) for one, each in zip(inputs, times, strict=True) if one.n_rows]
    naive = [(one, each) for one, each in read if each.form == "naive"]
    aware = [(one, each) for one, each in read if each.form == "instant"]
    if naive and aware:
        raise naive[0][0].error(
            f"its times have no zone, and those of {aware[0][0].name} have one; write all of them in one form",
            None,
            "time",
        )
    zone = None if options.zone is None else Zone.parse(options.zone)
    if aware:
        if zone is not None and not zone.is_utc:
            raise aware[0][0].error(
                f"the zone {zone.name} was given, but the times are instants or carry their own zone; leave out --zone",
                None,
                "time",
            )
        notes.decide("zone", "UTC", "the times are instants or carry their own zone")
        return "utc"
    is_daily = options.interval is None or Interval.parse(options.interval).is_session
    if naive and is_daily and all(each.all_midnight for _, each in naive):
        if options.label == "close":
            raise naive[0][0].error(
                "the times are dates, and a date marks its whole session; leave out --label close", None, "time"
            )
        if zone is not None and not zone.is_utc:
            notes.warnings.append(f"the zone {zone.name} is not used: the times are dates, and stay dates")
        notes.decide("timestamps", "session dates", "no time has a clock other than 00:00")
        return "session"
    for number, (one, each) in enumerate(zip(inputs, times, strict=True)):
        if one.n_rows:
            described = one.layout.format
            if zone is None and described is not None and described.time.zone is not None:
                source = f"the format {described.name}"
                each.parts = _localise(one, each, codes[number], Zone.parse(described.time.zone), source, notes)
            else:
                each.parts = _localise(one, each, codes[number], zone, "as told", notes)
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
        raise one.error(
            f"the time {time_text(int(value))} has no zone; say which with --zone, for example --zone America/New_York "
            "or --zone UTC",
            times.first_clock_row,
            "time",
        )
    notes.decide("zone", zone.name, source)
    if zone.is_utc:
        return times.parts

    def numbers() -> npt.NDArray[np.int32]:
        return np.concatenate([part.astype(np.int32) for part in codes])

    return to_utc(times.parts, numbers, zone, lambda text, row: one.error(text, row, "time"))


def settle_interval(
    arranged: Arranged,
    symbols: Sequence[str],
    timestamps: Timestamps,
    all_midnight: bool,
    options: ReadOptions,
    label: tuple[Literal["open", "close"], str],
    notes: Notes,
    path: str | None,
) -> tuple[Interval | None, Timestamps]:
    """The interval, told or inferred; times that mark a bar's close are shifted to its open, in place.

    Raises
    ------
    BarsError
        If the interval can't be inferred and was not told.
    """
    interval = None if options.interval is None else Interval.parse(options.interval)
    if interval is not None:
        notes.decide("interval", interval.text, "as told")
    elif len(arranged.times):
        try:
            interval, deviants = Interval.infer(arranged.times, arranged.first_rows, arranged.counts)
        except BarsError as error:
            raise BarsError(error.message, path=path) from None
        notes.decide("interval", interval.text, "the most frequent step inside the symbols")
        if deviants:
            shown = ", ".join(f"{symbols[number]} ({Interval.fixed(step).text})" for number, step in deviants[:10])
            more = f" and {len(deviants) - 10} more" if len(deviants) > 10 else ""
            notes.warnings.append(f"the most frequent step of some symbols is not {interval.text}: {shown}{more}")
    value, source = label
    if value == "close" and interval is not None:
        arranged.times = interval.opened(arranged.times + _missing_to_the_close(arranged.times))
        notes.decide("label", "close", f"{source}; shifted back by {interval.text} to the open")
    else:
        if options.label is None and len(arranged.times) and _missing_to_the_close(arranged.times):
            raise BarsError(
                f"every time ends just before a second is full, as in {time_text(int(arranged.times[0]))}, so it seems "
                "to mark the end of its bar; say so with --label close, or --label open",
                path=path,
            )
        notes.decide("label", value, source)
        if timestamps == "utc" and all_midnight and interval is not None and interval.is_session:
            notes.decide("timestamps", "session dates", "all times are at 00:00 UTC, a day or more apart")
            timestamps = "session"
    return interval, timestamps


def _missing_to_the_close(times: Int64) -> int:
    """What all times lack to a full second, where they end in .999, .999999 or .999999999; else 0."""
    # Nearly always the first time tells that there is nothing.
    steps = [step for step in (10**6, 10**3, 1) if len(times) and (int(times[0]) + step) % 10**9 == 0]
    return next((step for step in steps if not np.any((times + step) % 10**9)), 0)


def settle_label(inputs: Sequence[Decoded], options: ReadOptions) -> tuple[Literal["open", "close"], str]:
    """What a time marks, and from what that is known.

    Raises
    ------
    BarsError
        If the formats of two inputs differ in it.
    """
    if options.label is not None:
        return options.label, "as told"
    formats = [None if one.layout.format is None else one.layout.format for one in inputs]
    labels = ["open" if each is None else each.label for each in formats]
    if labels.count("close") not in (0, len(labels)):
        odd = labels.index("close" if labels[0] == "open" else "open")
        raise inputs[odd].error(
            f"its times mark the {labels[odd]} of a bar, and those of {inputs[0].name} don't; read them apart"
        )
    if "close" in labels and formats[0] is not None:
        return "close", f"the format {formats[0].name}"
    return "open", "not told; assumed" if formats[0] is None else f"the format {formats[0].name}"


def settle_adjustment(
    inputs: Sequence[Decoded], options: ReadOptions, notes: Notes
) -> Literal["raw", "split", "total", "unknown"]:
    """What prices are adjusted for: as told, else as the formats of all inputs say."""
    if options.adjustment != "unknown":
        notes.decide("adjustment", options.adjustment, "as told")
        return options.adjustment
    known = {"unknown" if one.layout.format is None else one.layout.format.adjustment for one in inputs}
    if len(known) == 1 and known != {"unknown"}:
        value = known.pop()
        notes.decide("adjustment", value, "the format")
        return value
    notes.decide("adjustment", "unknown", "not told")
    return "unknown"
