"""The arena's bookkeeping in plain integers: bins, fresh slab, and free ranges merged from their neighbours.

Nothing here knows CUDA. A *block* is ``size`` bytes at address ``start``. Blocks are cut from fresh slab, return to
the bin of their exact size, and are asked for again there. Only a request that finds neither its bin nor fresh slab
empties the bins into *ranges*, where neighbours grow together. Few ranges are merged by sorting everything; among many,
each freed block looks up its neighbours, so that the work follows the blocks freed and not the ranges there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort

UNIT = 512
"""Alignment and granularity of every block, in bytes, as CuPy's own pool has it."""

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
    bins : dict of int to list of int
        Addresses of free blocks by exact size, last in first out. The caller pops and appends without any lock. A bin
        exists as long as a block of its size does, so appending never meets a missing bin.
    of_size : dict of int to int
        Number of blocks of each size, live or in a bin.
    top, high : int
        End of the part in use now, and the furthest it ever reached.
    merges : int
        How often bins were emptied into ranges.
    """

    __slots__ = ("_ends", "_keys", "_sizes", "base", "bins", "end", "high", "merges", "of_size", "top")

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = self.top = self.high = base
        self.end = base + nbytes
        self.bins: dict[int, list[int]] = {}
        self.of_size: dict[int, int] = {}
        self.merges = 0
        self._keys: list[int] = []  # ranges as size << 64 | start, ascending: the best fit at the lowest address
        # Only while there are many ranges: size by start, and start by end.
        self._sizes: dict[int, int] | None = None
        self._ends: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Cut a block of ``size`` bytes, a positive multiple of 512.

        Returns
        -------
        int or None
            Its address; None when nothing fits, not even after merging.
        """
        keys = self._keys
        at = bisect_left(keys, size << _SHIFT)
        if at < len(keys):
            key = keys.pop(at)
            start, rest = key & _MASK, (key >> _SHIFT) - size
            if rest:
                insort(keys, rest << _SHIFT | (start + size))
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
        count = self.of_size.get(size)
        if count:
            self.of_size[size] = count + 1
        else:
            self.of_size[size] = 1
            self.bins[size] = []
        return start

    def _shrink(self, start: int, size: int, rest: int) -> None:
        assert self._sizes is not None
        del self._sizes[start]
        if rest:
            self._sizes[start + size] = rest
            self._ends[start + size + rest] = start + size
        else:
            del self._ends[start + size]

    def merge(self) -> int:
        """Empty the bins into ranges, neighbours joined; what borders on fresh slab becomes fresh slab again.

        Returns
        -------
        int
            Number of blocks moved.
        """
        freed: dict[int, int] = {}
        bins, of_size = self.bins, self.of_size
        # A copy, made in one step: destructors that garbage collection runs in between may add a bin.
        for size, stack in bins.copy().items():
            if not stack:
                continue
            moved = 0
            while stack:
                try:
                    freed[stack.pop()] = size
                except IndexError:  # another thread took the last one
                    break
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

    def cut(self) -> tuple[int, int]:
        """Number and bytes of the blocks that exist, live or in a bin."""
        counts = list(self.of_size.items())
        return sum(count for _, count in counts), sum(size * count for size, count in counts)

    def binned(self) -> tuple[int, int]:
        """Number and bytes of the blocks that lie in bins."""
        counts = [(size, len(stack)) for size, stack in self.bins.copy().items()]
        return sum(count for _, count in counts), sum(size * count for size, count in counts)

    def live(self) -> tuple[int, int]:
        """Number and bytes of the blocks that are neither in a bin nor merged."""
        blocks, nbytes = self.cut()
        n_binned, binned = self.binned()
        return blocks - n_binned, nbytes - binned

    def free_blocks(self) -> list[tuple[int, int]]:
        """(start, size) of everything free as merging would leave it, fresh slab included, ascending."""
        free = [(start, size) for size, stack in self.bins.copy().items() for start in stack.copy()]
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
