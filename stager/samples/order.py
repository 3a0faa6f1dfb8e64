"""The order of an epoch: position -> sample id, a keyed bijection that is never stored.

Algorithms have versions, which are part of the contract: golden vectors fix them on host and device. `words` of an
algorithm are the 32-bit little-endian words of BLAKE2b digests of 32 bytes of the ASCII text ``stager ALGORITHM seed
SEED epoch EPOCH`` (decimal), salted with the byte 0 for words 0 to 7, 1 for the next 8, ..., so no two pairs of seed
and epoch share them.

``feistel32-1``, of ``shuffle="full"``, permutes ``0..n-1``:

- ``left_size = ceil(sqrt(n))`` and ``right_size = ceil(n / left_size)``; a position is ``left * right_size + right``;
- round keys: the words from 0 on;
- alternately ``left = (left + F(right)) % left_size`` and ``right = (right + F(left)) % right_size``: an alternating
  Feistel network over mixed radices (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), where F adds
  the key, applies the 32-bit mixer lowbias32 (C. Wellons) and scales the result to the half by its high product;
- 8 rounds, 32 for fewer than 4,096 samples, whose halves have too few values to mix sooner;
- results >= n, less than one in ``right_size``, are encrypted again (cycle walking).

``blocks32-1``, of ``shuffle="block"``, keeps samples of one block of ``b`` consecutive ones together. There are
``n // b`` full blocks and, where ``b`` does not divide ``n``, a shorter one of the rest:

- words 64 to 67, as one little-endian integer, modulo n: the rotation. Block k holds the samples ``(k * b + i +
  rotation) % n``, so that no block begins where it did in another epoch; the shorter one is the last, k = ``n // b``;
- words 68 to 71, modulo ``n // b + 1``: the place of the shorter block among the full ones, which come in the order of
  the network above over ``n // b`` with round keys from word 0 on;
- inside block k, i follows from the network over the size of the block with round keys from word 32 on, to each of
  which a tweak is added: ``mix(mix(low(k) + word 72) + high(k) + word 73)``, of the lower and upper 32 bits of k and
  the mixer lowbias32, modulo 2**32.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError

ALGORITHM = "feistel32-1"
BLOCKS = "blocks32-1"
UNSHUFFLED = "none"
MAX_SAMPLES = 1 << 62
DEFAULT_BLOCK = 4096

IntArray = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S16, _S15, _S32 = np.uint32(16), np.uint32(15), np.uint64(32)
_BLOCK = 1 << 15


def check_counters(n: int, seed: int, epoch: int) -> None:
    """Raise SampleError if these are not numbers that an order is of."""
    for name, value, limit in (("seed", seed, 1 << 64), ("epoch", epoch, 1 << 63)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
            raise SampleError(f"{name} is {value!r}; it must be an integer from 0 to {limit - 1:,}")
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= MAX_SAMPLES:
        raise SampleError(f"an order is over 1 to {MAX_SAMPLES:,} samples, not {n!r}")


def words_of(algorithm: str, seed: int, epoch: int, first: int, count: int) -> Words:
    """(count,) uint32: words `first` and on, a multiple of 8, of an algorithm."""
    text = f"stager {algorithm} seed {int(seed)} epoch {int(epoch)}".encode()
    salts = range(first // 8, -(-(first + count) // 8))
    words = b"".join(hashlib.blake2b(text, digest_size=32, salt=bytes([salt])).digest() for salt in salts)
    return np.frombuffer(words, "<u4").astype(np.uint32)[:count]


class Network:
    """A keyed permutation of ``0..n-1``, as the module states it.

    Attributes
    ----------
    n, left_size, right_size : int
    keys : (n_rounds,) uint32
    """

    def __init__(self, n: int, words: Words) -> None:
        self.n = int(n)
        self.left_size = math.isqrt(self.n - 1) + 1
        self.right_size = -(-self.n // self.left_size)
        self.keys = words[: rounds_of(self.n)]

    def permute(self, x: IntArray, tweaks: Words | None = None) -> None:
        """Permute values below n in place; each with the keys plus its tweak, where there are tweaks."""
        for start in range(0, len(x), _BLOCK):
            block = x[start : start + _BLOCK]
            tweak = None if tweaks is None else tweaks[start : start + _BLOCK]
            self._encrypt(block, tweak)
            # Cycle walking ends for values below n; another one may never get there.
            while (outside := np.flatnonzero(block >= self.n)).size:
                again = block[outside]
                self._encrypt(again, None if tweak is None else tweak[outside])
                block[outside] = again

    def _encrypt(self, x: IntArray, tweak: Words | None) -> None:
        """One pass of the network over `x`, in place."""
        left, right = (half.astype(np.uint32) for half in np.divmod(x, self.right_size))
        mixed, shifted = np.empty_like(left), np.empty_like(left)
        wide = np.empty(len(x), np.uint64)
        for index, key in enumerate(self.keys):
            half, other = (left, right) if index % 2 == 0 else (right, left)
            size = self.left_size if index % 2 == 0 else self.right_size
            np.add(other, key, out=mixed)
            if tweak is not None:
                np.add(mixed, tweak, out=mixed)
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


class Blocks:
    """The keyed blocks of one epoch, as the module states them.

    Attributes
    ----------
    n, size : int
        Samples, and those of a full block.
    rotation, place : int
    outer, inside, rest : Network or None
        Of the full blocks, inside one of them, and inside the shorter one; None where there is none.
    tweak_words : (2,) uint32
    """

    def __init__(self, n: int, size: int, seed: int, epoch: int) -> None:
        self.n, self.size = int(n), min(int(size), int(n))
        words = words_of(BLOCKS, seed, epoch, 0, 80)
        n_full, n_rest = divmod(self.n, self.size)
        self.rotation = int.from_bytes(words[64:68].astype("<u4").tobytes(), "little") % self.n
        self.place = int.from_bytes(words[68:72].astype("<u4").tobytes(), "little") % (n_full + 1)
        self.outer, self.inside = Network(n_full, words), Network(self.size, words[32:])
        self.rest = Network(n_rest, words[32:]) if n_rest else None
        self.tweak_words = words[72:74]

    def permute(self, x: IntArray) -> None:
        """Positions to samples, in place."""
        n_rest = 0 if self.rest is None else self.rest.n
        first = self.place * self.size
        short = (x >= first) & (x < first + n_rest)
        x -= np.where(x >= first + n_rest, n_rest, 0)
        slots, places = np.divmod(x, self.size)
        if self.rest is None or not short.any():
            x[:] = self._inside(self.inside, self._ordered(slots), places)
        else:
            x[~short] = self._inside(self.inside, self._ordered(slots[~short]), places[~short])
            x[short] = self._inside(self.rest, np.full(int(short.sum()), self.outer.n), places[short])
        x += self.rotation
        x -= np.where(x >= self.n, self.n, 0)

    def _ordered(self, slots: IntArray) -> IntArray:
        """The full block at each slot."""
        # Neighbours mostly share one.
        heads = np.flatnonzero(np.diff(slots, prepend=-1))
        blocks = slots[heads]
        self.outer.permute(blocks)
        return np.repeat(blocks, np.diff(heads, append=len(slots)))

    def _inside(self, network: Network, blocks: IntArray, places: IntArray) -> IntArray:
        """The samples at places of blocks, before the rotation."""
        low, high = blocks.astype(np.uint32), (blocks >> np.int64(32)).astype(np.uint32)
        network.permute(places, _mix(_mix(low + self.tweak_words[0]) + high + self.tweak_words[1]))
        return blocks * np.int64(self.size) + places


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
    shuffle : {"full", "block", False}
        A keyed permutation, one that keeps blocks together, or the sample's own order.
    block : int, optional
        Samples of a block, at least 1.
    """

    n: int
    seed: int = 0
    epoch: int = 0
    shuffle: str | bool = "full"
    block: int = DEFAULT_BLOCK
    how: Network | Blocks | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shuffle is not False and self.shuffle not in ("full", "block"):
            raise SampleError(f"shuffle is {self.shuffle!r}; there are 'full', 'block' and False")
        check_counters(self.n, self.seed, self.epoch)
        how: Network | Blocks | None = None
        if self.shuffle == "full":
            how = Network(self.n, words_of(ALGORITHM, self.seed, self.epoch, 0, rounds_of(self.n)))
        elif self.shuffle == "block":
            if isinstance(self.block, bool) or not isinstance(self.block, (int, np.integer)) or self.block < 1:
                raise SampleError(f"block is {self.block!r}; it must be an integer of at least 1 sample")
            how = Blocks(self.n, self.block, self.seed, self.epoch)
        object.__setattr__(self, "how", how)

    @property
    def algorithm(self) -> str:
        """Name and version of what decides the order."""
        if self.how is None:
            return UNSHUFFLED
        return ALGORITHM if isinstance(self.how, Network) else BLOCKS

    def at(self, positions: IntArray) -> IntArray:
        """(n,) int64: the samples at positions of the epoch, which must be 0 to n - 1, written over them."""
        if self.how is not None:
            self.how.permute(positions)
        return positions

    def sample_ids(self, first: int, count: int) -> IntArray:
        """(count,) int64: the samples at positions ``first : first + count`` of the epoch.

        Raises
        ------
        SampleError
            If not all of them are positions of the epoch.
        """
        return self.at(positions_of(self.n, first, count))


def positions_of(n: int, first: int, count: int) -> IntArray:
    """(count,) int64: positions ``first : first + count`` of an epoch of n samples.

    Raises
    ------
    SampleError
        If it does not have all of them.
    """
    if first < 0 or count < 0 or first + count > n:
        raise SampleError(f"positions {first} to {first + count} are not in an epoch of {n:,} samples")
    return np.arange(first, first + count, dtype=np.int64)


def rounds_of(n: int) -> int:
    """Rounds of the network over n values."""
    return 8 if n >= 4096 else 32


def _mix(x: Words) -> Words:
    """lowbias32."""
    x = (x ^ (x >> _S16)) * _M1
    x = (x ^ (x >> _S15)) * _M2
    return x ^ (x >> _S16)
