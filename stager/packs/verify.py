"""Checking every byte and every invariant of a pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stager.errors import PackDamagedError, PackError
from stager.packs import layout
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
    folder = f"{pack.path}/{pack.manifest.segments[0].name}"
    findings: list[str] = []
    ends = np.cumsum(pack.counts)
    if list(pack.symbols) != sorted(set(pack.symbols)):
        findings.append(f"{folder}/symbols.arrow: the symbols are not sorted and unique")
    codes: Any = pack.bars.column("symbol").combine_chunks()
    if codes.dictionary.to_pylist() != list(pack.symbols) or not np.array_equal(
        codes.indices.to_numpy(), np.repeat(np.arange(len(pack.symbols)), pack.counts)
    ):
        findings.append(f"{folder}/bars.arrow: its symbols are not those of symbols.arrow")
    steps = np.diff(pack.times)
    steps[ends[:-1] - 1] = 1
    if (backwards := np.flatnonzero(steps <= 0)).size:
        findings.append(f"{folder}/bars.arrow: times do not ascend after row {backwards[0]:,}")
    elif layout.span(pack.times, pack.first_rows, pack.counts) != pack.manifest.span:
        findings.append(f"{pack.path}/manifest.json: the span is not that of the bars")
    for index, column in enumerate(pack.manifest.columns):
        values, n_missing = pack.column(column.name), 0
        for first in range(0, pack.n_rows, _CHUNK_ROWS):
            part = values[first : first + _CHUNK_ROWS]
            n_missing += int((~np.isfinite(part)).sum())
            with np.errstate(over="ignore"):
                same = np.array_equal(part.astype(np.float32), pack.rows[first : first + _CHUNK_ROWS, index], True)
            if not same:
                findings.append(
                    f"{folder}/rows.npy: column {column.name!r} differs from bars.arrow in rows "
                    f"{first:,} to {first + len(part) - 1:,}"
                )
        if n_missing != column.n_missing:
            findings.append(
                f"{pack.path}/manifest.json: column {column.name!r} misses {n_missing:,} values, "
                f"not {column.n_missing:,}"
            )
    if layout.fingerprint(pack.bars, pack.symbols, pack.counts) != pack.manifest.fingerprint:
        findings.append(f"{pack.path}/manifest.json: the fingerprint is not that of the bars")
    return findings
