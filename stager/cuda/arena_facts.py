"""What is known about an arena's pool: live tokens, a snapshot, the verdict, and the line that is logged once."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from stager.config import format_nbytes
from stager.cuda.arena_driver import DEVICE_ERROR
from stager.cuda.arena_tokens import ArenaOutOfMemoryError
from stager.cuda.report import ArenaStats, Holder, Site, line, verdict

if TYPE_CHECKING:
    from stager.cuda.arena_pool import Pool

logger = logging.getLogger("stager.arena")


def tokens(pool: Pool) -> list[Any]:
    """Everything alive that the arena gave out, found among the objects that garbage collection knows."""
    kinds = {pool.token, None if pool.overflow is None else pool.overflow.token}
    return [found for found in gc.get_objects() if type(found) in kinds]


def owner_of(token: Any) -> tuple[Any, Site | None]:
    """The step that a token of the slab belongs to, and the line that made it, if it was traced."""
    return token._owner if type(token._owner) is tuple else (token._owner, None)


def holders(pool: Pool) -> list[Holder]:
    """Live blocks of slab and overflow with the age of their step."""
    found = []
    for token in tokens(pool):
        if type(token) is not pool.token:
            continue
        owner, site = owner_of(token)
        age = "outside" if owner.number == 0 else "now" if owner.number in pool.open_steps else "earlier"
        found.append(Holder(token.size, age, site))
    return found


def snapshot(pool: Pool) -> ArenaStats:
    """One snapshot; no driver call."""
    with pool.lock:
        blocks = pool.blocks
        n_live, used = blocks.live()
        free = blocks.free_blocks()
        outside_blocks, outside = pool.overflow.live() if pool.overflow is not None else (0, 0)
        allocations = pool.gate.allocations
        return ArenaStats(
            epoch=pool.epoch,
            capacity_nbytes=pool.capacity,
            used_nbytes=used,
            free_nbytes=pool.capacity - used,
            largest_free_nbytes=max((size for _, size in free), default=0),
            peak_nbytes=blocks.high - blocks.base,
            needed_nbytes=max(pool.needed, blocks.high - blocks.base),
            live_blocks=n_live,
            free_blocks=len(free),
            allocations=allocations,
            largest_nbytes=pool.largest,
            hits=allocations - pool.carved - pool.spilled,
            misses=pool.carved + pool.unfit,
            merges=blocks.merges - pool.merges_before,
            steps=pool.steps,
            escaped_blocks=pool.escaped_blocks,
            overflows=pool.overflows,
            refused=pool.refused,
            foreign_requests=pool.foreign_requests,
            overflow_live_blocks=outside_blocks,
            overflow_live_nbytes=outside,
            overflow_peak_nbytes=max(pool.overflow_peak, outside),
            captured_blocks=pool.captured_blocks,
        )


def words(pool: Pool, size: int, foreign: bool, stream: Any, device: int) -> str:
    """Why a request did not get memory of the slab."""
    if foreign:
        return (
            f"the request comes from stream {stream.ptr} on device {device}, but the arena is bound to stream "
            f"{pool.stream.ptr} on device {pool.device}; enter an arena of its own under that stream"
        )
    return verdict(snapshot(pool), size, holders(pool))


def announce(pool: Pool, nbytes: int, size: int, path: str, said: str) -> None:
    """Log the line."""
    free = None if path == "capture-refused" else _device_free(pool)
    text = line(snapshot(pool), path=path, requested=nbytes, aligned=size, device_free_nbytes=free, words=said)
    logger.warning("%s", text)


def _device_free(pool: Pool) -> int | None:
    try:
        return pool.driver.memory()[0]
    except DEVICE_ERROR:
        return None


def failure(pool: Pool, nbytes: int, size: int, said: str) -> ArenaOutOfMemoryError:
    """The error for a request that gets no memory."""
    found = snapshot(pool)
    return ArenaOutOfMemoryError(
        f"no memory for {nbytes:,} bytes in an arena of {format_nbytes(pool.capacity)} with "
        f"{format_nbytes(found.used_nbytes)} in {found.live_blocks:,} live blocks: {said}",
        found,
        size,
    )
