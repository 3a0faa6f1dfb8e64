"""What a pack holds, for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stager.packs.layout import Pack
from stager.packs.manifest import Manifest, readable
from stager.samples.runs import NEW_SYMBOL, find_breaks


@dataclass(frozen=True)
class Summary:
    """Facts about a pack.

    Attributes
    ----------
    n_gaps, n_missing : int
        Places inside a symbol where bars are missing, and the bars missing there.
    largest_gap : int
        Bars missing at the widest of them.
    rows_nbytes, disk_nbytes : int
        Bytes of the float32 rows, and of all files of the pack.
    manifest : Manifest
    path : str
    """

    path: str
    n_gaps: int
    n_missing: int
    largest_gap: int
    rows_nbytes: int
    disk_nbytes: int
    manifest: Manifest

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)


def summarise(pack: Pack) -> Summary:
    """Look at the times of a pack once and tell what is in it."""
    breaks = find_breaks(pack)
    inside = breaks.missing[breaks.missing < NEW_SYMBOL]
    files = [stored for segment in pack.manifest.segments for stored in segment.files.values()]
    return Summary(
        path=readable(pack.path or "in memory"),
        n_gaps=len(inside),
        n_missing=int(inside.sum()),
        largest_gap=int(inside.max(initial=0)),
        rows_nbytes=pack.rows_nbytes,
        disk_nbytes=sum(stored.size_nbytes for stored in files),
        manifest=pack.manifest,
    )
