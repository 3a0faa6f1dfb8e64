"""What is kept of an input whose rows were taken: all that the other inputs need to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stager.bars.checks import Checked
from stager.bars.detect import Decision
from stager.bars.times import Form, whole_numbers
from stager.errors import BarsError

# The source of a symbol that was given as an option.
AS_TOLD = "as told"


@dataclass
class Taken:
    """An input without its rows.

    Attributes
    ----------
    name : str
        Path or URI as given, or ``"table"``.
    size_nbytes, n_rows : int
    names : list of str
        The columns beside time and symbol: roles, then further ones.
    n_null : dict of str to int
        Rows without a value, of each column.
    decisions : list of Decision
        What was decided while decoding.
    symbol : Decision or None
        Which symbol all rows belong to, where no column tells.
    time : Decision
    zone : list of Decision
    time_name : str
        The time column's name in the file.
    form : {"instant", "naive"}
    all_midnight : bool
    extremes : (int, int) or None
        The least and largest time, where times are whole numbers.
    is_dates : bool
        The times have no zone and were kept as dates; right only if those of all other inputs are dates.
    first_time, first_line : int
        Of the first row, where they are dates.
    warnings, zone_warnings : list of str
    format, label, adjustment : str or None
        The format's name, and what it says.
    price_names : tuple of str
        Its columns that are read as open, high, low and close.
    latest : int or None
        The latest time of a bar, as it was read; None: there is no bar.
    first_violation : tuple of (str, int) or None
        Symbol and time of the first bar whose high is not the highest or low not the lowest price.
    checked : list of Checked
        What was found in the rows, which are not kept here.
    path_symbol : str or None
        The symbol that the file's name or folder tells, whatever else was told.
    """

    name: str
    size_nbytes: int
    n_rows: int
    names: list[str]
    n_null: dict[str, int]
    decisions: list[Decision]
    symbol: Decision | None
    time: Decision
    zone: list[Decision]
    time_name: str
    form: Form
    all_midnight: bool
    extremes: tuple[int, int] | None
    is_dates: bool
    first_time: int
    first_line: int
    warnings: list[str]
    zone_warnings: list[str]
    format: str | None
    label: Literal["open", "close"] | None
    adjustment: Literal["raw", "split", "total", "unknown"]
    price_names: tuple[str, ...]
    latest: int | None
    first_violation: tuple[str, int] | None
    checked: list[Checked] = field(default_factory=list)
    path_symbol: str | None = None

    @property
    def n_dropped(self) -> int:
        return sum(part.n_dropped for part in self.checked)

    @property
    def n_bars(self) -> int:
        return sum(part.relation.n_bars for part in self.checked)

    def error(self, message: str, column: str | None = None) -> BarsError:
        """The error of the whole input."""
        return BarsError(message, path=self.name, column=column)


def joined(parts: Sequence[Taken]) -> Taken:
    """One input that was taken in several parts.

    Raises
    ------
    BarsError
        If their times are of two kinds.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    extremes = [part.extremes for part in parts if part.extremes is not None]
    time = first.time
    if extremes:
        low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
        time = whole_numbers(time.value, low, high)
    given = [part for part in parts if part.time.value != "none"]
    for part in given:
        if part.time.value != given[0].time.value:
            raise part.error(
                f"the times of its first rows are {given[0].time.value}, and those of later ones {part.time.value}; "
                "write all of them in one unit",
                part.time_name,
            )
    zone = list({(each.what, each.value): each for part in parts for each in part.zone}.values())
    return replace(
        first,
        n_rows=sum(part.n_rows for part in parts),
        n_null={name: sum(part.n_null[name] for part in parts) for name in first.names},
        decisions=list({(each.what, each.value): each for part in parts for each in part.decisions}.values()),
        time=time,
        zone=zone,
        all_midnight=all(part.all_midnight for part in parts),
        is_dates=all(part.is_dates for part in parts),
        warnings=_in_order([text for part in parts for text in part.warnings], first.names),
        zone_warnings=list(dict.fromkeys(text for part in parts for text in part.zone_warnings)),
        latest=max((part.latest for part in parts if part.latest is not None), default=None),
        first_violation=next((part.first_violation for part in parts if part.first_violation is not None), None),
        checked=[checked for part in parts for checked in part.checked],
    )


def _in_order(warnings: list[str], names: list[str]) -> list[str]:
    """Each warning once; those about whole numbers in the order of the columns, whatever part they came from."""

    def place(text: str) -> int:
        return next((i for i, name in enumerate(names) if text.startswith(f"column {name!r} holds whole")), -1)

    once = list(dict.fromkeys(warnings))
    places = [i for i, text in enumerate(once) if place(text) >= 0]
    for i, text in zip(places, sorted((once[i] for i in places), key=place), strict=True):
        once[i] = text
    return once
