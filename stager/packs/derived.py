"""Where derived packs are kept: beside the pack that they came from, under a name that tells both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from stager.errors import PackError
from stager.packs.layout import Pack, open_pack
from stager.packs.publish import check_target, refusing


def check_out(out: str | Path | None, overwrite: bool) -> None:
    """Refuse a target that can't be written, before anything is made for it; see :func:`publish.check_target`."""
    if out is not None:
        with refusing(Path(out)):
            check_target(Path(out), overwrite)


def beside(path: Path, key: str) -> Path:
    """The place of a derived pack, ``bars-0f3c....pack`` of ``bars.pack``."""
    return path.with_name(f"{path.name.removesuffix('.pack')}-{key}.pack")


def key_of(pack: Pack, recipe: Sequence[Any], tables: Iterable[npt.NDArray[Any]]) -> str:
    """Hash of everything that derived bars depend on: the pack, a recipe by its text, and tables."""
    manifest = pack.manifest
    told = pack.fingerprint, pack.interval, manifest.timestamps, manifest.adjustment, *recipe
    state = hashlib.blake2b(repr(told).encode(), digest_size=8)
    for table in tables:
        state.update(len(table).to_bytes(8, "little") + table.tobytes())
    return state.hexdigest()


def made_before(place: Path) -> Pack | None:
    """The pack at that place; None if there is none, or it is damaged or of a newer stager and has to be made anew."""
    if not place.exists():
        return None
    try:
        return open_pack(place)
    except PackError:
        return None
