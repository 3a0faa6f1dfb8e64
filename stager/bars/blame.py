"""Slow search, after parsing failed: which line or cell of a CSV file is at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.detect import NULL_WORDS, time_form
from stager.bars.sample import Sample, fields, is_blank, not_utf8
from stager.bars.sources import Opened, lines
from stager.bars.times import time_fault, time_type
from stager.errors import BarsError


@dataclass(frozen=True)
class Fault:
    """A cell that can't be read: its row, a message, and the cell."""

    row: int
    message: str
    cell: str = ""


def line_of(opened: Opened, sample: Sample, row: int) -> int:
    """Physical line, counted from 1, of a row, counted from 0."""
    left = row
    for number, line in enumerate(lines(opened.stream()), start=1):
        if number <= sample.header_line:
            continue
        if is_blank(line.decode("utf-8", "replace"), sample.delimiter, len(sample.names)):
            continue
        if left == 0:
            return number
        left -= 1
    return sample.header_line + 1 + row


def find_ragged(opened: Opened, sample: Sample) -> BarsError | None:
    """The error of the first row with too few or too many fields, or with a quote that isn't closed."""
    expected = len(sample.names)
    for number, raw in enumerate(lines(opened.stream()), start=1):
        if number <= sample.header_line:
            continue
        line = raw.decode("utf-8", "replace")
        if is_blank(line, sample.delimiter, expected):
            continue
        if line.count('"') % 2:
            return BarsError(
                f"a quoted field is not closed: {line[:80]!r}; a field can't hold a line end, and a quote in a field "
                "is doubled",
                path=opened.source.name,
                line=number,
            )
        found = fields(line, sample.delimiter)
        if sample.has_header and len(found) > expected and {len(cells) for _, cells in sample.rows} == {len(found)}:
            return BarsError(
                f"every row has {len(found)} fields, and the header names {expected}: {line[:80]!r}; name all of them "
                "as `positions` of a format (`stager formats new FILE` drafts one) and give it with --format",
                path=opened.source.name,
                line=number,
            )
        if len(found) != expected:
            return BarsError(
                f"the row has {len(found)} fields, and the header has {expected}: {line[:80]!r}; the line is cut, or a "
                "field holds the delimiter without quotes",
                path=opened.source.name,
                line=number,
            )
    return None


def footer(opened: Opened, sample: Sample) -> str | None:
    """The last line, if it is a sentence and no row: words without the delimiter, and not one of a row that was cut."""
    with opened.stream() as stream:
        data = stream.read()
    last = data.rstrip().replace(b"\r", b"\n").rpartition(b"\n")[2].decode("utf-8", "replace")
    is_sentence = last[:1].isalpha() and len(last.split()) >= 3
    return last if is_sentence and sample.delimiter not in last else None


def find_faults(
    opened: Opened,
    sample: Sample,
    read_text: Callable[[], pa.Table],
    kinds: Mapping[str, Literal["time", "text", "number"]],
    years: tuple[int, int],
) -> dict[str, Fault]:
    """The first unreadable cell of each column.

    Parameters
    ----------
    read_text : callable
        Gives the columns as binary.
    kinds : mapping
        What each column is read as.
    years : tuple of int
        First and last plausible year, for the messages.

    Raises
    ------
    BarsError
        If a cell is no UTF-8.
    """
    table, faults = read_text(), {}
    for name, kind in kinds.items():
        first: str | None = None
        start = 0
        for chunk in table[name].chunks:
            try:
                cells = chunk.cast(pa.string())
            except pa.ArrowInvalid:
                row, byte = _undecodable(chunk)
                raise not_utf8(opened.source.name, line_of(opened, sample, start + row), byte) from None
            if kind == "time" and first is None:
                first = next((cell for cell in cells.to_pylist() if cell not in NULL_WORDS), None)
            row = first_bad(cells, kind, first)
            if row >= 0:
                cell = cells[row].as_py()
                message = None
                if kind == "time" and first is not None:
                    message = time_fault(cell, first, years)
                faults[name] = Fault(
                    start + row, message or f"{cell!r} is no {'time' if kind == 'time' else 'number'}", cell
                )
                break
            start += len(chunk)
    return faults


def _undecodable(chunk: pa.Array[Any]) -> tuple[int, int]:
    cells: list[Any] = chunk.to_pylist()
    for row, cell in enumerate(cells):
        try:
            cell.decode("utf-8")
        except UnicodeDecodeError as error:
            return row, cell[error.start]
    return 0, 0


def first_bad(cells: pa.Array[Any], kind: Literal["time", "text", "number"], first: str | None = None) -> int:
    """The first cell of a string array that doesn't convert, or -1; ``first`` is the column's first time."""
    if kind == "text":
        return -1
    target = pa.float64() if kind == "number" else time_type(time_form(first or ""))
    trimmed = cells if kind == "time" else pc.ascii_trim(cells, characters=" \t")
    # Not at import: the first pa.array() loads pandas where it is installed.
    words = pa.array(NULL_WORDS)
    trimmed = pc.if_else(pc.is_in(trimmed, value_set=words), pa.scalar(None, pa.string()), trimmed)
    if _converts(trimmed, target):
        return -1
    low, high = 0, len(trimmed)
    while high - low > 1:
        middle = (low + high) // 2
        if _converts(trimmed.slice(low, middle - low), target):
            low = middle
        else:
            high = middle
    return low


def _converts(cells: pa.Array[Any], target: pa.DataType) -> bool:
    try:
        cells.cast(target)
    except pa.ArrowInvalid:
        return False
    return True
