"""What a pack is: the files, the manifest, and opening one.

::

    bars.pack/
        manifest.json            the manifest; ``checksum`` covers the file with that value zeroed
        segment-0/
            rows.npy             (n_rows, n_columns) float32, C order; a standard .npy, data at a multiple of 64
            bars.arrow           Arrow IPC, one record batch: symbol, time, float64 columns
            symbols.arrow        Arrow IPC: symbol, first_row, count

Rows lie symbol after symbol (by symbol text), time ascending inside a symbol. Checksums are BLAKE2b of 16 bytes over
blocks of 64 MiB, so that damage is located, not only found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.interval import Interval
from stager.bars.threads import parallel
from stager.errors import NotAPackError, PackDamagedError, PackVersionError

FORMAT_VERSION = 1
BLOCK_NBYTES = 64 << 20
MANIFEST = "manifest.json"
PRICES = ("open", "high", "low", "close")

Role = Literal["price", "volume", "other"]


class Column(msgspec.Struct, frozen=True):
    """A column of the rows: name, role, and how many of its values are missing (NaN)."""

    name: str
    role: Role
    n_missing: int


class Input(msgspec.Struct, frozen=True):
    """An input file: its name as given, size, rows read, and rows that became no bar."""

    name: str
    size_nbytes: int
    n_rows: int
    n_dropped: int


class Decision(msgspec.Struct, frozen=True):
    """What was decided about the input, and from what."""

    what: str
    value: str
    source: str


class StoredFile(msgspec.Struct, frozen=True):
    """Size and block checksums of a file."""

    size_nbytes: int
    blocks: list[str]


class Segment(msgspec.Struct, frozen=True):
    """A directory of rows that is never changed once written."""

    name: str
    n_rows: int
    files: dict[str, StoredFile]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a pack that is not rows.

    ``span`` is the first and last bar's open, ISO 8601 UTC. ``fingerprint`` is empty for bars in memory, where it is
    computed when asked for.
    """

    format_version: int
    stager_version: str
    created: str
    columns: list[Column]
    interval: str
    timestamps: Literal["utc", "session"]
    adjustment: Literal["raw", "split", "total", "unknown"]
    span: tuple[str, str]
    n_rows: int
    n_symbols: int
    fingerprint: str
    inputs: list[Input]
    decisions: list[Decision]
    dropped: dict[str, int]
    warnings: list[str]
    segments: list[Segment]
    checksum: str


class Pack:
    """Bars in packed form: a mapped pack directory, or bars held in memory.

    Not built by hand: :func:`open_pack`, :func:`stager.pack` and ``packing.pack_in_memory`` return one. Arrays are
    read-only and stay valid as long as something refers to them; the files must not be changed meanwhile.

    Attributes
    ----------
    path : Path or None
        The directory; None in memory.
    manifest : Manifest
    rows : (n_rows, n_columns) float32, C order
    symbols : tuple of str
        Sorted by text.
    first_rows, counts : (n_symbols,) int64
        Symbol ``i`` owns rows ``first_rows[i] : first_rows[i] + counts[i]``.
    """

    def __init__(
        self,
        path: Path | None,
        manifest: Manifest,
        rows: npt.NDArray[np.float32],
        bars: pa.Table,
        symbols: tuple[str, ...],
        first_rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
    ) -> None:
        self.path, self.manifest, self.rows, self.bars = path, manifest, rows, bars
        self.symbols, self.first_rows, self.counts = symbols, first_rows, counts

    def __repr__(self) -> str:
        m = self.manifest
        where = "in memory" if self.path is None else repr(str(self.path))
        return f"<Pack {where}: {m.n_symbols} symbols, {m.n_rows:,} rows of {', '.join(self.columns)}, {m.interval}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order of ``rows``."""
        return tuple(column.name for column in self.manifest.columns)

    @property
    def n_rows(self) -> int:
        return self.manifest.n_rows

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the sorted (symbol, time, float64 values), whatever files and segments they came from."""
        return self.manifest.fingerprint or fingerprint(self.bars, self.symbols, self.counts)

    @cached_property
    def interval(self) -> Interval:
        """Spacing of the bars."""
        return Interval.parse(self.manifest.interval)

    @cached_property
    def times(self) -> npt.NDArray[np.int64]:
        """(n_rows,) int64: open of each bar, nanoseconds since 1970 UTC."""
        return contiguous(self.bars, "time").view(np.int64)

    def available_at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Instants at which bars become available (their close), nanoseconds UTC, shape of `rows`."""
        return self.interval.available(self.times[rows])

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """(n_rows,) float64 values of one column; NaN where missing."""
        return contiguous(self.bars, name)


def contiguous(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The values of a column without nulls as one array, without a copy where it lies in one chunk."""
    column = table.column(name)
    chunk: Any = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_timestamp(chunk.type):
        chunk = chunk.view(pa.int64())
    array: npt.NDArray[Any] = chunk.to_numpy(zero_copy_only=True)
    return array


def open_pack(path: str | Path) -> Pack:
    """Open a pack: checks manifest, sizes and footers, maps the data and reads none of it.

    Parameters
    ----------
    path : str or Path
        The pack's directory.

    Returns
    -------
    Pack
        Mapped read-only.

    Raises
    ------
    NotAPackError, PackVersionError, PackDamagedError
    """
    path = Path(path)
    manifest = read_manifest(path)
    if len(manifest.segments) != 1:
        raise PackVersionError(
            f"{path}: the pack has {len(manifest.segments)} segments; this stager reads packs of one. Update stager."
        )
    (segment,) = manifest.segments
    folder = path / segment.name
    for name, stored in segment.files.items():
        file = folder / name
        if not file.is_file():
            raise PackDamagedError(f"{file}: the file is missing; restore it or pack the bars again")
        if (size := file.stat().st_size) != stored.size_nbytes:
            raise PackDamagedError(
                f"{file}: has {size:,} bytes, the manifest says {stored.size_nbytes:,}; restore it or pack again"
            )
    rows = _map_rows(folder / "rows.npy", (segment.n_rows, len(manifest.columns)))
    bars = _map_arrow(folder / "bars.arrow")
    symbols = _map_arrow(folder / "symbols.arrow")
    expected = ["symbol", "time", *(column.name for column in manifest.columns)]
    if bars.column_names != expected or bars.num_rows != segment.n_rows or segment.n_rows != manifest.n_rows:
        raise PackDamagedError(f"{folder / 'bars.arrow'}: its columns or rows are not those of the manifest")
    if symbols.column_names != ["symbol", "first_row", "count"] or symbols.num_rows != manifest.n_symbols:
        raise PackDamagedError(f"{folder / 'symbols.arrow'}: its columns or rows are not those of the manifest")
    return Pack(
        path,
        manifest,
        rows,
        bars,
        tuple(map(str, symbols.column("symbol").to_pylist())),
        contiguous(symbols, "first_row"),
        contiguous(symbols, "count"),
    )


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of the pack at `path`; raises as :func:`open_pack`."""
    file = path / MANIFEST
    if not path.exists():
        raise NotAPackError(f"{path}: there is no such pack; `stager pack` makes one from bar files")
    if not file.is_file():
        raise NotAPackError(f"{path}: no pack (it has no {MANIFEST}); `stager pack` makes one from bar files")
    raw = file.read_bytes()
    try:
        version = msgspec.json.decode(raw, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise PackVersionError(
                f"{path}: pack format {version}; this stager reads up to {FORMAT_VERSION}. Update stager."
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
        if seal(raw, manifest.checksum) != manifest.checksum:
            raise PackDamagedError(f"{file}: its checksum does not match; it was damaged or edited. Pack again.")
    except msgspec.DecodeError as error:
        raise PackDamagedError(f"{file}: no valid manifest ({error}); restore it or pack the bars again") from error
    for segment in manifest.segments:
        if re.fullmatch(r"segment-[0-9]+", segment.name) is None:
            raise PackDamagedError(f"{file}: {segment.name!r} is no name of a segment")
        if missing := {"rows.npy", "bars.arrow", "symbols.arrow"} - set(segment.files):
            raise PackDamagedError(f"{file}: segment {segment.name} lists no {', '.join(sorted(missing))}")
    return manifest


def seal(raw: bytes, checksum: str) -> str:
    """Checksum of a manifest's bytes, with the stored checksum's place zeroed."""
    return hashlib.blake2b(raw.replace(checksum.encode(), b"0" * 32, 1), digest_size=16).hexdigest()


def block_checksums(file: Path) -> list[str]:
    """BLAKE2b (16 bytes, hex) of each 64 MiB block of a file, several blocks at a time."""

    def digest(index: int) -> str:
        state = hashlib.blake2b(digest_size=16)
        with file.open("rb") as stream:
            stream.seek(index * BLOCK_NBYTES)
            left = BLOCK_NBYTES
            while left and (data := stream.read(min(left, 1 << 20))):
                state.update(data)
                left -= len(data)
        return state.hexdigest()

    return parallel(digest, range(-(-file.stat().st_size // BLOCK_NBYTES)))


def fingerprint(table: pa.Table, symbols: Sequence[str], counts: npt.NDArray[np.int64]) -> str:
    """Hash over the sorted (symbol, time, float64 values): the same for the same bars, however they were stored."""
    names = table.column_names[1:]
    columns = [contiguous(table, name).view(np.uint64) for name in names]

    ends = np.cumsum(counts)

    def digest(index: int) -> bytes:
        rows = slice(int(ends[index] - counts[index]), int(ends[index]))
        parts = [hashlib.blake2b(column[rows].data, digest_size=16).digest() for column in columns]
        return hashlib.blake2b(symbols[index].encode() + b"\0" + b"".join(parts), digest_size=16).digest()

    total = hashlib.blake2b("\0".join(names).encode(), digest_size=16)
    for part in parallel(digest, range(len(symbols))):
        total.update(part)
    return total.hexdigest()


class _Version(msgspec.Struct):
    format_version: int


def _map_rows(file: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    try:
        with file.open("rb") as stream:
            version = np.lib.format.read_magic(stream)
            found, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            offset = stream.tell()
    except ValueError as error:
        raise PackDamagedError(f"{file}: no valid .npy header ({error}); restore it or pack again") from error
    if (version, found, fortran, dtype.str) != ((1, 0), shape, False, "<f4"):
        raise PackDamagedError(f"{file}: holds {dtype} {found}, the manifest says float32 {shape}")
    if offset % 64 or file.stat().st_size != offset + 4 * shape[0] * shape[1]:
        raise PackDamagedError(f"{file}: its size does not fit its header; restore it or pack again")
    return np.memmap(file, dtype=np.float32, mode="r", offset=offset, shape=shape)


def _map_arrow(file: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (pa.ArrowException, OSError) as error:
        raise PackDamagedError(f"{file}: no valid Arrow IPC file ({error}); restore it or pack again") from error
