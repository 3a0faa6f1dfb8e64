"""Host memory that is left: what registering may pin."""

from __future__ import annotations

import os
from pathlib import Path

from stager.config import format_nbytes
from stager.errors import StagingMemoryError


def available_nbytes(root: Path = Path("/")) -> int:
    """Bytes that can be pinned: the system's MemAvailable, within the limit of this process's control group.

    Page cache counts as available in both, since it can be dropped.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    group = root / "sys/fs/cgroup"
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        try:
            most = int((group / limit).read_text())
            left = most - int((group / used).read_text())
            cached = dict(line.split() for line in (group / stat).read_text().splitlines())
            available = min(available, left + int(cached.get(cache, 0)))
        except (OSError, ValueError):
            # No such controller, or the limit reads "max".
            continue
    return available


def check_host(nbytes: int) -> None:
    """Raise unless `nbytes` of host memory can be pinned.

    Raises
    ------
    StagingMemoryError
        With needed and available bytes, and the remedy.
    """
    if (available := available_nbytes()) < nbytes:
        raise StagingMemoryError(
            f"{format_nbytes(nbytes)} of host memory would be pinned, {format_nbytes(available)} are available; "
            f"free memory, raise the limit of the container, or use placement='device'"
        )
