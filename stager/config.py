"""Typed configuration: argument > environment > TOML > default.

Each room keeps its options in a frozen ``msgspec.Struct``; this module only merges the sources and reports what is
wrong with a value. The environment variable of field ``size`` in table ``[arena]`` is ``STAGER_ARENA_SIZE``.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from stager.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = _UNITS[_letter] = 1024**_power


def parse_nbytes(text: str | int, *, total: int | None = None, name: str = "size") -> int:
    """Bytes meant by ``"512MiB"``, ``"2GB"``, ``"1048576"``, ``"40%"`` or an integer.

    Parameters
    ----------
    text : str or int
        ``k``, ``M``, ``G``, ``T`` and the ``iB`` forms are powers of 1024; ``kB``, ``MB``, ``GB``, ``TB`` of 1000.
    total : int, optional
        Bytes that a percentage refers to; without it a percentage is refused.
    name : str
        What the value is, for the error.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ConfigError
        If the text is no size, not positive, or a percentage outside (0, 100].
    """
    remedy = "write bytes such as 512MiB, 2GB or 1048576"
    if not isinstance(text, str):
        if isinstance(text, bool) or not hasattr(text, "__index__"):
            raise ConfigError(f"{name} is {text!r}; {remedy}, or a share such as 40%")
        nbytes = operator.index(text)
    else:
        match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(%|[a-z]*)\s*", text.lower())
        if match is None or (match[2] != "%" and match[2] not in _UNITS):
            raise ConfigError(f"{name} is {text!r}; {remedy}, or a share such as 40%")
        number, unit = Fraction(match[1]), match[2]
        if unit == "%":
            if total is None:
                raise ConfigError(f"{name} is {text!r}; a share is not possible here, {remedy}")
            if not 0 < number <= 100:
                raise ConfigError(f"{name} is {text!r}; a share lies above 0% and up to 100%")
            nbytes = int(total * number / 100)
        else:
            nbytes = int(number * _UNITS[unit])
    if nbytes <= 0:
        raise ConfigError(f"{name} is {text!r}; it must be at least 1 byte")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Human form of a number of bytes, powers of 1024: ``1.5 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises
    ------
    ConfigError
        If the file is missing or no valid TOML (with line and column).
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error


def resolve(
    kind: type[T],
    section: str,
    *,
    toml: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Options of one table, from argument, environment, TOML and default, in this order.

    Parameters
    ----------
    kind : type
        A frozen ``msgspec.Struct`` or dataclass.
    section : str
        Name of the TOML table and of the environment variables, ``STAGER_<SECTION>_<FIELD>``.
    toml : mapping, optional
        The table's values.
    arguments : mapping, optional
        What the caller gave; None means "not given".
    environ : mapping, optional
        Default ``os.environ``.

    Raises
    ------
    ConfigError
        Naming the source and the field of an unknown name or an unusable value.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(field: str, value: Any, source: str) -> None:
        values[field], sources[field] = value, source

    if toml is not None and not isinstance(toml, Mapping):
        raise ConfigError(f"[{section}] is the value {toml!r}; write a table of options under [{section}]")
    fields = _fields(kind)
    for field, value in (toml or {}).items():
        put(field, value, f"[{section}] {field}")
    for field in fields:
        variable = _variable(section, field)
        if variable in environ:
            put(field, environ[variable], variable)
    for field, value in (arguments or {}).items():
        if value is not None:
            put(field, value, field)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{sources[unknown[0]]} is no option; there are: {', '.join(sorted(fields))}")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        # The environment has only text, so numbers and booleans may be written as text there.
        lax = sources[name].startswith("STAGER_")
        try:
            checked[name] = msgspec.convert(value, fields[name], strict=not lax)
        except msgspec.ValidationError as error:
            choices = _choices(fields[name])
            why = f"; there are {', '.join(map(repr, choices))}" if choices else f": {error}"
            raise ConfigError(f"{sources[name]} is {value!r:.200}{why}") from None
    if missing := [name for name in _required(kind) if name not in checked]:
        # What is written inside a value has no variable.
        variable = "" if "." in section else f", or set {_variable(section, missing[0])}"
        raise ConfigError(f"[{section}] {missing[0]} is not given; write it there{variable}")
    return kind(**checked)


def _choices(annotation: Any) -> list[Any]:
    """The values that a field may have, if they are listed."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    parts = [_choices(part) for part in get_args(annotation) if part is not type(None)]
    return [value for part in parts for value in part] if all(parts) else []


def _variable(section: str, field: str) -> str:
    return f"STAGER_{section}_{field}".upper()


def _fields(kind: type[Any]) -> dict[str, Any]:
    """Name and type of the fields of a Struct or dataclass."""
    if issubclass(kind, msgspec.Struct):
        return {field.name: field.type for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _required(kind: type[Any]) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind) if field.required]
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
