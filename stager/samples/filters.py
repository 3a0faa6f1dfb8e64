"""Which rows a selection lets end a sample, and where it ends runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stager.bars.clock import instant_text
from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.fill import FILLED
from stager.samples.runs import IntArray, decision_numbers
from stager.samples.select import Select
from stager.samples.sessions import Sessions, make_sessions
from stager.samples.tables import LAST, EventTable, TableSource, rows_from

BoolArray = npt.NDArray[np.bool_]

FloatArray = npt.NDArray[np.float64]

_CHUNK_ROWS = 1 << 18
# What prices may be adjusted for if they still jump at splits.
_WITH_SPLITS = ("raw", "unknown")
# The least logarithm of a ratio whose jump is told from what a day may bring: 5 for 4.
_CLEAR_SPLIT = 0.2


def covered(lows: IntArray, highs: IntArray, n_rows: int) -> BoolArray:
    """(n_rows,) bool: the row lies in one of the half-open ranges."""
    steps = np.zeros(n_rows + 1, np.int32)
    np.add.at(steps, lows, 1)
    np.add.at(steps, highs, -1)
    return np.cumsum(steps[:-1], dtype=np.int32) > 0


def sessions_of(pack: Pack, select: Select) -> Sessions | None:
    """The sessions that bound runs; None without."""
    if select.session is None:
        return None
    if pack.interval.is_session:
        raise SampleError(
            f"session is {select.session!r}, and the bars are of {pack.interval.text}; sessions bound shorter ones"
        )
    first, last = int(pack.times[pack.first_rows].min()), int(pack.times[pack.first_rows + pack.counts - 1].max())
    return make_sessions(select.session, first, last, select.close_inclusive)


def jumps_of(pack: Pack, select: Select) -> IntArray | None:
    """Rows of the first bars after a contract roll, or a split that the prices are not adjusted for."""
    rows: list[IntArray] = []
    if isinstance(select.rolls, str) and select.rolls in pack.columns:
        real = _real_rows(pack)
        contract = pack.column(select.rolls)[real]
        before, after = contract[:-1], contract[1:]
        rows.append(real[1:][(before != after) & ~(np.isnan(before) & np.isnan(after))])
    elif select.rolls is not None:
        rows.append(_effective_rows(pack, EventTable(select.rolls, "rolls"))[0])
    if select.splits is not None:
        found, _ = _splits(pack, select.splits)
        if pack.manifest.adjustment in _WITH_SPLITS:
            rows.append(found)
    if not rows:
        return None
    return np.setdiff1d(np.concatenate(rows), pack.first_rows)


def doubted_splits(pack: Pack, select: Select) -> tuple[str, ...]:
    """A warning, if most closes at declared splits contradict what the pack says of its adjustment."""
    if select.splits is None:
        return ()
    rows, ratios = _splits(pack, select.splits)
    close, symbols = pack.column("close"), np.searchsorted(pack.first_rows, rows, side="right") - 1
    inside = rows > pack.first_rows[symbols]
    rows, ratios, symbols = rows[inside], ratios[inside], symbols[inside]
    with np.errstate(divide="ignore", invalid="ignore"):
        moves, wanted = np.log(close[rows - 1] / close[rows]), np.log(ratios)
    # Small ones, such as dividends in shares, are no larger than what a day may bring.
    judged = np.isfinite(moves) & (np.abs(wanted) > _CLEAR_SPLIT)
    jumps = np.abs(moves - wanted) < np.abs(moves)
    adjusted = pack.manifest.adjustment not in _WITH_SPLITS
    odd = np.flatnonzero(judged & (jumps == adjusted))
    if 2 * len(odd) <= judged.sum():
        return ()
    row, ratio = int(rows[odd[0]]), ratios[odd[0]]
    first = (
        f"first {pack.symbols[int(symbols[odd[0]])]} at {instant_text(int(pack.times[row]))}, ratio {ratio:g}, close "
        f"{close[row - 1]:g} and then {close[row]:g}"
    )
    if adjusted:
        return (
            f"closes jump by the ratio at {len(odd):,} of {int(judged.sum()):,} declared splits, {first}; the pack "
            f"says that its prices are adjusted ({pack.manifest.adjustment}), so windows and labels span them: pack "
            f"the bars as raw, if they are",
        )
    return (
        f"closes do not jump by the ratio at {len(odd):,} of {int(judged.sum()):,} declared splits, {first}; if the "
        f"prices are adjusted for splits already, pack the bars as that, and runs need not end there",
    )


def _splits(pack: Pack, source: TableSource) -> tuple[IntArray, FloatArray]:
    """The first bar after each declared split, where there is one, and how many new shares came of one."""
    table = EventTable(source, "splits")
    ratios = table.numbers("ratio")
    if not np.all(good := np.isfinite(ratios) & (ratios > 0)):
        row = int(np.flatnonzero(~good)[0])
        raise SampleError(f"splits: ratio must be above 0, such as 4 for four new shares of one; "
                          f"first otherwise {table.told(row, 'time', 'ratio')}")  # fmt: skip
    # One for one is none.
    rows, events = _effective_rows(pack, table, ratios != 1)
    return rows, ratios[events]


def _effective_rows(pack: Pack, table: EventTable, chosen: BoolArray | None = None) -> tuple[IntArray, IntArray]:
    """The first bar of each symbol at or after an effective time, where it has one, and of which event it is."""
    codes, instants = known_codes(pack, table, "effective times"), table.instants("time")
    if pack.interval.is_session:
        # A stamp of a daily bar is its date; the hour of the day on which a split takes effect is that day's.
        day = 86_400 * 10**9
        instants = instants // day * day
    keep = codes >= 0 if chosen is None else (codes >= 0) & chosen
    rows = rows_from(pack, codes[keep], instants[keep])
    if FILLED in pack.columns:
        # Bars that were filled in meanwhile still have the prices from before.
        real = np.append(_real_rows(pack), pack.n_rows)
        rows = real[np.searchsorted(real, rows)]
    there = rows < pack.first_rows[codes[keep]] + pack.counts[codes[keep]]
    return rows[there], np.flatnonzero(keep)[there]


def _real_rows(pack: Pack) -> IntArray:
    """Rows of bars that were not filled in."""
    return np.flatnonzero(pack.column(FILLED) == 0) if FILLED in pack.columns else np.arange(pack.n_rows)


def known_codes(pack: Pack, table: EventTable, what: str) -> IntArray:
    """Places of a table's symbols in the pack, -1 for others; at least one must be there."""
    codes = table.codes(pack.symbols)
    if len(codes) and not (codes >= 0).any():
        raise SampleError(
            f"none of the {len(codes):,} {what} is of a symbol of the pack: the first is of {table.told(0)}, "
            f"the pack has {', '.join(pack.symbols[:8])}"
        )
    return codes


def historic_rows(pack: Pack, min_history: int) -> IntArray:
    """(n_symbols,) int64: the first row of each symbol with so many real bars up to its decision, or its end."""
    ends = pack.first_rows + pack.counts
    n_before = min(min_history, pack.n_rows + 1) - 1
    if FILLED not in pack.columns:
        rows: IntArray = np.minimum(pack.first_rows + n_before, ends)
        return rows
    real = _real_rows(pack)
    place = np.searchsorted(real, pack.first_rows) + n_before
    rows = np.minimum(np.append(real, pack.n_rows)[np.minimum(place, len(real))], ends)
    return rows


def members(pack: Pack, select: Select) -> BoolArray:
    """(n_rows,) bool: at its decision the symbol belongs to the universe."""
    table = EventTable(select.universe, "universe")
    codes = known_codes(pack, table, "entries of the universe")
    starts, ends = table.instants("start"), table.instants("end", null=LAST)
    if np.any(bad := ends <= starts):
        row = int(np.flatnonzero(bad)[0])
        raise SampleError(
            f"universe: an end must lie after its start, first otherwise {table.told(row, 'start', 'end')}"
        )
    keep = codes >= 0
    lows = rows_from(pack, codes[keep], starts[keep], decision=True)
    highs = rows_from(pack, codes[keep], ends[keep], decision=True)
    return covered(lows, highs, pack.n_rows)


def on_stride(pack: Pack, stride: int) -> BoolArray:
    """(n_rows,) bool: the close is a multiple of so many bars, counted alike for all symbols."""
    chosen, numbers = np.empty(pack.n_rows, bool), decision_numbers(pack)

    def fill(first: int) -> None:
        stop = min(first + _CHUNK_ROWS, pack.n_rows)
        chosen[first:stop] = numbers(first, stop) % stride == 0

    parallel(fill, range(0, pack.n_rows, _CHUNK_ROWS))
    return chosen


def complete_windows(pack: Pack, columns: Sequence[str], window: int, dilation: int = 1) -> BoolArray:
    """(n_rows,) bool: no value is missing in the `window` rows up to this one, or in each `dilation`-th of them."""
    bad = np.zeros(pack.n_rows, bool)
    for name in columns:
        bad |= ~np.isfinite(pack.column(name))
    rows = np.flatnonzero(bad)
    if dilation == 1:
        return ~covered(rows, np.minimum(rows + window, pack.n_rows), pack.n_rows)
    complete = np.ones(pack.n_rows, bool)
    for later in range(0, window, dilation):
        complete[rows[rows < pack.n_rows - later] + later] = False
    return complete


def positive(pack: Pack, column: str) -> BoolArray:
    """(n_rows,) bool: the value, as float32, is a positive number."""
    with np.errstate(over="ignore", under="ignore"):
        values = pack.column(column).astype(np.float32)
    return np.isfinite(values) & (values > 0)
