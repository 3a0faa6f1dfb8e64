"""The hash that is the same for the same bars, however they were stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


def _fingerprint(
    names: Sequence[str],
    symbols: Sequence[str],
    counts: npt.NDArray[np.int64],
    values: Callable[[int, int, int], npt.NDArray[Any]],
) -> str:
    ends = np.cumsum(counts)

    def digest(index: int) -> bytes:
        first, stop = int(ends[index] - counts[index]), int(ends[index])
        columns = (_one_nan(values(number, first, stop)) for number in range(len(names)))
        parts = [hashlib.blake2b(column.data, digest_size=16).digest() for column in columns]
        return hashlib.blake2b(symbols[index].encode() + b"\0" + b"".join(parts), digest_size=16).digest()

    total = hashlib.blake2b("\0".join(names).encode(), digest_size=16)
    for part in parallel(digest, range(len(symbols))):
        total.update(part)
    return total.hexdigest()


def _one_nan(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values; NaN has many bit patterns, and here one."""
    missing = np.isnan(values) if values.dtype == np.float64 else None
    return values if missing is None or not missing.any() else np.where(missing, np.nan, values)
