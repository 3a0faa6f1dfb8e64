"""The first lines of a text file: which of them is the header, what stands between the fields, and some rows."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from stager.bars.detect import NULL_WORDS, is_number, normalise, time_form
from stager.bars.formats import Format, built_in
from stager.bars.options import ReadOptions
from stager.bars.room import Room
from stager.bars.sources import HEAD_NBYTES, Opened
from stager.errors import BarsError

_SAMPLE_ROWS = 100
_SEP = re.compile(r'\s*"?sep=(.)"?\s*', re.IGNORECASE)


@dataclass(frozen=True)
class Sample:
    """The first lines of a CSV file.

    Attributes
    ----------
    delimiter : str
    names : tuple of str
        Of a file without a header: ``"1"``, ``"2"`` and so on.
    header_line : int
        The lines up to this one, counted from 1, hold no rows.
    rows : tuple of (int, tuple of str)
        Line and cells of the first rows.
    is_header_only : bool
    has_header : bool
    header : str
        The header as it stands in the file.
    has_repeats : bool
        Whether the header stands again among the first rows.
    """

    delimiter: str
    names: tuple[str, ...]
    header_line: int
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    is_header_only: bool
    has_header: bool = True
    header: str = ""
    has_repeats: bool = False


def sample_csv(
    opened: Opened, options: ReadOptions, described: Format | None = None, room: Room | None = None
) -> Sample:
    """Header line, delimiter and first rows of a CSV file; aligned columns get tabs between them, in ``opened``.

    Raises
    ------
    BarsError
        If it is no UTF-8 text, or has no delimiter; or if it must be rewritten and there is no `room` for that.
    """
    name = opened.source.name
    lines = _first_lines(opened, room)
    if not any(line.strip() for line in lines):
        raise BarsError(f"the first line is longer than {HEAD_NBYTES} bytes; this is no CSV file of bars", path=name)
    told = options.delimiter or (None if described is None else described.delimiter)
    header_line, hint = _header_line(lines, told)
    header = lines[header_line - 1]
    delimiter = told or hint or _best_delimiter(header)
    if delimiter not in header:
        n_names = len(header.split())
        following = next((line for line in lines[header_line:] if line.strip()), "")
        if options.delimiter is None and n_names >= 5 and len(following.split()) == n_names:
            if room is not None:
                room.check(4 * opened.unpacked_nbytes(), "aligned columns are not read in parts; write CSV")
            _tabs_for_blanks(opened)
            return sample_csv(opened, options, described, room)
        raise BarsError(
            f"the header line {header.strip()[:80]!r} holds "
            + (f"no {delimiter!r}" if told else "none of the delimiters , ; | and tab")
            + "; say what stands between the fields with --delimiter",
            path=name,
            line=header_line,
        )
    names = tuple(fields(header, delimiter))
    has_header = not is_data(names)
    if has_header:
        names, header_line = _levels(lines, header_line, names, delimiter)
    else:
        names, header_line = tuple(str(i) for i in range(1, len(names) + 1)), header_line - 1
    rows: list[tuple[int, tuple[str, ...]]] = []
    has_repeats = False
    for number, line in enumerate(lines[header_line:], start=header_line + 1):
        if is_blank(line, delimiter, len(names)):
            continue
        if has_header and line == header:
            has_repeats = True
            continue
        if len(rows) == _SAMPLE_ROWS:
            break
        rows.append((number, tuple(fields(line, delimiter))))
    return Sample(
        delimiter, names, header_line, tuple(rows), not rows and opened.is_whole, has_header, header, has_repeats
    )


def with_names(sample: Sample, names: Sequence[str]) -> Sample:
    """The same with names for the columns of a file without a header."""
    return replace(sample, names=tuple(names))


def _first_lines(opened: Opened, room: Room | None) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(opened.head, final=opened.is_whole)
    except UnicodeDecodeError as error:
        if _is_gbk(opened, room):
            opened.replace(opened.read().decode("gbk").encode())
            return _first_lines(opened, room)
        before = opened.head[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        raise not_utf8(opened.source.name, before.count(b"\n") + 1, opened.head[error.start]) from None
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not opened.is_whole:
        lines.pop()
    return lines


def _is_gbk(opened: Opened, room: Room | None) -> bool:
    """Whether the bytes read as GBK give the header of a known format, which chance does not."""
    header = opened.head.split(b"\n", 1)[0]
    try:
        names = header.decode("gbk").strip()
        if room is not None:
            room.check(4 * opened.unpacked_nbytes(), "text that is no UTF-8 is not read in parts; convert it")
        opened.read().decode("gbk")
    except UnicodeDecodeError:
        return False
    return any(
        each.header and not "".join(each.header).isascii() and all(name in names for name in each.header)
        for each in built_in().values()
    )


def _header_line(lines: Sequence[str], told: str | None) -> tuple[int, str | None]:
    """Number of the header, or of the first row if there is none, and the delimiter that a line before it names."""
    filled = list(islice((number for number, line in enumerate(lines, start=1) if line.strip()), 20))
    hint = None
    for place, number in enumerate(filled):
        line = lines[number - 1]
        match = _SEP.fullmatch(line)
        if match is not None:
            hint = match[1]
            continue
        if place + 1 == len(filled):
            return number, hint
        following = lines[filled[place + 1] - 1]
        delimiter = told or hint or _best_delimiter(following)
        these, those = fields(line, delimiter), fields(following, delimiter)
        # A title or an address above the header: fewer fields, and what follows is no row yet.
        is_title = len(these) < 4 and len(those) > len(these) and not is_data(these) and not is_data(those)
        if not is_title and not (line.lstrip().startswith("#") and len(those) >= 4):
            return number, hint
    return filled[-1], hint


def _levels(
    lines: Sequence[str], header_line: int, names: tuple[str, ...], delimiter: str
) -> tuple[tuple[str, ...], int]:
    """Names of a header of three lines (fields, symbols, name of the index) as the text of pairs."""
    below = [fields(line, delimiter) for line in lines[header_line : header_line + 2]]
    if len(below) < 2 or any(len(cells) != len(names) for cells in below) or len(names) < 2:
        return names, header_line
    symbols, index = below
    if not index[0].strip() or any(cell.strip() for cell in index[1:]) or is_data(symbols):
        return names, header_line
    if normalise(names[0]) not in ("price", "", "attributes") or normalise(symbols[0]) not in ("ticker", "", "symbols"):
        return names, header_line
    pairs = (repr((field.strip(), symbol.strip())) for field, symbol in zip(names[1:], symbols[1:], strict=True))
    return (index[0], *pairs), header_line + 2


def _tabs_for_blanks(opened: Opened) -> None:
    data = re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", opened.read())
    opened.replace(re.sub(rb"[ \t]+", b"\t", data))


def _best_delimiter(line: str) -> str:
    return max(",;\t|", key=re.sub(r'"[^"]*"', "", line).count)


def not_utf8(path: str, line: int, byte: int) -> BarsError:
    """The error of a line that is no UTF-8."""
    return BarsError(
        f"is no UTF-8 text (byte 0x{byte:02x}); say what it is with --encoding, such as latin-1 or gbk",
        path=path,
        line=line,
    )


def fields(line: str, delimiter: str) -> list[str]:
    """The fields of one line."""
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:
        return line.split(delimiter)


def is_blank(line: str, delimiter: str, n_fields: int) -> bool:
    """Whether a line holds no row: nothing, or blanks that are no fields."""
    return not line or (not line.strip(" \t") and line.count(delimiter) + 1 != n_fields)


def is_data(names: Sequence[str]) -> bool:
    """Whether a line looks like a row: numbers, or a time and a number."""
    cells = [name.strip() for name in names if name.strip()]
    n_numbers = sum(is_number(cell) and cell not in NULL_WORDS for cell in cells)
    n_times = sum(time_form(cell) is not None for cell in cells)
    return n_numbers >= 3 or (n_numbers >= 1 and n_times > n_numbers)
