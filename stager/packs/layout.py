"""What a pack is: the files, the manifest, and opening one.

::

    bars.pack/
        manifest.json            the manifest; ``checksum`` covers the file with that value zeroed
        segment-0/               one, and another for each append
            rows.npy             (n_rows, n_columns) float32, C order; a standard .npy, data at a multiple of 64
            bars.arrow           Arrow IPC, one record batch: symbol, time, float64 columns
            symbols.arrow        Arrow IPC: symbol, first_row, count

Rows of a segment lie symbol after symbol (by symbol text), time ascending inside a symbol, and no bar is in two
segments. A pack of several is opened as one, its rows in that order over all of them. A segment that the manifest does
not list was left by an append that was killed. Checksums are 16 bytes of BLAKE3 over blocks of 64 MiB, so that damage
is located, not only found.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from stager.bars.interval import Interval
from stager.bars.threads import parallel
from stager.errors import PackDamagedError, PackError
from stager.packs.fingerprints import fingerprint_of
from stager.packs.held import Held, Joined, Part, Shard, contiguous
from stager.packs.manifest import FORMAT_VERSION, MANIFEST, Manifest, Role, Segment, read_manifest, settled
from stager.packs.rows import RowsFile

__all__ = ["BLOCK_NBYTES", "FORMAT_VERSION", "MANIFEST", "PRICES", "Manifest", "Pack", "open_pack"]

BLOCK_NBYTES = 64 << 20
# What is read stays in the processor's cache until it is hashed.
_READ_NBYTES = 1 << 19
PRICES = ("open", "high", "low", "close")

_SYMBOLS: dict[str, pa.DataType] = {"symbol": pa.string(), "first_row": pa.int64(), "count": pa.int64()}


class Pack:
    """Bars in packed form: a mapped pack directory, or bars held in memory.

    Not built by hand: :func:`open_pack`, :func:`stager.pack` and ``packing.pack_in_memory`` return one. Arrays are
    read-only and stay valid as long as something refers to them; the files must not be changed meanwhile.

    Attributes
    ----------
    path : Path or None
        The directory; None in memory.
    manifest : Manifest
    held : Held
        What the arrays are taken from.
    symbols : tuple of str
        Sorted by text.
    first_rows, counts : (n_symbols,) int64
        Symbol ``i`` owns rows ``first_rows[i] : first_rows[i] + counts[i]``.
    parts : tuple of Part
        The opened segments; none in memory.
    shard : Shard or None
        Which part of a pack on disk this is, if it is one.
    """

    def __init__(
        self,
        path: Path | None,
        manifest: Manifest,
        held: Held,
        symbols: tuple[str, ...],
        first_rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        parts: tuple[Part, ...] = (),
        shard: Shard | None = None,
    ) -> None:
        self.path, self.manifest, self.held, self.parts, self.shard = path, manifest, held, parts, shard
        self.symbols, self.first_rows, self.counts = symbols, first_rows, counts

    def __repr__(self) -> str:
        m = self.manifest
        where = "in memory" if self.path is None else repr(str(self.path))
        n_symbols, columns = m.shape
        names, panel = ", ".join(column.name for column in columns), "panel of " * (m.panel is not None)
        return f"<Pack {where}: {panel}{n_symbols} symbols, {m.n_rows:,} rows of {names}, {m.interval}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order of ``rows``."""
        return tuple(column.name for column in self.manifest.columns)

    @property
    def n_rows(self) -> int:
        return self.manifest.n_rows

    @property
    def rows_nbytes(self) -> int:
        """Bytes of ``rows``."""
        return sum(part.rows.nbytes for part in self.parts) if self.parts else self.rows.nbytes

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """(n_rows, n_columns) float32, C order: a mapping; of several segments a copy, made when it is asked for."""
        return self.held.rows

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the sorted (symbol, time, float64 values), whatever files and segments they came from."""
        return self.manifest.fingerprint or fingerprint_of(self.held, self.columns, self.symbols, self.counts)

    @cached_property
    def interval(self) -> Interval:
        """Spacing of the bars, and when they close."""
        return Interval.parse(self.manifest.interval).closing(self.manifest.session_close)

    @cached_property
    def bars(self) -> pa.Table:
        """symbol, time, float64 columns; in memory and of several segments it is put together when it is asked for."""
        return self.held.bars

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """(n_rows,) int64: open of each bar, nanoseconds since 1970 UTC."""
        return self.held.times

    def available_at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Instants at which bars become available (their close), nanoseconds UTC, shape of `rows`."""
        return self.interval.available(self.times[rows])

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """(n_rows,) float64 values of one column; NaN where missing."""
        return self.held.column(name)


def open_pack(path: str | Path) -> Pack:
    """Open a pack: checks manifest, sizes, footers and the symbols' rows; maps the bars and reads none of them.

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
    PackError
        If the system refuses to read a file.
    """
    path = Path(path)
    return settled(path, lambda: _open(path))


def _open(path: Path) -> Pack:
    manifest = read_manifest(path)
    try:
        parts = tuple(open_part(path / segment.name, manifest, segment) for segment in manifest.segments)
    except OSError as error:
        raise PackError(f"{path}: can't be read: {error.strerror or error}") from error
    pack = join(path, manifest, parts)
    if len(pack.symbols) != manifest.n_symbols:
        raise PackDamagedError(
            f"{path / MANIFEST}: says {manifest.n_symbols:,} symbols, its segments have {len(pack.symbols):,}; restore "
            f"it or pack the bars again"
        )
    return pack


def join(path: Path, manifest: Manifest, parts: tuple[Part, ...]) -> Pack:
    """The pack of opened segments."""
    if len(parts) == 1:
        (part,) = parts
        return Pack(path, manifest, part, part.symbols, part.first_rows, part.counts, parts)
    symbols = tuple(sorted({symbol for part in parts for symbol in part.symbols}))
    number = {symbol: code for code, symbol in enumerate(symbols)}
    counts = np.zeros(len(symbols), np.int64)
    for part in parts:
        np.add.at(counts, [number[symbol] for symbol in part.symbols], part.counts)
    return Pack(path, manifest, Joined(parts, symbols, counts), symbols, np.cumsum(counts) - counts, counts, parts)


def open_part(folder: Path, manifest: Manifest, segment: Segment) -> Part:
    """Open a segment; raises as :func:`open_pack`, and OSError."""
    for name, stored in segment.files.items():
        file = folder / name
        if not file.is_file():
            raise PackDamagedError(f"{file}: the file is missing; restore it or pack the bars again")
        if (size := file.stat().st_size) != stored.size_nbytes:
            raise PackDamagedError(
                f"{file}: has {size:,} bytes, the manifest says {stored.size_nbytes:,}; restore it or pack again"
            )
    opened = RowsFile(folder / "rows.npy", (segment.n_rows, len(manifest.columns)))
    fields: dict[str, pa.DataType] = {
        "symbol": pa.dictionary(pa.int32(), pa.string()),
        "time": pa.timestamp("ns", "UTC"),
        **{column.name: pa.float64() for column in manifest.columns},
    }
    bars = _map_arrow(folder / "bars.arrow", fields, segment.n_rows)
    file = folder / "symbols.arrow"
    # Small, and a wrong row number here would give samples of another symbol.
    if block_checksums(file) != segment.files[file.name].blocks:
        raise PackDamagedError(f"{file}: its checksum does not match; restore it or pack the bars again")
    table = _map_arrow(file, _SYMBOLS, manifest.n_symbols if len(manifest.segments) == 1 else None)
    symbols = tuple(map(str, table.column("symbol").to_pylist()))
    first_rows, counts = contiguous(table, "first_row"), contiguous(table, "count")
    ends = np.cumsum(counts)
    if not len(counts) or np.any(counts < 1) or np.any(first_rows != ends - counts) or ends[-1] != segment.n_rows:
        raise PackDamagedError(f"{file}: first rows and counts do not cover the rows; pack the bars again")
    return Part(folder, opened, bars, symbols, first_rows, counts)


def block_checksums(file: Path) -> list[str]:
    """BLAKE3 (16 bytes, hex) of each 64 MiB block of a file, several blocks at a time."""
    return parallel(lambda index: block_checksum(file, index), blocks_of(file))


def blocks_of(file: Path) -> range:
    """The numbers of a file's blocks."""
    return range(-(-file.stat().st_size // BLOCK_NBYTES))


def block_checksum(file: Path, index: int) -> str:
    """That of one block."""
    state, room = blake3(), memoryview(bytearray(_READ_NBYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(index * BLOCK_NBYTES)
        left = BLOCK_NBYTES
        while left and (n_read := stream.readinto(room[:left])):
            state.update(room[:n_read])
            left -= n_read
    return state.hexdigest(16)


def role_of(name: str) -> Role:
    """What a column is by its name."""
    return "price" if name in PRICES else "volume" if name == "volume" else "other"


def span(
    times: npt.NDArray[np.int64], first_rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[str, str]:
    """First and last time, ISO 8601 UTC, of times that ascend inside each symbol."""
    return span_of(int(times[first_rows].min()), int(times[first_rows + counts - 1].max()))


def span_of(first: int, last: int) -> tuple[str, str]:
    """Two times, nanoseconds since 1970, as ISO 8601 UTC."""
    one, other = np.datetime_as_string(np.array([first, last]).view("datetime64[ns]"), unit="ns")
    return f"{one}Z", f"{other}Z"


def _map_arrow(file: Path, fields: dict[str, pa.DataType], n_rows: int | None) -> pa.Table:
    remedy = "restore it or pack again"
    try:
        table = pa.ipc.open_file(pa.memory_map(os.fsencode(file))).read_all()  # type: ignore[arg-type]
        fits = table.schema.equals(pa.schema(fields)) and n_rows in (None, table.num_rows)
        table.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PackDamagedError(f"{file}: no valid Arrow IPC file ({error}); {remedy}") from error
    if not fits or any(column.null_count for column in table.columns):
        raise PackDamagedError(f"{file}: its columns or rows are not those of the manifest; {remedy}")
    return table
