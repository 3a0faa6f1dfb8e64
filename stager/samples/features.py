"""Derived columns, computed in float64 before the cast: built in, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.zones import Zone
from stager.errors import SampleError
from stager.samples.runs import rows_of

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

BUILT_IN = ("log_return", "range", "dollar_volume", "time_of_day")

_DAY_SECONDS, _NS = 86_400, 10**9
_N_CHECKED = 3


@dataclass(frozen=True)
class Feature:
    """A column computed by a function.

    Parameters
    ----------
    name : str
        The column's name.
    function : callable
        Takes the bars of one symbol, a ``pyarrow.Table`` of symbol, time, float64 columns and the derived columns
        before this one, oldest first; gives one float64 value for each row, which depends on that row and on
        `lookback` rows before it alone. This is spot-checked with later, and with older, rows left out.
    lookback : int
        Rows before its own that a value needs. Where so many are not there, after the symbol's first bar or a contract
        roll or split, the value is missing.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    name: str
    function: Callable[[Any], Any]
    _: KW_ONLY
    lookback: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name in ("symbol", "time", *BUILT_IN):
            raise SampleError(f"feature name is {self.name!r}; it must be text, and not that of another column")
        if not callable(self.function):
            raise SampleError(f"feature {self.name!r}: {self.function!r} is no function")
        value = self.lookback
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise SampleError(f"feature {self.name!r}: lookback is {value!r}; it must be an integer of at least 0 rows")


@dataclass(frozen=True)
class Stretches:
    """Rows whose values compare: those of one symbol, without contract roll or split between them.

    Attributes
    ----------
    first_rows : (n,) int64
        Ascending; together the stretches cover all rows.
    n_rows : int
    """

    first_rows: IntArray
    n_rows: int

    def beginnings(self, count: int) -> IntArray:
        """The first `count` rows of each stretch."""
        lengths = np.minimum(np.diff(self.first_rows, append=self.n_rows), min(count, self.n_rows))
        return rows_of(self.first_rows, lengths)


def log_return(close: FloatArray, stretches: Stretches) -> FloatArray:
    """``log(close / close of the symbol's bar before)``, however long ago that was; NaN where none compares."""
    out = np.full(len(close), np.nan)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        out[1:] = np.log(close[1:] / close[:-1])
    out[1:][(close[1:] <= 0) | (close[:-1] <= 0)] = np.nan
    out[stretches.beginnings(1)] = np.nan
    return out


def relative_range(high: FloatArray, low: FloatArray, close: FloatArray) -> FloatArray:
    """``(high - low) / close``; NaN where the close is not positive."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(close > 0, (high - low) / close, np.nan)


def dollar_volume(close: FloatArray, volume: FloatArray, adjustment: str) -> FloatArray:
    """``close * volume``.

    Raises
    ------
    SampleError
        If price and volume are not known to be adjusted for the same: dividends change prices alone.
    """
    if adjustment not in ("raw", "split"):
        raise SampleError(
            f"dollar_volume needs prices and volume of the same adjustment, and the pack's is {adjustment!r}; pack raw "
            f"or split-adjusted bars and say so (ReadOptions(adjustment='raw'), or --adjustment raw)"
        )
    return close * volume


def time_of_day(closes: IntArray, zone: Zone) -> tuple[FloatArray, FloatArray]:
    """Sine and cosine of the local time of day at which bars become available, a day being the whole circle."""
    seconds, rest = np.divmod(closes, _NS)
    changes, offsets = zone.changes(int(seconds.min()) - _DAY_SECONDS, int(seconds.max()) + _DAY_SECONDS)
    local = seconds + np.array(offsets)[np.searchsorted(np.array(changes, np.int64), seconds, side="right")]
    angle = 2 * np.pi * ((local % _DAY_SECONDS) + rest / _NS) / _DAY_SECONDS
    return np.sin(angle), np.cos(angle)


def evaluate(
    feature: Feature, bars: pa.Table, first_rows: IntArray, counts: IntArray, stretches: Stretches
) -> FloatArray:
    """The values of a user's function for all symbols, one symbol after another.

    Raises
    ------
    SampleError
        If it fails, gives something else than a value for each row, looks ahead, or needs more than its lookback.
    """
    out = np.empty(bars.num_rows)
    left_to_check = _N_CHECKED
    for first, count in zip(first_rows.tolist(), counts.tolist(), strict=True):
        part = bars.slice(first, count)
        out[first : first + count] = _call(feature, part)
        if left_to_check and count > feature.lookback + 1:
            _check(feature, part, out[first : first + count])
            left_to_check -= 1
    out[stretches.beginnings(feature.lookback)] = np.nan
    return out


def _call(feature: Feature, bars: pa.Table) -> FloatArray:
    try:
        found = feature.function(bars)
    except Exception as error:
        raise SampleError(
            f"feature {feature.name!r} raised {type(error).__name__}: {error}; it was given {bars.num_rows:,} bars of "
            f"{bars['symbol'][0].as_py()} with columns {', '.join(bars.column_names)}"
        ) from error
    try:
        values = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SampleError(f"feature {feature.name!r} gave {type(found).__name__}, no numbers: {error}") from error
    if values.shape != (bars.num_rows,):
        raise SampleError(
            f"feature {feature.name!r} gave values of shape {values.shape} for {bars.num_rows:,} bars; it must give "
            f"one for each"
        )
    return values


def _check(feature: Feature, bars: pa.Table, whole: FloatArray) -> None:
    """Compare with what the function gives without the last third of the bars, and with the fewest bars."""
    stop = max(feature.lookback + 1, bars.num_rows * 2 // 3)
    prefix = _call(feature, bars.slice(0, stop))
    rows = slice(feature.lookback, stop)
    if not _same(prefix[rows], whole[rows]):
        raise SampleError(
            f"feature {feature.name!r} looks ahead: of {bars.num_rows:,} bars of a symbol, its values in the first "
            f"{stop:,} are others when the later bars are left out"
        )
    first = stop - feature.lookback - 1
    if not _same(_call(feature, bars.slice(first, stop - first))[-1:], whole[stop - 1 : stop]):
        raise SampleError(
            f"feature {feature.name!r} needs more than its lookback of {feature.lookback:,} rows: a value is another "
            f"one when older bars are left out; declare a longer lookback"
        )


def _same(values: FloatArray, others: FloatArray) -> bool:
    # Sums in another order differ in the last bits, which is no leak.
    return bool(np.allclose(values, others, rtol=1e-9, atol=1e-12, equal_nan=True))


def names_of(column: str | Feature) -> tuple[str, ...]:
    """The columns that are added."""
    if isinstance(column, Feature):
        return (column.name,)
    if column == "time_of_day":
        return ("time_of_day_sin", "time_of_day_cos")
    if column in BUILT_IN:
        return (column,)
    raise SampleError(
        f"there is no derived column {column!r}; there are {', '.join(BUILT_IN)}, TimeFrame(...) and Feature(...)"
    )
