"""What the arena says about itself: a snapshot of integers, one line with a verdict, and a picture."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stager.config import format_nbytes

Site = tuple[str, int]
"""File and line that asked for memory."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """One consistent snapshot; whatever is not called ``nbytes`` is a count. Taking it makes no driver call.

    Attributes
    ----------
    epoch : int
        Number of resets so far.
    capacity_nbytes, used_nbytes, free_nbytes, largest_free_nbytes : int
        The slab: all of it, what live blocks hold, the rest, and the longest free piece once neighbours are merged.
    peak_nbytes : int
        Furthest extent of the slab that was in use during the epoch.
    needed_nbytes : int
        Capacity that would have held everything at once, overflow included, as far as the epoch has shown.
    live_blocks, free_blocks : int
        Blocks that something points into, and free pieces once neighbours are merged.
    allocations, largest_nbytes : int
        Requests served in the epoch, and the largest that did not find its bin at once (rounded).
    hits, misses, merges : int
        Requests served from their bin, those that were not, and how often free neighbours were merged.
    steps, escaped_blocks : int
        Steps entered, and blocks that outlived theirs until the next one began.
    overflows, refused, foreign_requests : int
        Requests the slab could not hold and the pool served, those that were refused, and those of another stream or
        device, which the pool serves too.
    overflow_live_blocks, overflow_live_nbytes, overflow_peak_nbytes : int
        Memory outside the slab: in use now, and the most at any time of the epoch.
    captured_blocks : int
        Blocks held for CUDA graphs.
    """

    epoch: int
    capacity_nbytes: int
    used_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    peak_nbytes: int
    needed_nbytes: int
    live_blocks: int
    free_blocks: int
    allocations: int
    largest_nbytes: int
    hits: int
    misses: int
    merges: int
    steps: int
    escaped_blocks: int
    overflows: int
    refused: int
    foreign_requests: int
    overflow_live_blocks: int
    overflow_live_nbytes: int
    overflow_peak_nbytes: int
    captured_blocks: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A live block: its bytes, how old it is, and the line that asked for it where traced.

    ``age`` is ``"now"`` for blocks of steps that are open, ``"earlier"`` for those of steps that ended, and
    ``"outside"`` for those that belong to no step.
    """

    nbytes: int
    age: str
    site: Site | None


def where(site: Site) -> str:
    """``file:line``, relative to the working directory where that is shorter."""
    path = os.path.relpath(site[0])
    return f"{path if len(path) < len(site[0]) else site[0]}:{site[1]}"


def largest_sites(holders: Iterable[Holder], most: int = 3) -> str:
    """The lines that hold most bytes, such as ``train.py:41 (12 blocks, 3.00 MiB)``."""
    nbytes: Counter[Site] = Counter()
    blocks: Counter[Site] = Counter()
    for holder in holders:
        if holder.site is not None:
            nbytes[holder.site] += holder.nbytes
            blocks[holder.site] += 1
    return ", ".join(
        f"{where(site)} ({blocks[site]:,} blocks, {format_nbytes(total)})" for site, total in nbytes.most_common(most)
    )


def fitting(nbytes: int) -> str:
    """A capacity of at least ``nbytes``, as one would write it: whole MiB, or KiB below 4 MiB."""
    unit, name = (1 << 20, "MiB") if nbytes >= 4 << 20 else (1 << 10, "KiB")
    return f"{-(-nbytes // unit)}{name}"


def verdict(stats: ArenaStats, size: int, holders: list[Holder]) -> str:
    """Why a request of ``size`` bytes did not fit, in words.

    Parameters
    ----------
    stats : ArenaStats
        Before the request.
    holders : list of Holder
        All live blocks of the arena.
    """
    asked = format_nbytes(size)
    if size > stats.capacity_nbytes or (size * 2 > stats.capacity_nbytes and size >= 8 * stats.largest_nbytes > 0):
        before = f"; the largest before was {format_nbytes(stats.largest_nbytes)}" if stats.largest_nbytes else ""
        return f"one runaway request: {asked} at once in an arena of {format_nbytes(stats.capacity_nbytes)}{before}"
    earlier = [holder for holder in holders if holder.age == "earlier"]
    held = sum(holder.nbytes for holder in earlier)
    stepped = any(holder.age != "outside" for holder in holders)
    in_the_way = held >= size and held * 4 >= stats.used_nbytes  # without them it would have fitted
    # With little left the arena is full rather than fragmented.
    enough_free = stats.free_nbytes >= max(size, stats.capacity_nbytes // 16)
    if enough_free and (stats.free_nbytes >= 2 * size or not in_the_way):
        return (
            f"fragmented: {format_nbytes(stats.free_nbytes)} are free in {stats.free_blocks:,} pieces, "
            f"but the largest has {format_nbytes(stats.largest_free_nbytes)} and the request {asked}"
        )
    fit = fitting(max(stats.needed_nbytes, stats.used_nbytes + stats.overflow_live_nbytes + size))
    if stepped and not in_the_way:
        now = [holder.nbytes for holder in holders if holder.age == "now"]
        return (
            f"the working set is larger than the arena: this step has {format_nbytes(sum(now))} alive in "
            f"{len(now):,} arrays and asks for {asked} more; a capacity of at least {fit} would fit"
        )
    if stepped:
        text = f"memory is held by live arrays: {len(earlier):,} of earlier steps hold {format_nbytes(held)}"
    else:
        earlier = holders
        text = (
            f"memory is held by live arrays: {stats.live_blocks:,} hold {format_nbytes(stats.used_nbytes)}; if one "
            f"step needs them all, {fit} would fit (mark steps with arena.step() to tell the two apart)"
        )
    sites = largest_sites(earlier)
    return f"{text}; largest holders: {sites}" if sites else f"{text}; Arena(trace=True) names the lines that made them"


def line(
    stats: ArenaStats, *, path: str, requested: int, aligned: int, device_free_nbytes: int | None, words: str
) -> str:
    """The one line of an epoch's first overflow."""
    fields = {
        "path": path,
        "requested": requested,
        "aligned": aligned,
        "capacity": stats.capacity_nbytes,
        "used": stats.used_nbytes,
        "peak": stats.peak_nbytes,
        "allocations": stats.allocations,
        "largest": stats.largest_nbytes,
        "hits": stats.hits,
        "misses": stats.misses,
        "merges": stats.merges,
        "steps": stats.steps,
        "live_blocks": stats.live_blocks,
        "live_bytes": stats.used_nbytes,
        "free_bytes": stats.free_nbytes,
        "largest_free": stats.largest_free_nbytes,
        "device_free": "unknown" if device_free_nbytes is None else device_free_nbytes,
    }
    return "arena overflow: " + " ".join(f"{name}={value}" for name, value in fields.items()) + f" verdict: {words}"


def picture(
    stats: ArenaStats, base: int, live: dict[int, int], free: list[tuple[int, int]], holders: list[Holder]
) -> str:
    """Where blocks lie in the slab, and how many of each size are live and free.

    Parameters
    ----------
    base : int
        Address of the slab.
    live : dict of int to int
        Live blocks, size by address.
    free : list of (int, int)
        Address and size of free pieces.
    """
    capacity, width = stats.capacity_nbytes, 72
    filled = [0.0] * width
    cell = capacity / width
    for start, size in live.items():
        at, end = (start - base) / cell, (start - base + size) / cell
        for index in range(int(at), min(int(end), width - 1) + 1):
            filled[index] += max(0.0, min(end, index + 1) - max(at, index))
    strip = "".join("." if part < 0.005 else ":" if part < 0.5 else "+" if part < 0.995 else "#" for part in filled)
    lines = [
        f"arena of {format_nbytes(capacity)}: {format_nbytes(stats.used_nbytes)} live in {stats.live_blocks:,} blocks, "
        f"{format_nbytes(stats.free_nbytes)} free (largest {format_nbytes(stats.largest_free_nbytes)}), "
        f"peak {format_nbytes(stats.peak_nbytes)}",
        f"0 |{strip}| {format_nbytes(capacity)}   # live  + mostly  : partly  . free",
        f"{stats.allocations:,} allocations: {stats.hits:,} from their bin, {stats.misses:,} not; "
        f"{stats.merges:,} merges; {stats.steps:,} steps, {stats.escaped_blocks:,} blocks outlived theirs",
        f"overflow: {stats.overflows:,} requests, {format_nbytes(stats.overflow_live_nbytes)} alive in "
        f"{stats.overflow_live_blocks:,}, at most {format_nbytes(stats.overflow_peak_nbytes)}; "
        f"{stats.foreign_requests:,} requests of another stream or device; {stats.refused:,} refused",
    ]
    if stats.overflows or stats.refused:
        lines.append(f"a capacity of {fitting(stats.needed_nbytes)} would have held everything seen in this epoch")
    lives, frees = Counter(live.values()), Counter(size for _, size in free)
    rows = sorted(set(lives) | set(frees), key=lambda size: -size * (lives[size] + frees[size]))
    lines.append(f"{'block size':>12} {'live':>8} {'live bytes':>12} {'free':>8} {'free bytes':>12}")
    lines.extend(
        f"{format_nbytes(size):>12} {lives[size]:>8,} {format_nbytes(size * lives[size]):>12} "
        f"{frees[size]:>8,} {format_nbytes(size * frees[size]):>12}"
        for size in rows[:16]
    )
    if len(rows) > 16:
        lines.append(f"{len(rows) - 16:>12,} further sizes")
    sites = largest_sites(holders, most=5)
    if sites:
        lines.append(f"largest holders: {sites}")
    return "\n".join(lines)
