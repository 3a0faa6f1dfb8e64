"""The algorithms of the order as their documentation states them, one position at a time, in Python's integers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def words_of(algorithm: str, seed: int, epoch: int, count: int) -> list[int]:
    words: list[int] = []
    for salt in range(-(-count // 8)):
        text = f"stager {algorithm} seed {seed} epoch {epoch}"
        digest = hashlib.blake2b(text.encode("ascii"), digest_size=32, salt=bytes([salt])).digest()
        words += [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    return words


def permuted(n: int, words: Sequence[int], position: int, tweak: int = 0, *, backwards: bool = False) -> int:
    """The network over n values with the round keys that come first among the words, or its inverse."""
    left_size = math.isqrt(n)
    left_size += left_size * left_size < n
    right_size = (n + left_size - 1) // left_size
    keys = [(word + tweak) % 2**32 for word in words[: 32 if n < 4096 else 8]]

    def mix(value: int, key: int, size: int) -> int:
        value = (value + key) % 2**32
        value = (value ^ (value >> 16)) * 0x7FEB352D % 2**32
        value = (value ^ (value >> 15)) * 0x846CA68B % 2**32
        return value * size >> 32

    sign = -1 if backwards else 1
    while True:
        left, right = divmod(position, right_size)
        for number, key in list(enumerate(keys))[::sign]:
            if number % 2 == 0:
                left = (left + sign * mix(right, key, left_size)) % left_size
            else:
                right = (right + sign * mix(left, key, right_size)) % right_size
        position = left * right_size + right
        if position < n:
            return position


def full(n: int, seed: int, epoch: int, position: int, *, backwards: bool = False) -> int:
    """``feistel32-1``, or the position of a sample."""
    return permuted(n, words_of("feistel32-1", seed, epoch, 32), position, backwards=backwards)


def _lowbias(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


class Blocks:
    """``blocks32-1``."""

    def __init__(self, n: int, block: int, seed: int, epoch: int) -> None:
        self.n, self.size = n, min(n, block)
        self.words = words_of("blocks32-1", seed, epoch, 80)
        self.n_full, self.n_rest = divmod(n, self.size)
        self.rotation = sum(word << 32 * i for i, word in enumerate(self.words[64:68])) % n
        self.place = sum(word << 32 * i for i, word in enumerate(self.words[68:72])) % (self.n_full + 1)

    def _tweak(self, block: int) -> int:
        once = _lowbias((block % 2**32 + self.words[72]) % 2**32)
        return _lowbias((once + (block >> 32) + self.words[73]) % 2**32)

    def _size(self, block: int) -> int:
        return self.n_rest if block == self.n_full else self.size

    def sample(self, position: int) -> int:
        first = self.place * self.size
        if first <= position < first + self.n_rest:
            block, inside = self.n_full, position - first
        else:
            slot, inside = divmod(position - (self.n_rest if position >= first else 0), self.size)
            block = permuted(self.n_full, self.words, slot)
        inside = permuted(self._size(block), self.words[32:], inside, self._tweak(block))
        return (block * self.size + inside + self.rotation) % self.n

    def position(self, sample: int) -> int:
        """The inverse."""
        block, inside = divmod((sample - self.rotation) % self.n, self.size)
        inside = permuted(self._size(block), self.words[32:], inside, self._tweak(block), backwards=True)
        first = self.place * self.size
        if block == self.n_full:
            return first + inside
        position = permuted(self.n_full, self.words, block, backwards=True) * self.size + inside
        return position + (self.n_rest if position >= first else 0)


def drawn(table: npt.NDArray[np.uint64], seed: int, epoch: int, position: int) -> int:
    """``alias64-1``."""
    words = words_of("alias64-1", seed, epoch, 8)
    keys = [words[i] | words[i + 1] << 32 for i in (0, 2, 4)]

    def mix(x: int) -> int:
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    a = mix(mix(position + keys[0]) ^ keys[1])
    column = a * len(table) >> 64
    threshold, alias = (int(value) for value in table[column])
    return column if mix(a + keys[2]) >> 11 < threshold else alias


def chi_square_z(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64] | float) -> float:
    """How many standard deviations the counts lie from what is expected."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


def spread_z(values: npt.NDArray[np.int64], n_bins: int, size: int) -> float:
    """How many standard deviations the counts of `values` (0..size-1) in equal bins lie from even."""
    edges = -(-np.arange(n_bins + 1) * size // n_bins)
    counts = np.histogram(values, bins=np.array(edges, float) - 0.5)[0]
    return chi_square_z(counts, len(values) * np.diff(edges) / size)
