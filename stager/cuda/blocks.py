"""The arena's bookkeeping in plain integers: bins, fresh slab, and free ranges merged from their neighbours.

Nothing here knows CUDA. A *block* is ``size`` bytes at address ``start``, cut from fresh slab. A size that recurs gets
a bin, where its blocks wait for the next request without any of what follows; a block of a size that was not seen
before waits alone, because a bin would cost more than the block. Only a request that finds no block of its size and no
fresh slab empties all of them into *ranges*, where neighbours grow together. Few ranges are merged by sorting
everything; among many, each freed block looks up its neighbours, so that the work follows the blocks freed and not the
ranges there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

UNIT = 512
"""Alignment and granularity of every block, in bytes, as CuPy's own pool has it."""

Block: TypeAlias = Sequence[Any]
"""``start, size, give_back``; calling ``give_back()`` frees it, in one step of the interpreter and without a Python
frame, so that it can be a destructor."""

_SHIFT = 64
_MASK = (1 << _SHIFT) - 1
_FEW = 64


def round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole units."""
    return (nbytes + UNIT - 1) & -UNIT


class Blocks:
    """Blocks of one slab.

    Parameters
    ----------
    base : int
        Address of the slab, a multiple of 512.
    nbytes : int
        Size of the slab, a multiple of 512.

    Attributes
    ----------
    bins : dict of int to list of Block
        Free blocks by exact size, last in first out. The caller pops them without any lock. A bin exists as long as a
        block that returns to it does, so giving back never meets a missing bin.
    of_size : dict of int to int
        Number of blocks of each size that return to a bin, live or in it.
    top, high : int
        End of the part in use now, and the furthest it ever reached.
    merges : int
        How often bins were emptied into ranges.
    """

    __slots__ = (
        "_dead", "_ends", "_keys", "_n_single", "_single_nbytes", "_sizes", "_waiting",
        "base", "bins", "end", "high", "merges", "of_size", "top",
    )  # fmt: skip

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = self.top = self.high = base
        self.end = base + nbytes
        self.bins: dict[int, list[Block]] = {}
        self.of_size: dict[int, int] = {}
        self.merges = 0
        self._keys: list[int] = []  # ranges as size << 64 | start, ascending: the best fit at the lowest address
        # Blocks without a bin: their number and bytes, and the freed ones, as (size, start) and then start by size.
        self._n_single = self._single_nbytes = 0
        self._dead: list[tuple[int, int]] = []
        self._waiting: dict[int, int] = {}
        # Only while there are many ranges: size by start, and start by end.
        self._sizes: dict[int, int] | None = None
        self._ends: dict[int, int] = {}

    def take(self, size: int) -> Block | None:
        """A block of ``size`` bytes, a positive multiple of 512, that is in no bin.

        Returns
        -------
        Block or None
            A tuple if it was cut, a list if it had waited; None when nothing fits, not even after merging.
        """
        if self._dead:
            self._settle()
        if size in self._waiting:
            return self._binned(self._waiting.pop(size), size)
        keys = self._keys
        at = bisect_left(keys, size << _SHIFT)
        if at < len(keys):
            key = keys[at]
            start, rest = key & _MASK, (key >> _SHIFT) - size
            left = rest << _SHIFT | (start + size)
            if rest and (at == 0 or keys[at - 1] < left):
                keys[at] = left
            else:
                del keys[at]
                if rest:
                    insort(keys, left, 0, at)
            if self._sizes is not None:
                self._shrink(start, size, rest)
        else:
            start = self.top
            end = start + size
            if end > self.end:
                return self.take(size) if self.merge() else None
            self.top = end
            if end > self.high:
                self.high = end
        self._n_single += 1
        self._single_nbytes += size
        return start, size, partial(self._dead.append, (size, start))

    def _binned(self, start: int, size: int) -> Block:
        """A block that waited, as one that returns to the bin of its size."""
        self._n_single -= 1
        self._single_nbytes -= size
        stack = self.bins.get(size)
        if stack is None:
            self.of_size[size] = 1
            stack = self.bins[size] = []
        else:
            self.of_size[size] += 1
        block: list[Any] = [start, size]
        block.append(partial(stack.append, block))
        return block

    def _settle(self) -> None:
        """Let freed blocks without a bin wait for a request of their size; two of one size get a bin."""
        dead, waiting = self._dead, self._waiting
        while dead:
            size, start = dead.pop()
            if size in waiting:
                self._binned(start, size)[2]()
            else:
                waiting[size] = start

    def _shrink(self, start: int, size: int, rest: int) -> None:
        assert self._sizes is not None
        del self._sizes[start]
        if rest:
            self._sizes[start + size] = rest
            self._ends[start + size + rest] = start + size
        else:
            del self._ends[start + size]

    def merge(self) -> int:
        """Empty the bins into ranges and join neighbours; what borders on fresh slab becomes fresh slab again.

        Returns
        -------
        int
            Number of blocks moved.
        """
        self._settle()
        freed = {start: size for size, start in self._waiting.items()}
        self._n_single -= len(freed)
        self._single_nbytes -= sum(self._waiting)
        self._waiting.clear()
        bins, of_size = self.bins, self.of_size
        # A copy, made in one step: destructors that garbage collection runs in between may add a bin.
        for size, stack in bins.copy().items():
            if not stack:
                continue
            moved = 0
            while stack:
                try:
                    block: Any = stack.pop()
                except IndexError:  # another thread took the last one
                    break
                freed[block[0]] = size
                block.clear()  # it refers to itself
                moved += 1
            if of_size[size] == moved:  # no block of this size is left that could still be appended
                del of_size[size], bins[size]
            else:
                of_size[size] -= moved
        if not freed:
            return 0
        self.merges += 1
        if len(self._keys) <= 4 * len(freed) + _FEW:
            self._sort_in(freed)
        else:
            self._join_in(freed)
        return len(freed)

    def _sort_in(self, freed: dict[int, int]) -> None:
        self._sizes = None
        sizes = freed.copy()
        for key in self._keys:
            sizes[key & _MASK] = key >> _SHIFT
        keys = []
        first = end = -1
        for start in sorted(sizes):
            if start != end:
                if end > first:
                    keys.append((end - first) << _SHIFT | first)
                first = end = start
            end += sizes[start]
        if end == self.top:
            self.top = first
        else:
            keys.append((end - first) << _SHIFT | first)
        keys.sort()
        self._keys = keys

    def _join_in(self, freed: dict[int, int]) -> None:
        keys = self._keys
        if self._sizes is None:
            self._sizes = {key & _MASK: key >> _SHIFT for key in keys}
            self._ends = {start + size: start for start, size in self._sizes.items()}
        sizes, ends = self._sizes, self._ends
        for start, size in freed.items():
            end = start + size
            right = sizes.pop(end, None)
            if right is not None:
                del keys[bisect_left(keys, right << _SHIFT | end)]
                end += right
            left = ends.pop(start, None)
            if left is not None:
                del keys[bisect_left(keys, sizes.pop(left) << _SHIFT | left)]
                start = left
            if end == self.top:
                self.top = start
                ends.pop(end, None)
            else:
                sizes[start] = end - start
                ends[end] = start
                insort(keys, (end - start) << _SHIFT | start)

    def live(self) -> tuple[int, int]:
        """Number and bytes of the blocks that are not free."""
        dead = self._dead.copy()
        blocks = self._n_single - len(dead) - len(self._waiting)
        nbytes = self._single_nbytes - sum(size for size, _ in dead) - sum(self._waiting)
        for size, count in self.of_size.copy().items():
            blocks += count
            nbytes += size * count
        for size, stack in self.bins.copy().items():
            n_free = len(stack)
            blocks -= n_free
            nbytes -= size * n_free
        return blocks, nbytes

    def free_blocks(self) -> list[tuple[int, int]]:
        """(start, size) of everything free as merging would leave it, fresh slab included, ascending."""
        free = [(block[0], size) for size, stack in self.bins.copy().items() for block in stack.copy()]
        free.extend((start, size) for size, start in (*self._dead, *self._waiting.items()))
        free.extend((key & _MASK, key >> _SHIFT) for key in self._keys)
        if self.top < self.end:
            free.append((self.top, self.end - self.top))
        free.sort()
        joined: list[tuple[int, int]] = []
        for start, size in free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        return joined
