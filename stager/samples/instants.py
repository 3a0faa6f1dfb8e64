"""Many instants that lie on a grid, as those of bars do: which there are, and in which order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stager.bars.interval import Interval

IntArray = npt.NDArray[np.int64]

# A table of the grid may be this much longer than the instants.
_SPARE = 1 << 18


def distinct(instants: IntArray, interval: Interval) -> IntArray:
    """The distinct instants, ascending; linear in their number where they lie on a grid of the interval."""
    steps = _steps(instants, interval)
    if steps is None or (last := int(steps.max())) > 4 * len(instants) + _SPARE:
        return np.unique(instants)
    seen = np.zeros(last + 1, bool)
    seen[steps] = True
    found: IntArray = instants.min() + np.flatnonzero(seen) * np.int64(interval.nanoseconds)
    return found


def by_instant(instants: IntArray, interval: Interval) -> IntArray:
    """(n,) int64: the order of the instants, equal ones as they come; linear where they lie on a grid as above."""
    steps = _steps(instants, interval)
    if steps is None or (last := int(steps.max())) >= 1 << 32:
        return np.argsort(instants, kind="stable")
    # NumPy sorts 16 bits by counting.
    order = np.argsort(steps.astype(np.uint16), kind="stable")
    if last >= 1 << 16:
        order = order[np.argsort((steps >> np.uint64(16)).astype(np.uint16)[order], kind="stable")]
    return order


def _steps(instants: IntArray, interval: Interval) -> npt.NDArray[np.uint64] | None:
    """Steps of the interval since the first instant; None if they are not all whole."""
    step = np.uint64(interval.nanoseconds)
    if not step:
        return None
    # Unsigned, so that no two instants are too far apart.
    offsets = instants.view(np.uint64) - instants.min().view(np.uint64)
    steps = offsets // step
    return steps if np.array_equal(steps * step, offsets) else None
