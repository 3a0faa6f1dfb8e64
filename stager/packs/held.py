"""What a pack's bars are taken from: a segment, or several of them joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.config import format_nbytes
from stager.packs.pieces import Pieces, find_pieces
from stager.packs.rows import RowsFile


class Held(Protocol):
    """A segment, several of them joined, or bars in memory; arrays as in :class:`stager.packs.layout.Pack`."""

    @property
    def rows(self) -> npt.NDArray[np.float32]: ...
    @property
    def bars(self) -> pa.Table: ...
    @property
    def times(self) -> npt.NDArray[np.int64]: ...
    def column(self, name: str) -> npt.NDArray[np.float64]: ...


@dataclass(frozen=True)
class Part:
    """An opened segment: what :class:`stager.packs.layout.Pack` tells of all bars, of some.

    Attributes
    ----------
    folder : Path
    file : RowsFile
        The file that ``rows`` maps.
    bars : pyarrow.Table
    symbols : tuple of str
    first_rows, counts : (n_symbols,) int64
    """

    folder: Path
    file: RowsFile
    bars: pa.Table
    symbols: tuple[str, ...]
    first_rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        return self.file.rows

    @cached_property
    def times(self) -> npt.NDArray[np.int64]:
        return contiguous(self.bars, "time")

    def column(self, name: str) -> npt.NDArray[np.float64]:
        return contiguous(self.bars, name)


@dataclass(frozen=True)
class Joined:
    """Several segments as one: arrays are brought into the order (symbol, time) when they are asked for.

    Attributes
    ----------
    parts : tuple of Part
    symbols : tuple of str
    counts : (n_symbols,) int64
    room : callable(shape, dtype)
        Makes the arrays.
    """

    parts: tuple[Part, ...]
    symbols: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    room: Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]] = np.empty

    @cached_property
    def pieces(self) -> Pieces:
        """Where the rows of the segments lie; raises PackDamagedError if two of them hold the same bar."""
        return find_pieces(self.parts, self.symbols)

    @cached_property
    def rows(self) -> npt.NDArray[np.float32]:
        return self._ordered([part.rows for part in self.parts])

    @cached_property
    def times(self) -> npt.NDArray[np.int64]:
        return self._ordered([part.times for part in self.parts])

    @property
    def bars(self) -> pa.Table:
        codes = np.repeat(np.arange(len(self.symbols), dtype=np.int32), self.counts)
        symbol = pa.DictionaryArray.from_arrays(codes, pa.array(self.symbols, pa.string()))
        time: Any = pa.array(self.times).view(pa.timestamp("ns", "UTC"))
        names = self.parts[0].bars.column_names[2:]
        return pa.table({"symbol": symbol, "time": time, **{name: pa.array(self.column(name)) for name in names}})

    def column(self, name: str) -> npt.NDArray[np.float64]:
        return self._ordered([part.column(name) for part in self.parts])

    def read(self, out: npt.NDArray[np.uint8], first: int) -> None:
        """Fill `out` with the bytes of the rows as they lie, segment after segment, from byte `first` on."""
        stop, start = first + len(out), 0
        for part in self.parts:
            end = start + part.rows.nbytes
            if first < end and start < stop:
                begin = max(first, start)
                part.file.read(out[begin - first : min(stop, end) - first], begin - start)
            start = end

    def _ordered(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        out = self.room((int(self.pieces.starts[-1]), *parts[0].shape[1:]), parts[0].dtype)
        self.pieces.fill(parts, out)
        out.flags.writeable = False
        return out


def contiguous(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The values of a column without nulls as one array, without a copy where it lies in one chunk."""
    column = table.column(name)
    chunk: Any = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_timestamp(chunk.type):
        chunk = chunk.view(pa.int64())
    array: npt.NDArray[Any] = chunk.to_numpy(zero_copy_only=True)
    return array


@dataclass(frozen=True)
class Shard:
    """Which part of a pack this is.

    Attributes
    ----------
    number, n_shards : int
    by : {"symbols", "segments"}
    parts : tuple of str
        The first and the last symbol, or the segments.
    n_rows, n_symbols, rows_nbytes : int
        Of this part.
    all_rows, all_symbols, all_rows_nbytes : int
        Of the whole pack.
    """

    number: int
    n_shards: int
    by: str
    parts: tuple[str, ...]
    n_rows: int
    n_symbols: int
    rows_nbytes: int
    all_rows: int
    all_symbols: int
    all_rows_nbytes: int

    def __str__(self) -> str:
        what = " to ".join(self.parts) if self.by == "symbols" else ", ".join(self.parts)
        return (
            f"{self.number} of {self.n_shards}, by {self.by}: {what}; {self.n_rows:,} of {self.all_rows:,} rows, "
            f"{self.n_symbols:,} of {self.all_symbols:,} symbols, {format_nbytes(self.rows_nbytes)} of "
            f"{format_nbytes(self.all_rows_nbytes)}; nothing else is served here"
        )
