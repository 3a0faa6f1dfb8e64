"""The segments of a pack rewritten as one, beside it, and put in its place by a rename."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stager.errors import PackDamagedError
from stager.packs.fingerprints import fingerprint
from stager.packs.held import Joined
from stager.packs.layout import Pack, open_pack
from stager.packs.packing import Progress, write_manifest
from stager.packs.publish import partial_of, publish, refusing, sync
from stager.packs.segment import write_segment


def compact(path: str | Path, *, progress: Progress | None = None) -> Pack:
    """Rewrite the segments of a pack as one.

    The old pack stays whole until the new one is, and is then deleted; bars, rows and fingerprint are the same. Columns
    are brought into order in scratch files beside the pack, not in memory.

    Parameters
    ----------
    path : str or Path
        The pack's directory.
    progress : callable(phase, done_nbytes, total_nbytes), optional
        Phases ``write`` and ``checksum``.

    Returns
    -------
    Pack
        The pack, opened. One of a single segment is left as it is.

    Raises
    ------
    NotAPackError, PackVersionError, PackDamagedError
        As :func:`stager.open_pack`, and if the bars are not those that were written.
    PackError
        If another process writes the pack, or it can't be written.
    """
    target = Path(os.path.realpath(path))
    open_pack(target)
    with refusing(target), partial_of(target) as partial:
        # Opened under the lock: another process may have appended meanwhile.
        pack = open_pack(target)
        if isinstance(pack.held, Joined):
            _rewrite(pack, replace(pack.held, room=_scratch(partial)), target, partial, progress)
    return open_pack(target)


def _rewrite(pack: Pack, held: Joined, target: Path, partial: Path, progress: Progress | None) -> None:
    table = held.bars
    # What is damaged would get right checksums.
    if fingerprint(table, pack.symbols, pack.counts) != pack.manifest.fingerprint:
        raise PackDamagedError(
            f"{target}: its bars are not those that were written; nothing was compacted. `stager verify` tells where"
        )
    segment = write_segment(partial / "segment-0", table, pack.symbols, pack.counts, target, progress)
    manifest = msgspec.structs.replace(pack.manifest, segments=[segment], checksum="0" * 32)
    write_manifest(partial, manifest)
    sync(partial)
    publish(partial, target)


def _scratch(folder: Path) -> Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]:
    """Room for arrays in files without a name; the system writes them out where memory is short."""

    def room(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk is an error here; of a mapping it would be the end of the process.
            os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return np.memmap(file, dtype, "r+", shape=shape).view(np.ndarray)

    return room
