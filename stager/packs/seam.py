"""The seam between a pack and later bars: whether prices go on where they were."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stager.bars.findings import Place, counted, named, stamps
from stager.bars.jumps import LEVEL_BARS, describe, find_jumps
from stager.bars.read import Bars
from stager.packs.layout import Pack

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

# So many bars before the seam tell how far a price usually moves.
_BEFORE = 250


def jumps_at_the_seam(pack: Pack, bars: Bars) -> list[str]:
    """What a user should know about prices that jump from a symbol's last bar in a pack to the first of later bars.

    Jumps inside the bars are not told of here.
    """
    opens, closes = (bars.arranged.columns[bars.names.index(name)] for name in ("open", "close"))
    all_times = bars.arranged.times
    times: list[Int64] = []
    prices: list[tuple[Float64, Float64]] = []
    symbols, seams = [], []
    ends = _ends(pack)
    for symbol, first, n in zip(bars.symbols, bars.first_rows.tolist(), bars.counts.tolist(), strict=True):
        if symbol not in ends:
            continue
        before, before_open, before_close = ends[symbol]
        if before[-1] >= all_times[first]:
            continue
        rows = slice(first, first + min(n, LEVEL_BARS))
        times.append(np.concatenate([before, all_times[rows]]))
        prices.append((np.concatenate([before_open, opens[rows]]), np.concatenate([before_close, closes[rows]])))
        symbols.append(symbol)
        seams.append(len(before))
    if not symbols:
        return []
    counts = np.array([len(some) for some in times])
    first_rows = np.cumsum(counts) - counts
    open_, close = (np.concatenate(column) for column in zip(*prices, strict=True))
    jumps = find_jumps(np.concatenate(times), open_, close, first_rows, counts)
    jumps = jumps.where(np.isin(jumps.rows, first_rows + np.array(seams)))
    if not len(jumps):
        return []
    found = [symbols[number] for number in np.searchsorted(first_rows, jumps.rows, "right") - 1]
    near = f", near {jumps.near[0]}" if jumps.near[0] else ""
    first = Place(found[0], stamps(jumps.times[:1], bars.timestamps)[0]).words
    return [
        f"{counted(len(jumps), 'jump')} of price from the pack's bars to the appended ones, of {named(found)}: "
        f"{describe(jumps.kinds.tolist())}; first {first}, new price over old {jumps.ratios[0]:.4g}{near}; they may be "
        "split, adjusted or in another unit: pack all files again in one adjustment, or name splits with "
        "Select(splits=...)"
    ]


def _ends(pack: Pack) -> dict[str, tuple[Int64, Float64, Float64]]:
    """Times, opens and closes of each symbol's last bars."""
    pieces: dict[str, list[tuple[Int64, Float64, Float64]]] = {}
    for part in pack.parts:
        times, opens, closes = part.times, part.column("open"), part.column("close")
        stops = part.first_rows + part.counts
        for symbol, first, stop in zip(part.symbols, part.first_rows.tolist(), stops.tolist(), strict=True):
            rows = slice(max(first, stop - _BEFORE), stop)
            pieces.setdefault(symbol, []).append((times[rows], opens[rows], closes[rows]))
    ends: dict[str, tuple[Int64, Float64, Float64]] = {}
    for symbol, some in pieces.items():
        times = np.concatenate([each[0] for each in some])
        order = np.argsort(times, kind="stable")[-_BEFORE:]
        opens, closes = (np.concatenate([each[column] for each in some])[order] for column in (1, 2))
        ends[symbol] = times[order], opens, closes
    return ends
