"""Zip archives and encodings: bytes in, the bytes that are parsed out."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Any

from stager.errors import BarsError


def unzipped_nbytes(file: Any) -> int:
    """Bytes of all files in a zip archive; 0 if it is none."""
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError):
        return 0


def unzipped(data: bytes, name: str) -> bytes:
    """The one file in a zip archive."""

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=name)

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            names = [entry.filename for entry in entries if not entry.filename.startswith("__MACOSX/")]
            if "[Content_Types].xml" in names:
                raise refuse("the file is an Excel file; save the sheet as CSV")
            if len(names) != 1:
                raise refuse(f"the zip archive holds {len(names)} files, not one; unpack it")
            return archive.read(names[0])
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, BarsError):
            raise
        raise refuse("the zip archive is truncated, damaged or encrypted; get it again, or unpack it") from None


def to_utf8(data: bytes, encoding: str, name: str) -> bytes:
    """Text of another encoding as UTF-8."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise BarsError(
            f"is no {encoding} text (byte 0x{data[error.start]:02x} at {error.start:,}); name its encoding with "
            "--encoding, or get it again",
            path=name,
        ) from None
    return text.removeprefix("\ufeff").encode("utf-8", "replace")
