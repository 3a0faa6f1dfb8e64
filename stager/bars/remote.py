"""Files elsewhere: URIs of object stores and web servers, read through pyarrow's file systems or fsspec's."""

from __future__ import annotations

import io
import os
import re
import tempfile
import weakref
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from stager.errors import BarsError

_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
# What pyarrow reads itself, and what it does where fsspec has no client. Not Google's store: without credentials its
# client says nothing for many minutes.
_ARROW_FIRST = ("file", "s3")
_ARROW = ("abfs", "abfss", "hdfs", "viewfs")
_HTTP = ("http", "https")
# A file of a web server up to this size is fetched with one request; a larger one is read in ranges.
FETCHED_NBYTES = 1 << 23
_SILENT_SECONDS = 60


def is_uri(name: str) -> bool:
    """Whether a name has a scheme, such as ``s3://``."""
    return _URI.match(name) is not None


def scheme_of(uri: str) -> str:
    """``s3`` of ``s3://bucket/day.csv``."""
    return uri.partition("://")[0].lower()


def is_http(uri: str) -> bool:
    """Whether a web server has it."""
    return is_uri(uri) and scheme_of(uri) in _HTTP


def without_secrets(uri: str) -> str:
    """The URI as it may be printed and kept in a manifest: without user, password and options."""
    return re.sub(r"^([^:/?#]+://)[^/?#]*@", r"\1", uri).partition("?")[0]


def connect(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI, and the path in it.

    Raises
    ------
    BarsError
        If a package is missing, or nothing is known that reads such URIs.
    """
    scheme, name = scheme_of(uri), without_secrets(uri)
    if scheme in _ARROW_FIRST:
        return pafs.FileSystem.from_uri(uri)
    missing = f"reading {scheme}:// needs fsspec; pip install 'stager[remote]'"
    try:
        import fsspec

        options: dict[str, Any] = _http_options() if scheme in _HTTP else {}
        filesystem, path = fsspec.core.url_to_fs(uri, **options)
        return pafs.PyFileSystem(_handler(filesystem)), path
    except ImportError as error:
        if scheme in _ARROW:
            return pafs.FileSystem.from_uri(uri)
        if error.name is not None and error.name.partition(".")[0] != "fsspec":
            missing = f"reading {scheme}:// needs the package {error.name}; pip install 'stager[remote]' {error.name}"
        elif error.name is None:
            missing = f"reading {scheme}:// needs a package that is not there: {error}"
        raise BarsError(missing, path=name) from None
    except ValueError:
        if scheme in _ARROW:
            return pafs.FileSystem.from_uri(uri)
        raise BarsError(
            f"{scheme}:// is nothing that pyarrow or fsspec reads; use s3://, gs://, https:// or a local file",
            path=name,
        ) from None


def _http_options() -> dict[str, Any]:
    import aiohttp

    # Compressed on the way, a file's ranges would not be the file's own; and a large file may take longer than minutes.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    return {
        "headers": {"Accept-Encoding": "identity"},
        "client_kwargs": {"timeout": timeout},
        "skip_instance_cache": True,
    }


class _Copy:
    """A file that was copied to a temporary one, which goes with the last reference."""

    def __init__(self, filesystem: Any, path: str) -> None:
        number, self.path = tempfile.mkstemp(prefix="stager-")
        weakref.finalize(self, Path(self.path).unlink, missing_ok=True)
        with open(number, "wb") as copy:
            filesystem.get_file(path, copy)


class _Handler(pafs.FSSpecHandler):
    """A file system of fsspec; of web servers it also knows when a file was changed, and why there is none."""

    fs: Any

    def __init__(self, filesystem: Any) -> None:
        super().__init__(filesystem)
        # Of files that a server doesn't give in parts, or whose size it doesn't tell.
        self._copies: dict[str, _Copy] = {}

    def get_file_info(self, paths: Any) -> Any:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            info = self.fs.info(path)
        except FileNotFoundError as error:
            cause = error.__cause__
            if cause is not None and getattr(cause, "status", 404) != 404:
                raise cause from None
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise cause from None
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        kind = {"file": pafs.FileType.File, "directory": pafs.FileType.Directory}.get(
            info["type"], pafs.FileType.Unknown
        )
        size = info.get("size")
        if size is None and is_http(path):
            size = os.stat(self._copied(path).path).st_size
        return pafs.FileInfo(path, kind, size=size, mtime=self._changed(path, info))

    def _changed(self, path: str, info: dict[str, Any]) -> float | None:
        try:
            if "Last-Modified" in info:
                return parsedate_to_datetime(info["Last-Modified"]).timestamp()
            return float(self.fs.modified(path).timestamp())
        except (NotImplementedError, KeyError, TypeError, ValueError, AttributeError, OSError):
            return None

    def open_input_file(self, path: str) -> Any:
        return pa.PythonFile(self._opened(path), mode="r")

    def _opened(self, path: str) -> Any:
        if not is_http(path):
            return self.fs.open(path, mode="rb")
        size = None if path in self._copies else self.fs.info(path).get("size")
        if size is not None and size <= FETCHED_NBYTES:
            return io.BytesIO(self.fs.cat_file(path))
        if size is not None:
            file = self.fs.open(path, mode="rb")
            try:
                file.seek(size - 1)
                if len(file.read(1)) == 1:
                    file.seek(0)
                    return file
            except (ValueError, OSError):
                # The server gives no parts of files.
                pass
            file.close()
        return pa.memory_map(self._copied(path).path)

    def _copied(self, path: str) -> _Copy:
        if path not in self._copies:
            self._copies[path] = _Copy(self.fs, path)
        return self._copies[path]


def _handler(filesystem: Any) -> _Handler:
    return _Handler(filesystem)  # type: ignore[abstract]  # the stubs don't know what pyarrow's class has


class _Watched:
    """A file elsewhere: what goes wrong while it is read is told by its name, and a part that is missing is an error.

    Parameters
    ----------
    file : file object
    name : str
    nbytes : int
        Its size.
    """

    def __init__(self, file: Any, name: str, nbytes: int) -> None:
        self._file, self._name, self._nbytes, self._at = file, name, nbytes, 0

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def read(self, n: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        left = left if n is None or n < 0 else min(n, left)
        parts: list[bytes] = []
        while left:
            try:
                part = self._file.read(left)
            except Exception as error:
                raise BarsError(f"reading broke off after {self._at:,} of {self._nbytes:,} bytes: {reason(error)}; "
                                "try again", path=self._name) from None  # fmt: skip
            if not part:
                raise BarsError(
                    f"only {self._at:,} of {self._nbytes:,} bytes came; the connection broke off, or the file was "
                    "changed meanwhile; try again",
                    path=self._name,
                )
            parts.append(part)
            self._at += len(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = start + offset
        self._file.seek(self._at)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


def open_file(filesystem: pafs.FileSystem, path: str, name: str, nbytes: int) -> pa.NativeFile:
    """A file's bytes.

    Raises
    ------
    BarsError
        If it can't be opened; later, if it can't be read to its end.
    """
    try:
        file = filesystem.open_input_file(path)
    except Exception as error:
        raise BarsError(f"can't be opened: {reason(error)}", path=name) from None
    watched: Any = _Watched(file, name, nbytes)
    return pa.PythonFile(watched, mode="r")


def matching(path: str) -> tuple[str, Callable[[str], bool]] | None:
    """The folder above the first ``*`` of a path, and which paths below it match; None: there is no ``*``.

    ``*`` stands for any characters of a name, ``**`` also for folders, and ``?`` and ``[ab]`` for one character, but
    not in the address of a web server.
    """
    found = re.search(r"\*" if is_http(path) else r"[*?\[]", path)
    if found is None:
        return None
    base = path[: path.rindex("/", 0, found.start())] if "/" in path[: found.start()] else ""
    expression, rest = "", path
    tokens: tuple[tuple[str, str], ...] = ((r"\*\*/", "(?:[^/]+/)*"), (r"\*\*", ".*"), (r"\*", "[^/]*"))
    if not is_http(path):
        tokens = (*tokens, (r"\?", "[^/]"))
    while rest:
        for token, meaning in tokens:
            if match := re.match(token, rest):
                expression, rest = expression + meaning, rest[match.end() :]
                break
        else:
            some = None if is_http(path) else re.match(r"\[(!?)([^\]/]+)\]", rest)
            if some is None:
                expression, rest = expression + re.escape(rest[0]), rest[1:]
            else:
                inner = some[2].replace("\\", "\\\\").replace("^", "\\^")
                expression, rest = expression + f"[{'^' if some[1] else ''}{inner}]", rest[some.end() :]
    try:
        pattern = re.compile(expression)
    except re.error:
        return None
    return base, lambda other: pattern.fullmatch(other) is not None


def reason(error: BaseException) -> str:
    """What went wrong, in the system's or the server's own words; without addresses, which may hold a password."""
    if isinstance(error, BarsError):
        return error.message
    status: Any = getattr(error, "status", None)
    if isinstance(status, int):
        return f"the server answered {status} {getattr(error, 'message', '')}".strip()
    # Clients of web servers have errors that are the system's too, with a number that says little.
    if isinstance(error, OSError) and error.errno and error.errno > 0 and type(error).__module__ == "builtins":
        return os.strerror(error.errno).lower()
    if isinstance(error, TimeoutError):
        return f"nothing came for {_SILENT_SECONDS} seconds"
    detail = str(error).splitlines()[0] if str(error) else ""
    detail = re.sub(r"\s*\[errno \d+\].*?:\s*", " ", detail, flags=re.IGNORECASE)
    detail = re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"]+", lambda match: without_secrets(match[0]), detail)
    return detail[:200] or type(error).__name__
