"""Later bars as a further segment of a pack; the bars that are there are not written again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stager.bars.arrange import Arranged
from stager.bars.inspection import with_findings
from stager.bars.interval import Interval
from stager.bars.read import Bars, InputFile, ReadOptions, Source
from stager.errors import BarsError, PackError
from stager.packs.fingerprints import fingerprint_of
from stager.packs.layout import Pack, join, open_pack, open_part
from stager.packs.manifest import MANIFEST, Column, Manifest, read_manifest, readable
from stager.packs.overlap import Overlap, compare, first_and_last
from stager.packs.packing import Progress, missing_in, read_bars, write_manifest
from stager.packs.publish import partial_of, refusing, sync
from stager.packs.seam import jumps_at_the_seam
from stager.packs.segment import write_segment


def append(
    path: str | Path,
    source: Source,
    *,
    read: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> Pack:
    """Add bars to a pack, as a further segment.

    The pack is the old one until the new manifest is in place, also if the process is killed. Bars that it already has
    are compared: identical ones are dropped and counted as duplicates. New symbols are allowed. The pack is read once,
    for its fingerprint.

    Parameters
    ----------
    path : str or Path
        The pack's directory.
    source : as in :func:`stager.pack`
        Columns that the pack does not have are left out.
    read : ReadOptions
        What the input does not tell; interval, adjustment and close of the sessions are the pack's unless told.
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Returns
    -------
    Pack
        The pack with the new bars, opened. Packs that were opened before keep their rows.

    Raises
    ------
    BarsError
        If the input can't be read as bars, or holds none.
    PackError
        If bars differ from those of the same symbol and time in the pack, telling where all prices of a symbol differ
        by one ratio (then one of the two was adjusted); if the input does not fit the pack in interval, columns, kind
        of time stamps or adjustment; or if the pack can't be written.
    NotAPackError, PackVersionError, PackDamagedError
        As :func:`stager.open_pack`.
    """
    target = Path(os.path.realpath(path))
    before = open_pack(target)
    if before.manifest.panel is not None:
        raise PackError(f"{target}: can't append to a panel; append to the pack that it came from and set it anew")
    options = msgspec.structs.replace(
        read,
        interval=read.interval or before.manifest.interval,
        session_close=read.session_close or before.manifest.session_close,
        adjustment=before.manifest.adjustment if read.adjustment == "unknown" else read.adjustment,
    )
    bars = with_findings(read_bars(source, options, progress))
    with refusing(target), partial_of(target) as partial:
        _add(target, partial, bars, progress)
    return open_pack(target)


def _add(target: Path, partial: Path, bars: Bars, progress: Progress | None) -> None:
    # Opened under the lock: another process may have appended meanwhile.
    pack = open_pack(target)
    bars, notes = _fitted(pack, bars)
    overlap = compare(pack, bars)
    bars, notes = _new(bars, overlap), notes + overlap.notes()
    notes += jumps_at_the_seam(pack, bars)
    manifest = _continued(pack.manifest, bars, overlap, notes)
    if not len(bars.arranged.times):
        write_manifest(partial, manifest)
        _commit(target, partial)
        return
    name = f"segment-{1 + max(_number(segment.name) for segment in manifest.segments)}"
    segment = write_segment(partial / name, bars.table, bars.symbols, bars.counts, target, progress)
    columns = [
        Column(column.name, column.role, column.n_missing + n)
        for column, n in zip(manifest.columns, missing_in(bars), strict=True)
    ]
    first, last = first_and_last(bars)
    manifest = _replaced(
        manifest,
        columns=columns,
        span=(min(manifest.span[0], first), max(manifest.span[1], last)),
        n_rows=manifest.n_rows + segment.n_rows,
        segments=[*manifest.segments, segment],
    )
    whole = join(target, manifest, (*pack.parts, open_part(partial / name, manifest, segment)))
    hashed = fingerprint_of(whole.held, whole.columns, whole.symbols, whole.counts)
    write_manifest(partial, _replaced(manifest, n_symbols=len(whole.symbols), fingerprint=hashed))
    with _orphan_removed(target, name):
        shutil.rmtree(target / name, ignore_errors=True)  # left by an append that was killed here
        os.rename(partial / name, target / name)
        sync(target)
        _commit(target, partial)


def _commit(target: Path, partial: Path) -> None:
    os.rename(partial / MANIFEST, target / MANIFEST)
    # Not synced, the pack is the old or the new one after a crash, and whole in both cases.
    with suppress(OSError):
        sync(target)


@contextmanager
def _orphan_removed(target: Path, name: str) -> Iterator[None]:
    """After a failure, remove a segment that the manifest in place does not list."""
    try:
        yield
    except BaseException:
        if all(segment.name != name for segment in read_manifest(target).segments):
            shutil.rmtree(target / name, ignore_errors=True)
        raise


def _number(segment: str) -> int:
    return int(segment.removeprefix("segment-"))


def _replaced(manifest: Manifest, **changes: Any) -> Manifest:
    return msgspec.structs.replace(manifest, checksum="0" * 32, **changes)


def _fitted(pack: Pack, bars: Bars) -> tuple[Bars, list[str]]:
    """The bars with the pack's columns, and what a user should know."""
    manifest, notes = pack.manifest, list(bars.warnings)
    where = f"{pack.path}: can't append"
    assert bars.interval is not None  # it was told
    if bars.interval.text != pack.interval.text:
        raise PackError(f"{where}: the bars are of {bars.interval.text}, those of the pack of {manifest.interval}")
    if bars.timestamps != manifest.timestamps:
        kinds = {"utc": "instants", "session": "session dates"}
        raise PackError(
            f"{where}: the times of the input are {kinds[bars.timestamps]}, those of the pack "
            f"{kinds[manifest.timestamps]}; bring them into one form"
        )
    if bars.interval.close_text != manifest.session_close:
        told = [close or "the next 00:00 UTC" for close in (bars.interval.close_text, manifest.session_close)]
        raise PackError(
            f"{where}: sessions close at {told[0]}, and those of the pack at {told[1]}; leave --session-close out, "
            f"or pack all files again with it"
        )
    if bars.adjustment != manifest.adjustment:
        raise PackError(
            f"{where}: the adjustment told is {bars.adjustment}, that of the pack {manifest.adjustment}; pack all "
            f"files again in one adjustment"
        )
    labels = [{d.value for d in decided if d.what == "label"} for decided in (manifest.decisions, bars.decisions)]
    if labels == [{"close"}, {"open"}]:
        raise PackError(
            f"{where}: the pack's time stamps marked the end of their bars, and those of the input are read as the "
            f"start; say --label close"
        )
    missing = [name for name in pack.columns if name not in bars.names and name not in bars.empty]
    if missing:
        raise PackError(f"{where}: the input has no column {missing[0]!r}, and the pack has one; name it with --column")
    more = [name for name in bars.names if name not in pack.columns]
    notes += [f"column {name!r} is left out: the pack does not have it" for name in more]
    try:
        inferred, _ = Interval.infer(bars.arranged.times, bars.first_rows, bars.counts)
    except BarsError:  # too few bars to tell
        inferred = bars.interval
    if inferred.text != bars.interval.text:
        notes.append(
            f"the most frequent step of the appended bars is {inferred.text}, and the pack's interval "
            f"{manifest.interval}"
        )
    n_rows = len(bars.arranged.times)
    columns = [
        bars.arranged.columns[bars.names.index(name)] if name in bars.names else np.full(n_rows, np.nan)
        for name in pack.columns
    ]
    return _with(bars, pack.columns, bars.arranged.times, bars.counts, columns, bars.symbols), notes


def _new(bars: Bars, overlap: Overlap) -> Bars:
    """The bars that the pack does not have."""
    new = ~overlap.held
    codes = np.repeat(np.arange(len(bars.symbols)), bars.counts)[new]
    counts = np.bincount(codes, minlength=len(bars.symbols))
    symbols = tuple(symbol for symbol, n in zip(bars.symbols, counts, strict=True) if n)
    columns = [column[new] for column in bars.arranged.columns]
    return _with(bars, bars.names, bars.arranged.times[new], counts[counts > 0], columns, symbols)


def _with(
    bars: Bars,
    names: tuple[str, ...],
    times: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    columns: list[npt.NDArray[np.float64]],
    symbols: tuple[str, ...],
) -> Bars:
    first_rows = np.cumsum(counts) - counts
    arranged = Arranged(times, first_rows, counts, len(columns), [], _columns=columns)
    return with_values(bars, arranged=arranged, names=names, symbols=symbols, first_rows=first_rows, counts=counts)


def _continued(manifest: Manifest, bars: Bars, overlap: Overlap, notes: list[str]) -> Manifest:
    """The manifest with where the bars came from."""
    dropped = dict(manifest.dropped)
    for reason, n in (*bars.dropped.items(), ("duplicate", int(overlap.held.sum()))):
        dropped[reason] = dropped.get(reason, 0) + n
    known = {(decision.what, decision.value) for decision in manifest.decisions}
    inputs = [InputFile(readable(one.name), one.size_nbytes, one.n_rows, one.n_dropped) for one in bars.inputs]
    return _replaced(
        manifest,
        inputs=[*manifest.inputs, *inputs],
        decisions=[*manifest.decisions, *(d for d in bars.decisions if (d.what, d.value) not in known)],
        dropped=dropped,
        warnings=[*manifest.warnings, *(note for note in notes if note not in manifest.warnings)],
    )
