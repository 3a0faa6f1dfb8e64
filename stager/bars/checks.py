"""What is wrong with the rows of an input: missing and non-finite prices, missing times and symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.options import PRICES
from stager.bars.relation import Relation, relation
from stager.errors import BarsError

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Refuse: TypeAlias = Callable[[str, int, str], BarsError]

# So many rows of a few columns stay in the processor's cache.
_CACHED_ROWS = 1 << 15


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one input.

    Attributes
    ----------
    codes : ndarray of unsigned int, shape (n_rows,)
        Place of the row's symbol among all symbols sorted as text.
    times : ndarray of int64, shape (n_rows,)
        Nanoseconds since 1970.
    columns : tuple of ndarray of float64, each shape (n_rows,)
        open, high, low, close, then the other columns.
    """

    codes: npt.NDArray[np.unsignedinteger[Any]]
    times: Int64
    columns: tuple[Float64, ...]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class Checked:
    """A piece without the rows that are no bars, and what was found in it."""

    piece: Piece
    n_dropped: int
    relation: Relation
    n_infinite: tuple[int, ...]
    n_missing: tuple[int, ...]


def check(
    codes: npt.NDArray[np.unsignedinteger[Any]],
    times: Int64,
    present: Mask | None,
    arrays: Sequence[pa.Array[Any]],
    *,
    empty_code: int | None,
    first_row: int,
    nan: Literal["error", "null"],
    refuse: Refuse,
) -> Checked:
    """Check consecutive rows and drop those without a price.

    Parameters
    ----------
    codes, times : ndarray, shape (n_rows,)
    present : ndarray of bool or None
        Where a time is given.
    arrays : sequence of pyarrow.Array of float64
        open, high, low, close, then the other columns.
    empty_code : int or None
        The code of the empty symbol.
    first_row : int
        Number of the first row in its input, for errors.
    nan : {"error", "null"}
        What a literal NaN or infinity in a price is.
    refuse : callable
        Makes the error of a message, a row and a column.

    Raises
    ------
    BarsError
        If a bar has no time or no symbol, or a price is NaN or infinite and ``nan`` is ``"error"``.
    """
    columns = tuple(array.to_numpy(zero_copy_only=False) for array in arrays)
    keep: Mask | None = None
    for name, array, column in zip(PRICES, arrays, columns, strict=False):
        if all_finite(column):
            continue
        finite = np.isfinite(column)
        if array.null_count < len(column) - np.count_nonzero(finite) and nan == "error":
            given = array.is_valid().to_numpy(zero_copy_only=False)
            row = int(np.flatnonzero(given & ~finite)[0])
            raise refuse(
                f"the price is {column[row]}; correct it, or count NaN and infinity as no price with --nan null",
                first_row + row,
                name,
            )
        keep = finite if keep is None else keep & finite
    if present is not None:
        lost = np.flatnonzero(~present if keep is None else ~present & keep)
        if len(lost):
            raise refuse("the time is missing; fill it in, or remove the row", first_row + int(lost[0]), "time")
    if empty_code is not None:
        nameless = codes == empty_code
        lost = np.flatnonzero(nameless if keep is None else nameless & keep)
        if len(lost):
            raise refuse("the symbol is missing; fill it in, or remove the row", first_row + int(lost[0]), "symbol")
    n_dropped = 0
    if keep is not None:
        n_dropped = len(keep) - int(np.count_nonzero(keep))
        codes, times, columns = codes[keep], times[keep], tuple(column[keep] for column in columns)
    odd = [column[:0] if all_finite(column) else column for column in columns[4:]]
    missing = tuple(int(np.count_nonzero(np.isnan(column))) for column in odd)
    infinite = tuple(int(np.count_nonzero(np.isinf(column))) for column in odd)
    related = Relation(0)
    for first in range(0, len(codes), _CACHED_ROWS):
        some = slice(first, first + _CACHED_ROWS)
        related += relation(codes[some], times[some], [column[some] for column in columns[:4]])
    return Checked(Piece(codes, times, columns), n_dropped, related, infinite, missing)


def all_finite(column: Float64) -> bool:
    """Whether no value is NaN or infinite, in one pass without a mask; a sum that overflows says no."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(column.sum()))


def describe(checked: Sequence[Checked], names: Sequence[str]) -> list[str]:
    """Sentences about what was found in all pieces, whose columns have these names."""
    found: list[str] = []
    for i, name in enumerate(names[4:]):
        n_infinite = sum(part.n_infinite[i] for part in checked)
        n_missing = sum(part.n_missing[i] for part in checked)
        if n_infinite:
            found.append(f"column {name!r} is infinite in {n_infinite} bars; windows leave them out, as missing values")
        if n_missing:
            found.append(f"column {name!r} has no value in {n_missing} bars; they hold NaN")
    return found
