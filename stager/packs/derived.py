"""Where derived packs are kept: beside the pack that they came from, under a name that tells both."""

from __future__ import annotations

from pathlib import Path

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


def made_before(place: Path) -> Pack | None:
    """The pack at that place; None if there is none, or it is damaged or of a newer stager and has to be made anew."""
    if not place.exists():
        return None
    try:
        return open_pack(place)
    except PackError:
        return None
