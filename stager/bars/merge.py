"""Inputs made alike: their columns, symbols and times, one interval, and what was noted about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.bars import symbols as symbol_numbers
from stager.bars.arrange import Arranged
from stager.bars.checks import Checked, Mask, check, describe
from stager.bars.columns import Decoded
from stager.bars.detect import Decision
from stager.bars.interval import Interval
from stager.bars.options import PRICES, ReadOptions
from stager.bars.symbols import Codes, SymbolColumn
from stager.bars.threads import parallel
from stager.bars.times import Times, read_times, year_window
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


@dataclass(frozen=True)
class Merged:
    """All inputs, checked.

    Attributes
    ----------
    symbols : tuple of str
        Sorted; the codes of the pieces count in it. Some may have no row.
    names : list of str
        Columns of the pieces: the prices, volume, further ones.
    checked : list of list of Checked
        The pieces of each input.
    timestamps : {"utc", "session"}
    all_midnight : bool
        Whether every time is at 00:00.
    notes : Notes
    """

    symbols: tuple[str, ...]
    names: list[str]
    checked: list[list[Checked]]
    timestamps: Timestamps
    all_midnight: bool
    notes: Notes


def merge(inputs: Sequence[Decoded], options: ReadOptions) -> Merged:
    """Bring inputs to one set of columns, symbol numbers and UTC times, and check their rows.

    Raises
    ------
    BarsError
        If they don't fit together, a zone is missing or wrong, or a row is wrong.
    """
    notes = Notes()
    for one in inputs:
        for decision in one.decisions:
            notes.decide(decision.what, decision.value, decision.source)
    names = _common_columns(inputs)
    symbols, codes = symbol_numbers.encode(_symbol_columns(inputs, options, notes))
    years = year_window(options.allow_years)

    def times_of(one: Decoded) -> Times:
        return read_times(one.columns["time"], years, one.is_text, lambda text, row: one.error(text, row, "time"))

    times = [times_of(one) for one in inputs]
    for each in times:
        notes.decide(each.decision.what, each.decision.value, each.decision.source)
    timestamps = _settle_zone(inputs, times, codes, options, notes)
    checked = _check_all(inputs, symbols, codes, times, names, options)
    _add_warnings(notes, inputs)
    notes.warnings += describe([part for parts in checked for part in parts], names)
    all_midnight = all(each.all_midnight for each in times)
    return Merged(symbols, names, checked, timestamps, all_midnight, notes)


def _add_warnings(notes: Notes, inputs: Sequence[Decoded]) -> None:
    by_text: dict[str, list[str]] = {}
    for one in inputs:
        for text in one.warnings:
            by_text.setdefault(text, []).append(one.name)
    for text, files in by_text.items():
        where = "" if len(inputs) == 1 else f"{files[0]}: "
        notes.warnings.append(where + text + (f" (so in {len(files) - 1} more files)" if len(files) > 1 else ""))


def _common_columns(inputs: Sequence[Decoded]) -> list[str]:
    """Prices, volume and the further columns that all inputs have and that hold a value somewhere."""
    first = inputs[0]
    for one in inputs[1:]:
        for has, lacks in ((first, one), (one, first)):
            if "volume" in has.columns and "volume" not in lacks.columns:
                raise lacks.error(
                    f"there is no column for volume, and {has.name} has one; name it with --column volume=NAME, or "
                    "read the files apart"
                )
    shared = [name for name in first.columns if all(name in one.columns for one in inputs)]
    for one in inputs:
        one.warnings += [
            f"column {name!r} is left out: not every file has it" for name in one.columns if name not in shared
        ]
    names = [name for name in shared if name not in ("time", "symbol", *PRICES)]
    names.sort(key=lambda name: name != "volume")
    n_rows = sum(one.n_rows for one in inputs)
    empty = [name for name in names if n_rows and n_rows == sum(one.columns[name].null_count for one in inputs)]
    first.warnings += [f"column {name!r} has no value in any row and is left out" for name in empty]
    return [*PRICES, *(name for name in names if name not in empty)]


def _symbol_columns(inputs: Sequence[Decoded], options: ReadOptions, notes: Notes) -> list[SymbolColumn]:
    columns: list[SymbolColumn] = []
    for one in inputs:
        lengths = [len(chunk) for chunk in one.columns["time"].chunks]
        if "symbol" in one.columns:
            if options.symbol is not None:
                named = one.layout.names[one.layout.roles["symbol"]]
                raise one.error(
                    f"the symbol {options.symbol!r} was given, but the column {named!r} holds symbols; leave out "
                    "--symbol, or remove the column"
                )
            columns.append(one.columns["symbol"])
        elif options.symbol is not None:
            notes.decide("symbol", options.symbol, "as told")
            columns.append(symbol_numbers.constant(options.symbol, lengths))
        elif one.stem is not None and len(inputs) == 1:
            notes.decide("symbol", one.stem, "the file's name")
            columns.append(symbol_numbers.constant(one.stem, lengths))
        else:
            raise one.error(
                "there is no column for symbol; name it with --column symbol=NAME, or say with --symbol which symbol "
                "all rows belong to"
            )
    return columns


def _settle_zone(
    inputs: Sequence[Decoded],
    times: Sequence[Times],
    codes: Sequence[Sequence[Codes]],
    options: ReadOptions,
    notes: Notes,
) -> Timestamps:
    """Bring wall-clock times to UTC, in place, unless they are dates."""
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
            each.parts = _localise(one, each, codes[number], zone, notes)
    return "utc"


def _localise(one: Decoded, times: Times, codes: Sequence[Codes], zone: Zone | None, notes: Notes) -> list[Int64]:
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
    notes.decide("zone", zone.name, "as told")
    if zone.is_utc:
        return times.parts

    def numbers() -> npt.NDArray[np.int32]:
        return np.concatenate([part.astype(np.int32) for part in codes])

    return to_utc(times.parts, numbers, zone, lambda text, row: one.error(text, row, "time"))


def _check_all(
    inputs: Sequence[Decoded],
    symbols: Sequence[str],
    codes: Sequence[Sequence[Codes]],
    times: Sequence[Times],
    names: Sequence[str],
    options: ReadOptions,
) -> list[list[Checked]]:
    empty_code = 0 if symbols and symbols[0] == "" else None
    jobs: list[tuple[int, int, Codes, Int64, Mask | None, int]] = []
    for number, each in enumerate(times):
        first_row = 0
        for chunk, (code, part, present) in enumerate(zip(codes[number], each.parts, each.present, strict=True)):
            jobs.append((number, chunk, code, part, present, first_row))
            first_row += len(part)

    def run(job: tuple[int, int, Codes, Int64, Mask | None, int]) -> Checked:
        number, chunk, code, part, present, first_row = job
        one = inputs[number]
        return check(
            code,
            part,
            present,
            [one.columns[name].chunk(chunk) for name in names],
            empty_code=empty_code,
            first_row=first_row,
            nan=options.nan,
            refuse=one.error,
        )

    checked: list[list[Checked]] = [[] for _ in inputs]
    for job, result in zip(jobs, parallel(run, jobs), strict=True):
        checked[job[0]].append(result)
    return checked


def settle_interval(
    arranged: Arranged, symbols: Sequence[str], merged: Merged, options: ReadOptions, path: str | None = None
) -> tuple[Interval | None, Timestamps]:
    """The interval, told or inferred; times that mark a bar's close are shifted to its open, in place.

    Raises
    ------
    BarsError
        If the interval can't be inferred and was not told.
    """
    notes, timestamps = merged.notes, merged.timestamps
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
    if options.label == "close" and interval is not None:
        arranged.times = interval.opened(arranged.times)
        notes.decide("label", "close", f"as told; shifted back by {interval.text} to the open")
    else:
        notes.decide("label", options.label, "as told" if options.label == "close" else "not told; assumed")
        if timestamps == "utc" and merged.all_midnight and interval is not None and interval.is_session:
            notes.decide("timestamps", "session dates", "all times are at 00:00 UTC, a day or more apart")
            timestamps = "session"
    return interval, timestamps


def time_text(nanoseconds: int) -> str:
    """ISO form of an instant or wall-clock time."""
    return str(np.datetime64(nanoseconds, "ns")).removesuffix(".000000000").replace("T", " ")
