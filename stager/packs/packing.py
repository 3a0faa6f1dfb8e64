"""Writing packs: beside the target, synced, then renamed, so that a target is whole or absent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.inputs import find_inputs
from stager.bars.read import Bars, ReadOptions, Source, read
from stager.bars.threads import parallel
from stager.errors import PackError
from stager.packs import layout
from stager.packs.fingerprints import fingerprint
from stager.packs.held import contiguous
from stager.packs.layout import Pack, open_pack
from stager.packs.making import make, nothing_packed
from stager.packs.manifest import (
    MANIFEST,
    SHARED,
    UNFINISHED,
    Column,
    Manifest,
    PanelLayout,
    Segment,
    new_manifest,
    seal,
)
from stager.packs.publish import check_target, clear, partial_name, partial_of, publish, refusing, sync
from stager.packs.scratch import check_left, keep_rows, n_kept
from stager.packs.segment import Progress, write_segment
from stager.packs.usage import Budget, Usage

__all__ = ["Progress", "Usage", "discard", "pack", "pack_in_memory", "write"]

_ENDINGS = re.compile(r"(\.(csv|txt|tsv|parquet|pq|gz|gzip|zst|zstd))+$", re.IGNORECASE)


def pack(
    source: Source,
    out: str | Path | None = None,
    *,
    read: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    overwrite: bool = False,
    progress: Progress | None = None,
    memory_nbytes: int | None = None,
    workers: int | None = None,
    resume: bool = False,
    usage: Usage | None = None,
) -> Pack:
    """Read bars and write them as a pack; of any size, in the memory that it is given.

    Every file is parsed once. Rows are kept in memory as far as there is room, and else in a scratch file in
    ``TARGET.partial``, which is removed at the end, also after a failure. If the process is killed, it stays, for
    ``resume=True`` or :func:`discard`.

    Parameters
    ----------
    source : path, URI, glob, directory, sequence of these, pyarrow.Table or data frame
        CSV or Parquet input, plain or compressed.
    out : path, optional
        The pack's directory; by default beside a single input, ``bars.csv`` -> ``bars.pack``.
    read : ReadOptions
        What the input does not tell by itself.
    overwrite : bool
        Replace an existing pack. The old one stays whole until the new one is.
    progress : callable(phase, done_nbytes, total_nbytes), optional
        Called from this thread; phases ``parse``, ``sort``, ``write``, ``checksum``.
    memory_nbytes : int, optional
        Memory that the process may take, without files that are mapped; by default a quarter of the machine's, or of
        what its container allows.
    workers : int, optional
        Inputs, and then parts of the rows, that are worked on at once; by default as many as there are cores.
    resume : bool
        Go on with what a killed pack left. Inputs that were changed since are read again.
    usage : Usage, optional
        Is told what it took.

    Returns
    -------
    Pack
        The new pack, opened.

    Raises
    ------
    BarsError
        If the input can't be read as bars, or holds none; or if an input needs more memory than there is, and can't be
        read in parts.
    PackExistsError, NotAPackError, PackError
        If `out` exists (and is no pack), is being written by another process, or can't be written; if a killed pack
        left something and it was not told what to do with it, or it was begun with other options; or if memory or disk
        are too small.
    """
    target = target_of(source, out)
    with refusing(target):
        check_target(target, overwrite)
    if resume and not os.path.lexists(partial_name(target)):
        raise PackError(f"{partial_name(target)}: there is no unfinished pack to go on with; leave out --resume")
    inputs = find_inputs(source)
    if resume and isinstance(inputs, pa.Table):
        raise PackError("a table is in memory, so nothing of it was left to go on with; leave out resume")
    budget = Budget.of(memory_nbytes, workers, () if isinstance(inputs, pa.Table) else inputs)
    usage = Usage() if usage is None else usage
    usage.memory_nbytes, usage.n_workers = budget.memory_nbytes, budget.n_workers

    def made(folder: Path) -> Manifest:
        return make(inputs, read, folder, target, budget, usage, resume, progress)

    return put(target, overwrite, usage, partial(take_over, resume, read), made)


def put(
    target: Path,
    overwrite: bool,
    usage: Usage,
    take_over: Callable[[Path], object],
    made: Callable[[Path], Manifest],
) -> Pack:
    """Have a segment made in ``TARGET.partial``, of which `made` gives the manifest, and put it in place; open it."""
    with refusing(target), usage.measured(), partial_of(target, take_over) as folder:
        write_manifest(folder, made(folder))
        # What is in the segment now.
        for name in UNFINISHED:
            (folder / name).unlink(missing_ok=True)
        if (folder / SHARED).exists():
            shutil.rmtree(folder / SHARED)
        sync(folder)
        # Checked again: another process may have put a pack there meanwhile.
        check_target(target, overwrite)
        publish(folder, target)
    return open_pack(target)


def discard(source: Source, out: str | Path | None = None) -> Path:
    """Remove what a killed pack left beside its target.

    Parameters
    ----------
    source, out : as in :func:`pack`

    Returns
    -------
    Path
        The directory that was removed.

    Raises
    ------
    PackError
        If there is none, or another process is packing to it.
    NotAPackError
        If something else has its name.
    """
    target = target_of(source, out)
    folder = partial_name(target)
    if not os.path.lexists(folder):
        raise PackError(f"{folder}: there is no unfinished pack; nothing was removed")
    with refusing(target), partial_of(target, clear):
        pass
    return folder


def take_over(resume: bool, options: ReadOptions, folder: Path) -> None:
    """Decide what becomes of what an earlier attempt left."""
    if resume:
        check_left(folder, options)
        keep_rows(folder)
    elif n := n_kept(folder):
        raise PackError(
            f"{folder}: an unfinished pack that had read {n:,} input{'s' * (n > 1)}; go on with --resume, or remove it "
            "with --discard"
        )
    else:
        clear(folder)


def write(
    bars: Bars, target: Path, overwrite: bool, progress: Progress | None = None, *, panel: PanelLayout | None = None
) -> Pack:
    """Write bars as a pack and open it; raises as :func:`pack`."""
    with refusing(target):
        _write(bars, target, overwrite, progress, panel)
    return open_pack(target)


def read_bars(source: Source, options: ReadOptions, progress: Progress | None = None) -> Bars:
    """`read`, refusing input without a single bar."""
    bars = read(source, options, progress=progress)
    if len(bars.arranged.times) == 0:
        raise nothing_packed(bars.dropped)
    return bars


def pack_in_memory(source: Source, options: ReadOptions = ReadOptions(), *, progress: Progress | None = None) -> Pack:  # noqa: B008
    """The pack of a bar file or Table, held in memory instead of written. Raises as :func:`pack`."""
    return hold(read_bars(source, options, progress))


def hold(bars: Bars, *, panel: PanelLayout | None = None) -> Pack:
    """The pack of bars, held in memory; raises BarsError if a value is too large for float32."""
    rows, n_missing = bars.rows()
    rows.flags.writeable = False
    manifest = _manifest(bars, n_missing, [Segment("segment-0", len(rows), {})], fingerprint="", panel=panel)
    return Pack(None, manifest, InMemory(rows, bars), bars.symbols, bars.first_rows, bars.counts)


@dataclass(frozen=True)
class InMemory:
    """Bars in memory, and their rows."""

    rows: npt.NDArray[np.float32]
    _bars: Bars

    @property
    def bars(self) -> pa.Table:
        return self._bars.table

    @property
    def times(self) -> npt.NDArray[np.int64]:
        return self._bars.arranged.times

    def column(self, name: str) -> npt.NDArray[np.float64]:
        return contiguous(self._bars.table, name)


def target_of(source: Source, out: str | Path | None) -> Path:
    """Where a pack of some input goes; raises PackError if that has to be told."""
    if out is not None:
        target = Path(out)
        # A link stays: the pack goes where it leads. Names such as ".." have no place beside them.
        return Path(os.path.realpath(target)) if target.is_symlink() or target.name in ("", "..") else target
    if isinstance(source, (str, Path)) and (
        os.path.lexists(source) or not (any(c in str(source) for c in "*?[") or "://" in str(source))
    ):
        path = Path(source)
        return path.with_name(f"{stem}.pack") if (stem := _ENDINGS.sub("", path.name)).strip(".") else Path("bars.pack")
    raise PackError("several inputs, a glob, a URI or a table have no name of their own; say where to with -o DIR")


def _write(bars: Bars, target: Path, overwrite: bool, progress: Progress | None, panel: PanelLayout | None) -> None:
    with partial_of(target) as partial:
        segment = write_segment(partial / "segment-0", bars.table, bars.symbols, bars.counts, target, progress)
        hashed = fingerprint(bars.table, bars.symbols, bars.counts)
        write_manifest(partial, _manifest(bars, missing_in(bars), [segment], hashed, panel))
        sync(partial)
        # Checked again: another process may have put a pack there meanwhile.
        check_target(target, overwrite)
        publish(partial, target)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a directory, synced."""
    (folder / MANIFEST).write_bytes(_encode(manifest))
    sync(folder / MANIFEST)


def missing_in(bars: Bars) -> list[int]:
    """Values of each column that are NaN or infinite."""
    return parallel(lambda name: int((~np.isfinite(contiguous(bars.table, name))).sum()), bars.names)


def _manifest(
    bars: Bars, n_missing: list[int], segments: list[Segment], fingerprint: str, panel: PanelLayout | None
) -> Manifest:
    assert bars.interval is not None  # bars without rows were refused before
    columns = [
        Column(name, bars.roles.get(name, layout.role_of(name)), missing)
        for name, missing in zip(bars.names, n_missing, strict=True)
    ]
    return new_manifest(
        bars.interval,
        bars.inputs,
        columns=columns,
        timestamps=bars.timestamps,
        adjustment=bars.adjustment,
        span=layout.span(bars.arranged.times, bars.first_rows, bars.counts),
        n_rows=len(bars.arranged.times),
        n_symbols=len(bars.symbols),
        fingerprint=fingerprint,
        decisions=list(bars.decisions),
        dropped=dict(bars.dropped),
        warnings=list(bars.warnings),
        segments=segments,
        panel=panel,
    )


def _encode(manifest: Manifest) -> bytes:
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    checksum = seal(raw, "0" * 32)
    # The checksum is the last field, so its place is the last run of zeros.
    head, _, tail = raw.rpartition(b"0" * 32)
    return head + checksum.encode() + tail
