"""Text that is larger than memory, in pieces of whole lines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from stager.bars.sources import Opened, damaged
from stager.errors import BarsError

# The end of the last line is looked for in so many bytes at a time.
_LINE_NBYTES = 4096


def pieces_of_text(opened: Opened, nbytes: int) -> Iterator[tuple[pa.Buffer, bool]]:
    """The unpacked bytes of a file in pieces of about so many, each ending with a line, and whether it is the last.

    Raises
    ------
    BarsError
        If a compressed file is damaged, or a line is longer than a piece.
    """
    before: pa.Buffer | None = None
    for piece in _pieces(opened, nbytes):
        if before is not None:
            yield before, False
        before = piece
    if before is not None:
        yield before, True


def _pieces(opened: Opened, nbytes: int) -> Iterator[pa.Buffer]:
    """The unpacked bytes in pieces of about so many, each ending with a line."""
    line_end = b"\n" if b"\n" in opened.head else b"\r"
    try:
        with opened.stream() as stream:
            rest = pa.py_buffer(b"")
            is_mapped = opened.compression is None and opened.source.filesystem is None and opened.data is None
            start = 0
            while True:
                if is_mapped:
                    # Not copied: it is the file's own memory.
                    stream.seek(start)
                    data = stream.read_buffer(nbytes)
                else:
                    data = pa.py_buffer(b"".join((rest, stream.read_buffer(nbytes))))
                if len(data) == len(rest):
                    if len(rest):
                        yield rest
                    return
                is_end = is_mapped and start + len(data) >= opened.source.size_nbytes
                cut = len(data) if is_end else _last_line_end(data, line_end)
                if cut == 0 and len(data) - len(rest) < nbytes:
                    cut = len(data)
                if cut == 0:
                    raise BarsError(f"a line is longer than {nbytes:,} bytes; this is no CSV file of bars",
                                    path=opened.source.name)  # fmt: skip
                yield data.slice(0, cut)
                rest = pa.py_buffer(b"") if is_mapped else data.slice(cut)
                start += cut
    except (OSError, pa.ArrowException):
        raise damaged(opened.source, opened.compression or "") from None


def _last_line_end(data: pa.Buffer, line_end: bytes) -> int:
    """Bytes up to the end of the last whole line; 0 if there is none."""
    stop = len(data)
    while stop > 0:
        start = max(0, stop - _LINE_NBYTES)
        found = bytes(data[start:stop]).rfind(line_end)
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


def count_lines(data: pa.Buffer) -> int:
    """Lines in text that ends with one."""
    view = np.frombuffer(memoryview(data), np.uint8)
    n_feeds = int(np.count_nonzero(view == 10))
    returns = np.flatnonzero(view == 13)
    if not len(returns):
        return n_feeds
    alone = returns[(returns + 1 >= len(view)) | (view[np.minimum(returns + 1, len(view) - 1)] != 10)]
    return n_feeds + len(alone)
