"""The rows of a pack in the making, in memory as far as there is room and else in a file that outlives a kill.

``DIR.partial`` holds, beside the segment that is written last::

    scratch          rows of inputs, sorted by (symbol, time): of each sheet the times, the columns, in what order the
                     rows came, and the symbols
    journal.jsonl    what the rows are told by: options, then symbols and inputs as they were read, a line each

An input is in the journal when all of its rows are in the scratch file. Going on after a kill trusts those whose size
and time of modification are still the same, on a machine that was not restarted (else what was written may be lost).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.arrange import join_pieces
from stager.bars.checks import Checked, Piece
from stager.bars.formats import named
from stager.bars.options import ReadOptions
from stager.bars.sheets import TIMES, InFile, Sheet, is_sorted, read_all, sheet_of, sort_pieces, unsorted_sheet_of
from stager.bars.sources import BarFile
from stager.bars.taken import Taken
from stager.config import format_nbytes
from stager.errors import PackError
from stager.packs.manifest import JOURNAL, SCRATCH
from stager.packs.publish import clear
from stager.packs.segment import room_for
from stager.version import __version__

_SHEET_ROWS = 1 << 20
# A piece of so many rows in memory is a sheet by itself, and its columns stay as they came.
_LEAST_UNSORTED_ROWS = 1 << 17
# When such a share of the inputs is read, it tells how many rows all of them have.
_KNOWN = 0.2
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Begun(msgspec.Struct, tag="begun", frozen=True):
    """The journal's first line."""

    version: str
    boot: str
    options: dict[str, Any]


class _Symbols(msgspec.Struct, tag="symbols", frozen=True):
    """Symbols that are numbered next."""

    names: list[str]


class _Input(msgspec.Struct, tag="input", frozen=True):
    """An input whose rows are in the scratch file."""

    key: Key
    taken: dict[str, Any]
    # Where each sheet begins, its rows, its columns and its symbols.
    sheets: list[tuple[int, int, int, int]]


class Key(msgspec.Struct, frozen=True):
    """What an input is recognised by: its name, which of that name it is, its size, and when it was changed."""

    name: str
    which: int
    size_nbytes: int
    modified: int | None


_Line = msgspec.json.Decoder(_Begun | _Symbols | _Input)


@dataclass(frozen=True)
class Kept:
    """What an earlier attempt left: inputs whose rows are in the scratch file, and what has become of the others."""

    taken: list[Taken | None]
    changed: list[str]


class Scratch:
    """Rows of inputs as sheets; a Keeper of :func:`stager.bars.inputs.take_inputs`.

    Parameters
    ----------
    folder : Path
        The partial pack.
    inputs : sequence of BarFile
        Empty for a table.
    options : ReadOptions
    target : Path
        The pack, for errors.
    held_nbytes : int
        Memory for rows; what is more goes to the scratch file.

    Attributes
    ----------
    symbols : dict of str to int
        The numbers that sheets count in.
    scratch_nbytes : int
        Bytes taken in the scratch file.
    """

    def __init__(
        self, folder: Path, inputs: Sequence[BarFile], options: ReadOptions, target: Path, held_nbytes: int
    ) -> None:
        self.symbols: dict[str, int] = {}
        self.scratch_nbytes = 0
        self._folder, self._options, self._target, self._most_held = folder, options, target, held_nbytes
        self._sheets: dict[int, list[Sheet]] = {}
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()
        self._n_journaled = 0
        self._total_nbytes = sum(file.size_nbytes for file in inputs)
        self._done_nbytes, self._done_rows = 0, 0
        seen: dict[str, int] = {}
        self._keys: list[Key] = []
        for file in inputs:
            which = seen[file.name] = seen.get(file.name, -1) + 1
            self._keys.append(Key(file.name, which, file.size_nbytes, file.modified))

    def close(self) -> None:
        """Close the files; their contents stay."""
        for name in ("_scratch", "_journal"):
            if name in self.__dict__:
                os.close(self.__dict__.pop(name))

    def sheets(self) -> list[list[Sheet]]:
        """The sheets of each input, in the order of its rows."""
        return [self._sheets[number] for number in sorted(self._sheets)]

    def rows(self) -> list[Iterator[Piece]]:
        """The rows of each input without columns, a sheet at a time; their codes count in ``symbols``."""

        def of(sheets: Sequence[Sheet]) -> Iterator[Piece]:
            for sheet in sheets:
                yield Piece(sheet.numbers().astype(np.uint32), sheet.values.read(TIMES, 0, len(sheet)), ())

        return [of(sheets) for sheets in self.sheets()]

    # The Keeper.

    def begin(self, number: int) -> None:
        with self._lock:
            self._sheets[number], self._held[number] = [], 0

    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Piece]) -> None:
        numbers = self._number(symbols)
        pieces = [piece for piece in pieces if len(piece)]
        # Beside times and columns, where each row of a piece lies that is not in order.
        nbytes = sum(len(piece) * 8 * (2 + len(piece.columns)) for piece in pieces)
        with self._lock:
            fits = sum(self._held.values()) + nbytes <= self._most_held
            self._held[number] += nbytes if fits else 0
        sheets = self._sheets[number]
        while pieces:
            if fits and len(pieces[0]) >= _LEAST_UNSORTED_ROWS:
                piece = pieces.pop(0)
                sheets.append(sheet_of(piece, numbers) if is_sorted(piece) else unsorted_sheet_of(piece, numbers))
                continue
            some, n_rows = [pieces.pop(0)], 0
            while pieces and n_rows + len(some[-1]) < _SHEET_ROWS:
                n_rows += len(some[-1])
                some.append(pieces.pop(0))
            in_order = all(is_sorted(piece) for piece in some)
            if fits and in_order:
                sheets += [sheet_of(piece, numbers) for piece in some]
                continue
            piece, came = (join_pieces(some), None) if in_order else sort_pieces(some)
            if not is_sorted(piece):
                piece, came = sort_pieces([piece])
            del some
            sheet = sheet_of(piece, numbers, came)
            sheets.append(sheet if fits else self._store(sheet, len(piece.columns)))
        if not fits:
            # Arrow keeps what was freed for the next file, and others may need it first.
            pa.default_memory_pool().release_unused()

    def end(self, number: int, taken: Taken) -> None:
        with self._lock:
            self._done_nbytes += taken.size_nbytes
            self._done_rows += taken.n_rows
            sheets = self._sheets[number]
            if not self._keys or not sheets or not all(isinstance(sheet.values, InFile) for sheet in sheets):
                return
            names = list(self.symbols)
            if len(names) > self._n_journaled:
                self._write(_Symbols(names[self._n_journaled :]))
                self._n_journaled = len(names)
            places = [
                (sheet.values.offset, len(sheet), sheet.values.n_columns, len(sheet.symbols))
                for sheet in sheets
                if isinstance(sheet.values, InFile)
            ]
            # A name that is no text can't be told in JSON; that input is read again.
            with suppress(UnicodeEncodeError):
                self._write(_Input(self._keys[number], _plain(taken), places))

    def _number(self, symbols: tuple[str, ...]) -> npt.NDArray[np.int32]:
        with self._lock:
            return np.array([self.symbols.setdefault(name, len(self.symbols)) for name in symbols], np.int32)

    def _store(self, sheet: Sheet, n_columns: int) -> Sheet:
        """The same sheet in the scratch file."""
        n_rows, n_symbols = len(sheet), len(sheet.symbols)
        nbytes = _sheet_nbytes(n_rows, n_columns, n_symbols)
        with self._lock:
            self._check_disk(nbytes, n_columns)
            offset, self.scratch_nbytes = self.scratch_nbytes, self.scratch_nbytes + nbytes
            descriptor = self._scratch
        at = offset
        for number in range(TIMES, n_columns):
            at = _write_all(descriptor, np.ascontiguousarray(sheet.values.read(number, 0, n_rows)), at)
        at = _write_all(descriptor, sheet.came(), at)
        _write_all(descriptor, sheet.starts, _write_all(descriptor, sheet.symbols, at))
        return Sheet(sheet.symbols, sheet.starts, InFile(descriptor, offset, n_rows, n_columns))

    def _check_disk(self, nbytes: int, n_columns: int) -> None:
        """Refuse to go on where the disk will not hold the rest, by what was read so far."""
        # The first few may be unlike the others.
        is_known = self._done_nbytes >= _KNOWN * self._total_nbytes > 0
        n_rows = self._done_rows * self._total_nbytes // self._done_nbytes if is_known else self._done_rows
        row_nbytes = 8 * (1 + n_columns)
        scratch = max(self.scratch_nbytes + nbytes, n_rows * row_nbytes - sum(self._held.values()))
        needed = scratch - self.scratch_nbytes + room_for(n_rows, n_columns)
        if (free := shutil.disk_usage(self._folder).free) < needed:
            raise PackError(
                f"{self._target}: about {format_nbytes(scratch)} of scratch and {format_nbytes(needed)} of disk in "
                f"all are still to be taken, the disk has {format_nbytes(free)} free; free some, choose another place "
                "with -o DIR, or give more --memory, which takes less scratch"
            )

    @cached_property
    def _scratch(self) -> int:
        return os.open(self._folder / SCRATCH, os.O_RDWR | os.O_CREAT, 0o666)

    @cached_property
    def _journal(self) -> int:
        journal = os.open(self._folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if not os.fstat(journal).st_size:
            _write_line(journal, _Begun(__version__, _boot(), told(self._options)))
        return journal

    def _write(self, line: _Symbols | _Input) -> None:
        _write_line(self._journal, line)

    # Going on.

    def resume(self) -> Kept:
        """Take over what an earlier attempt left in the folder, which was checked by :func:`check_left`."""
        lines, whole_nbytes = _read_lines(self._folder / JOURNAL)
        kept: list[Taken | None] = [None] * len(self._keys)
        begun = lines[0] if lines else None
        if not isinstance(begun, _Begun):
            clear(self._folder)
            return Kept(kept, [])
        found = {(line.key.name, line.key.which): line for line in lines if isinstance(line, _Input)}
        if begun.boot != _boot():
            clear(self._folder)
            return Kept(kept, [name for name, _ in found])
        # What follows the last whole line was being written.
        os.truncate(self._folder / JOURNAL, whole_nbytes)
        for line in lines:
            if isinstance(line, _Symbols):
                for name in line.names:
                    self.symbols[name] = len(self.symbols)
        self._n_journaled = len(self.symbols)
        changed: list[str] = []
        self.scratch_nbytes = _end(lines)
        for number, key in enumerate(self._keys):
            before = found.get((key.name, key.which))
            if before is None:
                continue
            if before.key != key or key.modified is None:
                changed.append(key.name)
                continue
            kept[number] = one = _taken(before.taken)
            self._sheets[number] = [self._load(*place) for place in before.sheets]
            self._held[number] = 0
            self._done_nbytes += one.size_nbytes
            self._done_rows += one.n_rows
        return Kept(kept, changed)

    def _load(self, offset: int, n_rows: int, n_columns: int, n_symbols: int) -> Sheet:
        symbols, starts = np.empty(n_symbols, np.int32), np.empty(n_symbols + 1, np.int64)
        at = offset + 8 * n_rows * (1 + n_columns) + 32 * n_symbols
        read_all(self._scratch, symbols, at)
        read_all(self._scratch, starts, at + symbols.nbytes)
        return Sheet(symbols, starts, InFile(self._scratch, offset, n_rows, n_columns))


def n_kept(folder: Path) -> int:
    """Inputs whose rows an earlier attempt left in the folder."""
    lines, _ = _read_lines(folder / JOURNAL)
    return len({(line.key.name, line.key.which) for line in lines if isinstance(line, _Input)})


def check_left(folder: Path, options: ReadOptions) -> None:
    """Refuse to go on with what an earlier attempt left, where it does not fit.

    Raises
    ------
    PackError
        If it was begun with other options or by another version, or is damaged.
    """
    lines, _ = _read_lines(folder / JOURNAL)
    if not lines:
        return
    begun, remedy = lines[0], "remove it with --discard and pack anew"
    if not isinstance(begun, _Begun):
        raise PackError(f"{folder / JOURNAL}: is damaged; {remedy}")
    if begun.version != __version__:
        raise PackError(f"{folder}: was begun by stager {begun.version}, and this is {__version__}; {remedy}")
    if begun.options != told(options):
        raise PackError(f"{folder}: was begun with other options; give the same, or {remedy}")
    scratch = folder / SCRATCH
    if not scratch.exists() or scratch.stat().st_size < _end(lines):
        raise PackError(f"{scratch}: is cut or missing; {remedy}")


def _sheet_nbytes(n_rows: int, n_columns: int, n_symbols: int) -> int:
    """Times, columns, in what order the rows came, symbols, and their rows."""
    return 8 * n_rows * (1 + n_columns) + 8 * 4 * n_symbols + 4 * n_symbols + 8 * (n_symbols + 1)


def _end(lines: Sequence[_Begun | _Symbols | _Input]) -> int:
    """Where the rows end that a journal tells of."""
    return max(
        (
            offset + _sheet_nbytes(n_rows, n_columns, n_symbols)
            for line in lines
            if isinstance(line, _Input)
            for offset, n_rows, n_columns, n_symbols in line.sheets
        ),
        default=0,
    )


def keep_rows(folder: Path) -> None:
    """Remove from a partial pack all but the rows of inputs."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in (SCRATCH, JOURNAL):
            entry.unlink()


def told(options: ReadOptions) -> dict[str, Any]:
    """Options as plain values, a format with what it says."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    if options.format is not None:
        plain["format"] = msgspec.to_builtins(named(options.format))
    return msgspec.json.decode(msgspec.json.encode(plain), type=dict[str, Any])


def _plain(taken: Taken) -> dict[str, Any]:
    plain = {field.name: getattr(taken, field.name) for field in dataclasses.fields(taken)}
    plain["checked"] = [
        {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != "piece"}
        for part in taken.checked
    ]
    return plain


def _taken(plain: dict[str, Any]) -> Taken:
    nothing = Piece(np.empty(0, np.uint8), np.empty(0, np.int64), ())
    kinds = get_type_hints(Checked)
    checked = [
        Checked(piece=nothing, **{name: msgspec.convert(value, kinds[name]) for name, value in part.items()})
        for part in plain["checked"]
    ]
    kinds = get_type_hints(Taken)
    fields = {name: msgspec.convert(value, kinds[name]) for name, value in plain.items() if name != "checked"}
    return Taken(**fields, checked=checked)


def _read_lines(file: Path) -> tuple[list[_Begun | _Symbols | _Input], int]:
    """The whole lines of a journal, and their bytes."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        return [_Line.decode(line) for line in whole.splitlines()], len(whole)
    except (msgspec.DecodeError, UnicodeError):
        raise PackError(f"{file}: is damaged; remove it with --discard and pack anew") from None


def _write_line(descriptor: int, line: msgspec.Struct) -> None:
    left = memoryview(msgspec.json.encode(line) + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]


def _write_all(descriptor: int, values: npt.NDArray[Any], at: int) -> int:
    left = memoryview(values.data).cast("B")
    while left:
        n_written = os.pwrite(descriptor, left, at)
        at, left = at + n_written, left[n_written:]
    return at


def _boot() -> str:
    """What changes when the machine is started again."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
