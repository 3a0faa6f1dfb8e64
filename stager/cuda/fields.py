"""What a sample has of each array of a batch, and where pieces of memory lie beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

_ALIGNMENT = 256


@dataclass(frozen=True)
class Field:
    """What each sample has of one array.

    Parameters
    ----------
    shape : tuple of int
    dtype : {"float32", "float16", "bfloat16", "bool"}
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * {"float32": 4, "bool": 1}.get(self.dtype, 2)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where pieces of so many bytes begin one after the other, aligned for any load; the bytes of all."""
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    return [0, *ends[:-1]], ends[-1]
