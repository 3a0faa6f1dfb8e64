"""Host memory in whole pages, as it can be registered."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

PAGE_NBYTES = mmap.PAGESIZE
PIECE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Bytes ``first : stop`` of a source, and the whole pages ``page_ptr : page_ptr + page_nbytes`` around them."""

    first: int
    stop: int
    page_ptr: int
    page_nbytes: int


def cut(ptr: int, nbytes: int, piece_nbytes: int = PIECE_NBYTES) -> list[Piece]:
    """Cut a buffer at page boundaries, so that no two pieces share a page and no copy straddles two."""
    if not nbytes:
        return []
    base, end = ptr - ptr % PAGE_NBYTES, ptr + nbytes
    pieces = []
    for page in range(base, end, piece_nbytes):
        stop = min(page + piece_nbytes, -(-end // PAGE_NBYTES) * PAGE_NBYTES)
        pieces.append(Piece(max(page, ptr) - ptr, min(stop, end) - ptr, page, stop - page))
    return pieces
