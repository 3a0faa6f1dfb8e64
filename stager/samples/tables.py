"""Tables about symbols that a user supplies: labels, universes, contract rolls, splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from stager.bars.clock import instant_text
from stager.errors import SampleError
from stager.packs.layout import Pack

IntArray = npt.NDArray[np.int64]
# A pyarrow.Table, a data frame that Arrow can read (pandas, Polars), or the path of a Parquet or CSV file.
TableSource: TypeAlias = Any

LAST = np.iinfo(np.int64).max


class EventTable:
    """A table with a column ``symbol`` and columns of instants and numbers.

    Instants are timestamps or dates (their first instant); without a zone they are UTC.

    Parameters
    ----------
    source : pyarrow.Table, data frame or path
        A data frame is one with Arrow's stream interface, such as of pandas and Polars. A path ending in ``.parquet``
        or ``.pq`` is read as Parquet, any other as CSV.
    what : str
        What it is, for errors.

    Raises
    ------
    SampleError
        If it can't be read, or a column is missing or of another type.
    """

    def __init__(self, source: TableSource, what: str) -> None:
        self._table, self._what = read_table(source, what), what

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self._table.column_names

    @property
    def symbols(self) -> Any:
        """(n,) text: the symbols, without nulls."""
        column = self._column("symbol")
        try:
            column = column.cast(pa.string())
        except pa.ArrowException:
            raise SampleError(f"{self._what}: column 'symbol' is {column.type}; it must be text") from None
        self._refuse_nulls(column, "symbol")
        return column

    def codes(self, symbols: Sequence[str]) -> IntArray:
        """(n,) int64: the place of each row's symbol in `symbols`; -1 where it is not there."""
        known: Any = pa.array(symbols, pa.string())
        found: Any = pc.fill_null(pc.index_in(self.symbols, known), -1)
        return np.asarray(found).astype(np.int64)

    def instants(self, name: str, *, null: int | None = None) -> IntArray:
        """(n,) int64: nanoseconds UTC; `null` where there is none, which is refused by default."""
        column = self._column(name)
        kind = column.type
        if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_null(kind)):
            raise SampleError(f"{self._what}: column {name!r} is {kind}; it must hold timestamps or dates")
        if null is None:
            self._refuse_nulls(column, name)
        try:
            # Only the unit is changed: the values of zoned timestamps are UTC already.
            column = column.cast(pa.timestamp("ns", getattr(kind, "tz", None))).cast(pa.int64())
        except pa.ArrowException as error:
            raise SampleError(f"{self._what}: column {name!r} has an instant beyond 1678 to 2261: {error}") from None
        return np.asarray(pc.fill_null(column, 0 if null is None else null)).astype(np.int64)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """(n,) float64: NaN where there is none."""
        column = self._column(name)
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
                or pa.types.is_boolean(kind)):  # fmt: skip
            raise SampleError(f"{self._what}: column {name!r} is {kind}; it must hold numbers")
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        filled: Any = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
        return np.asarray(filled).astype(np.float64)

    def told(self, row: int, *names: str) -> str:
        """A row in words, for errors."""
        values = [self._text(name, row) for name in ("symbol", *names)]
        return f"{values[0]} {', '.join(values[1:])}" if len(values) > 1 else values[0]

    def _text(self, name: str, row: int) -> str:
        value: Any = self._table.column(name)[row]
        # As a Python value a timestamp of nanoseconds is another one with pandas than without, or none.
        if pa.types.is_timestamp(value.type) and value.is_valid:
            return instant_text(int(value.cast(pa.timestamp("ns", value.type.tz)).cast(pa.int64()).as_py()))
        return str(value.as_py())

    def _column(self, name: str) -> Any:
        if name not in self._table.column_names:
            raise SampleError(
                f"{self._what}: there is no column {name!r}; it has: {', '.join(self._table.column_names) or 'none'}"
            )
        return self._table.column(name)

    def _refuse_nulls(self, column: Any, name: str) -> None:
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            raise SampleError(f"{self._what}: column {name!r} is empty in {column.null_count:,} rows, first row {row}")


def rows_from(pack: Pack, codes: IntArray, instants: IntArray, *, decision: bool = False) -> IntArray:
    """(n,) int64: for each event the first row of its symbol that is not before the instant.

    Parameters
    ----------
    pack : Pack
    codes : (n,) int64
        Places of the symbols in the pack.
    instants : (n,) int64
    decision : bool
        Whether the instants are compared with the closes of bars instead of their opens.
    """
    rows = np.empty(len(codes), np.int64)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(pack.symbols) + 1))
    for code in np.flatnonzero(np.diff(bounds)):
        part = order[bounds[code] : bounds[code + 1]]
        first = int(pack.first_rows[code])
        stamps = pack.times[first : first + int(pack.counts[code])]
        rows[part] = first + np.searchsorted(pack.interval.available(stamps) if decision else stamps, instants[part])
    return rows


def read_table(source: TableSource, what: str) -> Any:
    """The Arrow table that a user gives or names; `what` is for errors, see :class:`EventTable`."""
    if isinstance(source, pa.Table):
        return source
    is_frame = hasattr(source, "__arrow_c_stream__")
    if not is_frame and not isinstance(source, (str, Path)):
        raise SampleError(
            f"{what} is {source!r:.80}; give a pyarrow.Table, a data frame, or the path of a Parquet or CSV file"
        )
    try:
        if is_frame:
            return pa.table(source)
        if Path(source).suffix.lower() in (".parquet", ".pq"):
            return parquet.read_table(source)
        return csv.read_csv(source)
    except (OSError, pa.ArrowException) as error:
        raise SampleError(f"{what}: {source!s:.80} can't be read: {error}") from error
