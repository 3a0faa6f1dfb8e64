"""The time column to nanoseconds: text, whole numbers, dates and Arrow time stamps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.detect import Decision, cannot_tell, mixed_zones, time_form
from stager.bars.options import FIRST_YEAR, LAST_YEAR
from stager.bars.threads import parallel
from stager.errors import BarsError

Int64 = npt.NDArray[np.int64]
Refuse: TypeAlias = Callable[[str, int], BarsError]
Form: TypeAlias = Literal["instant", "naive"]

DAY = 86_400 * 10**9
_UNITS = {"seconds": 10**9, "milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}
_DATES = "dates"
_ARROW_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


@dataclass
class Times:
    """The times of one input, in its order.

    Attributes
    ----------
    parts : list of ndarray of int64
        Nanoseconds since 1970: UTC if ``form`` is ``"instant"``, else of the wall clock. Missing times hold some value.
    present : list of ndarray of bool or None
        Where a time is given; None: everywhere.
    form : {"instant", "naive"}
    all_midnight : bool
        Whether every time is at 00:00.
    """

    parts: list[Int64]
    present: list[npt.NDArray[np.bool_] | None]
    form: Form
    all_midnight: bool
    decision: Decision
    first_clock_row: int = 0
    # The least and largest, where the times are whole numbers.
    extremes: tuple[int, int] | None = None


def year_window(allow_years: tuple[int, int] | None) -> tuple[int, int]:
    """First and last plausible year: as told, else 1980 to next year."""
    return allow_years or (1980, date.today().year + 1)


def read_times(column: pa.ChunkedArray[Any], years: tuple[int, int], is_text_file: bool, refuse: Refuse) -> Times:
    """Times of a column, in parts as its chunks.

    Parameters
    ----------
    column : ChunkedArray
        Time stamps, dates, whole numbers or text.
    years : tuple of int
        First and last plausible year.
    is_text_file : bool
        Whether Arrow types are what text was parsed into.
    refuse : callable
        Makes the error of a message and a row.

    Raises
    ------
    BarsError
        If the column can't be told, mixes forms, or leaves the plausible years.
    """
    times = _read(column, years, is_text_file, refuse)
    lengths = [len(chunk) for chunk in column.chunks]
    if [len(part) for part in times.parts] != lengths:
        # Arrow's kernels may make one chunk of several.
        cuts = np.cumsum(lengths)[:-1]
        present = [
            np.ones(len(p), np.bool_) if m is None else m for p, m in zip(times.parts, times.present, strict=True)
        ]
        has_all = all(mask is None for mask in times.present)
        times.parts = np.split(np.concatenate(times.parts), cuts)
        times.present = [None] * len(lengths) if has_all else np.split(np.concatenate(present), cuts)
    return times


def _read(column: pa.ChunkedArray[Any], years: tuple[int, int], is_text_file: bool, refuse: Refuse) -> Times:
    kind = column.type
    if pa.types.is_null(kind):
        column, kind = column.cast(pa.timestamp("ns")), pa.timestamp("ns")
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        column = _parse_text(column.cast(pa.string()), years, refuse)
        kind, is_text_file = column.type, True
    if pa.types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.timestamp("s"))
        return _finish(column, 10**9, years, "naive", Decision("time", "dates", f"the type {kind}"), refuse)
    if pa.types.is_timestamp(kind):
        form: Form = "naive" if kind.tz is None else "instant"
        if is_text_file:
            source = "ISO 8601 text " + ("without a zone" if kind.tz is None else "with a zone")
        else:
            source = f"the type {kind}"
        return _finish(column, _ARROW_UNITS[kind.unit], years, form, Decision("time", "time stamps", source), refuse)
    if pa.types.is_integer(kind):
        return _from_integers(column, years, refuse)
    raise refuse(
        f"the time column has the type {kind}, which is no time; give time stamps, dates, ISO 8601 text or whole "
        "numbers since 1970",
        0,
    )


def _parse_text(column: pa.ChunkedArray[Any], years: tuple[int, int], refuse: Refuse) -> pa.ChunkedArray[Any]:
    """Text to time stamps or whole numbers."""
    column = pc.utf8_trim_whitespace(column)
    words = pa.array(["", "null", "NULL", "None", "N/A", "NA", "#N/A", "-"])
    column = pc.if_else(pc.is_in(column, value_set=words), pa.scalar(None, pa.string()), column)
    row = next((i for i, value in enumerate(column) if value.is_valid), None)
    if row is None:
        return column.cast(pa.timestamp("ns"))
    sample = str(column[row].as_py())
    form = time_form(sample)
    if form is None:
        raise refuse(cannot_tell(sample), row)
    kind = time_type(form)
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        for number, value in enumerate(column):
            text = value.as_py()
            if text is not None and (message := time_fault(text, sample, years)) is not None:
                raise refuse(message, number) from None
        raise refuse("a time in this column can't be read", 0) from None


def time_type(form: str | None) -> pa.DataType:
    """The Arrow type that a form of time text is parsed into."""
    if form == "integer":
        return pa.int64()
    return pa.timestamp("ns", "UTC") if form == "aware" else pa.timestamp("ns")


def time_fault(cell: str, sample: str, years: tuple[int, int]) -> str | None:
    """What is wrong with a time text in a column whose first time is ``sample``; None: nothing."""
    form, first = time_form(cell), time_form(sample)
    if form is None:
        return cannot_tell(cell)
    if "aware" in (form, first) and form != first and "integer" not in (form, first):
        return mixed_zones(cell, sample)
    if (form == "integer") != (first == "integer"):
        return f"times of two forms are mixed: {cell!r} and {sample!r}; write all of them in one form"
    try:
        if form == "integer":
            pa.scalar(cell).cast(pa.int64())
        else:
            pa.scalar(cell).cast(time_type(form))
    except pa.ArrowInvalid:
        if form != "integer" and not FIRST_YEAR <= int(cell[:4]) <= LAST_YEAR:
            return year_fault(cell, years)
        return f"{cell!r} is no time that exists; check the month, the day and the clock"
    return None


def year_fault(value: str, years: tuple[int, int]) -> str:
    """The message about a time outside the plausible years."""
    return (
        f"the time {value} lies outside the years {years[0]} to {years[1]}; most likely its unit or form is another "
        f"than it looks. If it is right, allow it with --allow-years FIRST LAST (int64 nanoseconds hold {FIRST_YEAR} "
        f"to {LAST_YEAR})"
    )


def _finish(
    column: pa.ChunkedArray[Any],
    unit: int,
    years: tuple[int, int],
    form: Form,
    decision: Decision,
    refuse: Refuse,
) -> Times:
    """Check the years of Arrow time stamps and bring them to nanoseconds."""
    low = int(np.datetime64(f"{years[0]:04d}-01-01", "s").astype(np.int64)) * (10**9 // unit)
    high = int(np.datetime64(f"{years[1] + 1:04d}-01-01", "s").astype(np.int64)) * (10**9 // unit)

    def convert(part: pa.Array[Any]) -> tuple[Int64, npt.NDArray[np.bool_] | None, int, int]:
        raw, present = _numbers(part)
        outside = -1
        if len(raw) and (raw.min() < low or raw.max() >= high):
            wrong = (raw < low) | (raw >= high)
            rows = np.flatnonzero(wrong if present is None else wrong & present)
            outside = int(rows[0]) if len(rows) else -1
        nanoseconds = raw if unit == 1 or outside >= 0 else raw * unit
        clock = -1
        if outside < 0 and len(raw):
            # Nearly always the first row tells.
            rows = np.flatnonzero(raw[:1] % (DAY // unit))
            rows = rows if len(rows) else np.flatnonzero(raw % (DAY // unit))
            clock = int(rows[0]) if len(rows) else -1
        return nanoseconds, present, outside, clock

    parts: list[Int64] = []
    present: list[npt.NDArray[np.bool_] | None] = []
    start, first_clock = 0, -1
    for raw, given, outside, clock in parallel(convert, column.chunks):
        if outside >= 0:
            value = np.datetime64(int(raw[outside]), _unit_name(unit))
            raise refuse(year_fault(str(value).removesuffix(".000000000"), years), start + outside)
        if clock >= 0 and first_clock < 0:
            first_clock = start + clock
        parts.append(raw)
        present.append(given)
        start += len(raw)
    return Times(parts, present, form, first_clock < 0, decision, max(first_clock, 0))


def _unit_name(unit: int) -> Any:
    return next(name for name, size in _ARROW_UNITS.items() if size == unit)


def _numbers(part: pa.Array[Any]) -> tuple[Int64, npt.NDArray[np.bool_] | None]:
    """The integers of an array; a missing one holds the first that is given."""
    numbers = part.view(pa.int64()) if pa.types.is_timestamp(part.type) else part
    if numbers.null_count == 0:
        return numbers.to_numpy(), None
    present = numbers.is_valid().to_numpy(zero_copy_only=False)
    filler = numbers.drop_null()[0] if present.any() else pa.scalar(0, pa.int64())
    return numbers.fill_null(filler).to_numpy(), present


def _from_integers(column: pa.ChunkedArray[Any], years: tuple[int, int], refuse: Refuse) -> Times:
    try:
        column = column.cast(pa.int64())
    except pa.ArrowInvalid:
        raise refuse("a time is larger than int64 holds", 0) from None
    extremes: Any = pc.min_max(column).as_py()
    if extremes["min"] is None:
        return _finish(
            column.cast(pa.timestamp("ns")), 1, years, "instant", Decision("time", "none", "no rows"), refuse
        )
    low, high = int(extremes["min"]), int(extremes["max"])
    first, last = years[0] * 10_000 + 101, years[1] * 10_000 + 1231
    if first <= low and high <= last:
        dates = _calendar_dates(column, refuse)
        if dates is not None:
            found = _finish(dates, 10**9, years, "naive", whole_numbers(_DATES, low, high), refuse)
            return replace(found, extremes=(low, high))
    start = int(np.datetime64(f"{years[0]:04d}-01-01", "s").astype(np.int64)) * 10**9
    end = int(np.datetime64(f"{years[1] + 1:04d}-01-01", "s").astype(np.int64)) * 10**9

    def unit_of(value: int) -> str | None:
        return next((name for name, size in _UNITS.items() if start <= value * size < end), None)

    name = next((name for name, size in _UNITS.items() if start <= low * size and high * size < end), None)
    if name is None:
        units = (unit_of(low), unit_of(high))
        if None in units:
            row, value = _first(column, lambda value: unit_of(value) is None)
            raise refuse(
                f"{value} is neither seconds, milliseconds, microseconds nor nanoseconds since 1970 in the years "
                f"{years[0]} to {years[1]}, nor a date YYYYMMDD; most likely its unit is another one. If it is right, "
                "allow it with --allow-years FIRST LAST",
                row,
            )
        row, value = _first(column, lambda value: unit_of(value) != units[0])
        raise refuse(
            f"whole numbers of two units are mixed: {low} would be {units[0]} and {value} {unit_of(value)} since 1970; "
            "write all of them in one unit",
            row,
        )
    size = _UNITS[name]
    scaled = pa.chunked_array(
        parallel(lambda part: pc.multiply(part, size) if size > 1 else part, column.chunks), type=pa.int64()
    )
    decision = whole_numbers(f"{name} since 1970 UTC", low, high)
    found = _finish(scaled.cast(pa.timestamp("ns")), 1, years, "instant", decision, refuse)
    return replace(found, extremes=(low, high))


def whole_numbers(meaning: str, low: int, high: int) -> Decision:
    """The decision about times that are whole numbers between two."""
    return Decision("time", meaning, f"whole numbers {'YYYYMMDD,' if meaning == _DATES else 'from'} {low} to {high}")


def _first(column: pa.ChunkedArray[Any], wanted: Callable[[int], bool]) -> tuple[int, int]:
    """Row and value of the first number that is wanted."""
    return next((i, value.as_py()) for i, value in enumerate(column) if value.is_valid and wanted(value.as_py()))


def _calendar_dates(column: pa.ChunkedArray[Any], refuse: Refuse) -> pa.ChunkedArray[Any] | None:
    """Whole numbers YYYYMMDD to dates; None if one has no such month or day."""
    parts: list[pa.Array[Any]] = []
    for part in column.chunks:
        numbers, present = _numbers(part)
        if present is not None and not present.any():
            parts.append(pa.nulls(len(numbers), pa.timestamp("s")))
            continue
        years, months, days = numbers // 10_000, numbers // 100 % 100, numbers % 100
        if np.any((months < 1) | (months > 12) | (days < 1)):
            return None
        begin = (years * 12 + months - 1 - 1970 * 12).astype("datetime64[M]")
        dates = begin.astype("datetime64[D]") + (days - 1).astype("timedelta64[D]")
        if np.any(dates.astype("datetime64[M]") != begin):
            return None
        mask = None if present is None else ~present
        parts.append(pa.array(dates.astype("datetime64[s]"), type=pa.timestamp("s"), mask=mask))
    return pa.chunked_array(parts, type=pa.timestamp("s"))
