"""Bars that are to be appended, beside those of the pack: which are there already, and whether they are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.clock import time_text
from stager.bars.read import Bars
from stager.errors import PackError
from stager.packs.held import Part
from stager.packs.layout import PRICES, Pack, span

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

# Rounded prices leave a ratio this much of freedom.
_RATIO_SPREAD = 1e-3
_SHOWN = 5


@dataclass(frozen=True)
class Overlap:
    """What the pack has of some bars.

    Attributes
    ----------
    held : ndarray of bool, shape (n_rows,)
        Bars that the pack has, with the same values.
    n_between : int
        Bars that it has not, and which lie before the last that it has of their symbol.
    new_symbols : list of str
    """

    held: Mask
    n_between: int
    new_symbols: list[str]

    def notes(self) -> list[str]:
        """What a user should know."""
        notes = []
        if self.new_symbols:
            more = f" and {len(self.new_symbols) - _SHOWN:,} more" if len(self.new_symbols) > _SHOWN else ""
            notes.append(f"appended symbols that the pack did not have: {', '.join(self.new_symbols[:_SHOWN])}{more}")
        if self.n_between:
            notes.append(
                f"{self.n_between:,} appended bars lie before the last bar that the pack had of their symbol; they "
                f"were put in between"
            )
        return notes


def compare(pack: Pack, bars: Bars) -> Overlap:
    """Look for bars in a pack and compare those that are there.

    Raises
    ------
    PackError
        If some differ, naming symbols and values, and the ratio where all prices of a symbol differ by one.
    """
    codes = np.repeat(np.arange(len(bars.symbols)), bars.counts)
    times = bars.arranged.times
    held, differs = np.zeros(len(times), np.bool_), np.zeros(len(times), np.bool_)
    last = np.full(len(bars.symbols), np.iinfo(np.int64).min)
    there = {name: np.empty(len(times)) for name in bars.names}
    for part in pack.parts:
        rows, found = _find(part, bars, codes, last)
        held |= found
        for name, values in zip(bars.names, bars.arranged.columns, strict=True):
            old, new = part.column(name)[rows[found]], values[found]
            there[name][found] = old
            differs[found] |= ~((old == new) | (np.isnan(old) & np.isnan(new)))
    if differs.any():
        raise PackError(_told(pack, bars, codes, held, differs, there))
    known = set(pack.symbols)
    new_symbols = [symbol for symbol in bars.symbols if symbol not in known]
    return Overlap(held, int((~held & (times < last[codes])).sum()), new_symbols)


def first_and_last(bars: Bars) -> tuple[str, str]:
    """The span of the bars, as in the manifest."""
    return span(bars.arranged.times, bars.first_rows, bars.counts)


def _find(part: Part, bars: Bars, codes: Int64, last: Int64) -> tuple[Int64, Mask]:
    """The row of each bar in a segment, and whether it is there; raises `last` to the symbols' last times in it."""
    number = {symbol: code for code, symbol in enumerate(part.symbols)}
    numbers = np.array([number.get(symbol, -1) for symbol in bars.symbols], np.int64)
    known = numbers >= 0
    first = np.where(known, part.first_rows[numbers], 0)
    stop = np.where(known, first + part.counts[numbers], 0)
    ends = part.times[np.maximum(stop - 1, 0)]
    np.maximum(last, ends, out=last, where=known)
    times, rows = bars.arranged.times, np.zeros(len(codes), np.int64)
    # Later bars, which most are, need no search.
    maybe = np.flatnonzero((known & (stop > 0))[codes] & (times <= ends[codes]))
    low, high, wanted = first[codes[maybe]], stop[codes[maybe]] - 1, times[maybe]
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) >> 1
        below = part.times[middle] < wanted[open_]
        low[open_] = np.where(below, middle + 1, low[open_])
        high[open_] = np.where(below, high[open_], middle)
    found = np.zeros(len(codes), np.bool_)
    found[maybe] = part.times[low] == wanted
    rows[maybe] = low
    return rows, found


def _told(pack: Pack, bars: Bars, codes: Int64, held: Mask, differs: Mask, there: dict[str, Float64]) -> str:
    """The message about bars that differ."""
    values = dict(zip(bars.names, bars.arranged.columns, strict=True))
    symbols = np.unique(codes[differs])
    examples: list[str] = []
    n_adjusted = 0
    for symbol in symbols.tolist():
        mine = slice(int(bars.first_rows[symbol]), int(bars.first_rows[symbol] + bars.counts[symbol]))
        both = np.flatnonzero(held[mine]) + mine.start
        ratio = _ratio([there[name][both] for name in PRICES], [values[name][both] for name in PRICES])
        n_adjusted += ratio is not None
        if len(examples) == _SHOWN:
            continue
        row = int(both[differs[both]][0])
        name = next(n for n in bars.names if not _same(there[n][row], values[n][row]))
        found = f"{bars.symbols[symbol]} at {time_text(int(bars.arranged.times[row]))}: {name} "
        found += f"{float(there[name][row])!r} in the pack, {float(values[name][row])!r} in the input"
        if ratio is not None:
            found += f" (all prices of its {len(both):,} overlapping bars differ by the ratio {ratio:.4g}: re-adjusted)"
        examples.append(found)
    more = f"; and {len(symbols) - _SHOWN:,} more symbols" if len(symbols) > _SHOWN else ""
    remedy = (
        f"the prices of {n_adjusted:,} symbols were re-adjusted, as for a split or dividend since: pack all files "
        f"again in one adjustment"
        if n_adjusted
        else "remove these bars from the input, or pack all files again"
    )
    return (
        f"{pack.path}: {int(differs.sum()):,} bars of {len(symbols):,} symbols differ from those of the same time in "
        f"the pack: {'; '.join(examples)}{more}. Nothing was appended; {remedy}"
    )


def _same(one: float, other: float) -> bool:
    return one == other or (np.isnan(one) and np.isnan(other))


def _ratio(old: list[Float64], new: list[Float64]) -> float | None:
    """New by old prices, if that is one number other than 1 but for rounding."""
    before, after = np.concatenate(old), np.concatenate(new)
    if (before == 0).any() or not (np.isfinite(before) & np.isfinite(after)).all():
        return None
    ratios = after / before
    middle = float(np.median(ratios))
    spread = float(np.max(np.abs(ratios - middle)))
    return middle if middle > 0 and middle != 1 and spread <= min(_RATIO_SPREAD * middle, abs(middle - 1) / 4) else None
