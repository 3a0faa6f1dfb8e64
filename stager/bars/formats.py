"""Formats: descriptions of vendors' file layouts, as data.

A format is a TOML file. Those that come with stager lie in ``stager/configs/formats``; a user's own is named by its
path. The vocabulary is :class:`Format`, and nothing else is understood.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from stager.bars.options import PRICES, ROLES, Role, check_encoding
from stager.bars.patterns import regex_of
from stager.bars.zones import Zone
from stager.config import read_toml
from stager.errors import ConfigError


class TimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How times are written.

    Attributes
    ----------
    unit : {"s", "ms", "us", "ns", "ms of day"}, optional
        Of whole numbers, since 1970 UTC; None: told by their size. ``"ms of day"`` counts from local midnight of the
        date in the file's name.
    pattern : str, optional
        Of text, such as ``"%Y.%m.%d %H:%M"``; several columns are joined by a blank. None: ISO 8601.
    zone : str, optional
        IANA zone or fixed offset of times that carry none; None: must be told.
    date_from_file : str, optional
        Regular expression whose group finds YYYYMMDD in the file's name.
    """

    unit: Literal["s", "ms", "us", "ns", "ms of day"] | None = None
    pattern: str | None = None
    zone: str | None = None
    date_from_file: str | None = None


class NumberRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How numbers are written.

    Attributes
    ----------
    price_scale : int
        Prices are stored multiplied by it.
    decimal, thousands : str, optional
        Their marks; None: told by the cells. ``thousands`` may hold several characters, each a mark.
    suffixes : bool
        Whether K, M, B and T after a number stand for powers of 1000.
    nulls : tuple of str
        Further words for a missing value.
    """

    price_scale: int = 1
    decimal: Literal[".", ","] | None = None
    thousands: str | None = None
    suffixes: bool = False
    nulls: tuple[str, ...] = ()


class SymbolRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The symbol, where no column holds it: the groups of a regular expression over the file's name without endings,
    joined; a group that is not there is left out."""

    from_file: str
    upper: bool = False


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layout.

    Attributes
    ----------
    name : str
        Of the TOML file; not written in it.
    title, about : str
        For people: whose files these are, and what is to be known about them.
    files : str, optional
        Regular expression; only files of such a name are taken for this format unless it is told.
    header : tuple of str
        Names that the header must hold; other names may stand beside them.
    positions : tuple of str
        Names of the columns of a file without a header, in their order; the file must have as many.
    columns : dict
        Role to the column's name, or to names: of a time in several columns, or of a volume that must be chosen.
    time, numbers, symbol : TimeRule, NumberRule, SymbolRule
    encoding, delimiter : str, optional
        None: told by the file.
    skip : tuple of str
        Regular expressions of whole lines that are no rows.
    label : {"open", "close"}
        What a time marks.
    adjustment : {"raw", "split", "total", "unknown"}
        What prices are adjusted for.
    confirm : str
        What such a file can't tell of itself, so that the format must be told by ``--format``; empty: it may be found.
    """

    title: str
    name: str = ""
    about: str = ""
    files: str | None = None
    header: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    columns: dict[Role, str | tuple[str, ...]] = {}
    time: TimeRule = TimeRule()
    numbers: NumberRule = NumberRule()
    symbol: SymbolRule | None = None
    encoding: str | None = None
    delimiter: str | None = None
    skip: tuple[str, ...] = ()
    label: Literal["open", "close"] = "open"
    adjustment: Literal["raw", "split", "total", "unknown"] = "unknown"
    confirm: str = ""

    def names_of(self, role: Role) -> tuple[str, ...]:
        """Names of a role's columns, none if it is not described."""
        names = self.columns.get(role, ())
        return (names,) if isinstance(names, str) else names

    def symbol_of(self, stem: str) -> str | None:
        """The symbol in a file's name without its endings; None: there is none."""
        match = None if self.symbol is None else re.search(self.symbol.from_file, stem)
        if match is None or self.symbol is None:
            return None
        found = "".join(group for group in match.groups() if group)
        return (found.upper() if self.symbol.upper else found) or None


@cache
def built_in() -> dict[str, Format]:
    """The formats that come with stager, by name."""
    folder = resources.files("stager.configs") / "formats"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda entry: entry.name)
    return {entry.name[:-5]: load(str(entry)) for entry in found}


def named(name: str) -> Format:
    """The format of a name, or of the path of a TOML file.

    Raises
    ------
    ConfigError
        If there is none, or it is not valid.
    """
    if name.endswith(".toml"):
        return load(name)
    formats = built_in()
    if name not in formats:
        raise ConfigError(
            f"format is {name!r}, which is unknown; give the path of a TOML file, or one of {', '.join(formats)}"
        )
    return formats[name]


def text_of(name: str) -> str:
    """The TOML text of a format, which is checked first; raises as :func:`named`."""
    named(name)
    if name.endswith(".toml"):
        return Path(name).read_text(encoding="utf-8")
    return (resources.files("stager.configs") / "formats" / f"{name}.toml").read_text(encoding="utf-8")


def load(path: str) -> Format:
    """The checked format in a TOML file.

    Raises
    ------
    ConfigError
        Naming the file, the entry, and what is allowed.
    """
    table = read_toml(path)
    try:
        found = msgspec.convert({**table, "name": Path(path).stem}, Format)
        _check(found)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}; `stager formats show` lists what a format may say") from None
    return found


def _check(found: Format) -> None:
    symbol = None if found.symbol is None else found.symbol.from_file
    for expression, fewest, most in (
        (found.files, 0, None),
        *((each, 0, None) for each in found.skip),
        (found.time.date_from_file, 1, 1),
        (symbol, 1, None),
    ):
        if expression is None:
            continue
        try:
            groups = re.compile(expression).groups
        except re.error as error:
            raise ConfigError(f"{expression!r} is no regular expression: {error}") from None
        if groups < fewest or (most is not None and groups > most):
            raise ConfigError(
                f"{expression!r} needs {'one' if most else 'at least one'} group (...) that holds what is looked for"
            )
    roles = [role for role in ROLES if role in found.columns]
    missing = [role for role in ("time", *PRICES) if role not in roles]
    if missing:
        raise ConfigError(f"[columns] lacks {', '.join(missing)}")
    if not found.header and not found.positions:
        raise ConfigError("header or positions must say which files these are")
    for role in roles:
        names = found.names_of(role)
        if not names or (len(names) > 1 and role not in ("time", "volume")):
            raise ConfigError(f"[columns] {role} needs the name of one column")
        lost = [name for name in names if found.positions and not found.header and name not in found.positions]
        if lost:
            raise ConfigError(f"[columns] {role} is {lost[0]!r}, which is not among the positions")
    if len(set(found.positions)) != len(found.positions):
        raise ConfigError("positions holds a name twice")
    if found.time.pattern is not None:
        regex_of(found.time.pattern)
    if found.time.zone is not None:
        Zone.parse(found.time.zone)
    if (found.time.unit == "ms of day") != (found.time.date_from_file is not None):
        raise ConfigError("[time] unit 'ms of day' and date_from_file need each other")
    if found.numbers.price_scale < 1:
        raise ConfigError(f"[numbers] price_scale is {found.numbers.price_scale}; it is a whole number of at least 1")
    if found.encoding is not None:
        check_encoding(found.encoding)
    if found.delimiter is not None and len(found.delimiter) != 1:
        raise ConfigError(f"delimiter is {found.delimiter!r}; give one character")


def vocabulary() -> list[tuple[str, Any]]:
    """Entries of a format and their defaults, for people."""
    entries: list[tuple[str, Any]] = []
    for prefix, kind in (("", Format), ("time.", TimeRule), ("numbers.", NumberRule), ("symbol.", SymbolRule)):
        entries += [
            (prefix + field.name, None if field.required else field.default)
            for field in msgspec.structs.fields(kind)
            if prefix or field.name not in ("name", "time", "numbers", "symbol")
        ]
    return entries
