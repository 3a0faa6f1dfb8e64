"""Checking every byte and every invariant of a pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stager.errors import PackDamagedError, PackError
from stager.packs import layout
from stager.packs.fingerprints import fingerprint_of
from stager.packs.held import Part
from stager.packs.layout import Pack
from stager.packs.manifest import Segment, read_manifest, settled

Progress = Callable[[str, int, int], None]

_CHUNK_ROWS = 1 << 20


def verify(path: str | Path, *, progress: Progress | None = None) -> list[str]:
    """Check all checksums and invariants of a pack.

    Parameters
    ----------
    path : str or Path
        The pack's directory.
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Returns
    -------
    list of str
        One sentence per damage found, naming the file and the bytes or rows; empty if the pack is whole.

    Raises
    ------
    NotAPackError, PackVersionError
        If there is nothing to verify. Damage is returned, not raised.
    PackError
        If the system refuses to read a file.
    """
    path = Path(path)
    return settled(path, lambda: _findings(path, progress))


def _findings(path: Path, progress: Progress | None) -> list[str]:
    try:
        return _damaged_files(path, progress) or _broken_invariants(layout.open_pack(path))
    except PackDamagedError as error:
        return [str(error)]
    except OSError as error:
        raise PackError(f"{path}: can't be read: {error.strerror or error}") from error


def _damaged_files(path: Path, progress: Progress | None) -> list[str]:
    manifest = read_manifest(path)
    findings: list[str] = []
    total = sum(stored.size_nbytes for segment in manifest.segments for stored in segment.files.values())
    done = 0
    for segment in manifest.segments:
        for name, stored in segment.files.items():
            findings += _damaged_blocks(path, segment, name)
            done += stored.size_nbytes
            if progress:
                progress("verify", done, total)
    return findings


def _damaged_blocks(path: Path, segment: Segment, name: str) -> list[str]:
    file, stored = path / segment.name / name, segment.files[name]
    if not file.is_file():
        return [f"{file}: the file is missing"]
    size = file.stat().st_size
    if size != stored.size_nbytes:
        return [f"{file}: has {size:,} bytes, the manifest says {stored.size_nbytes:,}"]
    found = layout.block_checksums(file)
    if len(found) != len(stored.blocks):
        return [f"{file}: has {len(found)} blocks, the manifest lists {len(stored.blocks)} checksums"]
    findings = []
    for index, (was, now) in enumerate(zip(stored.blocks, found, strict=True)):
        if was != now:
            first = index * layout.BLOCK_NBYTES
            last = min(first + layout.BLOCK_NBYTES, size) - 1
            findings.append(f"{file}: bytes {first:,} to {last:,} are damaged (checksum {now}, should be {was})")
    return findings


def _broken_invariants(pack: Pack) -> list[str]:
    """What holds for every pack that stager writes; broken only by a writer's fault or a forged manifest."""
    manifest, parts = f"{pack.path}/manifest.json", pack.parts
    findings = [finding for part in parts for finding in _broken_order(part)]
    if findings:
        return findings
    spans = [layout.span(part.times, part.first_rows, part.counts) for part in parts]
    if (min(first for first, _ in spans), max(last for _, last in spans)) != pack.manifest.span:
        findings.append(f"{manifest}: the span is not that of the bars")
    for index, column in enumerate(pack.manifest.columns):
        n_missing = 0
        for part in parts:
            found, n = _differing_rows(part, index, column.name)
            findings += found
            n_missing += n
        if n_missing != column.n_missing:
            findings.append(f"{manifest}: column {column.name!r} misses {n_missing:,} values, not {column.n_missing:,}")
    try:
        hashed = fingerprint_of(pack.held, pack.columns, pack.symbols, pack.counts)
    except PackDamagedError as error:  # a bar in two segments
        return [*findings, f"{pack.path}: {error}"]
    if hashed != pack.manifest.fingerprint:
        findings.append(f"{manifest}: the fingerprint is not that of the bars")
    return findings


def _broken_order(part: Part) -> list[str]:
    findings: list[str] = []
    if list(part.symbols) != sorted(set(part.symbols)):
        findings.append(f"{part.folder}/symbols.arrow: the symbols are not sorted and unique")
    codes: Any = part.bars.column("symbol").combine_chunks()
    if codes.dictionary.to_pylist() != list(part.symbols) or not np.array_equal(
        codes.indices.to_numpy(), np.repeat(np.arange(len(part.symbols)), part.counts)
    ):
        findings.append(f"{part.folder}/bars.arrow: its symbols are not those of symbols.arrow")
    steps = np.diff(part.times)
    steps[np.cumsum(part.counts)[:-1] - 1] = 1
    if (backwards := np.flatnonzero(steps <= 0)).size:
        findings.append(f"{part.folder}/bars.arrow: times do not ascend after row {backwards[0]:,}")
    return findings


def _differing_rows(part: Part, index: int, name: str) -> tuple[list[str], int]:
    """Where a column of the rows is not that of the bars, and how many of its values are missing."""
    findings: list[str] = []
    values, n_missing = part.column(name), 0
    for first in range(0, len(values), _CHUNK_ROWS):
        some = values[first : first + _CHUNK_ROWS]
        n_missing += int((~np.isfinite(some)).sum())
        with np.errstate(over="ignore"):
            same = np.array_equal(some.astype(np.float32), part.rows[first : first + _CHUNK_ROWS, index], True)
        if not same:
            findings.append(
                f"{part.folder}/rows.npy: column {name!r} differs from bars.arrow in rows "
                f"{first:,} to {first + len(some) - 1:,}"
            )
    return findings, n_missing
