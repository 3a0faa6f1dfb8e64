"""The arena's bookkeeping in plain integers: bins, fresh slab, and free ranges merged from their neighbours.

Nothing here knows CUDA. A *block* is ``size`` bytes at address ``start``. Blocks are cut from fresh slab, return to
the bin of their exact size, and are asked for again there. Only a request that finds neither its bin nor fresh slab
empties the bins into *ranges*, where neighbours grow together; every block is sorted in once, so the work of merging
follows the number of blocks freed and not the number of blocks there are.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import compress

UNIT = 512
"""Alignment and granularity of every block, in bytes, as CuPy's own pool has it."""

_SHIFT = 64
_MASK = (1 << _SHIFT) - 1
_BULK = 256  # so many ranges at once are sorted again as a whole rather than inserted one by one


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
    bins : dict of int to list of int
        Addresses of free blocks by exact size, last in first out. The caller pops and appends without any lock. A bin
        exists as long as a block of its size does, so appending never meets a missing bin.
    top, high : int
        End of the part in use now, and the furthest it ever reached.
    n_blocks, nbytes_blocks : int
        Blocks cut and not merged back, live or in a bin, and their bytes.
    merges : int
        How often bins were emptied into ranges.
    """

    __slots__ = ("_ends", "_keys", "_sizes", "base", "bins", "end", "high", "merges", "n_blocks", "nbytes_blocks",
                 "of_size", "top")  # fmt: skip

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = self.top = self.high = base
        self.end = base + nbytes
        self.bins: dict[int, list[int]] = {}
        self.of_size: dict[int, int] = {}
        self.n_blocks = self.nbytes_blocks = self.merges = 0
        self._sizes: dict[int, int] = {}  # start -> size of a range
        self._ends: dict[int, int] = {}  # end -> start of a range
        self._keys: list[int] = []  # size << 64 | start, ascending: the best fit at the lowest address

    def take(self, size: int) -> int | None:
        """Cut a block of ``size`` bytes, a positive multiple of 512.

        Returns
        -------
        int or None
            Its address; None when nothing fits, not even after merging.
        """
        start = self._cut(size)
        if start is None:
            if not self.merge():
                return None
            start = self._cut(size)
            if start is None:
                return None
        self.n_blocks += 1
        self.nbytes_blocks += size
        count = self.of_size.get(size, 0)
        self.of_size[size] = count + 1
        if not count:
            self.bins[size] = []
        return start

    def _cut(self, size: int) -> int | None:
        keys = self._keys
        index = bisect_left(keys, size << _SHIFT)
        if index < len(keys):
            key = keys.pop(index)
            start, found = key & _MASK, key >> _SHIFT
            del self._sizes[start]
            if found == size:
                del self._ends[start + size]
            else:
                rest, left = start + size, found - size
                self._sizes[rest] = left
                self._ends[rest + left] = rest
                keys.insert(bisect_left(keys, left << _SHIFT | rest), left << _SHIFT | rest)
            return start
        start = self.top
        if start + size > self.end:
            return None
        self.top = start + size
        if self.top > self.high:
            self.high = self.top
        return start

    def merge(self) -> int:
        """Empty the bins into ranges, neighbours joined; what borders on fresh slab becomes fresh slab again.

        Returns
        -------
        int
            Number of blocks moved.
        """
        freed: list[tuple[int, int]] = []
        for size in list(compress(self.bins, self.bins.values())):
            stack = self.bins[size]
            before = len(freed)
            while stack:
                try:
                    freed.append((stack.pop(), size))
                except IndexError:  # another thread took the last one
                    break
            moved = len(freed) - before
            self.nbytes_blocks -= moved * size
            left = self.of_size[size] - moved
            if left:
                self.of_size[size] = left
            else:  # no block of this size is left that could still be appended
                del self.of_size[size], self.bins[size]
        if not freed:
            return 0
        self.n_blocks -= len(freed)
        self.merges += 1
        freed.sort()
        runs: list[list[int]] = []
        end = -1
        for start, size in freed:
            if start == end:
                runs[-1][1] = end = end + size
            else:
                end = start + size
                runs.append([start, end])
        bulk = len(runs) > _BULK
        for start, end in runs:
            self._join(start, end, keyed=not bulk)
        if bulk:
            self._keys = sorted(size << _SHIFT | start for start, size in self._sizes.items())
        return len(freed)

    def _join(self, start: int, end: int, *, keyed: bool) -> None:
        left = self._ends.pop(start, None)
        if left is not None:
            self._forget(left, self._sizes.pop(left), keyed)
            start = left
        right = self._sizes.pop(end, None)
        if right is not None:
            self._forget(end, right, keyed)
            end += right
            del self._ends[end]
        if end == self.top:
            self.top = start
            return
        self._sizes[start] = end - start
        self._ends[end] = start
        if keyed:
            key = (end - start) << _SHIFT | start
            self._keys.insert(bisect_left(self._keys, key), key)

    def _forget(self, start: int, size: int, keyed: bool) -> None:
        if keyed:
            del self._keys[bisect_left(self._keys, size << _SHIFT | start)]

    def binned(self) -> tuple[int, int]:
        """Number and bytes of the blocks that lie in bins."""
        counts = [(size, len(stack)) for size, stack in list(self.bins.items())]
        return sum(count for _, count in counts), sum(size * count for size, count in counts)

    def free_blocks(self) -> list[tuple[int, int]]:
        """(start, size) of everything free as merging would leave it, fresh slab included, ascending."""
        free = [(start, size) for size, stack in list(self.bins.items()) for start in stack.copy()]
        free.extend(self._sizes.items())
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
