"""The order of an epoch: position -> sample id, a keyed bijection that is never stored.

Algorithm ``feistel32-1`` (the version is part of the contract: golden vectors fix it on host and device):

- ``left_size = ceil(sqrt(n))`` and ``right_size = ceil(n / left_size)``; a position is ``left * right_size + right``;
- round keys: the 32-bit little-endian words of BLAKE2b digests of 32 bytes of the ASCII text ``stager feistel32-1
  seed SEED epoch EPOCH`` (decimal), salted with the byte 0 for the first 8, 1 for the next, ..., so no two pairs of
  seed and epoch share them;
- alternately ``left = (left + F(right)) % left_size`` and ``right = (right + F(left)) % right_size``: an alternating
  Feistel network over mixed radices (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), where F adds
  the key, applies the 32-bit mixer lowbias32 (C. Wellons) and scales the result to the half by its high product;
- 8 rounds, 32 for fewer than 4,096 samples, whose halves have too few values to mix sooner;
- results >= n, less than one in ``right_size``, are encrypted again (cycle walking).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError

ALGORITHM = "feistel32-1"
MAX_SAMPLES = 1 << 62

_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S16, _S15, _S32 = np.uint32(16), np.uint32(15), np.uint64(32)
_BLOCK = 1 << 15


@dataclass(frozen=True)
class Order:
    """The order of one epoch of `n` samples.

    Parameters
    ----------
    n : int
        Number of samples, 1 to 2**62.
    seed : int
        0 to 2**64 - 1.
    epoch : int
        0 to 2**63 - 1.
    shuffle : {"full", False}
        A keyed permutation, or the sample's own order.
    """

    n: int
    seed: int = 0
    epoch: int = 0
    shuffle: str | bool = "full"
    keys: npt.NDArray[np.uint32] = field(init=False, repr=False, compare=False)
    left_size: int = field(init=False, repr=False, compare=False)
    right_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shuffle is not False and self.shuffle != "full":
            raise SampleError(f"shuffle is {self.shuffle!r}; there are 'full' and False")
        for name, value, limit in (("seed", self.seed, 1 << 64), ("epoch", self.epoch, 1 << 63)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
                raise SampleError(f"{name} is {value!r}; it must be an integer from 0 to {limit - 1:,}")
        if isinstance(self.n, bool) or not isinstance(self.n, (int, np.integer)) or not 1 <= self.n <= MAX_SAMPLES:
            raise SampleError(f"an order is over 1 to {MAX_SAMPLES:,} samples, not {self.n!r}")
        object.__setattr__(self, "left_size", math.isqrt(self.n - 1) + 1)
        object.__setattr__(self, "right_size", -(-self.n // self.left_size))
        text = f"stager {ALGORITHM} seed {int(self.seed)} epoch {int(self.epoch)}".encode()
        n_rounds = 8 if self.n >= 4096 else 32
        words = b"".join(hashlib.blake2b(text, digest_size=32, salt=bytes([i])).digest() for i in range(n_rounds // 8))
        object.__setattr__(self, "keys", np.frombuffer(words, "<u4").astype(np.uint32))

    def sample_ids(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """(count,) int64: the samples at positions ``first : first + count`` of the epoch.

        Raises
        ------
        SampleError
            If not all of them are positions of the epoch.
        """
        # Cycle walking ends for positions below n; another one may never get there.
        if first < 0 or count < 0 or first + count > self.n:
            raise SampleError(f"positions {first} to {first + count} are not in an epoch of {self.n:,} samples")
        ids = np.arange(first, first + count, dtype=np.int64)
        if self.shuffle:
            for start in range(0, count, _BLOCK):
                block = ids[start : start + _BLOCK]
                self._encrypt(block)
                while (outside := np.flatnonzero(block >= self.n)).size:
                    again = block[outside]
                    self._encrypt(again)
                    block[outside] = again
        return ids

    def _encrypt(self, x: npt.NDArray[np.int64]) -> None:
        """One pass of the network over `x`, in place."""
        left, right = (half.astype(np.uint32) for half in np.divmod(x, self.right_size))
        mixed, shifted = np.empty_like(left), np.empty_like(left)
        wide = np.empty(len(x), np.uint64)
        for index, key in enumerate(self.keys):
            half, other = (left, right) if index % 2 == 0 else (right, left)
            size = self.left_size if index % 2 == 0 else self.right_size
            np.add(other, key, out=mixed)
            np.right_shift(mixed, _S16, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, _M1, out=mixed)
            np.right_shift(mixed, _S15, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, _M2, out=mixed)
            np.multiply(mixed, np.uint64(size), out=wide)
            np.right_shift(wide, _S32, out=wide)
            half += wide.astype(np.uint32)
            # half - size wraps to a huge number where half < size, so the smaller of the two is half % size.
            np.subtract(half, np.uint32(size), out=shifted)
            np.minimum(half, shifted, out=half)
        np.multiply(left, np.int64(self.right_size), out=x, casting="unsafe")
        x += right
