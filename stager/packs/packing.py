"""Writing packs: beside the target, synced, then renamed, so that a target is whole or absent."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.columns import to_float32
from stager.bars.inspection import with_findings
from stager.bars.read import Bars, ReadOptions, Source, read
from stager.bars.series_findings import no_bars
from stager.bars.threads import parallel
from stager.config import format_nbytes
from stager.errors import BarsError, PackError
from stager.packs import layout
from stager.packs.fingerprints import fingerprint
from stager.packs.held import contiguous
from stager.packs.layout import Pack, open_pack
from stager.packs.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Column,
    Manifest,
    PanelLayout,
    Role,
    Segment,
    StoredFile,
    readable,
    seal,
)
from stager.packs.publish import check_target, partial_of, publish, refusing, sync
from stager.version import __version__

Progress = Callable[[str, int, int], None]

_CHUNK_ROWS = 1 << 18
_ENDINGS = re.compile(r"(\.(csv|txt|tsv|parquet|pq|gz|gzip|zst|zstd))+$", re.IGNORECASE)


def pack(
    source: Source,
    out: str | Path | None = None,
    *,
    read: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pack:
    """Read bars and write them as a pack.

    Parameters
    ----------
    source : path, URI, glob, directory, sequence of these, or pyarrow.Table
        CSV or Parquet input, plain or compressed.
    out : path, optional
        The pack's directory; by default beside a single input, ``bars.csv`` -> ``bars.pack``.
    read : ReadOptions
        What the input does not tell by itself.
    overwrite : bool
        Replace an existing pack. The old one stays whole until the new one is.
    progress : callable(phase, done_nbytes, total_nbytes), optional
        Called from this thread; phases ``parse``, ``sort``, ``write``, ``checksum``.

    Returns
    -------
    Pack
        The new pack, opened.

    Raises
    ------
    BarsError
        If the input can't be read as bars, or holds none.
    PackExistsError, NotAPackError, PackError
        If `out` exists (and is no pack), is being written by another process, or can't be written.
    """
    target = _target(source, out)
    with refusing(target):
        check_target(target, overwrite)
    return write(with_findings(read_bars(source, read, progress)), target, overwrite, progress)


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
        raise BarsError(f"{no_bars(bars.dropped)}; nothing was packed")
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


def cast_rows(table: pa.Table, first: int, out: npt.NDArray[np.float32]) -> None:
    """Fill `out` (n, n_columns) float32 with rows ``first : first + n`` of the float64 columns, several threads.

    Raises
    ------
    BarsError
        If a value is too large for float32.
    """
    columns = {name: contiguous(table, name) for name in table.column_names[2:]}

    def fill(start: int) -> None:
        stop = min(start + _CHUNK_ROWS, len(out))
        for index, (name, column) in enumerate(columns.items()):
            out[start:stop, index] = to_float32(column[first + start : first + stop], name)

    parallel(fill, range(0, len(out), _CHUNK_ROWS))


def _target(source: Source, out: str | Path | None) -> Path:
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
        segment = write_segment(
            partial / "segment-0", bars.table, bars.symbols, bars.first_rows, bars.counts, target, progress
        )
        hashed = fingerprint(bars.table, bars.symbols, bars.counts)
        write_manifest(partial, _manifest(bars, missing_in(bars), [segment], hashed, panel))
        sync(partial)
        # Checked again: another process may have put a pack there meanwhile.
        check_target(target, overwrite)
        publish(partial, target)


def write_segment(
    folder: Path,
    table: pa.Table,
    symbols: Sequence[str],
    first_rows: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    target: Path,
    progress: Progress | None = None,
) -> Segment:
    """Write sorted bars as the segment `folder`, synced; `target` is the pack that errors name.

    Raises
    ------
    PackError
        If the disk has no room.
    BarsError
        If a value is too large for float32.
    """
    n_rows, n_columns = table.num_rows, table.num_columns - 2
    needed = n_rows * (n_columns * 12 + 12) + (1 << 20)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise PackError(
            f"{target}: the pack takes {format_nbytes(needed)}, the disk has {format_nbytes(free)} free; "
            "free some, or choose another place with -o DIR"
        )
    folder.mkdir()
    _write_rows(folder / "rows.npy", table, n_rows, n_columns, progress)
    _write_arrow(folder / "bars.arrow", table)
    _write_arrow(
        folder / "symbols.arrow",
        pa.table({"symbol": list(symbols), "first_row": first_rows, "count": counts}),
    )
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    files: dict[str, StoredFile] = {}
    done = 0
    for name, size in sizes.items():
        files[name] = StoredFile(size, layout.block_checksums(folder / name))
        done += size
        if progress:
            progress("checksum", done, sum(sizes.values()))
    for path in (*folder.iterdir(), folder):
        sync(path)
    return Segment(folder.name, n_rows, files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a directory, synced."""
    (folder / MANIFEST).write_bytes(_encode(manifest))
    sync(folder / MANIFEST)


def missing_in(bars: Bars) -> list[int]:
    """Values of each column that are NaN or infinite."""
    return parallel(lambda name: int((~np.isfinite(contiguous(bars.table, name))).sum()), bars.names)


def _write_rows(file: Path, table: pa.Table, n_rows: int, n_columns: int, progress: Progress | None) -> None:
    with file.open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, n_columns)}
        np.lib.format.write_array_header_1_0(stream, header)
        step = max(1, layout.BLOCK_NBYTES // (4 * n_columns))
        block = np.empty((min(step, n_rows), n_columns), np.float32)
        for first in range(0, n_rows, step):
            out = block[: n_rows - first]
            cast_rows(table, first, out)
            stream.write(out.data.cast("B"))
            if progress:
                progress("write", (first + len(out)) * 4 * n_columns, n_rows * 4 * n_columns)


def _write_arrow(file: Path, table: pa.Table) -> None:
    with pa.OSFile(os.fsencode(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:  # type: ignore[arg-type]
        writer.write_table(table.combine_chunks())


def _manifest(
    bars: Bars, n_missing: list[int], segments: list[Segment], fingerprint: str, panel: PanelLayout | None
) -> Manifest:
    assert bars.interval is not None  # bars without rows were refused before
    columns = []
    for name, missing in zip(bars.names, n_missing, strict=True):
        role: Role = "price" if name in layout.PRICES else "volume" if name == "volume" else "other"
        columns.append(Column(name, bars.roles.get(name, role), missing))
    return Manifest(
        format_version=FORMAT_VERSION,
        stager_version=__version__,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        columns=columns,
        interval=bars.interval.text,
        timestamps=bars.timestamps,
        adjustment=bars.adjustment,
        span=layout.span(bars.arranged.times, bars.first_rows, bars.counts),
        n_rows=len(bars.arranged.times),
        n_symbols=len(bars.symbols),
        fingerprint=fingerprint,
        inputs=[replace(one, name=readable(one.name)) for one in bars.inputs],
        decisions=list(bars.decisions),
        dropped=dict(bars.dropped),
        warnings=list(bars.warnings),
        segments=segments,
        panel=panel,
        checksum="0" * 32,
    )


def _encode(manifest: Manifest) -> bytes:
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    checksum = seal(raw, "0" * 32)
    # The checksum is the last field, so its place is the last run of zeros.
    head, _, tail = raw.rpartition(b"0" * 32)
    return head + checksum.encode() + tail
