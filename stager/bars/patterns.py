"""Times as text by patterns such as ``%d.%m.%Y %H:%M``: column-wise, every month and day checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.options import FIRST_YEAR, LAST_YEAR
from stager.bars.threads import parallel
from stager.errors import ConfigError

DateOrder = Literal["dmy", "mdy"]
Int64 = npt.NDArray[np.int64]

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_TOKENS = {
    "Y": r"(?P<Y>\d{4})",
    "y": r"(?P<y>\d{2})",
    "m": r"(?P<m>\d{1,2})",
    "d": r"(?P<d>\d{1,2})",
    "b": r"(?P<b>[A-Za-z]{3})[a-z]*\.?",
    "H": r"(?P<H>\d{1,2})",
    "I": r"(?P<I>\d{1,2})",
    "M": r"(?P<M>\d{2})",
    "S": r"(?P<S>\d{2})",
    "f": r"(?P<f>\d{1,9})",
    "p": r"(?P<p>[AaPp])\.?[Mm]\.?",
    "z": r"(?P<z>Z|[+-]\d\d:?\d\d)",
    "s": r"(?P<s>\d{9,10})",
}
_DAY_NAME = re.compile(r"%[aA][, ]*")

# With dots the day stands first: nobody writes 12.31.2024.
_DATES = {
    "%Y-%m-%d": None,
    "%Y.%m.%d": None,
    "%Y/%m/%d": None,
    "%Y%m%d": None,
    "%d.%m.%Y": None,
    "%d.%m.%y": None,
    "%m/%d/%Y": "mdy",
    "%d/%m/%Y": "dmy",
    "%m-%d-%Y": "mdy",
    "%d-%m-%Y": "dmy",
    "%m/%d/%y": "mdy",
    "%d/%m/%y": "dmy",
    "%b %d, %Y": None,
    "%d %b %Y": None,
    "%d-%b-%Y": None,
    "%d-%b-%y": None,
}
_CLOCKS = (
    "", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %H.%M.%S", " %I:%M %p", " %I:%M:%S %p", " %I:%M%p", " %I-%p",
    " %H%M%S", " %H%M", "T%H:%M", "T%H:%M:%S", "T%H:%M:%S.%f", "T%H%M%S", " %H:%M:%S%z", " %H:%M:%S.%f%z",
    " %H:%M:%S %z", "T%H:%M:%S%z",
)  # fmt: skip


@cache
def regex_of(pattern: str) -> str:
    """The regular expression of a pattern.

    Raises
    ------
    ConfigError
        If it holds an unknown letter, holds one twice, or doesn't determine a day.
    """
    parts: list[str] = []
    letters: list[str] = []
    for piece in re.findall(r"%.|[^%]+|%$", pattern, flags=re.DOTALL):
        if piece.startswith("%") and piece != "%%":
            letter = piece[1:]
            # Written without anything between them, fields have their full width.
            if letter not in _TOKENS or letter in letters:
                known = " ".join(f"%{each}" for each in _TOKENS)
                raise ConfigError(f"time pattern {pattern!r}: {piece!r} is unknown or stands twice; there are {known}")
            letters.append(letter)
            parts.append(_TOKENS[letter])
        else:
            parts.append(re.escape(piece.replace("%%", "%")))
    for i in range(len(parts) - 1):
        if parts[i].startswith("(") and parts[i + 1].startswith("("):
            parts[i] = parts[i].replace(r"\d{1,2}", r"\d{2}")
            if r"\d{2}" in parts[i]:
                parts[i + 1] = parts[i + 1].replace(r"\d{1,2}", r"\d{2}")
    has = set(letters)
    if not ("s" in has or (has & {"Y", "y"} and has & {"m", "b"} and "d" in has)) or ("I" in has) != ("p" in has):
        raise ConfigError(
            f"time pattern {pattern!r} needs a year (%Y), a month (%m or %b) and a day (%d), and %I and %p together"
        )
    return "^" + "".join(parts) + "$"


def possible(cells: Sequence[str], order: DateOrder | None) -> list[str]:
    """The known patterns that all these texts fit, leaving out those of the other date order."""
    found: list[str] = []
    column = pa.chunked_array([pa.array(list(cells), pa.string())])
    for date, its_order in _DATES.items():
        if order is not None and its_order is not None and its_order != order:
            continue
        found += [
            date + clock
            for clock in _CLOCKS
            if re.match(regex_of(date + clock), cells[0]) and _fits(column, date + clock)
        ]
    if not found and re.match(regex_of("%s.%f"), cells[0]):
        found = ["%s.%f"]
    return found


def _fits(column: Any, pattern: str) -> bool:
    """Whether all texts are such times, up to one in a year that int64 nanoseconds don't hold."""
    _, bad, is_outside = parse(column, pattern)
    return bad < 0 or is_outside


def is_order_open(patterns: Sequence[str]) -> bool:
    """Whether day-first and month-first patterns are both among these."""
    return len({order for date, order in _DATES.items() if order and any(p.startswith(date) for p in patterns)}) > 1


def parse(column: pa.ChunkedArray[Any], pattern: str) -> tuple[pa.ChunkedArray[Any], int, bool]:
    """Time stamps of text.

    Parameters
    ----------
    column : ChunkedArray of string
        Without blanks around the cells.
    pattern : str

    Returns
    -------
    stamps : ChunkedArray of timestamp[ns] or timestamp[ns, UTC]
        With a zone if the pattern has one.
    bad : int
        The first row that doesn't fit or doesn't exist; -1: none.
    is_outside : bool
        Whether that row only leaves the years that int64 nanoseconds hold.
    """
    expression = regex_of(pattern)
    aware = "%z" in pattern or "%s" in pattern
    # RE2 writes only this form of named groups, also in old versions.
    results = parallel(lambda chunk: _parse_chunk(chunk, expression), column.chunks)
    kind: Any = pa.timestamp("ns", "UTC") if aware else pa.timestamp("ns")
    stamps: list[Any] = []
    start, bad, is_outside = 0, -1, False
    for nanoseconds, missing, wrong, outside in results:
        if wrong >= 0 and bad < 0:
            bad, is_outside = start + wrong, outside
        stamps.append(pa.array(nanoseconds, mask=missing).cast(kind))
        start += len(nanoseconds)
    return pa.chunked_array(stamps, type=kind), bad, is_outside


def _parse_chunk(chunk: Any, expression: str) -> tuple[Int64, npt.NDArray[np.bool_], int, bool]:
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    fields = pc.extract_regex(chunk, pattern=expression)
    wrong = fields.is_null().to_numpy(zero_copy_only=False) & ~missing
    names = {field.name for field in fields.type}

    def text(name: str) -> Any:
        return pc.fill_null(pc.struct_field(fields, name), "")

    def number(name: str, default: int) -> Int64:
        if name not in names:
            return np.full(len(chunk), default, dtype=np.int64)
        digits = text(name)
        numbers: Int64 = pc.if_else(pc.equal(digits, pa.scalar("")), str(default), digits).cast(pa.int64()).to_numpy()
        return numbers

    fraction = np.zeros(len(chunk), dtype=np.int64)
    if "f" in names:
        digits = pc.utf8_rpad(text("f"), 9, "0")
        fraction = digits.cast(pa.int64()).to_numpy()
    if "s" in names:
        nanoseconds = number("s", 0) * 10**9 + fraction
        return nanoseconds, missing | wrong, _first(wrong), False
    years = number("Y", 2000)
    if "y" in names:
        short = number("y", 0)
        years = np.where(short < 70, 2000 + short, 1900 + short)
    months = number("m", 1)
    if "b" in names:
        place = pc.index_in(pc.utf8_lower(text("b")), value_set=pa.array(_MONTHS))
        months = pc.fill_null(place, -1).to_numpy().astype(np.int64) + 1
    days, hours = number("d", 1), number("H", 0)
    minutes, seconds = number("M", 0), number("S", 0)
    if "I" in names:
        twelve = number("I", 12)
        wrong |= (twelve < 1) | (twelve > 12)
        is_pm = pc.equal(pc.utf8_lower(text("p")), pa.scalar("p")).to_numpy(zero_copy_only=False)
        hours = twelve % 12 + 12 * is_pm
    wrong |= (months < 1) | (months > 12) | (days < 1) | (days > 31) | (hours > 23) | (minutes > 59) | (seconds > 59)
    wrong &= ~missing
    begin = ((years - 1970) * 12 + np.clip(months, 1, 12) - 1).astype("datetime64[M]")
    dates = begin.astype("datetime64[D]") + (days - 1).astype("timedelta64[D]")
    wrong |= (dates.astype("datetime64[M]") != begin) & ~missing
    outside = ((years < FIRST_YEAR) | (years > LAST_YEAR)) & ~missing & ~wrong
    day = np.where(outside, 0, dates.astype(np.int64))
    nanoseconds = ((day * 86_400 + hours * 3600 + minutes * 60 + seconds) * 10**9) + fraction
    if "z" in names:
        nanoseconds -= _offsets(text("z")) * 10**9
    first_wrong, first_outside = _first(wrong), _first(outside)
    if first_outside >= 0 and (first_wrong < 0 or first_outside < first_wrong):
        return nanoseconds, missing | wrong | outside, first_outside, True
    return nanoseconds, missing | wrong | outside, first_wrong, False


def _offsets(texts: Any) -> Int64:
    """Seconds of ``+05:30``, ``-0500`` or ``Z``, of which there are few different ones."""
    words = texts.dictionary_encode()
    seconds: list[int] = []
    for word in words.dictionary.to_pylist():
        digits = word.replace(":", "").replace("Z", "+0000") or "+0000"
        size = int(digits[1:3]) * 3600 + int(digits[3:5]) * 60
        seconds.append(-size if digits[0] == "-" else size)
    table: Int64 = np.array(seconds, dtype=np.int64)
    found: Int64 = table[words.indices.to_numpy()]
    return found


def _first(rows: npt.NDArray[np.bool_]) -> int:
    found = np.flatnonzero(rows)
    return int(found[0]) if len(found) else -1
