"""``rows.npy``: mapped for those who look at a few rows, read for those who take them all."""

from __future__ import annotations

import ast
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stager.errors import PackDamagedError


class RowsFile:
    """An open ``rows.npy``; it stays the same file, also when the pack is replaced.

    Parameters
    ----------
    file : Path
    shape : (n_rows, n_columns)
        What the manifest says.

    Attributes
    ----------
    rows : (n_rows, n_columns) float32, C order
        The mapping, read-only.

    Raises
    ------
    PackDamagedError
        If the file is not of that shape.
    """

    def __init__(self, file: Path, shape: tuple[int, int]) -> None:
        self._file = file
        # Of some rows: the file that owns the descriptor.
        self._whole: RowsFile | None = None
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        start = os.pread(self._descriptor, 10, 0)
        header = os.pread(self._descriptor, int.from_bytes(start[8:10], "little"), len(start))
        self._offset = len(start) + len(header)
        try:
            # NumPy's own reader warns about, and repairs, headers that stager never writes.
            found = ast.literal_eval(header.decode("latin1").strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = None
        expected = {"descr": "<f4", "fortran_order": False, "shape": shape}
        if start[:8] != b"\x93NUMPY\x01\x00" or found != expected:
            raise PackDamagedError(f"{file}: its header is not that of float32 {shape}; restore it or pack again")
        size = os.fstat(self._descriptor).st_size
        if self._offset % 64 or size != self._offset + 4 * shape[0] * shape[1]:
            raise PackDamagedError(f"{file}: its size does not fit its header; restore it or pack again")
        with open(self._descriptor, "rb", closefd=False) as stream:
            self.rows: npt.NDArray[np.float32] = np.memmap(
                stream, dtype=np.float32, mode="r", offset=self._offset, shape=shape
            )

    def between(self, first: int, stop: int) -> RowsFile:
        """Some consecutive rows of the same file, as if it held no others."""
        some = object.__new__(RowsFile)
        some._file, some._descriptor, some.rows = self._file, self._descriptor, self.rows[first:stop]
        some._offset, some._whole = self._offset + self.rows[:first].nbytes, self
        return some

    def read(self, out: npt.NDArray[np.uint8], first: int) -> None:
        """Fill `out` with the bytes of the rows from byte `first` on; spares the page faults of the mapping.

        Raises
        ------
        PackDamagedError
            If the file has become shorter.
        """
        at, left = self._offset + first, out.data
        while left:
            if not (n_read := os.preadv(self._descriptor, [left], at)):
                raise PackDamagedError(f"{self._file}: ends too early; it was cut while it was read")
            at, left = at + n_read, left[n_read:]
