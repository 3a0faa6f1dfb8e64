"""Directories that are whole or absent: written beside the target under a lock, synced, then renamed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from stager.errors import NotAPackError, PackError, PackExistsError
from stager.packs.manifest import JOURNAL, UNFINISHED, is_foreign


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is a pack and may be overwritten.

    Raises
    ------
    NotAPackError, PackExistsError
    """
    if not os.path.lexists(target):
        return
    if is_foreign(target) or not any(target.glob("segment-*")):
        raise NotAPackError(f"{target}: exists and is no pack; it is not replaced. Choose another place with -o DIR")
    if not overwrite:
        raise PackExistsError(f"{target}: the pack exists; replace it with --force, or choose another with -o DIR")


@contextmanager
def refusing(target: Path) -> Iterator[None]:
    """Errors of the system become PackError."""
    try:
        yield
    except PackError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise PackError(f"{target}: can't be written: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def partial_of(target: Path, keep: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """The directory ``TARGET.partial``, locked; what is not published is removed at the end.

    Parameters
    ----------
    target : Path
    keep : callable, optional
        Called with the directory; removes what is not wanted of what an earlier attempt left, or refuses. By default,
        everything is removed, unless it may be gone on with.

    Raises
    ------
    NotAPackError
        If something else lies there.
    PackError
        If another process holds it, or `keep` refuses.
    """
    partial = partial_name(target)
    busy = f"{partial}: another process is packing to this target; wait for it"
    in_the_way = f"{partial}: is in the way and is no unfinished pack; move it, or choose another place with -o DIR"
    made = [parent for parent in partial.parents if not os.path.lexists(parent)]
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotAPackError(in_the_way) from None
    # A process that finishes meanwhile moves the directory away with its lock.
    try:
        lock = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        raise PackError(busy) from None
    try:
        if not (_lock(lock) and _is_at(lock, partial)):
            raise PackError(busy)
        if is_foreign(partial, UNFINISHED) or partial.is_symlink():
            raise NotAPackError(in_the_way)
        (_clear_unless_unfinished if keep is None else keep)(partial)
        try:
            yield partial
        finally:
            # Once published, the name may belong to another process.
            if _is_at(lock, partial):
                shutil.rmtree(partial, ignore_errors=True)
                for parent in made:
                    with suppress(OSError):  # somebody else uses it
                        parent.rmdir()
    finally:
        os.close(lock)


def partial_name(target: Path) -> Path:
    """Where a pack is written before it has its own name."""
    return target.with_name(target.name + ".partial")


def clear(partial: Path) -> None:
    """Remove everything in a partial pack."""
    for left_over in partial.iterdir():
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()


def _clear_unless_unfinished(partial: Path) -> None:
    if (partial / JOURNAL).exists():
        raise PackError(
            f"{partial}: an unfinished `stager pack` is in the way; go on with it with --resume, or remove it with "
            "--discard"
        )
    clear(partial)


def publish(partial: Path, target: Path) -> None:
    """Give `partial` the target's name; a pack that had it is deleted."""
    if not target.exists():
        os.rename(partial, target)
    else:
        lock = os.open(target, os.O_RDONLY)
        try:
            # Locked before it is called TARGET.partial, where another process would take it for its own.
            _lock(lock)
            if _exchange(partial, target):
                shutil.rmtree(partial, ignore_errors=True)
            else:
                _replace(partial, target)
        finally:
            os.close(lock)
    # Not synced, the target is the old or the new pack after a crash, and whole in both cases.
    with suppress(OSError):
        sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step (Linux ``renameat2``); False where the system can't."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0)


def _replace(partial: Path, target: Path) -> None:
    """The same in two steps, the old pack aside in between."""
    old = target.with_name(target.name + ".old")
    if old.is_dir() and not is_foreign(old):  # left by a process that was killed here
        shutil.rmtree(old)
    os.rename(target, old)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
