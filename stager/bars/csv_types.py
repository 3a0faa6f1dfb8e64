"""What the columns of a CSV file are parsed into, by its header and first rows."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pyarrow as pa

from stager.bars.columns import SYMBOLS
from stager.bars.detect import NULL_WORDS, Layout, cannot_tell, is_number, mixed_zones, time_form
from stager.bars.formats import NumberRule
from stager.bars.numbers import dot_may_group, may_group
from stager.bars.options import ReadOptions
from stager.bars.patterns import possible
from stager.bars.sample import Sample
from stager.bars.sources import Opened
from stager.bars.times import time_type
from stager.errors import BarsError

Kind: TypeAlias = Literal["time", "text", "number"]


def marked_numbers(
    opened: Opened,
    sample: Sample,
    layout: Layout,
    options: ReadOptions,
    kinds: dict[str, Kind],
    types: dict[str, pa.DataType],
) -> set[str]:
    """Columns of roles whose numbers are written so that they are parsed as text."""
    rule = NumberRule() if layout.format is None else layout.format.numbers
    is_told = options.decimal == "," or options.thousands or rule.decimal == "," or rule.thousands
    numbers = [str(i) for role, i in layout.roles.items() if role not in ("time", "symbol")]
    rows = [cells for _, cells in sample.rows if len(cells) == len(sample.names)]
    is_plain = all(is_number(cells[int(key)]) for cells in rows for key in numbers)
    if is_plain and not (is_told or rule.suffixes or rule.nulls):
        if options.decimal is None and rule.decimal is None:
            for key in numbers:
                _refuse_groups(opened, sample, int(key))
        return set()
    # All of them, because the numbers of a file are written alike.
    types.update(dict.fromkeys(numbers, pa.string()))
    return set(numbers)


def _refuse_groups(opened: Opened, sample: Sample, column: int) -> None:
    """Refuse plain numbers whose dots may part thousands."""
    rows = [(line, cells[column].strip()) for line, cells in sample.rows if len(cells) == len(sample.names)]
    found = dot_may_group(cell for _, cell in rows)
    if found is not None:
        raise BarsError(
            may_group(*found),
            path=opened.source.name,
            line=next(line for line, cell in rows if cell == found[0]),
            column=sample.names[column].strip(),
        )


def csv_types(
    opened: Opened, sample: Sample, layout: Layout, options: ReadOptions
) -> tuple[dict[str, Kind], dict[str, pa.DataType]]:
    """What each column, named by its position, is and is parsed into; further columns of text leave the layout."""
    kinds: dict[str, Kind] = {}
    types: dict[str, pa.DataType] = {}
    for role, i in layout.roles.items():
        kinds[str(i)] = "time" if role == "time" else "text" if role == "symbol" else "number"
        types[str(i)] = SYMBOLS if role == "symbol" else pa.float64()
    time = _time_type(opened, sample, layout, options)
    for i in layout.time_columns:
        kinds[str(i)] = "time" if time is not None else "text"
        types[str(i)] = pa.string() if time is None else time
    for i in list(layout.further):
        text = next((c[i] for _, c in sample.rows if len(c) == len(sample.names) and not is_number(c[i])), None)
        if text is not None:
            layout.further.remove(i)
            layout.warnings.append(text_column(layout.names[i], text))
        else:
            kinds[str(i)], types[str(i)] = "number", pa.float64()
    return kinds, types


def text_column(name: str, cell: str) -> str:
    return f"column {name!r} holds text ({cell.strip()[:40]!r}) and is left out"


def _time_type(opened: Opened, sample: Sample, layout: Layout, options: ReadOptions) -> pa.DataType | None:
    """The Arrow type that the time is parsed into; None: text that is read by a pattern."""
    column = layout.time_columns[0]
    rule = None if layout.format is None else layout.format.time
    if options.time_pattern is not None or (rule is not None and rule.pattern is not None):
        return None
    if len(layout.time_columns) > 1:
        _refuse_two_times(opened, sample, layout)
        return None
    if rule is not None and rule.unit is not None:
        return pa.int64()
    first: tuple[str, str] | None = None
    needs_trimming = False
    for line, cells in sample.rows:
        if len(cells) != len(sample.names):
            continue
        cell = cells[column].strip()
        needs_trimming |= cell != cells[column]
        if cell in NULL_WORDS:
            continue
        form = time_form(cell)
        message = None
        if form is None and first is None and possible([cell], None):
            return None
        if form is None:
            message = cannot_tell(cell)
        elif first is None:
            first = (cell, form)
        elif (form == "aware") != (first[1] == "aware") and "integer" not in (form, first[1]):
            message = mixed_zones(cell, first[0])
        if message is not None:
            raise BarsError(message, path=opened.source.name, line=line, column=sample.names[column].strip())
    if needs_trimming:
        return pa.string()
    return time_type(None if first is None else first[1])


def _refuse_two_times(opened: Opened, sample: Sample, layout: Layout) -> None:
    """Refuse a date and a time of day whose second column holds whole times."""
    one, other = layout.time_columns[:2]
    for line, cells in sample.rows:
        if len(cells) == len(sample.names) and time_form(cells[other].strip()) not in (None, "integer"):
            raise BarsError(
                f"columns {sample.names[one].strip()!r} and {sample.names[other].strip()!r} could both be the time; "
                "name one with --column time=NAME",
                path=opened.source.name,
                line=line,
            )
