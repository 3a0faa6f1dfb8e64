"""Writing a segment: its files are laid out first, then filled by several threads, each some of the rows."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.columns import to_float32
from stager.bars.threads import parallel
from stager.config import format_nbytes
from stager.errors import PackError
from stager.packs import layout
from stager.packs.held import contiguous
from stager.packs.manifest import Segment, StoredFile
from stager.packs.publish import sync

Progress = Callable[[str, int, int], None]
Int64 = npt.NDArray[np.int64]

_CHUNK_ROWS = 1 << 17


class SegmentFiles:
    """The files of a segment, of their final sizes; rows are written to where they belong in any order.

    Parameters
    ----------
    folder : Path
        Is made; its name is the segment's.
    names : sequence of str
        The columns.
    symbols : sequence of str
        Sorted.
    counts : ndarray of int64, shape (n_symbols,)
        Rows of each.
    target : Path
        The pack, for errors.

    Raises
    ------
    PackError
        If the disk has no room.
    """

    def __init__(self, folder: Path, names: Sequence[str], symbols: Sequence[str], counts: Int64, target: Path) -> None:
        self.folder, self.names = folder, tuple(names)
        self.n_rows, n_columns = int(counts.sum()), len(names)
        needed = room_for(self.n_rows, n_columns)
        if (free := shutil.disk_usage(folder.parent).free) < needed:
            raise PackError(
                f"{target}: the pack takes {format_nbytes(needed)}, the disk has {format_nbytes(free)} free; "
                "free some, or choose another place with -o DIR"
            )
        folder.mkdir()
        write_arrow(
            folder / "symbols.arrow",
            pa.table({"symbol": list(symbols), "first_row": np.cumsum(counts) - counts, "count": counts}),
        )
        self._rows_at = _lay_out_rows(folder / "rows.npy", self.n_rows, n_columns)
        self._at = _lay_out_bars(folder / "bars.arrow", self.names, symbols, self.n_rows)
        self._open()

    def _open(self) -> None:
        self._rows = os.open(self.folder / "rows.npy", os.O_WRONLY)
        self._bars = os.open(self.folder / "bars.arrow", os.O_RDWR)

    # Sent to another process, the files are opened there as the context is entered.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_rows", "_bars")}

    def __enter__(self) -> SegmentFiles:
        if "_rows" not in self.__dict__:
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._rows)
        os.close(self._bars)

    def put(
        self,
        first_row: int,
        numbers: npt.NDArray[np.int32],
        times: Int64,
        columns: Sequence[npt.NDArray[np.float64]],
    ) -> None:
        """Write consecutive rows.

        Parameters
        ----------
        first_row : int
            Where they belong.
        numbers : ndarray of int32, shape (n_rows,)
            The place of each row's symbol among the symbols.
        times : ndarray of int64, shape (n_rows,)
        columns : sequence of ndarray of float64, each shape (n_rows,)

        Raises
        ------
        BarsError
            If a value is too large for float32.
        """
        n_columns = len(columns)
        rows = np.empty((min(len(times), _CHUNK_ROWS), n_columns), np.float32)
        for first in range(0, len(times), _CHUNK_ROWS):
            some = rows[: len(times) - first]
            for index, (name, column) in enumerate(zip(self.names, columns, strict=True)):
                some[:, index] = to_float32(column[first : first + len(some)], name)
            _write(self._rows, some, self._rows_at + 4 * n_columns * (first_row + first))
        everything: list[npt.NDArray[Any]] = [numbers, times, *columns]
        for values, at in zip(everything, self._at, strict=True):
            _write(self._bars, values, at + values.itemsize * first_row)

    def column(self, number: int, first: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with values of a column that were written, from row `first` on; 0 is the time."""
        left, at = memoryview(out.data).cast("B"), self._at[1 + number] + 8 * first
        while left:
            n_read = os.preadv(self._bars, [left], at)
            at, left = at + n_read, left[n_read:]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._rows)
        os.fsync(self._bars)

    def finish(
        self,
        progress: Progress | None = None,
        checksums: Callable[[Path], list[str]] | None = None,
    ) -> Segment:
        """Sync the files and take their checksums, both at once; `checksums` gives those of a file's blocks."""
        checksums = checksums or layout.block_checksums
        paths = sorted(self.folder.iterdir())
        sizes = {file.name: file.stat().st_size for file in paths}
        files: dict[str, StoredFile] = {}
        done = 0
        pool = ThreadPoolExecutor(1, thread_name_prefix="stager-sync")
        try:
            synced = [pool.submit(sync, path) for path in (*paths, self.folder)]
            for name, size in sizes.items():
                files[name] = StoredFile(size, checksums(self.folder / name))
                done += size
                if progress:
                    progress("checksum", done, sum(sizes.values()))
            for each in synced:
                each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return Segment(self.folder.name, self.n_rows, files)


def write_segment(
    folder: Path,
    table: pa.Table,
    symbols: Sequence[str],
    counts: Int64,
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
    names = table.column_names[2:]
    times = contiguous(table, "time")
    columns = [contiguous(table, name) for name in names]
    ends = np.cumsum(counts)
    with SegmentFiles(folder, names, symbols, counts, target) as files:

        def put(first: int) -> None:
            some = slice(first, first + _CHUNK_ROWS)
            numbers = np.searchsorted(ends, np.arange(first, min(some.stop, len(times))), "right").astype(np.int32)
            files.put(first, numbers, times[some], [column[some] for column in columns])

        def tell(done: int, total: int) -> None:
            if progress:
                progress("write", 4 * len(names) * len(times) * done // total, 4 * len(names) * len(times))

        parallel(put, range(0, len(times), _CHUNK_ROWS), done=tell)
        return files.finish(progress)


def room_for(n_rows: int, n_columns: int) -> int:
    """Bytes of a segment's files, about."""
    return n_rows * (n_columns * 12 + 12) + (1 << 20)


def write_arrow(file: Path, table: pa.Table) -> None:
    """Write a table as an Arrow IPC file of one record batch."""
    with pa.OSFile(os.fsencode(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:  # type: ignore[arg-type]
        writer.write_table(table.combine_chunks())


def _lay_out_rows(file: Path, n_rows: int, n_columns: int) -> int:
    """Make ``rows.npy`` without its rows; where they begin."""
    with file.open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, n_columns)}
        np.lib.format.write_array_header_1_0(stream, header)
        at = stream.tell()
        _reserve(stream.fileno(), at + 4 * n_rows * n_columns)
    return at


def _lay_out_bars(file: Path, names: Sequence[str], symbols: Sequence[str], n_rows: int) -> list[int]:
    """Make ``bars.arrow`` without the values of its columns; where those of each begin."""
    # Pages of it that nobody writes to take no memory.
    nothing = pa.py_buffer(mmap.mmap(-1, max(1, 8 * n_rows)))

    def blank(kind: Any, itemsize: int = 8) -> Any:
        return pa.Array.from_buffers(kind, n_rows, [None, nothing.slice(0, itemsize * n_rows)])

    symbol = pa.DictionaryArray.from_arrays(blank(pa.int32(), 4), pa.array(list(symbols), pa.string()))
    table = pa.table(
        [symbol, blank(pa.timestamp("ns", "UTC")), *(blank(pa.float64()) for _ in names)],
        names=["symbol", "time", *names],
    )
    with file.open("wb", buffering=0) as stream:
        around = _Around(stream.fileno(), nothing.address)
        with pa.ipc.new_file(pa.PythonFile(cast(Any, around), mode="w"), table.schema) as writer:
            writer.write_table(table)
        _reserve(stream.fileno(), around.position)
    return around.columns


class _Around:
    """A file to which Arrow writes everything but the values of columns, which begin at an address."""

    def __init__(self, descriptor: int, address: int) -> None:
        self._descriptor, self._address = descriptor, address
        self.position, self.columns, self.closed = 0, list[int](), False

    def write(self, data: Any) -> int:
        if isinstance(data, pa.Buffer) and data.address == self._address:
            self.columns.append(self.position)
        else:
            _write(self._descriptor, np.frombuffer(memoryview(data), np.uint8), self.position)
        self.position += len(data)
        return len(data)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its size, and its place on the disk where the system can."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno == 28:  # no space left
            raise
        os.truncate(descriptor, nbytes)


def _write(descriptor: int, values: npt.NDArray[Any], at: int) -> None:
    left = memoryview(np.ascontiguousarray(values).data).cast("B")
    while left:
        n_written = os.pwrite(descriptor, left, at)
        at, left = at + n_written, left[n_written:]
