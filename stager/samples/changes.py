"""The bars of a pack with their future changed: what a decision must not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.bars.arrange import Arranged
from stager.bars.options import PRICES
from stager.bars.read import Bars
from stager.packs.layout import Pack
from stager.packs.packing import hold

# (bars, an instant in nanoseconds UTC, source of chance) -> the bars with those changed that are available later; None
# where there is nothing to change.
Change: TypeAlias = Callable[[Pack, int, np.random.Generator], Pack | None]
Int64 = npt.NDArray[np.int64]

_MOST_BARS_LATE = 50


def altered(pack: Pack, instant: int, rng: np.random.Generator) -> Pack | None:
    """Every later value is another one of the same sign and order of magnitude; a missing one stays missing."""
    late = _late(pack, instant)
    if not late.any():
        return None
    columns = _columns(pack)
    n = int(late.sum())
    prices = rng.uniform(0.5, 2.0, n)
    for name, values in columns.items():
        # The prices of a bar keep their order.
        values[late] *= prices if name in PRICES else rng.uniform(0.5, 2.0, n)
    return _with(pack, pack.times, pack.counts, columns)


def deleted(pack: Pack, instant: int, rng: np.random.Generator) -> Pack | None:
    """Later bars are gone, and with them symbols that had no earlier one."""
    late = _late(pack, instant)
    if late.all() or not late.any():
        return None
    keep = ~late
    counts = np.array([int(keep[first : first + n].sum()) for first, n in _spans(pack)])
    return _with(pack, pack.times[keep], counts, {name: values[keep] for name, values in _columns(pack).items()})


def delayed(pack: Pack, instant: int, rng: np.random.Generator) -> Pack | None:
    """Later bars come some intervals later, all by as much."""
    late = _late(pack, instant)
    if pack.interval.months or not late.any():
        return None  # months begin on their first day
    times = pack.times.copy()
    times[late] += pack.interval.nanoseconds * int(rng.integers(1, _MOST_BARS_LATE))
    return _with(pack, times, pack.counts, _columns(pack))


def joined(pack: Pack, instant: int, rng: np.random.Generator) -> Pack | None:
    """One more symbol, listed after the instant."""
    late = _late(pack, instant)
    first, n = _spans(pack)[int(rng.integers(len(pack.symbols)))]
    copied = first + np.flatnonzero(late[first : first + n])
    if len(copied) == 0:
        return None
    times = np.concatenate([pack.times, pack.times[copied]])
    columns = {name: np.concatenate([values, values[copied]]) for name, values in _columns(pack).items()}
    # Behind all others in the order of text.
    symbols = (*pack.symbols, pack.symbols[-1] + "~")
    return _with(pack, times, np.append(pack.counts, len(copied)), columns, symbols)


CHANGES: dict[str, Change] = {
    "altered": altered,
    "deleted": deleted,
    "delayed": delayed,
    "joined by another symbol": joined,
}


def _late(pack: Pack, instant: int) -> npt.NDArray[np.bool_]:
    return pack.interval.available(pack.times) > instant


def _spans(pack: Pack) -> list[tuple[int, int]]:
    return list(zip(pack.first_rows.tolist(), pack.counts.tolist(), strict=True))


def _columns(pack: Pack) -> dict[str, npt.NDArray[np.float64]]:
    return {name: pack.column(name).copy() for name in pack.columns}


def _with(
    pack: Pack, times: Int64, counts: Int64, columns: dict[str, npt.NDArray[np.float64]],
    symbols: tuple[str, ...] | None = None,
) -> Pack:  # fmt: skip
    manifest = pack.manifest
    symbols = pack.symbols if symbols is None else symbols
    there = counts > 0
    counts = counts[there]
    first_rows = np.cumsum(counts) - counts
    arranged: Any = Arranged(times, first_rows, counts, len(columns), [], _columns=list(columns.values()))
    return hold(
        Bars(
            arranged=arranged,
            names=tuple(columns),
            symbols=tuple(symbol for symbol, has in zip(symbols, there, strict=True) if has),
            first_rows=first_rows,
            counts=counts,
            interval=pack.interval,
            timestamps=manifest.timestamps,
            adjustment=manifest.adjustment,
            decisions=tuple(manifest.decisions),
            inputs=tuple(manifest.inputs),
            dropped=dict(manifest.dropped),
            warnings=tuple(manifest.warnings),
            roles={column.name: column.role for column in manifest.columns},
        )
    )
