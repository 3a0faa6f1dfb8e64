"""Shards: parts of a pack, each for a node that cannot hold all of it.

A pack of several segments is dealt by whole segments, so that a node needs the files of its own alone; a pack of one
segment by groups of symbols, whose rows lie one after the other. A cut is a pure function of the pack, so nodes agree
without a word.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import numpy.typing as npt

from stager.errors import ConfigError
from stager.packs.held import Part, Shard
from stager.packs.layout import Pack, join, span


def shard_of(pack: Pack, number: int, n_shards: int) -> Pack:
    """A part of a pack, as a pack.

    Parameters
    ----------
    pack : Pack
        On disk.
    number : int
        0 to n_shards - 1.
    n_shards : int

    Returns
    -------
    Pack
        Mapped as `pack` is; its fingerprint is its own.

    Raises
    ------
    ConfigError
        If there is no such shard, or it would be empty.
    """
    for value in (number, n_shards):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ConfigError(f"shard is ({number!r}, {n_shards!r}); give two integers, such as (0, 4)")
    if not 0 <= number < n_shards:
        raise ConfigError(f"shard is ({number}, {n_shards}); the first is the shard's number, 0 to {n_shards - 1}")
    if not pack.parts:
        raise ConfigError("shard stages a part of a pack on disk; pack the bars first")
    if pack.shard is not None:
        raise ConfigError(f"shard is ({number}, {n_shards}), and the pack is a shard already: {pack.shard}")
    n_parts = len(pack.parts)
    if n_parts > 1 and n_parts < n_shards:
        raise ConfigError(
            f"shard is ({number}, {n_shards}), and a pack of several segments is dealt by whole segments, of which "
            f"{pack.path} has {n_parts}; use at most {n_parts} shards, or merge the segments with `stager compact`: "
            "then shards are groups of symbols"
        )
    if n_parts == 1 and len(pack.symbols) < n_shards:
        raise ConfigError(
            f"shard is ({number}, {n_shards}), and {pack.path} has {len(pack.symbols)} symbols; a shard is at least one"
        )
    counts = pack.counts if n_parts == 1 else np.array([len(part.rows) for part in pack.parts])
    edges = cut(counts, n_shards)
    some = slice(edges[number], edges[number + 1])
    parts: tuple[Part, ...]
    named: tuple[str, ...]
    if n_parts == 1:
        by, parts, segments = "symbols", (_symbols(pack.parts[0], some),), pack.manifest.segments
        named = (parts[0].symbols[0], parts[0].symbols[-1])
    else:
        by, parts, segments = "segments", pack.parts[some], pack.manifest.segments[some]
        named = tuple(segment.name for segment in segments)
    assert pack.path is not None
    whole = join(pack.path, pack.manifest, parts)
    manifest = msgspec.structs.replace(
        pack.manifest,
        n_rows=int(whole.counts.sum()),
        n_symbols=len(whole.symbols),
        span=_span(parts),
        segments=segments,
        fingerprint=hashlib.blake2b(
            f"{pack.fingerprint} shard {number} of {n_shards} by {by}".encode(), digest_size=16
        ).hexdigest(),
    )
    shard = Shard(
        number, n_shards, by, named, manifest.n_rows, manifest.n_symbols, whole.rows_nbytes,
        pack.n_rows, len(pack.symbols), pack.rows_nbytes,
    )  # fmt: skip
    return Pack(pack.path, manifest, whole.held, whole.symbols, whole.first_rows, whole.counts, parts, shard)


def cut(counts: npt.NDArray[np.int64], n: int) -> list[int]:
    """Edges of `n` stretches of some consecutive counts: none empty, and of sums that are about equal."""
    ends = np.cumsum(counts)
    wanted = [int(ends[-1]) * part // n for part in range(1, n)]
    edges = [0]
    for part, at in enumerate(wanted, 1):
        # The edge that is nearest, with one for each stretch before and after it.
        edge = int(np.searchsorted(ends, at))
        before = int(ends[edge - 1]) if edge else 0
        edge += int(ends[edge]) - at <= at - before
        edges.append(min(max(edge, edges[-1] + 1), len(counts) - (n - part)))
    return [*edges, len(counts)]


def _symbols(part: Part, some: slice) -> Part:
    """Some consecutive symbols of a segment."""
    first = int(part.first_rows[some.start])
    stop = first + int(part.counts[some].sum())
    return Part(
        part.folder,
        part.file.between(first, stop),
        part.bars.slice(first, stop - first),
        part.symbols[some],
        part.first_rows[some] - first,
        part.counts[some],
    )


def _span(parts: tuple[Part, ...]) -> tuple[str, str]:
    spans = [span(part.times, part.first_rows, part.counts) for part in parts]
    return min(first for first, _ in spans), max(last for _, last in spans)
