"""The manifest of a pack: what it says, reading it, and which directories are packs."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from stager.bars.interval import Interval
from stager.bars.read import Decision, InputFile
from stager.errors import ConfigError, NotAPackError, PackDamagedError, PackError, PackVersionError
from stager.version import __version__

FORMAT_VERSION = 2
# Makes the fingerprint and the checksums of files, 16 bytes each; the manifest's own does not depend on it.
HASHING = "blake3"
MANIFEST = "manifest.json"
# From here on compacting is suggested.
MANY_SEGMENTS = 16
FILES = frozenset({"rows.npy", "bars.arrow", "symbols.arrow"})
# What else lies in a pack that is being written.
SCRATCH, JOURNAL = "scratch", "journal.jsonl"
UNFINISHED = frozenset({SCRATCH, JOURNAL})
# What the workers of a cluster share: a mark, sheets of some symbols each, and of each input a directory with its rows.
SHARED, MARK, SHEETS = "shared", "mark", "sheets-"

T = TypeVar("T")
Role = Literal["price", "volume", "other"]

_SEGMENT = re.compile(r"segment-[0-9]+")
_INPUT = re.compile(r"[0-9]+-[0-9a-f]{32}")
_SHARED = re.compile(rf"{MARK}|{SHEETS}[0-9]+")


class Column(msgspec.Struct, frozen=True):
    """A column of the rows: name, role, and how many of its values are missing (NaN or infinite)."""

    name: str
    role: Role
    n_missing: int


class PanelLayout(msgspec.Struct, frozen=True):
    """What the rows of a panel hold: of each symbol all columns, side by side; NaN where a symbol has no bar.

    `n_missing` of a column counts missing values in bars that are there.
    """

    symbols: list[str]
    columns: list[Column]

    @property
    def names(self) -> list[str]:
        """The pack's columns, in the order of the rows."""
        return [self.name(symbol, column.name) for symbol in self.symbols for column in self.columns]

    @staticmethod
    def name(symbol: str, column: str) -> str:
        """The pack's name of a symbol's column."""
        return f"{symbol}.{column}"


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

    ``panel`` says that a row holds all symbols; the pack's one symbol then is the panel itself. ``span`` is the first
    and last bar's open, ISO 8601 UTC. ``session_close`` is when sessions close, where times are their dates and it was
    told. ``hashing`` names what makes the fingerprint and the checksums of files. ``fingerprint`` is empty for bars in
    memory, where it is computed when asked for.
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
    inputs: list[InputFile]
    decisions: list[Decision]
    dropped: dict[str, int]
    warnings: list[str]
    segments: list[Segment]
    panel: PanelLayout | None = None
    session_close: str | None = None
    hashing: str = HASHING
    checksum: str

    @property
    def shape(self) -> tuple[int, list[Column]]:
        """The number of symbols and the columns of each, also where they lie side by side."""
        if self.panel is None:
            return self.n_symbols, self.columns
        return len(self.panel.symbols), self.panel.columns


def new_manifest(interval: Interval, inputs: Iterable[InputFile], **facts: Any) -> Manifest:
    """The manifest of bars that are packed now, of these facts; its checksum is to be taken as it is written."""
    return Manifest(
        format_version=FORMAT_VERSION,
        stager_version=__version__,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        interval=interval.text,
        session_close=interval.close_text,
        inputs=[replace(one, name=readable(one.name)) for one in inputs],
        checksum="0" * 32,
        **facts,
    )


class _Version(msgspec.Struct):
    format_version: int


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of the pack at `path`; raises as :func:`open_pack`."""
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        what = f"no pack (it has no {MANIFEST})" if os.path.lexists(path) else "there is no such pack"
        raise NotAPackError(f"{path}: {what}; `stager pack` makes one from bar files") from None
    except OSError as error:
        raise PackError(f"{file}: can't be read: {error.strerror or error}") from error
    try:
        version = msgspec.json.decode(raw, type=_Version).format_version
        if version < 1:
            raise PackDamagedError(f"{file}: format_version is {version}; restore it or pack the bars again")
        if version > FORMAT_VERSION:
            raise PackVersionError(
                f"{path}: pack format {version}; this stager reads up to {FORMAT_VERSION}. Update stager."
            )
        if version < FORMAT_VERSION:
            raise PackVersionError(
                f"{path}: pack format {version}; this stager reads {FORMAT_VERSION}. Pack the bars again."
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
        if seal(raw, manifest.checksum) != manifest.checksum:
            raise PackDamagedError(f"{file}: its checksum does not match; it was damaged or edited. Pack again.")
        if manifest.hashing != HASHING:
            raise PackVersionError(
                f"{path}: its checksums are made by {manifest.hashing!r}; this stager knows {HASHING}. Update stager."
            )
        Interval.parse(manifest.interval).closing(manifest.session_close)
    except (msgspec.DecodeError, UnicodeError, ConfigError) as error:
        raise PackDamagedError(f"{file}: no valid manifest ({error}); restore it or pack the bars again") from error
    if contradiction := _contradiction(manifest):
        raise PackDamagedError(f"{file}: {contradiction}; restore it or pack the bars again")
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    """What in the manifest does not fit the rest of it."""
    names = [column.name for column in manifest.columns]
    if not names or len({"symbol", "time", *names}) != len(names) + 2:
        return f"its columns {', '.join(names)} are none, twice the same, or named symbol or time"
    if manifest.panel is not None and (manifest.panel.names != names or manifest.n_symbols != 1):
        return "its columns are not those of its panel"
    if not 1 <= manifest.n_symbols <= manifest.n_rows or manifest.n_rows != sum(s.n_rows for s in manifest.segments):
        return f"{manifest.n_symbols:,} symbols of {manifest.n_rows:,} rows don't fit its segments"
    is_session = manifest.timestamps == "session" and Interval.parse(manifest.interval).is_session
    if manifest.session_close is not None and not is_session:
        return "its sessions have a close, and its bars are not of sessions"
    if len({segment.name for segment in manifest.segments}) != len(manifest.segments):
        return "it lists a segment twice"
    for segment in manifest.segments:
        if _SEGMENT.fullmatch(segment.name) is None:
            return f"{segment.name!r} is no name of a segment"
        if set(segment.files) != FILES:
            return f"segment {segment.name} lists {', '.join(sorted(segment.files))}, not {', '.join(sorted(FILES))}"
    return None


def readable(path: str | Path) -> str:
    """A path as text that JSON can hold: bytes of a name that are no UTF-8 are replaced."""
    return os.fsencode(path).decode("utf-8", "replace")


def settled(path: Path, look: Callable[[], T]) -> T:
    """What `look` finds in the pack at `path`, looking again if the pack was replaced meanwhile."""
    while True:
        before = _identity(path)
        try:
            found = look()
        except PackError:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return found


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def is_foreign(path: Path, more: frozenset[str] = frozenset()) -> bool:
    """Whether `path` is anything but a directory with nothing but a pack's files, or `more`, damaged or not.

    Decides what may be deleted, so a directory that only happens to have a manifest.json is foreign.
    """
    if not path.is_dir():
        return True
    entries = list(path.iterdir())
    segments = [entry for entry in entries if _SEGMENT.fullmatch(entry.name) and entry.is_dir()]
    known = len(segments) + sum(entry.name in {MANIFEST, *more} and entry.is_file() for entry in entries)
    known += bool(more) and any(entry.name == SHARED and _is_shared(entry) for entry in entries)
    return known != len(entries) or any(file.name not in FILES for segment in segments for file in segment.iterdir())


def _is_shared(folder: Path) -> bool:
    """Whether a directory holds nothing but what the workers of a cluster share."""
    return folder.is_dir() and all(
        (_SHARED.fullmatch(entry.name) and entry.is_file())
        or (_INPUT.fullmatch(entry.name) and entry.is_dir() and all(file.name == SCRATCH for file in entry.iterdir()))
        for entry in folder.iterdir()
    )


def seal(raw: bytes, checksum: str) -> str:
    """Checksum of a manifest's bytes, with the stored checksum's place zeroed."""
    return hashlib.blake2b(raw.replace(checksum.encode(), b"0" * 32, 1), digest_size=16).hexdigest()
