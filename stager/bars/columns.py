"""The decoded columns of one input, the same whatever they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.detect import Decision, Layout
from stager.bars.options import PRICES
from stager.bars.threads import parallel, thread_count
from stager.errors import BarsError

# The stubs of pyarrow know chunks of one type only.
Column: TypeAlias = Any

SYMBOLS: Any = pa.dictionary(pa.int32(), pa.string())
_CHUNK_ROWS = 1 << 17
# From here on float64 no longer holds every whole number.
_INEXACT = 2**53


@dataclass
class Decoded:
    """The columns of one input.

    Attributes
    ----------
    name : str
        Path or URI as given, or ``"table"``.
    size_nbytes : int
    stem : str or None
        What may serve as symbol; None for a table.
    columns : dict
        The roles that were found, then further columns by their names. Time as it was stored, symbol as a dictionary,
        others float64; all chunked alike.
    is_text : bool
        Whether the input was text.
    """

    name: str
    size_nbytes: int
    stem: str | None
    layout: Layout
    columns: dict[str, Column]
    is_text: bool
    line_of: Callable[[int], int]
    n_rows: int = 0
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # What the file's name or folder says, by its format.
    symbol: str | None = None
    # What the folder says, ``AAPL`` of ``symbol=AAPL/``.
    folder: str | None = None
    # Whether these are some of the file's rows and not all.
    is_part: bool = False

    def error(self, message: str, row: int | None = None, column: str | None = None) -> BarsError:
        """The error of a row (counted from 0) and a role or column."""
        line = None if row is None else self.line_of(row)
        role = next((role for role in self.layout.roles if role == column), None)
        if role is not None:
            column = self.layout.names[self.layout.roles[role]]
        return BarsError(message, path=self.name, line=line, column=column)


def aligned(table: pa.Table, n_threads: int | None = None) -> pa.Table:
    """The same table with all columns chunked alike, in chunks that keep so many threads busy, none of them empty.

    None: as many as there are cores. For one thread chunks stay as large as they are.
    """
    n_threads = thread_count() if n_threads is None else n_threads
    most = table.num_rows if n_threads == 1 else max(_CHUNK_ROWS, table.num_rows // (8 * n_threads))
    batches = table.to_batches(max_chunksize=max(1, most))
    return pa.Table.from_batches([batch for batch in batches if batch.num_rows], table.schema)


def alike(columns: dict[str, Column]) -> dict[str, Column]:
    """The same columns, chunked alike; Arrow's kernels may make one chunk of several."""
    if len({tuple(map(len, column.chunks)) for column in columns.values()}) == 1:
        return columns
    together = aligned(pa.table(columns))
    return {name: together[name] for name in columns}


def number_hint(role: str) -> str:
    """What a column of numbers needs, for the end of an error."""
    if role in PRICES or role == "volume":
        return f"; {role} needs numbers such as 1234.5, without thousands separators, units or decimal commas"
    return ""


def warn_inexact(decoded: Decoded, key: str) -> None:
    """Report whole numbers that float64 doesn't hold exactly."""
    extremes: list[Any] = parallel(lambda chunk: pc.min_max(chunk).as_py(), decoded.columns[key].chunks)
    if any(e["min"] is not None and max(-e["min"], e["max"]) >= _INEXACT for e in extremes):
        decoded.warnings.append(f"column {key!r} holds whole numbers of 2^53 and above, which float64 rounds")


def to_float32(values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float32]:
    """The nearest float32 values.

    Raises
    ------
    BarsError
        If one is too large, naming the column.
    """
    with np.errstate(over="raise", under="ignore", invalid="ignore"):
        try:
            return values.astype(np.float32)
        except FloatingPointError:
            raise BarsError(
                f"a value is above 3.4e38, the largest of float32; leave column {name!r} out or rescale it", column=name
            ) from None
