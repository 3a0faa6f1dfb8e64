"""How bar files are to be read: the options."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stager.bars.interval import Interval
from stager.bars.session_close import SessionClose
from stager.bars.zones import Zone
from stager.errors import ConfigError

Role = Literal["time", "symbol", "open", "high", "low", "close", "volume"]
Duplicates: TypeAlias = Literal["error", "first", "last"]
ROLES: tuple[Role, ...] = ("time", "symbol", "open", "high", "low", "close", "volume")
PRICES: tuple[Role, ...] = ("open", "high", "low", "close")

# The years whose every instant fits into int64 nanoseconds.
FIRST_YEAR, LAST_YEAR = 1678, 2261


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bar files are to be read; what is not given is taken from the files, and reported.

    Attributes
    ----------
    columns : dict of str to str
        Role (time, symbol, open, high, low, close, volume) to the column's name in the file.
    zone : str, optional
        IANA zone or fixed offset such as ``"-05:00"`` of time stamps that carry none.
    symbol : str, optional
        The symbol of input without a symbol column.
    label : {"open", "close"}, optional
        What a time stamp marks; ``"close"`` stamps are shifted back by the interval. None: as the format says, else
        open.
    interval : str, optional
        ``"1min"``, ``"5min"``, ``"1h"``, ``"1d"``, ``"1w"``, ``"1mo"``, ``"30s"``; None: inferred.
    allow_years : tuple of int, optional
        First and last plausible year; None: 1980 to next year.
    nan : {"error", "null"}
        What a literal NaN or infinity in a price is: an error, or no price.
    delimiter : str, optional
        Character between the fields of a CSV file; None: taken from the header line.
    adjustment : {"raw", "split", "total", "unknown"}
        What prices and volume are adjusted for.
    format : str, optional
        Name of a format, or path of its TOML file; None: found by the files' names, headers and first rows.
    time_pattern : str, optional
        How times are written, such as ``"%d.%m.%Y %H:%M"``.
    date_order : {"dmy", "mdy"}, optional
        Whether the day or the month stands first.
    encoding : str, optional
        Of text that is no UTF-8.
    decimal, thousands : str, optional
        The marks before a fraction and between thousands.
    field : {"open", "high", "low", "close", "volume"}, optional
        What the cells of a file with one column for each symbol hold.
    duplicates : {"error", "first", "last"}
        Which of several rows of one symbol and time is kept where they differ, in the order of files and rows;
        identical ones are always one bar.
    session_close : str, optional
        When the sessions of daily or longer bars close, ``"16:00 America/New_York"``: their bars are available from
        then on, on the last date of each. None: from the next 00:00 UTC.

    Raises
    ------
    ConfigError
        If an option has an unusable value.
    """

    columns: dict[str, str] = {}
    zone: str | None = None
    symbol: str | None = None
    label: Literal["open", "close"] | None = None
    interval: str | None = None
    allow_years: tuple[int, int] | None = None
    nan: Literal["error", "null"] = "error"
    delimiter: str | None = None
    adjustment: Literal["raw", "split", "total", "unknown"] = "unknown"
    format: str | None = None
    time_pattern: str | None = None
    date_order: Literal["dmy", "mdy"] | None = None
    encoding: str | None = None
    decimal: Literal[".", ","] | None = None
    thousands: str | None = None
    field: Literal["open", "high", "low", "close", "volume"] | None = None
    duplicates: Duplicates = "error"
    session_close: str | None = None

    def __post_init__(self) -> None:
        for role, name in self.columns.items():
            if role not in ROLES:
                raise ConfigError(f"column {role}={name}: {role!r} is no role; there are: {', '.join(ROLES)}")
        named = list(self.columns.values())
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise ConfigError(f"column {twice[0]!r} is named for two roles; each role needs a column of its own")
        if self.symbol is not None and "symbol" in self.columns:
            raise ConfigError("symbol and column symbol=NAME are both given; leave one out")
        if self.symbol is not None and not self.symbol.strip():
            raise ConfigError("symbol is empty; give the symbol's name")
        for field, value, allowed in (
            ("label", self.label, (None, "open", "close")),
            ("date_order", self.date_order, (None, "dmy", "mdy")),
            ("decimal", self.decimal, (None, ".", ",")),
            ("field", self.field, (None, "open", "high", "low", "close", "volume")),
            ("nan", self.nan, ("error", "null")),
            ("duplicates", self.duplicates, ("error", "first", "last")),
            ("adjustment", self.adjustment, ("raw", "split", "total", "unknown")),
        ):
            if value not in allowed:
                raise ConfigError(f"{field} is {value!r}; allowed are {', '.join(filter(None, allowed))}")
        if self.delimiter is not None and (len(self.delimiter.encode()) != 1 or self.delimiter in '\r\n"'):
            raise ConfigError(f"delimiter is {self.delimiter!r}; give one character such as , ; | or a tab")
        if self.allow_years is not None:
            first, last = self.allow_years
            if not FIRST_YEAR <= first <= last <= LAST_YEAR:
                raise ConfigError(
                    f"allow_years is {first} to {last}; give a first and a last year from {FIRST_YEAR} to {LAST_YEAR}, "
                    "the years that int64 nanoseconds hold"
                )
        if self.interval is not None:
            Interval.parse(self.interval)
        if self.session_close is not None:
            SessionClose.parse(self.session_close)
        if self.zone is not None:
            Zone.parse(self.zone)
        if self.encoding is not None:
            check_encoding(self.encoding)
        if self.decimal is not None and self.decimal in (self.thousands or ""):
            raise ConfigError(f"decimal and thousands are both {self.decimal!r}; a mark is one or the other")


def check_encoding(encoding: str) -> None:
    """Raise ConfigError unless text can be decoded so."""
    try:
        "".encode(encoding)
    except LookupError:
        raise ConfigError(f"encoding is {encoding!r}, which is unknown; write utf-8, utf-16, latin-1 or gbk") from None
