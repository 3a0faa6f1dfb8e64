"""Numbers as people write them: decimal commas, thousands marks, K and M, words for a missing value; column-wise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.detect import NULL_WORDS
from stager.bars.formats import NumberRule

# Marks of thousands that are nothing else: apostrophes and blanks.
_PLAIN_MARKS = "'\u2019 \u00a0\u202f\u2009"
_EXPONENTS = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}


@dataclass(frozen=True)
class Marks:
    """The mark before the fraction, and those between thousands (each character one)."""

    decimal: str
    thousands: str


def marks_of(columns: Sequence[Any], rule: NumberRule, decimal: str | None, thousands: str | None) -> Marks | str:
    """The marks of text columns that are written alike, as told or by their cells.

    Parameters
    ----------
    columns : sequence of ChunkedArray of string
    rule : NumberRule
    decimal, thousands : str or None
        As told; they win over the rule.

    Returns
    -------
    Marks, or the cell (str) that may be read in two ways.
    """
    decimal = decimal or rule.decimal
    thousands = thousands if thousands is not None else rule.thousands
    if decimal is not None and thousands is None:
        thousands = _PLAIN_MARKS + ("," if decimal == "." else ".")
    if thousands is not None and decimal is None:
        decimal = "," if "." in thousands else "."
    if decimal is not None and thousands is not None:
        return Marks(decimal, thousands)

    def has(expression: str) -> bool:
        return any(pc.any(pc.match_substring_regex(column, pattern=expression)).as_py() for column in columns)

    def is_fraction_mark(mark: str, other: str) -> tuple[bool, bool]:
        """Whether a mark stands before fractions, by its own cells and by cells with both marks or repeated ones."""
        alone = has(rf"^[^{other}]*{mark}(\d{{1,2}}|\d{{4,}})([eE].*)?\s*$") or has(rf"^\s*[+-]?(0?|\d{{4,}}){mark}\d")
        return alone, has(rf"{other}.*{mark}") or has(rf"{other}\d{{2,3}}{other}\d{{3}}")

    comma_alone, comma_sure = is_fraction_mark(",", r"\.")
    dot_alone, dot_sure = is_fraction_mark(r"\.", ",")
    # Without a cell that shows both, 149.526 beside 12,5 may be a fraction or thousands.
    comma_alone &= comma_sure or not has(r"^[^,]*\.[^,.]*$")
    if (dot_sure or dot_alone) and not (comma_sure or comma_alone):
        return Marks(".", "," + _PLAIN_MARKS)
    if (comma_sure or comma_alone) and not (dot_sure or dot_alone):
        return Marks(",", "." + _PLAIN_MARKS)
    if not has(","):
        return Marks(".", _PLAIN_MARKS)
    for column in columns:
        cells = column.filter(pc.match_substring(column, ","))
        if len(cells):
            return str(cells[0].as_py()).strip()
    return ""


def dot_may_group(cells: Iterable[str]) -> tuple[str, str] | None:
    """Two cells that show that dots may part thousands, though all are numbers: as a fraction 2.500 would be written
    with a needless zero, beside 950, which has none; None: there are no such cells."""
    dotted: list[str] = []
    whole: list[str] = []
    for cell in cells:
        (dotted if "." in cell else whole).append(cell)
    if not all(re.fullmatch(r"[+-]?[1-9]\d{0,2}(\.\d{3})+", cell) for cell in dotted):
        return None
    if not all(re.fullmatch(r"[+-]?\d{0,3}", cell) for cell in whole if cell not in NULL_WORDS):
        return None
    one = next((cell for cell in dotted if cell.endswith("0")), None)
    other = next((cell for cell in whole if cell.strip("+-0")), None)
    return None if one is None or other is None else (one, other)


def may_group(cell: str, other: str) -> str:
    """The message about what :func:`dot_may_group` found."""
    return (
        f"{cell!r} beside {other!r} may be a fraction or have thousands marks; say what the dot is with --decimal . or "
        "--thousands ."
    )


def read_numbers(column: Any, marks: Marks, rule: NumberRule) -> tuple[Any, int]:
    """Numbers of a text column.

    Returns
    -------
    numbers : ChunkedArray of float64
    bad : int
        The first row that is no number; -1: none.
    """
    words = pa.array([*NULL_WORDS, *rule.nulls])
    trimmed = pc.utf8_trim(column, characters=" \t\u00a0\u202f")
    text: Any = pc.if_else(pc.is_in(trimmed, value_set=words), pa.scalar(None, pa.string()), trimmed)
    decimal, group = re.escape(marks.decimal), "[" + re.escape(marks.thousands or marks.decimal) + "]"
    grouped = rf"\d{{1,3}}({group}\d{{2,3}})*{group}\d{{3}}"
    suffix = "[KMBT]?" if rule.suffixes else ""
    fits: Any = pc.match_substring_regex(
        text,
        pattern=rf"^[+-]?({grouped}|\d+)?({decimal}\d*)?([eE][+-]?\d+)?{suffix}$|^[+-]?(nan|NaN|inf|Inf|-?infinity)$",
    )
    plain = pc.replace_substring_regex(text, pattern=group, replacement="") if marks.thousands else text
    if marks.decimal != ".":
        plain = pc.replace_substring(plain, marks.decimal, ".")
    if rule.suffixes:
        for letter, exponent in _EXPONENTS.items():
            plain = pc.replace_substring_regex(plain, pattern=f"{letter}$", replacement=exponent)
    bad = pc.index(pc.fill_null(fits, True), False).as_py()
    if bad >= 0:
        return column, bad
    try:
        return plain.cast(pa.float64()), -1
    except pa.ArrowInvalid:
        return column, _first_not_a_number(plain)


def _first_not_a_number(column: Any) -> int:
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(pa.float64())
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def scaled(column: Any, price_scale: int) -> Any:
    """Prices that are stored multiplied; divided, because a quotient is rounded once and right."""
    return column if price_scale == 1 else pc.divide(column, float(price_scale))
