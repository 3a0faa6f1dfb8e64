"""Normalisation of windows: by what a window itself holds, or by what was fitted on the samples that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.manifest import Column

Method: TypeAlias = Literal["none", "last", "log1p", "zscore"]
DType: TypeAlias = Literal["float32", "float16", "bfloat16"]
FloatArray = npt.NDArray[np.float32]
# Mean and standard deviation of each served column, (2, n_columns).
Fitted: TypeAlias = npt.NDArray[np.float64]

_CHUNK_ROWS = 1 << 18

# Numbers of the methods, the same in serve.cu.
NONE, LAST, LOG1P, ZSCORE, FITTED = range(5)
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
    fit : {"window", "train"}
        What "zscore" takes mean and deviation from: each window, or once, in float64, the decision rows of the samples
        that train, of all symbols together: of a fold those of ``fold.train``, that is without what is purged or lies
        in the embargo, also for ``fold.test``; without folds, all samples.

    Raises
    ------
    SampleError
        If there is no such method for a role, or nothing to fit.
    """

    price: Method = "last"
    volume: Method = "log1p"
    other: Method = "none"
    fit: Literal["window", "train"] = "window"

    def __post_init__(self) -> None:
        for role in ("price", "volume", "other"):
            allowed = [method for method in _NUMBERS if role == "price" or method != "last"]
            if (method := getattr(self, role)) not in allowed:
                raise SampleError(f"normalisation of {role} is {method!r}; there are: {', '.join(allowed)}")
        if self.fit not in ("window", "train"):
            raise SampleError(f"fit is {self.fit!r}; there are 'window' and 'train'")
        if self.fit == "train" and "zscore" not in (self.price, self.volume, self.other):
            raise SampleError("fit='train' is for columns that are normalised by 'zscore', and there are none")

    def __str__(self) -> str:
        fitted = ", zscore fitted on what trains" if self.fit == "train" else ""
        return f"price {self.price}, volume {self.volume}, other {self.other}{fitted}"

    def methods(self, columns: Sequence[Column]) -> npt.NDArray[np.int32] | None:
        """(n_columns,) int32: the number of the method of each column; None if nothing is scaled."""
        numbers = np.array([_NUMBERS[getattr(self, column.role)] for column in columns], np.int32)
        if self.fit == "train":
            numbers[numbers == ZSCORE] = FITTED
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


def fit(rows: FloatArray, chosen: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Fitted:
    """Mean and standard deviation (of the population) of columns over chosen rows, in float64, in two passes.

    Parameters
    ----------
    rows : (n_rows, n_all) float32
    chosen : (n,) int64, n at least 1
    columns : (n_columns,) int64

    Returns
    -------
    (2, n_columns) float64
        The deviation of a constant column is 1.
    """

    starts = range(0, len(chosen), _CHUNK_ROWS)

    def values(first: int) -> npt.NDArray[np.float64]:
        return rows[chosen[first : first + _CHUNK_ROWS]][:, columns].astype(np.float64)

    def look(first: int) -> npt.NDArray[np.float64]:
        part = values(first)
        return np.stack([part.sum(axis=0), part.min(axis=0), part.max(axis=0)])

    looked = np.stack(parallel(look, starts))
    mean = looked[:, 0].sum(axis=0) / len(chosen)
    squares = np.stack(parallel(lambda first: ((values(first) - mean) ** 2).sum(axis=0), starts))
    deviation = np.sqrt(squares.sum(axis=0) / len(chosen))
    # The mean of equal values may be off by a rounding, which is no deviation.
    is_constant = looked[:, 1].min(axis=0) == looked[:, 2].max(axis=0)
    return np.stack([mean, np.where(is_constant | (deviation == 0), 1.0, deviation)])


def apply(x: FloatArray, methods: npt.NDArray[np.int32], last_close: FloatArray, fitted: Fitted | None = None) -> None:
    """Scale windows in place, in float64, in the order of operations of serve.cu.

    Parameters
    ----------
    x : (n, window, n_columns) float32
    methods : (n_columns,) int32
    last_close : (n, 1) or (n, n_columns) float32
        What "last" divides by: the last close of each window, or of each of its columns.
    fitted : (2, n_columns) float64, optional
        Needed for fitted columns.
    """
    # Only the cast may overflow: a value beyond float32 becomes infinite on every device. What is missing stays so.
    with np.errstate(over="ignore", invalid="ignore"):
        for method in (LAST, LOG1P, ZSCORE, FITTED):
            columns = np.flatnonzero(methods == method)
            if not len(columns):
                continue
            values = np.take(x, columns, axis=2).astype(np.float64)
            if method == LAST:
                closes = last_close if last_close.shape[1] == 1 else last_close[:, columns]
                values /= closes.astype(np.float64)[:, None]
                values -= 1.0
            elif method == LOG1P:
                values = np.copysign(np.log1p(np.abs(values)), values)
            elif method == ZSCORE:
                _zscore(values)
            elif fitted is not None:
                values -= fitted[0, columns]
                values /= fitted[1, columns]
            x[:, :, columns] = values


def last_there(values: FloatArray) -> FloatArray:
    """(n, n_columns) float32: the last value of each window that is not missing; NaN where all are.

    Parameters
    ----------
    values : (n, window, n_columns) float32
    """
    there = ~np.isnan(values[:, ::-1])
    last = values.shape[1] - 1 - there.argmax(axis=1)
    found: FloatArray = np.take_along_axis(values, last[:, None], axis=1)[:, 0]
    return found


def _zscore(values: npt.NDArray[np.float64]) -> None:
    missing = np.isnan(values)
    if missing.any():
        _zscore_of_some(values, missing)
        return
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


def _zscore_of_some(values: npt.NDArray[np.float64], missing: npt.NDArray[np.bool_]) -> None:
    """The same of what is there: missing values count for nothing, and stay missing."""
    n_rows, n_there = values.shape[1], (~missing).sum(axis=1)
    mean = np.zeros((len(values), values.shape[2]))
    for row in range(n_rows):
        np.add(mean, values[:, row], out=mean, where=~missing[:, row])
    mean /= n_there
    values -= mean[:, None]
    squares = np.zeros_like(mean)
    for row in range(n_rows):
        np.add(squares, values[:, row] * values[:, row], out=squares, where=~missing[:, row])
    deviation = np.sqrt(squares / n_there)
    deviation[deviation == 0] = 1.0
    values /= deviation[:, None]


def cast(x: FloatArray, dtype: DType) -> npt.NDArray[Any]:
    """Values as the nearest of another type, ties to even; the bits of bfloat16, which NumPy does not know, as uint16.

    What lies beyond float16 is infinite, and NaN is one number of either sign, on every device.
    """
    if dtype == "float32":
        return x
    bits = x.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = x.astype(np.float16).view(np.uint16)
    else:
        half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    missing = np.isnan(x)
    if missing.any():
        half[missing] = ((bits[missing] >> 16) & 0x8000) | (0x7E00 if dtype == "float16" else 0x7FC0)
    return half.view(np.float16) if dtype == "float16" else half
