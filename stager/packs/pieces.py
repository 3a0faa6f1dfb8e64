"""Where the rows of several segments lie in the order (symbol, time): in pieces, not row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.errors import PackDamagedError

Int64 = npt.NDArray[np.int64]

_CHUNK_ROWS = 1 << 18
# Pieces shorter than this are copied row by row, all at once: a call for each would take longer.
_SHORT_ROWS = 64


class Sorted(Protocol):
    """Rows of some symbols, sorted by (symbol, time)."""

    @property
    def symbols(self) -> tuple[str, ...]: ...
    @property
    def first_rows(self) -> Int64: ...
    @property
    def counts(self) -> Int64: ...
    @property
    def times(self) -> Int64: ...


@dataclass(frozen=True)
class Pieces:
    """Stretches of consecutive rows that stay together, in the order (symbol, time).

    Attributes
    ----------
    places : ndarray of int64, shape (n_pieces,)
        The first row of each piece in the order (symbol, time); ascending from 0.
    sources : ndarray of int64, shape (n_pieces,)
        The same row where it lies, counted segment after segment.
    starts : ndarray of int64, shape (n_segments + 1,)
        First row of each segment, and the number of all rows.
    """

    places: Int64
    sources: Int64
    starts: Int64

    def by_source(self) -> tuple[Int64, Int64]:
        """``sources`` ascending, and the places that belong to them."""
        order = np.argsort(self.sources)
        return self.sources[order], self.places[order]

    def fill(self, parts: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
        """Bring the rows of all segments into order, several threads.

        Parameters
        ----------
        parts : sequence of ndarray, a segment each
        out : ndarray, shape (n_rows, ...)
        """

        def some(first: int) -> None:
            self.read(parts, first, out[first : first + _CHUNK_ROWS])

        parallel(some, range(0, len(out), _CHUNK_ROWS))

    def read(self, parts: Sequence[npt.NDArray[Any]], first: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the rows from `first` on."""
        stop = first + len(out)
        one, last = (np.searchsorted(self.places, [first, stop - 1], "right") - 1).tolist()
        places, sources = self.places[one : last + 1], self.sources[one : last + 1]
        begins = np.maximum(places, first)
        lengths: Int64 = np.diff(begins, append=stop)
        sources = sources + begins - places
        owners = np.searchsorted(self.starts, sources, "right") - 1
        sources -= self.starts[owners]
        if len(places) * _SHORT_ROWS <= len(out):
            for owner, source, begin, length in zip(
                owners.tolist(), sources.tolist(), (begins - first).tolist(), lengths.tolist(), strict=True
            ):
                out[begin : begin + length] = parts[owner][source : source + length]
            return
        rows = np.repeat(sources - begins, lengths) + np.arange(first, stop)
        owner_of = np.repeat(owners, lengths)
        for owner in np.unique(owners):
            mine = owner_of == owner
            out[mine] = parts[owner][rows[mine]]


def find_pieces(parts: Sequence[Sorted], symbols: Sequence[str]) -> Pieces:
    """Where the rows of some segments lie in the order of `symbols` and time.

    Of a symbol whose stretches follow one another, the first and last times are looked at; of others, all.

    Raises
    ------
    PackDamagedError
        If two segments hold a bar of the same symbol and time.
    """
    starts = np.cumsum([0, *(int(part.counts.sum()) for part in parts)]).astype(np.int64)
    number = {symbol: code for code, symbol in enumerate(symbols)}
    codes = np.concatenate([np.array([number[s] for s in part.symbols], np.int64) for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    sources = np.concatenate([part.first_rows + start for part, start in zip(parts, starts, strict=False)])
    begins = np.concatenate([part.times[part.first_rows] for part in parts])
    ends = np.concatenate([part.times[part.first_rows + part.counts - 1] for part in parts])
    order = np.lexsort((begins, codes))
    codes, counts, sources, begins, ends = (a[order] for a in (codes, counts, sources, begins, ends))
    places = np.cumsum(counts) - counts
    clash = (codes[1:] == codes[:-1]) & (begins[1:] <= ends[:-1])
    tangled = np.isin(codes, codes[1:][clash])
    if tangled.any():
        where = _each(places[tangled], counts[tangled])
        rows = _by_time(parts, starts, symbols, np.repeat(codes[tangled], counts[tangled]),
                        _each(sources[tangled], counts[tangled]))  # fmt: skip
        places, sources = np.concatenate([places[~tangled], where]), np.concatenate([sources[~tangled], rows])
        order = np.argsort(places)
        places, sources = places[order], sources[order]
    owners = np.searchsorted(starts, sources, "right")
    begin = np.ones(len(places), np.bool_)
    begin[1:] = (np.diff(sources) != np.diff(places)) | (owners[1:] != owners[:-1])
    return Pieces(places[begin], sources[begin], starts)


def _each(firsts: Int64, counts: Int64) -> Int64:
    """All numbers of the ranges that begin at `firsts`."""
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def _by_time(parts: Sequence[Sorted], starts: Int64, symbols: Sequence[str], codes: Int64, rows: Int64) -> Int64:
    """The rows of symbols whose stretches lie in each other, sorted by (symbol, time)."""
    owners = np.searchsorted(starts, rows, "right") - 1
    times = np.empty(len(rows), np.int64)
    for owner in np.unique(owners):
        mine = owners == owner
        times[mine] = parts[owner].times[rows[mine] - starts[owner]]
    order = np.lexsort((times, codes))
    times, codes = times[order], codes[order]
    if (twice := np.flatnonzero((codes[1:] == codes[:-1]) & (times[1:] == times[:-1]))).size:
        symbol, time = symbols[int(codes[twice[0]])], np.datetime64(int(times[twice[0]]), "ns")
        raise PackDamagedError(f"two segments hold a bar of {symbol} at {time}Z; pack the bars again")
    return rows[order]
