"""Which columns are which, what the time is, what stands between the fields: every decision with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stager.bars.formats import Format
from stager.bars.options import PRICES, ROLES, ReadOptions, Role
from stager.bars.wide_names import Wide, find_wide
from stager.errors import BarsError

TimeForm: TypeAlias = Literal["aware", "naive", "date", "integer"]
Refuse: TypeAlias = Callable[[str], BarsError]

NULL_WORDS = ("", "null", "NULL", "None", "N/A", "NA", "#N/A", "-")
TIME_NAMES = frozenset(
    (
        "time", "timestamp", "datetime", "date time", "date", "ts", "open time", "ts event", "window start", "unix",
        "gmt time", "utc time", "time (utc)", "time (gmt)", "date (utc)", "date (gmt)",
    )
)  # fmt: skip
# A bar's end by its name.
END_NAMES = frozenset(("close time", "end time", "time close", "time end", "window end"))
VOLUME_NAMES = frozenset(("volume", "vol", "tickvol", "tick volume"))
SYMBOL_NAMES = frozenset(("symbol", "ticker", "sym", "instrument", "asset", "code", "secid"))
UNNAMED = frozenset(("", "__index_level_0__"))

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?P<clock>[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,9})?)?)?)?(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?"
)
_INTEGER = re.compile(r"[+-]?\d{1,19}")


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
    # Columns whose texts make up the time; more than one: joined by a blank.
    time_columns: tuple[int, ...] = ()
    format: Format | None = None
    wide: Wide | None = None
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def normalise(name: str) -> str:
    """Lower case, with blanks, underscores and dots alike, without the brackets of ``<DATE>``."""
    return re.sub(r"[\s_.]+", " ", name).strip().lower().removeprefix("<").removesuffix(">")


def find_columns(names: Sequence[str], options: ReadOptions, refuse: Refuse, described: Format | None = None) -> Layout:
    """Tell the roles of columns by their names.

    Parameters
    ----------
    names : sequence of str
        Names in the file, in its order.
    options : ReadOptions
    refuse : callable
        Makes the error of a message.
    described : Format, optional
        The format of the file; what it says comes before the usual names, and after what was told.

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
    times: tuple[int, ...] = ()
    for role in ROLES:
        if role in options.columns:
            told_names = options.columns[role].strip()
            parts = [told_names] if role != "time" or told_names in names else told_names.split("+")
            found = [_told(role, part.strip(), names, plain, refuse) for part in parts]
            roles[role], times = found[0], tuple(found) if role == "time" else times
    for role in ROLES:
        if described is not None and role not in roles and described.names_of(role):
            found = [plain.index(normalise(each)) for each in described.names_of(role) if normalise(each) in plain]
            if role == "volume" and len(found) > 1:
                raise refuse(_which(role, [names[i] for i in found]))
            if found:
                roles[role], times = found[0], tuple(found) if role == "time" else times
    letters = all(letter in plain for letter in "ohlc") and not any(role in plain for role in PRICES)
    for role in ROLES:
        if role not in roles:
            found = [i for i in _candidates(role, plain, letters) if i not in roles.values()]
            if role == "time" and sorted(plain[i] for i in found) == ["date", "time"]:
                found.sort(key=lambda i: plain[i])
                roles[role], times = found[0], tuple(found)
            elif len(found) > 1:
                raise refuse(_which(role, [names[i] for i in found]))
            elif found:
                roles[role] = found[0]
    if "time" not in roles and (ends := [i for i, name in enumerate(plain) if name in END_NAMES]):
        if options.label is None:
            raise refuse(
                f"the column {names[ends[0]]!r} seems to mark the end of its bar; say so with --label close, or that "
                "it marks the start with --label open"
            )
        roles["time"] = ends[0]
    missing = [role for role in ("time", *PRICES) if role not in roles]
    wide = find_wide(names, options.field) if len(missing) >= len(PRICES) else None
    if wide is not None:
        missing = [role for role in missing if role == "time"]
        roles = {role: i for role, i in roles.items() if role == "time"}
    if missing:
        # Without a column of its own the time may be the index that pandas writes first and without a name.
        unnamed = [i for i, name in enumerate(plain) if names[i] in UNNAMED and (i == 0 or name)]
        if missing == ["time"] and unnamed:
            roles["time"] = unnamed[0]
        else:
            raise refuse(
                f"there is no column for {', '.join(missing)}; the columns are {_listed(names)}; name it with "
                + " ".join(f"--column {role}=NAME" for role in missing)
                + ("; if every column is a symbol, say what its cells hold with --field close" * (missing == [*PRICES]))
            )
    layout = Layout(names, roles, [], time_columns=times or (roles["time"],), format=described)
    time = plain[roles["time"]]
    layout.zone_in_name = (time.endswith(" utc") and time.removesuffix(" utc") in TIME_NAMES) or (
        time in TIME_NAMES and bool(re.search(r"^(gmt|utc) |\((gmt|utc)\)$", time))
    )
    told = [role for role in ROLES if role in options.columns]
    layout.decisions.append(
        Decision(
            "columns",
            ", ".join(f"{role}={names[roles[role]]!r}" for role in ROLES if role in roles),
            ("the names in the file" if described is None else f"the format {described.name}")
            + (f"; {', '.join(told)} as told" if told else ""),
        )
    )
    if wide is not None:
        layout.wide = wide
        layout.further = sorted({i for each in wide.symbols.values() for i in each.values()})
        return layout
    if "volume" not in roles:
        layout.decisions.append(Decision("volume", "none", "no column is named volume"))
    for i, name in enumerate(names):
        if i in roles.values() or i in layout.time_columns:
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
        found = [i for i, name in enumerate(plain) if name in SYMBOL_NAMES]
        return found or [i for i, name in enumerate(plain) if name == "instrument id"]
    found = [i for i, name in enumerate(plain) if name == role or (letters and name == role[0])]
    if role == "volume" and not found:
        found = [i for i, name in enumerate(plain) if name in VOLUME_NAMES or name.startswith("volume ")]
    return found


def _which(role: Role, names: Sequence[str]) -> str:
    several, all_of = " and ".join(repr(name) for name in names), "both" if len(names) == 2 else "all"
    return f"columns {several} could {all_of} be the {role}; name one with --column {role}=NAME"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def is_number(cell: str) -> bool:
    """Whether a cell is a number or a null word."""
    try:
        float(cell)
    except ValueError:
        return cell.strip() in NULL_WORDS
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
    if re.fullmatch(r"[+-]?\d(\.\d+)?[eE]\+?\d+", cell):
        return f"the time {cell!r} lost its last digits in a spreadsheet; get the file again, and don't save it there"
    return (
        f"can't tell what time {cell!r} is; write ISO 8601 such as 2024-05-06T13:30:00Z, a date such as 2024-05-06, or "
        "whole seconds, milliseconds, microseconds or nanoseconds since 1970"
    )


def mixed_zones(cell: str, other: str) -> str:
    """The message about stamps with and without a zone in one column."""
    return f"stamps with and without a zone are mixed: {cell!r} and {other!r}; write all of them in one form"
