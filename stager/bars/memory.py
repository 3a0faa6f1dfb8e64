"""Host memory that is left: what may be allocated or pinned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from stager.config import format_nbytes
from stager.errors import StagingMemoryError


def available_nbytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken, pinned too: the system's MemAvailable, within the limit of this process's control group.

    Page cache counts as available in both, since it can be dropped.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    for group, limit, used in _groups(root):
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # No limit here, or it reads "max".
            continue
        # In version 1 the plain counters leave out the groups below.
        prefix = "total_" if "total_inactive_file" in stat else ""
        available = min(
            available, left + sum(int(stat.get(prefix + name, 0)) for name in ("active_file", "inactive_file"))
        )
    return max(0, available)


def total_nbytes(root: Path = Path("/")) -> int:
    """Bytes of memory of the machine, or of the limit of this process's control group where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group, limit, _ in _groups(root):
        try:
            total = min(total, int((group / limit).read_text()))
        except (OSError, ValueError):
            # No limit here, or it reads "max".
            continue
    return total


def anonymous_nbytes(root: Path = Path("/")) -> int:
    """Bytes that this process holds and that are no part of a file; 0 where the system does not tell."""
    try:
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def group_peak_nbytes(root: Path = Path("/")) -> int | None:
    """The most bytes that this process's control group has held, page cache included; None where that is not told."""
    for group, limit, _ in _groups(root):
        name = "memory.peak" if limit == "memory.max" else "memory.max_usage_in_bytes"
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """This process's control groups that may limit memory, up to the topmost that is visible here."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        entries = ["0::/", "1:memory:/"]
    for entry in entries:
        _, controllers, own = entry.split(":", 2)
        if controllers == "":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        path = PurePosixPath(own.lstrip("/"))
        for part in (path, *path.parents):
            yield mount / part, limit, used


def check_host(nbytes: int, what: str = "pinned", remedy: str = "use placement='device'") -> None:
    """Raise unless there are `nbytes` of host memory to be pinned or filled.

    Raises
    ------
    StagingMemoryError
        With needed and available bytes, and the remedy.
    """
    if (available := available_nbytes()) < nbytes:
        raise StagingMemoryError(
            f"{format_nbytes(nbytes)} of host memory would be {what}, {format_nbytes(available)} are available; "
            f"free memory, raise the limit of the container, or {remedy}"
        )
