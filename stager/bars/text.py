"""Text columns of a CSV file to times and numbers, where pyarrow's own parsing does not do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.columns import Column
from stager.bars.detect import NULL_WORDS, Decision, Layout, cannot_tell
from stager.bars.formats import Format, NumberRule
from stager.bars.numbers import Marks, marks_of, read_numbers
from stager.bars.options import ReadOptions
from stager.bars.patterns import is_order_open, parse, possible
from stager.bars.times import year_fault, year_window
from stager.errors import BarsError

# Makes the error of a message, a row and a column's position.
CellError = Callable[[str, int | None, int], BarsError]

_DAY_MS = 86_400_000


def read_times_text(
    columns: Sequence[Column], layout: Layout, options: ReadOptions, error: CellError
) -> tuple[Column, Decision]:
    """Time stamps of one text column, or of the columns of a date and a time of day.

    Raises
    ------
    BarsError
        If a time is wrong, no pattern is known, or several are possible; then the option that tells is named.
    """
    where = layout.time_columns[0]
    rule = None if layout.format is None else layout.format.time.pattern
    told = options.time_pattern or rule
    column = _joined(columns, told, lambda message, row: error(message, row, layout.time_columns[-1]))
    given = column.drop_null()
    kind: Any = pa.timestamp("ns")
    if len(given) == 0:
        return pa.chunked_array([pa.nulls(len(column), kind)]), Decision("time", "none", "no rows")
    if told is not None:
        patterns = [told]
    else:
        patterns = possible(given.slice(0, 100).to_pylist(), options.date_order)
        if not patterns:
            first = str(given[0].as_py())
            raise error(cannot_tell(first), pc.index(column, first).as_py(), where)
    results = [(pattern, *parse(column, pattern)) for pattern in patterns]
    fitting = [result for result in results if result[2] < 0]
    if not fitting:
        pattern, _, bad, is_outside = max(results, key=lambda result: result[2])
        cell = str(column[bad].as_py())
        if is_outside:
            raise error(year_fault(cell, year_window(options.allow_years)), bad, where)
        raise error(f"{cell!r} is no time that exists, written as {pattern}", bad, where)
    if len(fitting) > 1 and any(not result[1].equals(fitting[0][1]) for result in fitting):
        both = " and ".join(result[0] for result in fitting[:4])
        row = int(pc.index(column, given[0]).as_py())
        option = "--date-order dmy or mdy" if is_order_open([result[0] for result in fitting]) else "--time-pattern"
        raise error(
            f"the times, such as {given[0].as_py()!r}, can be read as {both}; say which with {option}", row, where
        )
    source = "as told" if options.time_pattern else "the format" if rule else "the only pattern that all times fit"
    if source.startswith("the only") and options.date_order is not None:
        source += f", {options.date_order} as told"
    return fitting[0][1], Decision("time", fitting[0][0], source)


def _joined(columns: Sequence[Column], told: str | None, refuse: Callable[[str, int], BarsError]) -> Column:
    """The texts of all columns, each parted by a blank; a clock gets the leading zeros that it lost as a number."""
    trimmed = [pc.utf8_trim_whitespace(column) for column in columns]
    if len(trimmed) > 1 and all(pc.all(pc.utf8_is_digit(column)).as_py() for column in trimmed[1:]):
        patterns = [] if told is None else told.split(" ")
        for number, clock in enumerate(trimmed[1:], start=1):
            width: int = pc.max(pc.utf8_length(clock)).as_py() or 0
            if told is not None:
                mine = patterns[number] if len(patterns) == len(trimmed) else told
                digits = 2 if len(mine) == 2 else 4 if mine.endswith("%H%M") else 6
            else:
                digits = 4 if 3 <= width <= 4 else 6
            if told is None and width <= 2:
                row: int = pc.index(pc.match_substring_regex(clock, "[^0]"), True).as_py()
                if row >= 0:
                    raise refuse(
                        f"the clock {clock[row].as_py()!r} may be hours, minutes or seconds; say how times are written "
                        "with --time-pattern, such as '%Y%m%d %H'",
                        row,
                    )
            trimmed[number] = pc.utf8_lpad(clock, digits, "0")
    column = trimmed[0] if len(trimmed) == 1 else pc.utf8_trim_whitespace(pc.binary_join_element_wise(*trimmed, " "))
    empty = pc.is_in(trimmed[0], value_set=pa.array(NULL_WORDS))
    return pc.if_else(empty, pa.scalar(None, pa.string()), column)


def time_of_day(column: Column, described: Format, file_name: str, error: CellError, where: int) -> Column:
    """Wall-clock times of milliseconds since the midnight of the date in the file's name."""
    match = re.search(str(described.time.date_from_file), file_name)
    try:
        day = date.fromisoformat(match[1]) if match is not None else None
    except ValueError:
        day = None
    if day is None:
        raise error(
            f"the file's name {file_name!r} holds no date, which the format {described.name} needs", None, where
        )
    extremes: Any = pc.min_max(column).as_py()
    if extremes["min"] is not None and not 0 <= extremes["min"] <= extremes["max"] < _DAY_MS:
        wrong = extremes["min"] if extremes["min"] < 0 else extremes["max"]
        raise error(f"{wrong} is no time of day in milliseconds", pc.index(column, wrong).as_py(), where)
    midnight = int(np.datetime64(day, "ms").astype(np.int64))
    return pc.add(column, midnight).cast(pa.timestamp("ms")).cast(pa.timestamp("ns"))


def read_marked(
    columns: dict[int, Column],
    rule: NumberRule,
    options: ReadOptions,
    hint: Callable[[int], str],
    error: CellError,
) -> tuple[dict[int, Column], Decision]:
    """Numbers of text columns, by position.

    Parameters
    ----------
    columns : dict
        Position to text.
    rule, options : NumberRule, ReadOptions
    hint : callable
        What a column needs, for errors.
    error : callable
        Makes the error of a message, a row and a column.

    Raises
    ------
    BarsError
        If a cell is no number, or the marks can be read in two ways.
    """
    marks = marks_of(list(columns.values()), rule, options.decimal, options.thousands)
    if not isinstance(marks, Marks):
        where, row = next(
            (i, row)
            for i, column in columns.items()
            if (row := pc.index(pc.utf8_trim_whitespace(column), marks).as_py()) >= 0
        )
        raise error(
            f"{marks!r} is no number that can be read in one way only: say what the comma is with --decimal , or "
            "--thousands ,",
            row,
            where,
        )
    numbers: dict[int, Column] = {}
    for i, column in columns.items():
        numbers[i], bad = read_numbers(column, marks, rule)
        if bad >= 0:
            raise error(f"{column[bad].as_py()!r} is no number{hint(i)}", bad, i)
    is_told = options.decimal or options.thousands or rule.decimal or rule.thousands
    shown = "".join(mark for mark in marks.thousands if mark in ",.") or "apostrophe or blank"
    return numbers, Decision("numbers", f"fractions after {marks.decimal}, thousands by {shown}",
                             "as told" if is_told else "the cells")  # fmt: skip
