"""Reading a mapped file ahead of its upload."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack

_READ_AHEAD_NBYTES = 512 << 20
_STEP_NBYTES = 16 << 20
_N_SAMPLES = 16


def read_ahead(pack: Pack) -> Callable[[int, int], None]:
    """Have the kernel read the mapped rows ahead of the upload, for files that are not in the page cache.

    The bytes of several segments are counted one segment after the other.
    """
    starts = np.cumsum([0, *(part.rows.nbytes for part in pack.parts)]).tolist()
    asks = [(start, _ask(part.rows)) for start, part in zip(starts, pack.parts, strict=False)]

    def ask(first: int, stop: int) -> None:
        for start, one in asks:
            one(first - start, stop - start)

    return ask


def _ask(rows: npt.NDArray[np.float32]) -> Callable[[int, int], None]:
    mapping: mmap.mmap = rows._mmap  # type: ignore[attr-defined]
    address: int = np.frombuffer(mapping, np.uint8).ctypes.data
    # Whole pages of the file, which the rows need not begin or end with.
    begin = rows.ctypes.data - address
    asked, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + rows.nbytes
    # To ask for what is there already takes longer than to copy it.
    if _is_cached(address + asked, end - asked):
        asked = end

    def ask(first: int, stop: int) -> None:
        nonlocal asked
        while asked < end and asked < begin + stop + _READ_AHEAD_NBYTES:
            mapping.madvise(mmap.MADV_WILLNEED, asked, min(_STEP_NBYTES, end - asked))
            asked += _STEP_NBYTES

    return ask


def _is_cached(address: int, nbytes: int) -> bool:
    """Whether pages all over some mapped bytes, from the beginning of a page on, are in the page cache."""
    flags = ctypes.create_string_buffer(1)
    last_page = (nbytes - 1) // mmap.PAGESIZE
    for sample in range(_N_SAMPLES + 1):
        place = address + last_page * sample // _N_SAMPLES * mmap.PAGESIZE
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(place), ctypes.c_size_t(1), flags) or not flags.raw[0] & 1:
            return False
    return True
