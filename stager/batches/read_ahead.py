"""Reading a mapped file ahead of its upload."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack

_READ_AHEAD_NBYTES = 512 << 20
_READ_AHEAD_STEP_NBYTES = 16 << 20


def read_ahead(pack: Pack) -> Callable[[int, int], None]:
    """Have the kernel read the mapped rows ahead of the upload, for files that are not in the page cache."""
    rows: npt.NDArray[np.float32] = pack.rows
    mapping: mmap.mmap = rows._mmap  # type: ignore[attr-defined]
    header = len(mapping) - rows.nbytes
    address = rows.ctypes.data - header
    mincore = ctypes.CDLL(None).mincore
    flags = ctypes.create_string_buffer(1)
    asked = 0

    def ask(first: int, stop: int) -> None:
        nonlocal asked
        while asked < min(header + stop + _READ_AHEAD_NBYTES, len(mapping)):
            # The kernel looks at every page that it is asked for, which takes longer than to copy what is there.
            mincore(ctypes.c_void_p(address + asked), ctypes.c_size_t(mmap.PAGESIZE), flags)
            if not flags.raw[0] & 1:
                mapping.madvise(mmap.MADV_WILLNEED, asked, min(_READ_AHEAD_STEP_NBYTES, len(mapping) - asked))
            asked += _READ_AHEAD_STEP_NBYTES

    return ask
