"""Which kernel serves windows of a shape: how wide its loads are, and by how many lanes a window is written."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from stager.cuda.kernels import COLUMN
from stager.cuda.tables import Tables

# Methods of samples/normalize.py.
LAST, ZSCORE, FITTED = 1, 3, 4
#: Lanes that copy together.
THREADS = 256
_MOST_LANES = 1024
_ROUNDS = 4
_MOST_FLOATS = 1 << 30


def copying(pointer: int, window: int, n_columns: int) -> tuple[str, int]:
    """The widest loads that copy whole windows, and how many of them one takes."""
    n = window * n_columns
    vector = next(size for size in (4, 2, 1) if (n | n_columns | pointer // 4) % size == 0)
    if vector < 4 and n % 4 == 0 and pointer % 16 == 0:
        return "shifted", n // 4
    return str(4 * vector), n // vector


def serving(pointer: int, index: Tables, n_columns: int, n_served: int) -> tuple[str, int, int]:
    """The kernel that serves columns, but for its type; the stores that a window takes, and by how many lanes."""
    n = index.length * n_served
    divided = index.methods is not None and bool(np.isin(index.methods, (ZSCORE, FITTED)).any())
    wide = 8 if n % 8 == 0 and not divided and _one_close(index, n_served, 8) else 4
    period = n_served // math.gcd(n_served, wide)
    too_long = period > _MOST_LANES or index.window * n_columns > _MOST_FLOATS
    if n % wide or too_long or not _one_close(index, n_served, wide):
        return "serve_", n, min(THREADS, max(8, 1 << (n - 1).bit_length()))
    whole = index.columns is None and n_columns % wide == 0 and pointer % 16 == 0
    kernel = f"serve_{wide}_{'whole_' if whole else ''}{'' if index.methods is None else 'scaled_'}"
    # Some rounds for each lane, which looks up its columns before the first.
    wanted = min(THREADS, max(8, n // wide // _ROUNDS))
    return kernel, n // wide, min(-(-wanted // period) * period, _MOST_LANES // period * period)


def _one_close(index: Tables, n_served: int, wide: int) -> bool:
    """Whether so many values in a row, from anywhere that a lane begins, are scaled by one close."""
    if index.close_columns is None or index.methods is None:
        return True
    closes = np.tile(np.where(index.methods == LAST, index.close_columns, -1), wide // math.gcd(n_served, wide))
    closes = closes.reshape(-1, wide)
    first = closes.max(axis=1, keepdims=True)
    return bool(((closes == first) | (closes < 0)).all())


def columns_of(index: Tables, n_columns: int) -> npt.NDArray[np.void]:
    """The kernel's struct Column of each served column."""
    sources = np.arange(n_columns) if index.columns is None else index.columns
    columns = np.zeros(len(sources), COLUMN)
    columns["source"] = sources
    if index.methods is not None:
        columns["method"] = index.methods
    columns["close"] = index.close_column if index.close_columns is None else index.close_columns
    if index.fitted is not None:
        columns["mean"], columns["deviation"] = index.fitted
    return columns
