"""Which columns are which, what the time is, what stands between the fields: every decision with its source."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stager.bars.options import PRICES, ROLES, ReadOptions, Role
from stager.bars.sources import HEAD_NBYTES, Opened
from stager.errors import BarsError

TimeForm: TypeAlias = Literal["aware", "naive", "date", "integer"]
Refuse: TypeAlias = Callable[[str], BarsError]

NULL_WORDS = ("", "null", "NULL", "None", "N/A", "NA", "#N/A", "-")
TIME_NAMES = frozenset(
    ("time", "timestamp", "datetime", "date time", "date", "ts", "open time", "ts event", "window start")
)
SYMBOL_NAMES = frozenset(("symbol", "ticker", "sym", "instrument", "asset", "code", "secid"))
UNNAMED = frozenset(("", "__index_level_0__"))

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?P<clock>[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,9})?)?)?)?(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?"
)
_INTEGER = re.compile(r"[+-]?\d{1,19}")
_SAMPLE_ROWS = 100


@dataclass(frozen=True)
class Decision:
    """Something that was decided while reading.

    Attributes
    ----------
    what, value, source : str
        For example ``"zone"``, ``"UTC"``, ``"the stamps end in Z"``.
    """

    what: str
    value: str
    source: str


@dataclass
class Layout:
    """The columns of an input: positions of the roles, and of the further columns that are kept."""

    names: tuple[str, ...]
    roles: dict[Role, int]
    further: list[int]
    zone_in_name: bool = False
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """The first lines of a CSV file."""

    delimiter: str
    names: tuple[str, ...]
    header_line: int
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    is_header_only: bool


def normalise(name: str) -> str:
    """Lower case, with blanks, underscores and dots alike."""
    return re.sub(r"[\s_.]+", " ", name).strip().lower()


def find_columns(names: Sequence[str], options: ReadOptions, refuse: Refuse) -> Layout:
    """Tell the roles of columns by their names.

    Parameters
    ----------
    names : sequence of str
        Names in the file, in its order.
    options : ReadOptions
    refuse : callable
        Makes the error of a message.

    Raises
    ------
    BarsError
        If a required column is missing, a name stands twice, or a role could be taken by two columns.
    """
    names = tuple(name.strip() for name in names)
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise refuse(f"the column name {twice[0]!r} stands {names.count(twice[0])} times; rename or remove all but one")
    plain = [normalise(name) for name in names]
    roles: dict[Role, int] = {}
    for role in ROLES:
        if role in options.columns:
            roles[role] = _told(role, options.columns[role].strip(), names, plain, refuse)
    letters = all(letter in plain for letter in "ohlc") and not any(role in plain for role in PRICES)
    for role in ROLES:
        if role not in roles:
            found = [i for i in _candidates(role, plain, letters) if i not in roles.values()]
            if len(found) > 1:
                both = " and ".join(repr(names[i]) for i in found)
                hint = " (a date and a time of day in two columns are not read)" if role == "time" else ""
                raise refuse(f"columns {both} could both be the {role}; name one with --column {role}=NAME{hint}")
            if found:
                roles[role] = found[0]
    missing = [role for role in ("time", *PRICES) if role not in roles]
    if missing:
        # Without a column of its own the time may be the index that pandas writes first and without a name.
        unnamed = [i for i, name in enumerate(plain) if names[i] in UNNAMED and (i == 0 or name)]
        if missing == ["time"] and unnamed:
            roles["time"] = unnamed[0]
        else:
            raise refuse(
                f"there is no column for {', '.join(missing)}; the columns are {_listed(names)}; name it with "
                + " ".join(f"--column {role}=NAME" for role in missing)
            )
    layout = Layout(names, roles, [])
    time = plain[roles["time"]]
    layout.zone_in_name = time.endswith(" utc") and time.removesuffix(" utc") in TIME_NAMES
    told = [role for role in ROLES if role in options.columns]
    layout.decisions.append(
        Decision(
            "columns",
            ", ".join(f"{role}={names[roles[role]]!r}" for role in ROLES if role in roles),
            "the names in the file" + (f"; {', '.join(told)} as told" if told else ""),
        )
    )
    if "volume" not in roles:
        layout.decisions.append(Decision("volume", "none", "no column is named volume"))
    for i, name in enumerate(names):
        if i in roles.values():
            continue
        if name in UNNAMED:
            layout.warnings.append(f"column {i + 1} has no name and is left out")
        elif plain[i] in ROLES:
            role = next(role for role in ROLES if role == plain[i])
            instead = f", because {names[roles[role]]!r} was named as {role}" if role in roles else ""
            layout.warnings.append(f"column {name!r} is left out{instead}")
        else:
            layout.further.append(i)
    return layout


def _told(role: str, name: str, names: Sequence[str], plain: Sequence[str], refuse: Refuse) -> int:
    if name in names:
        return names.index(name)
    alike = [i for i, other in enumerate(plain) if other == normalise(name)]
    if len(alike) == 1:
        return alike[0]
    raise refuse(f"there is no column {name!r} for {role}; the columns are {_listed(names)}")


def _candidates(role: Role, plain: Sequence[str], letters: bool) -> list[int]:
    if role == "time":
        found = [i for i, name in enumerate(plain) if name.removesuffix(" utc") in TIME_NAMES]
        return found or [i for i, name in enumerate(plain) if letters and name == "t"]
    if role == "symbol":
        return [i for i, name in enumerate(plain) if name in SYMBOL_NAMES]
    return [i for i, name in enumerate(plain) if name == role or (letters and name == role[0])]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def sample_csv(opened: Opened, options: ReadOptions) -> Sample:
    """Header line, delimiter and first rows of a CSV file.

    Raises
    ------
    BarsError
        If it is no UTF-8 text, has no delimiter, or begins with data instead of a header.
    """
    name = opened.source.name
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(opened.head, final=opened.is_whole)
    except UnicodeDecodeError as error:
        before = opened.head[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        raise not_utf8(name, before.count(b"\n") + 1, opened.head[error.start]) from None
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not opened.is_whole:
        lines.pop()
    header_line = next((i for i, line in enumerate(lines, start=1) if line.strip()), None)
    if header_line is None:
        raise BarsError(f"the first line is longer than {HEAD_NBYTES} bytes; this is no CSV file of bars", path=name)
    header = lines[header_line - 1]
    delimiter = options.delimiter or max(",;\t|", key=_outside_quotes(header).count)
    if delimiter not in header:
        raise BarsError(
            f"the header line {header.strip()[:80]!r} holds "
            + (f"no {delimiter!r}" if options.delimiter else "none of the delimiters , ; | and tab")
            + "; say what stands between the fields with --delimiter",
            path=name,
            line=header_line,
        )
    rows: list[tuple[int, tuple[str, ...]]] = []
    names = tuple(fields(header, delimiter))
    for number, line in enumerate(lines[header_line:], start=header_line + 1):
        if is_blank(line, delimiter, len(names)):
            continue
        if len(rows) == _SAMPLE_ROWS:
            break
        rows.append((number, tuple(fields(line, delimiter))))
    if _is_data(names):
        raise BarsError(
            f"the first line is data, not a header: {header.strip()[:80]!r}; put a line of column names before it, "
            "such as time,open,high,low,close,volume",
            path=name,
            line=header_line,
        )
    return Sample(delimiter, names, header_line, tuple(rows), not rows and opened.is_whole)


def not_utf8(path: str, line: int, byte: int) -> BarsError:
    """The error of a line that is no UTF-8."""
    return BarsError(f"is no UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8", path=path, line=line)


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


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)


def _is_data(names: Sequence[str]) -> bool:
    """Whether a header line looks like a row: numbers, or a time and a number."""
    cells = [name.strip() for name in names if name.strip()]
    n_numbers = sum(is_number(cell) and cell not in NULL_WORDS for cell in cells)
    n_times = sum(time_form(cell) is not None for cell in cells)
    return n_numbers >= 3 or (n_numbers >= 1 and n_times > n_numbers)


def is_number(cell: str) -> bool:
    """Whether a cell is a number or a null word."""
    if cell.strip() in NULL_WORDS:
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def time_form(cell: str) -> TimeForm | None:
    """What kind of time a text is: ISO 8601 with or without a zone, a date, a whole number, or None."""
    if _INTEGER.fullmatch(cell):
        return "integer"
    match = _TIME.fullmatch(cell)
    if match is None or (match["zone"] and not match["clock"]):
        return None
    return "aware" if match["zone"] else "naive" if match["clock"] else "date"


def cannot_tell(cell: str) -> str:
    """The message about a time that is no known form."""
    return (
        f"can't tell what time {cell!r} is; write ISO 8601 such as 2024-05-06T13:30:00Z, a date such as 2024-05-06, or "
        "whole seconds, milliseconds, microseconds or nanoseconds since 1970"
    )


def mixed_zones(cell: str, other: str) -> str:
    """The message about stamps with and without a zone in one column."""
    return f"stamps with and without a zone are mixed: {cell!r} and {other!r}; write all of them in one form"
