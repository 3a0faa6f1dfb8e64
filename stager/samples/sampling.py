"""Weighted sampling: position -> sample id with replacement, a pure function of seed, epoch, position and weights.

Algorithm ``alias64-1`` (the version is part of the contract: golden vectors fix it on host and device). The table has a
threshold and an alias for each sample (Walker's alias method):

- weights are multiplied by a power of two and rounded to integers, positive ones to at least 1. The power is
  ``61 - e - bits(n - 1)``, where the largest one lies in ``[2**(e - 1), 2**e)``, and then as much more as brings the
  sum of the integers, each by itself, into ``[2**60, 2**61)``. The capacity C is their sum by n, rounded up; what the
  sum lacks to ``n * C`` is spread over the positive ones as evenly as integers allow, the first ones getting one more.
  Integers make the table the same on every machine; a sample's chance is the given one within
  ``n * 2**-60 + 6 * 2**-53``;
- samples of up to C are light, the others heavy. Light ones are filled up by the heavy ones, both in ascending order,
  each heavy one giving until it is left with C or less, and then being filled up by the next (the sweep of
  Hübschle-Schneider and Sanders, "Parallel weighted random sampling", 2022); sums tell who gives to whom;
- the threshold is what a sample itself holds, by C, times 2**53, rounded down, positive ones at least 1.

A draw at position p, with 64-bit keys k0, k1, k2 (the words 0 to 5 of the algorithm, as ``samples/order.py`` has
them, the lower half first) and the 64-bit mixer of splitmix64 (D. Stafford's variant 13), modulo 2**64:

- ``a = mix(mix(p + k0) ^ k1)`` and ``b = mix(a + k2)``;
- the column is the high product of a and n; the sample is the column where ``b >> 11`` is below its threshold, else its
  alias.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError
from stager.samples.index import SampleIndex
from stager.samples.order import IntArray, check_counters, positions_of, words_of

ALIAS = "alias64-1"

Unsigned = npt.NDArray[np.uint64]

_A1, _A2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32, _S11 = (np.uint64(shift) for shift in (30, 27, 31, 32, 11))
_LOW = np.uint64(0xFFFFFFFF)
# Draws at once, so that their temporaries stay in the cache.
_CHUNK = 1 << 15


class Draws:
    """What decides how often each sample is drawn.

    Parameters
    ----------
    weights : (n_samples,) float64
        Finite, none negative, not all 0.

    Attributes
    ----------
    table : (n_samples, 2) uint64
        Threshold and alias of each sample: 16 bytes.
    """

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        self.table = alias_table(weights)

    @cached_property
    def digest(self) -> str:
        """Hash of the table."""
        return hashlib.blake2b(self.table.data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class WeightedOrder:
    """The draws of one epoch; as many positions as samples.

    Parameters
    ----------
    draws : Draws
    seed, epoch : int
        As of :class:`stager.samples.order.Order`.
    """

    draws: Draws
    seed: int = 0
    epoch: int = 0
    keys: Unsigned = field(init=False, repr=False, compare=False)

    algorithm = ALIAS

    def __post_init__(self) -> None:
        check_counters(self.n, self.seed, self.epoch)
        words = words_of(ALIAS, self.seed, self.epoch, 0, 6).astype(np.uint64)
        object.__setattr__(self, "keys", words[::2] | (words[1::2] << _S32))

    @property
    def n(self) -> int:
        """Positions of the epoch."""
        return len(self.draws.table)

    def at(self, positions: IntArray) -> IntArray:
        """(n,) int64: the samples drawn at positions."""
        ids = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), _CHUNK):
            part = slice(start, start + _CHUNK)
            a = _mix(_mix(positions[part].astype(np.uint64) + self.keys[0]) ^ self.keys[1])
            columns = _high_product(a, self.n).view(np.int64)
            chosen = self.draws.table[columns]
            kept = (_mix(a + self.keys[2]) >> _S11) < chosen[:, 0]
            ids[part] = np.where(kept, columns, chosen[:, 1].view(np.int64))
        return ids

    def sample_ids(self, first: int, count: int) -> IntArray:
        """(count,) int64: the samples drawn at positions ``first : first + count``.

        Raises
        ------
        SampleError
            If not all of them are positions of the epoch.
        """
        return self.at(positions_of(self.n, first, count))


def check_weights(weights: Any, n_samples: int, whose: str = "") -> npt.NDArray[np.float64]:
    """(n_samples,) float64: the weights of samples.

    Raises
    ------
    SampleError
        If they are not one number for each sample, or not finite, negative, or all 0; naming the first at fault.
    """
    try:
        given = np.asarray(weights)
    except (TypeError, ValueError) as error:
        raise SampleError(f"weights can't be read as a NumPy array: {error}; give one number for each sample") from None
    if given.dtype.kind not in "biuf":
        raise SampleError(f"weights are of {given.dtype}; give numbers, or 'uniqueness'")
    if given.shape != (n_samples,):
        raise SampleError(
            f"weights have shape {given.shape}; give ({n_samples},), one for each sample{whose}, by sample id"
        )
    values: npt.NDArray[np.float64] = given.astype(np.float64)
    for wrong, what in ((~np.isfinite(values), "finite"), (values < 0, "0 or more")):
        if wrong.any():
            place = int(np.argmax(wrong))
            raise SampleError(f"the weight of sample {place} is {values[place]}; weights must be {what}")
    if not values.any():
        raise SampleError(f"all {n_samples:,} weights{whose} are 0; give some samples a positive one")
    return values


def carried(weights: npt.NDArray[np.float64], index: SampleIndex, part: SampleIndex) -> npt.NDArray[np.float64]:
    """The weights of samples of `index` for those of `part`, which end at some of the same rows."""
    rows = part.rows_between(0, part.n_samples)
    order = index.spans_by_row
    spans = order[np.searchsorted(index.span_rows, rows, side="right", sorter=order) - 1]
    found: npt.NDArray[np.float64] = weights[index.span_ids[spans] + rows - index.span_rows[spans]]
    return found


def alias_table(weights: npt.NDArray[np.float64]) -> Unsigned:
    """(n, 2) uint64: threshold and alias of each column, as the module states them; without a loop over samples."""
    n = len(weights)
    share, capacity = _integers(weights)
    is_heavy = share > capacity
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    # What light ones have asked for, and heavy ones given, up to each of them.
    asked = np.append(0, np.cumsum(capacity - share[light]))
    given = np.cumsum(share[heavy] - capacity)
    table = np.empty((n, 2), np.uint64)
    alias = table[:, 1].view(np.int64)
    alias[:] = np.arange(n)
    if len(heavy):
        wanting = share[light] < capacity
        giver = np.searchsorted(given, asked[:-1][wanting], side="right")
        alias[light[wanting]] = heavy[giver]
        # A heavy one gives until it is left with the capacity or less; the next one makes that up.
        left = capacity + given - asked[np.searchsorted(asked, given, side="left")]
        share[heavy] = left
        alias[heavy[:-1]] = heavy[1:]
    thresholds = np.maximum(np.floor(share / np.float64(capacity) * 2.0**53), share > 0)
    table[:, 0] = thresholds.astype(np.uint64)
    return table


def _integers(weights: npt.NDArray[np.float64]) -> tuple[IntArray, int]:
    """The weights as integers whose sum is their number times the capacity, and the capacity."""
    n = len(weights)
    # A float can't hold every such power of two, but ldexp takes its exponent.
    scale = 61 - int(np.frexp(weights.max())[1]) - int(n - 1).bit_length()
    # Where few samples have most of the weight, the sum of the first integers leaves room for finer ones.
    scale += 61 - int(_rounded(weights, scale).sum()).bit_length()
    share = _rounded(weights, scale)
    positive = weights > 0
    np.maximum(share, positive, out=share)
    total = int(share.sum())
    capacity = -(-total // n)
    each, more = divmod(n * capacity - total, int(positive.sum()))
    np.add(share, each, out=share, where=positive)
    share[np.flatnonzero(positive)[:more]] += 1
    return share, capacity


def _rounded(weights: npt.NDArray[np.float64], scale: int) -> IntArray:
    integers: IntArray = np.rint(np.ldexp(weights, scale)).astype(np.int64)
    return integers


def _mix(x: Unsigned) -> Unsigned:
    x = (x ^ (x >> _S30)) * _A1
    x = (x ^ (x >> _S27)) * _A2
    return x ^ (x >> _S31)


def _high_product(x: Unsigned, n: int) -> Unsigned:
    """The upper 64 of the 128 bits of x * n."""
    n_low, n_high = np.uint64(n & 0xFFFFFFFF), np.uint64(n >> 32)
    low, high = x & _LOW, x >> _S32
    middle = high * n_low + ((low * n_low) >> _S32)
    product: Unsigned = high * n_high + (middle >> _S32) + ((low * n_high + (middle & _LOW)) >> _S32)
    return product
