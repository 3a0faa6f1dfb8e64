"""Looking at all of the rows that a service shares: clients can write into them, by mistake or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stager.batches.resident import Resident
from stager.packs.verify import verify
from stager.service.client import attach
from stager.service.sharing import on_host

_CHUNK_ROWS = 1 << 20


def verify_resident(
    name: str, socket: str | Path | None = None, *, progress: Callable[[str, int, int], None] | None = None
) -> list[str]:
    """Compare the rows that a service holds with the pack's files, bit for bit.

    Parameters
    ----------
    name : str
        As the service calls it.
    socket : str or Path, optional
    progress : callable(phase, done_nbytes, total_nbytes), optional

    Returns
    -------
    list of str
        One sentence per damage found, naming the rows; empty if all is right. On the CPU the rows are the files, which
        are verified.

    Raises
    ------
    NoServiceError, ServiceError, PackError, DeviceError, StagingError
    """
    with attach(name, socket=socket) as resident:
        pack = resident.pack
        if resident.device.index is None:
            assert pack.path is not None
            return verify(pack.path, progress=progress)
        findings: list[str] = []
        kept = pack.rows
        for first, part in _held(resident):
            differ = part.view(np.uint32) != kept[first : first + len(part)].view(np.uint32)
            if (rows := np.flatnonzero(differ.reshape(len(differ), -1).any(axis=1))).size:
                findings.append(
                    f"{name}: {rows.size:,} rows differ from {pack.path}, from row {first + rows[0]:,} to "
                    f"{first + rows[-1]:,}; release it and stage it again"
                )
            if progress:
                progress("compare", (first + len(part)) * 4 * len(pack.columns), resident.nbytes)
        return findings


def _held(resident: Resident) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Some rows at a time, on the host, and which the first is; those that two blocks hold from both."""
    rows = resident.rows
    blocks = [(0, rows)]
    if resident.placement == "spread":
        blocks = [(first, block) for (first, _), block in zip(rows.layout.spans, rows.blocks, strict=True)]
    for begin, block in blocks:
        for first in range(0, len(block), _CHUNK_ROWS):
            yield begin + first, on_host(block[first : first + _CHUNK_ROWS])
