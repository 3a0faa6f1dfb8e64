"""What the workers of a cluster share: a directory in the partial pack, on storage that all of them see.

::

    DIR.partial/shared/
        mark                   tells that this is the same directory everywhere; tasks end when it is gone
        NUMBER-TOKEN/scratch   the rows of an input, as one attempt to read it left them
        sheets-NUMBER          where the rows of some symbols lie in those files
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.checks import Piece
from stager.bars.sheets import TIMES, InFile, Sheet, Sheets
from stager.bars.taken import Taken
from stager.errors import PackError
from stager.packs.manifest import MARK, SHEETS

_MOST_OPEN = 128


@dataclass(frozen=True)
class Place:
    """The shared directory.

    Attributes
    ----------
    folder : Path
        Absolute.
    mark : str
        What the file ``mark`` holds.
    target : Path
        The pack, for errors.
    memory_nbytes : int or None
        Memory that each worker may take, as told.
    """

    folder: Path
    mark: str
    target: Path
    memory_nbytes: int | None

    def check(self, where: str) -> None:
        """Raise PackError unless the directory is there; `where` names the worker."""
        try:
            found = (self.folder / MARK).read_text()
        except OSError as error:
            found = str(error.strerror)
        if found != self.mark:
            raise PackError(
                f"{self.target}: the worker at {where} does not see {self.folder} ({found}); the pack must be on "
                "storage that this machine and all workers share under the same path: choose it with -o DIR"
            )

    def write_sheets(self, number: int, sheets: Sheets) -> None:
        """Tell the workers where some rows lie."""
        with (self.folder / f"{SHEETS}{number}").open("wb") as stream:
            pickle.dump(sheets, stream, pickle.HIGHEST_PROTOCOL)
            stream.flush()
            os.fsync(stream.fileno())

    def read_sheets(self, number: int) -> Sheets:
        with (self.folder / f"{SHEETS}{number}").open("rb") as stream:
            sheets: Sheets = pickle.load(stream)
        return sheets


class OpenFiles:
    """Files that are read again and again; of many, the last used ones stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    # In another process they are opened anew.

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OpenFiles.__init__(self)

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def read(
        self, path: str, rows: tuple[int, int, int], number: int, first: int, n_rows: int, out: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        """As :meth:`stager.bars.sheets.InFile.read`; `rows` are offset, rows and columns of the sheet."""
        with self._lock:
            return InFile(self._descriptor(path), *rows).read(number, first, n_rows, out)

    def came(self, path: str, rows: tuple[int, int, int], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        with self._lock:
            return InFile(self._descriptor(path), *rows).came(starts)

    def _descriptor(self, path: str) -> int:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        self._open.move_to_end(path)
        return self._open[path]


@dataclass(frozen=True)
class SharedRows:
    """The rows of a sheet in a file of an input; `rows` are where they begin, their number, and that of columns."""

    files: OpenFiles
    path: str
    rows: tuple[int, int, int]

    def read(self, number: int, first: int, n_rows: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        return self.files.read(self.path, self.rows, number, first, n_rows, out)

    def came(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.files.came(self.path, self.rows, starts)


@dataclass(frozen=True)
class Away:
    """An input whose rows a worker has put into the shared directory.

    Attributes
    ----------
    taken : Taken
    symbols : tuple of str
        What its sheets count in.
    sheets : list of (ndarray of int32, ndarray of int64, (int, int, int))
        Symbols and starts of each, and its rows as in :class:`SharedRows`.
    path : str
    nbytes : int
        Bytes of the file.
    memory_nbytes : int
        The most that the worker's process has held meanwhile.
    """

    taken: Taken
    symbols: tuple[str, ...]
    sheets: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], tuple[int, int, int]]]
    path: str
    nbytes: int
    memory_nbytes: int


@dataclass
class Gathered:
    """All inputs together; see :class:`stager.packs.making.KeptRows`."""

    symbols: dict[str, int]
    files: OpenFiles
    _sheets: list[list[Sheet]] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Sequence[Away]) -> Gathered:
        symbols: dict[str, int] = {}
        made = cls(symbols, OpenFiles())
        for one in inputs:
            numbers = np.array([symbols.setdefault(name, len(symbols)) for name in one.symbols], np.int32)
            made._sheets.append(
                [
                    Sheet(numbers[some], starts, SharedRows(made.files, one.path, rows))
                    for some, starts, rows in one.sheets
                ]
            )
        return made

    def sheets(self) -> list[list[Sheet]]:
        return self._sheets

    def rows(self) -> list[Iterator[Piece]]:
        def of(sheets: Sequence[Sheet]) -> Iterator[Piece]:
            for sheet in sheets:
                yield Piece(sheet.numbers().astype(np.uint32), sheet.values.read(TIMES, 0, len(sheet)), ())

        return [of(sheets) for sheets in self._sheets]
