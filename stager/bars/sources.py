"""Which files are meant, what they hold by their first bytes, and streams of their text."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from stager.bars import remote
from stager.bars.room import Room
from stager.bars.unpack import to_utf8, unzipped, unzipped_nbytes
from stager.errors import BarsError

PathLike: TypeAlias = str | os.PathLike[str]
Compression: TypeAlias = Literal["gzip", "zstd"]
Content: TypeAlias = Literal["text", "parquet", "arrow", "json"]

ENDINGS = (
    ".csv", ".csv.gz", ".csv.zst", ".csv.zip", ".txt", ".tsv", ".parquet", ".pq", ".json", ".json.gz", ".feather",
    ".arrow", ".zip",
)  # fmt: skip
# Beside other bar files these hold notes about them.
_NOTES = (".json", ".json.gz")
_STEM = re.compile(
    r"(\.(csv|txt|tsv|parquet|pq|json|jsonl|ndjson|feather|arrow|gz|gzip|zst|zstd|zip))+$", re.IGNORECASE
)

HEAD_NBYTES = 1 << 18
# Of a compressed file so much is unpacked to tell how large all of it is.
_LOOK_NBYTES = 1 << 23
_COMPRESSIONS: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_OTHERS = (
    (b"ORC", "an ORC file; save it as Parquet"),
    (b"BZh", "compressed with bzip2; unpack it, or use gzip or zstd"),
    (b"\xfd7zXZ\x00", "compressed with xz; unpack it, or use gzip or zstd"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (b"SQLite format 3", "an SQLite database; export the table as CSV or Parquet"),
    (b"\x89HDF", "an HDF5 file; save the table as Parquet"),
)


@dataclass(frozen=True)
class BarFile:
    """One input file.

    Attributes
    ----------
    name : str
        Path as given, or URI without user, password and options.
    size_nbytes : int
        Size on disk.
    warning : str or None
        What is to be told with the file.
    """

    name: str
    size_nbytes: int
    path: str
    filesystem: pafs.FileSystem | None = None
    warning: str | None = None

    def open(self) -> pa.NativeFile:
        """The bytes as they are; a local file is mapped."""
        if self.filesystem is not None:
            return remote.open_file(self.filesystem, self.path, self.name, self.size_nbytes)
        try:
            return pa.memory_map(os.fsencode(self.path), "r")  # type: ignore[arg-type]
        except (OSError, pa.ArrowException) as error:
            raise BarsError(f"can't be opened: {remote.reason(error)}", path=self.name) from None

    @property
    def modified(self) -> int | None:
        """When the file was changed, in nanoseconds since 1970; None where that is not known."""
        try:
            if self.filesystem is None:
                return os.stat(self.path).st_mtime_ns
            return self.filesystem.get_file_info(self.path).mtime_ns
        except Exception:  # clients of stores have errors of their own
            return None

    @property
    def stem(self) -> str:
        """The file's name without its known endings: ``6EH4`` of ``data/6EH4.csv.gz``."""
        return _STEM.sub("", self.file_name) or self.file_name

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return self._parts[-1]

    @property
    def partition(self) -> str | None:
        """The symbol in a folder's name such as ``symbol=AAPL``."""
        for part in reversed(self._parts[:-1]):
            key, sign, value = part.partition("=")
            if sign and value and key.lower() in ("symbol", "ticker"):
                return unquote(value)
        return None

    @property
    def _parts(self) -> list[str]:
        # An address has options behind it.
        return list(map(unquote, self.name.split("/"))) if remote.is_http(self.name) else re.split(r"[/\\]", self.path)


@dataclass
class Opened:
    """An input whose first bytes were looked at."""

    source: BarFile
    compression: Compression | None
    content: Content
    head: bytes
    is_whole: bool
    tell: Callable[[], int] = field(default=lambda: 0)
    # All bytes of a small file elsewhere, as they are there: it is fetched once.
    fetched: bytes | None = None
    # The content, where it had to be rewritten before parsing; then it is not compressed.
    data: bytes | pa.Buffer | None = None
    # What is to be told with the file.
    warnings: list[str] = field(default_factory=list)

    @property
    def size_nbytes(self) -> int:
        """Bytes to parse, of an uncompressed input."""
        return self.source.size_nbytes if self.data is None else len(self.data)

    def unpacked_nbytes(self) -> int:
        """Bytes of the unpacked content; of a compressed file about as many, by how its beginning was compressed."""
        if self.data is not None or self.compression is None:
            return self.size_nbytes
        with self.raw() as raw, pa.CompressedInputStream(raw, self.compression) as stream:
            n_unpacked = n_packed = 0
            while n_unpacked < _LOOK_NBYTES and (some := len(stream.read(1 << 20))):
                n_unpacked += some
                n_packed = raw.tell()
        if n_packed >= self.source.size_nbytes and n_unpacked < _LOOK_NBYTES:
            return n_unpacked
        return n_unpacked * self.source.size_nbytes // max(1, n_packed)

    def raw(self) -> pa.NativeFile:
        """A new stream of the bytes as they are in the file."""
        return self.source.open() if self.fetched is None else pa.BufferReader(self.fetched)

    def read(self) -> bytes:
        """All unpacked bytes.

        Raises
        ------
        BarsError
            If a compressed file is damaged.
        """
        try:
            with self.stream() as stream:
                return bytes(stream.read())
        except (OSError, pa.ArrowException):
            raise damaged(self.source, self.compression or "") from None

    def replace(self, data: bytes | pa.Buffer) -> None:
        """Parse these bytes from now on. Rewriting keeps the lines, so that errors name the file's own."""
        self.data, self.compression = data, None
        self.head, self.is_whole = bytes(data[:HEAD_NBYTES]), len(data) <= HEAD_NBYTES

    def stream(self) -> pa.NativeFile:
        """A new stream of the unpacked bytes; ``tell`` then gives how many packed bytes were read."""
        if self.data is not None:
            return pa.BufferReader(self.data)
        raw = self.raw()
        self.tell = raw.tell
        if self.compression is None:
            return raw
        return pa.CompressedInputStream(raw, self.compression)

    def damage(self) -> BarsError | None:
        """The error, if the compressed stream can't be read to its end."""
        if self.compression is None:
            return None
        try:
            with self.stream() as stream:
                while stream.read(1 << 22):
                    pass
        except (OSError, pa.ArrowException):
            return damaged(self.source, self.compression)
        return None


def damaged(source: BarFile, compression: str) -> BarsError:
    """The error of a compressed file that can't be unpacked."""
    return BarsError(f"the {compression} file is truncated or damaged; get it again", path=source.name)


def find(source: Any) -> list[BarFile]:
    """The files meant by a path, URI, glob or directory, or by a sequence of those.

    Raises
    ------
    BarsError
        If something doesn't exist, can't be listed, or holds no bar files.
    """
    if isinstance(source, str | os.PathLike):
        return _find_one(os.fspath(source))
    if isinstance(source, Sequence) and not isinstance(source, bytes | bytearray):
        if not source:
            raise BarsError("no input was given; name a bar file")
        return [found for item in source for found in find(item)]
    raise BarsError(
        f"the input is {source!r:.60}; give a path, a URI, a glob, a directory, a sequence of those, a "
        "pyarrow.Table, or a data frame"
    )


def _find_one(name: str) -> list[BarFile]:
    if not name or "\0" in name:
        raise BarsError(f"{name!r} is no path; name a bar file")
    if remote.is_uri(name):
        return _find_uri(name)
    path = Path(name)
    try:
        if path.is_dir():
            folders = [entry for entry in path.iterdir() if "=" in entry.name and entry.is_dir()]
            if folders:
                below = sorted(path.glob("*=*/**/*"))
                return _with_stray(
                    [_local(str(file)) for file in below if _is_bar_file(file.name) and file.is_file()],
                    (entry.name for entry in path.iterdir() if entry.is_file()),
                )
            files = _without_notes(
                sorted(entry.name for entry in path.iterdir() if _is_bar_file(entry.name) and entry.is_file())
            )
            if not files:
                raise BarsError(_no_bar_files("the directory"), path=name)
            return [_local(os.path.join(name, file)) for file in files]
        if not path.exists() and re.search(r"[*?\[]", name):
            files = sorted(match for match in glob.glob(name, recursive=True) if os.path.isfile(match))
            if not files:
                raise BarsError("no file matches this pattern", path=name)
            return [_local(file) for file in files]
        return [_local(name)]
    except OSError as error:
        raise BarsError(f"can't be read: {remote.reason(error)}", path=name) from None


def _local(name: str) -> BarFile:
    try:
        status = os.stat(name)
    except FileNotFoundError:
        raise BarsError("there is no such file", path=name) from None
    if not stat.S_ISREG(status.st_mode):
        raise BarsError("is no regular file; write the data to a file first", path=name)
    return BarFile(name, status.st_size, name)


def _find_uri(uri: str) -> list[BarFile]:
    name = remote.without_secrets(uri)
    try:
        filesystem, path = remote.connect(uri)
        # The address of a page that lists files is no file.
        is_page = remote.is_http(uri) and path.endswith("/")
        info: Any = None if is_page else filesystem.get_file_info(path)
        if is_page or (info is not None and info.type == pafs.FileType.Directory):
            return _files_below(filesystem, path.rstrip("/"), name.rstrip("/"))
        if info is not None and info.type == pafs.FileType.File:
            return [_far(name, info, filesystem)]
        pattern = remote.matching(path)
        if pattern is not None:
            base, matches = pattern
            is_deep = "/" in path[len(base) + 1 :] or "**" in path
            entries = filesystem.get_file_info(pafs.FileSelector(base, recursive=is_deep))
            found = [one for one in entries if one.type == pafs.FileType.File and matches(one.path)]
            if not found:
                raise BarsError("no file matches this pattern", path=name)
            above = remote.without_secrets(base) if remote.is_http(base) else base.strip("/")
            return _far_files(filesystem, base, name[: name.index(above) + len(above)], found)
    except BarsError:
        raise
    except Exception as error:  # clients of stores have errors of their own
        raise BarsError(f"can't be opened: {remote.reason(error).replace(uri, name)}", path=name) from None
    raise BarsError("there is no such file", path=name)


def _files_below(filesystem: pafs.FileSystem, path: str, name: str) -> list[BarFile]:
    """The bar files of a folder elsewhere, and of its folders ``key=value`` if it has some."""
    beside: list[str] = []
    entries: Any = filesystem.get_file_info(pafs.FileSelector(path))
    if any(one.type == pafs.FileType.Directory and "=" in one.base_name for one in entries):
        beside = [one.base_name for one in entries if one.type == pafs.FileType.File]
        entries = [
            one
            for one in filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            if "=" in one.path.strip("/")[len(path.strip("/")) + 1 :].partition("/")[0]
        ]
    files = [one for one in entries if one.type == pafs.FileType.File and _is_bar_file(one.base_name)]
    names = set(_without_notes([one.base_name for one in files]))
    files = [one for one in files if one.base_name in names]
    if not files:
        raise BarsError(_no_bar_files("the directory"), path=name)
    return _with_stray(_far_files(filesystem, path, name, files), beside)


def _far_files(filesystem: pafs.FileSystem, base: str, name: str, files: list[pafs.FileInfo]) -> list[BarFile]:
    files = sorted(files, key=lambda one: str(one.path))
    if any(one.size is None for one in files):
        files = filesystem.get_file_info([one.path for one in files])
    start = len(base.strip("/"))
    return [_far(f"{name}{one.path.lstrip('/')[start:]}", one, filesystem) for one in files]


def _far(name: str, info: pafs.FileInfo, filesystem: pafs.FileSystem) -> BarFile:
    if isinstance(filesystem, pafs.LocalFileSystem):
        return BarFile(name, info.size or 0, info.path)
    return BarFile(name, info.size or 0, info.path, filesystem)


def _without_notes(names: list[str]) -> list[str]:
    """The names without JSON, which beside other bar files holds notes about them."""
    return [name for name in names if not name.lower().endswith(_NOTES)] or names


def _with_stray(files: list[BarFile], names: Iterable[str]) -> list[BarFile]:
    """The files of folders ``key=value``; the first tells of bar files beside the folders, which nobody else misses."""
    stray = sorted(name for name in names if _is_bar_file(name) and not name.lower().endswith((*_NOTES, ".txt")))
    if stray and files:
        more = f" and {len(stray) - 1} more" if len(stray) > 1 else ""
        files[0] = replace(files[0], warning=f"beside the folder lies {stray[0]!r}{more}, which is not read")
    return files


def _is_bar_file(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith((".", "_"))


def _no_bar_files(what: str) -> str:
    return (
        f"{what} holds no bar files ({' '.join('*' + ending for ending in ENDINGS)}); subdirectories are not searched"
    )


def look(source: BarFile, encoding: str | None = None, room: Room | None = None) -> Opened:
    """Read the first bytes and tell what the file is; text of an encoding other than UTF-8 is decoded.

    Raises
    ------
    BarsError
        If it is empty, or something else than text or Parquet; or if it must be unpacked or decoded as a whole and
        there is no `room` for that.
    """
    room = Room(source.name) if room is None else room

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=source.name)

    if source.size_nbytes == 0:
        raise refuse("the file is empty")
    is_small = source.filesystem is not None and source.size_nbytes <= remote.FETCHED_NBYTES
    with source.open() as raw:
        fetched = raw.read() if is_small else None
        head = raw.read(HEAD_NBYTES) if fetched is None else fetched[:HEAD_NBYTES]
    compression = next((name for magic, name in _COMPRESSIONS if head.startswith(magic)), None)
    opened = Opened(source, compression, "text", head, is_whole=source.size_nbytes <= len(head), fetched=fetched)
    if compression is not None:
        try:
            with opened.stream() as stream:
                opened.head = stream.read(HEAD_NBYTES)
                opened.is_whole = len(opened.head) < HEAD_NBYTES or not stream.read(1)
        except (OSError, pa.ArrowException):
            raise damaged(source, compression) from None
    if opened.head.startswith(b"PK\x03\x04"):
        if room.nbytes is not None:
            with opened.raw() as raw:
                room.check(
                    source.size_nbytes + 2 * unzipped_nbytes(raw), "zip archives are not read in parts; unpack it"
                )
        opened.replace(unzipped(opened.read(), source.name))
    head = opened.head
    if head.startswith(b"PAR1"):
        opened.content = "parquet"
        return opened
    if head.startswith((b"ARROW1", b"FEA1")):
        opened.content = "arrow"
        return opened
    for magic, what in _OTHERS:
        if head.startswith(magic):
            raise refuse(f"the file is {what}")
    if encoding is not None or head.startswith((b"\xff\xfe", b"\xfe\xff")):
        # The bytes, the text, and the bytes of UTF-8.
        room.check(4 * opened.unpacked_nbytes(), "text that is no UTF-8 is not read in parts; convert it")
        opened.replace(to_utf8(opened.read(), encoding or "utf-16", source.name))
        head = opened.head
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    start = text[:64].lower()
    if not text and opened.is_whole:
        raise refuse("the file is empty: it holds nothing but blanks")
    if start.startswith(b"version https://git-lfs"):
        raise refuse("the file is a Git LFS pointer, not the data; fetch the data with git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<body", b"<?xml")):
        raise refuse("the file is an HTML or XML page, most likely an error page of a server; get the data again")
    if start.startswith((b"{", b"[")):
        opened.content = "json"
        return opened
    if b"\0" in head and b"\0" not in head.rstrip(b"\0"):
        raise refuse("the file ends in NUL bytes: it was not written to its end; get it again")
    if b"\0" in head:
        half = head[: len(head) // 2 * 2]
        if half and (half[1::2].count(0) * 2 > len(half) // 2 or half[::2].count(0) * 2 > len(half) // 2):
            raise refuse("the file looks like UTF-16 text without its mark; say --encoding utf-16-le or utf-16-be")
        raise refuse("the file holds NUL bytes: it is no text, or damaged")
    if source.file_name.lower().endswith((".parquet", ".pq")):
        raise refuse("the file is named Parquet but doesn't begin as one; it is damaged, or something else")
    return opened


def lines(stream: pa.NativeFile) -> Iterator[bytes]:
    """Physical lines without their ends; a line ends with LF, CR or CR LF."""
    rest = b""
    with stream:
        while block := stream.read(1 << 22):
            parts = (rest + block).splitlines(keepends=True)
            # The last line may go on in the next block, also when it ends with a CR whose LF comes there.
            rest = b"" if parts[-1].endswith(b"\n") else parts.pop()
            for part in parts:
                yield part.rstrip(b"\r\n")
    if rest:
        yield rest.rstrip(b"\r\n")
