"""Normalisation of windows: what a window itself holds, and nothing else, decides how it is scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError
from stager.packs.manifest import Column

Method: TypeAlias = Literal["none", "last", "log1p", "zscore"]
FloatArray = npt.NDArray[np.float32]

# Numbers of the methods, the same in gather.cu.
NONE, LAST, LOG1P, ZSCORE = range(4)
_NUMBERS = {"none": NONE, "last": LAST, "log1p": LOG1P, "zscore": ZSCORE}


@dataclass(frozen=True)
class Normalize:
    """How the columns of a window are scaled, by their role in the pack.

    Parameters
    ----------
    price : {"last", "zscore", "log1p", "none"}
        Open, high, low, close. "last": the value by the window's last close, less 1.
    volume : {"log1p", "zscore", "none"}
        Volume and dollar volume. "log1p": ``sign(v) * log(1 + abs(v))``.
    other : {"none", "log1p", "zscore"}
        Further and derived columns. "zscore": less the window's mean, by its standard deviation (of the population); 0
        where all values of the window are the same.

    Raises
    ------
    SampleError
        If there is no such method for a role.
    """

    price: Method = "last"
    volume: Method = "log1p"
    other: Method = "none"

    def __post_init__(self) -> None:
        for role in ("price", "volume", "other"):
            allowed = [method for method in _NUMBERS if role == "price" or method != "last"]
            if (method := getattr(self, role)) not in allowed:
                raise SampleError(f"normalisation of {role} is {method!r}; there are: {', '.join(allowed)}")

    def __str__(self) -> str:
        return f"price {self.price}, volume {self.volume}, other {self.other}"

    def methods(self, columns: Sequence[Column]) -> npt.NDArray[np.int32] | None:
        """(n_columns,) int32: the number of the method of each column; None if nothing is scaled."""
        numbers = np.array([_NUMBERS[getattr(self, column.role)] for column in columns], np.int32)
        return numbers if numbers.any() else None


RAW = Normalize("none", "none", "none")
_SHORT = {
    "none": RAW,
    "last": Normalize(),
    "zscore": Normalize("zscore", "zscore", "zscore"),
}


def as_normalize(normalize: str | Normalize) -> Normalize:
    """What is meant by "none", "last" or "zscore".

    Raises
    ------
    SampleError
    """
    if isinstance(normalize, Normalize):
        return normalize
    if not isinstance(normalize, str) or normalize not in _SHORT:
        raise SampleError(f"normalize is {normalize!r}; there are {', '.join(map(repr, _SHORT))}, and Normalize(...)")
    return _SHORT[normalize]


def apply(x: FloatArray, methods: npt.NDArray[np.int32], last_close: FloatArray) -> None:
    """Scale windows in place, in float64, in the order of operations of gather.cu.

    Parameters
    ----------
    x : (n, window, n_columns) float32
    methods : (n_columns,) int32
    last_close : (n,) float32
        The close of each window's last row.
    """
    # Only the cast may overflow: a value beyond float32 becomes infinite on every device.
    with np.errstate(over="ignore"):
        for method in (LAST, LOG1P, ZSCORE):
            columns = np.flatnonzero(methods == method)
            if not len(columns):
                continue
            values = np.take(x, columns, axis=2).astype(np.float64)
            if method == LAST:
                values /= last_close.astype(np.float64)[:, None, None]
                values -= 1.0
            elif method == LOG1P:
                values = np.copysign(np.log1p(np.abs(values)), values)
            else:
                _zscore(values)
            x[:, :, columns] = values


def _zscore(values: npt.NDArray[np.float64]) -> None:
    n_rows = values.shape[1]
    mean = np.zeros((len(values), values.shape[2]))
    # One row after another, as a thread of the GPU does it: sums in another order differ in their last bits.
    for row in range(n_rows):
        mean += values[:, row]
    mean /= n_rows
    values -= mean[:, None]
    squares = np.zeros_like(mean)
    for row in range(n_rows):
        squares += values[:, row] * values[:, row]
    deviation = np.sqrt(squares / n_rows)
    # All values are the same, so all are 0 already.
    deviation[deviation == 0] = 1.0
    values /= deviation[:, None]
