"""The hash that is the same for the same bars, however they were stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from stager.bars.checks import all_finite
from stager.bars.threads import parallel
from stager.packs.held import Held, Joined, contiguous


def fingerprint(table: pa.Table, symbols: Sequence[str], counts: npt.NDArray[np.int64]) -> str:
    """Hash over the sorted (symbol, time, float64 values)."""
    names = table.column_names[1:]
    columns = [contiguous(table, name) for name in names]
    return _fingerprint(names, symbols, counts, lambda number, first, stop: columns[number][first:stop])


def fingerprint_of(held: Held, columns: Sequence[str], symbols: Sequence[str], counts: npt.NDArray[np.int64]) -> str:
    """The same of a pack's bars; those of several segments are put together a symbol at a time."""
    if not isinstance(held, Joined):
        return fingerprint(held.bars, symbols, counts)
    pieces = held.pieces
    parts: list[list[npt.NDArray[Any]]] = [
        [part.times for part in held.parts],
        *([part.column(name) for part in held.parts] for name in columns),
    ]

    def values(number: int, first: int, stop: int) -> npt.NDArray[Any]:
        out = np.empty(stop - first, parts[number][0].dtype)
        pieces.read(parts[number], first, out)
        return out

    return _fingerprint(["time", *columns], symbols, counts, values)


def digest(symbol: str, columns: Iterable[Iterable[npt.NDArray[Any]]]) -> bytes:
    """Hash of one symbol's bars: time and float64 values, of each column the consecutive pieces."""
    parts = []
    for pieces in columns:
        state = blake3()
        for values in pieces:
            state.update(_one_nan(values).view(np.uint8).data)
        parts.append(state.digest(16))
    return blake3(symbol.encode() + b"\0" + b"".join(parts)).digest(16)


def of_digests(names: Sequence[str], digests: Iterable[bytes]) -> str:
    """The fingerprint of columns, the time first, and of the symbols' digests in the symbols' order."""
    total = blake3("\0".join(names).encode())
    for part in digests:
        total.update(part)
    return total.hexdigest(16)


def _fingerprint(
    names: Sequence[str],
    symbols: Sequence[str],
    counts: npt.NDArray[np.int64],
    values: Callable[[int, int, int], npt.NDArray[Any]],
) -> str:
    ends = np.cumsum(counts)

    def of(index: int) -> bytes:
        first, stop = int(ends[index] - counts[index]), int(ends[index])
        return digest(symbols[index], ([values(number, first, stop)] for number in range(len(names))))

    return of_digests(names, parallel(of, range(len(symbols))))


def _one_nan(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values; NaN has many bit patterns, and here one."""
    if values.dtype != np.float64 or all_finite(values):
        return values
    return np.where(np.isnan(values), np.nan, values)
