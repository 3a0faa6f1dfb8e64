"""From runs to samples: which rows end a complete window with a target, without an entry per sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples import filters, targets
from stager.samples.fill import FILLED
from stager.samples.index import SampleIndex
from stager.samples.labelling import LabelEnds, Targets, as_targets, keep_valid, label_rows, source_of
from stager.samples.labels import Labels
from stager.samples.normalize import LAST, RAW, Normalize
from stager.samples.runs import JUMP, NEW_SESSION, NEW_SYMBOL, IntArray, Runs, find_breaks
from stager.samples.select import Select
from stager.samples.targets import Target

# First match in this order, for each row that ends no sample.
_TARGET_REASONS = {
    targets.BEYOND_RUN: "label beyond the end of the run",
    targets.FILLED: "entry or exit at a filled bar",
    targets.MISSING: "missing value in the target",
    targets.NOT_POSITIVE: "base of the target not positive",
    targets.LEFT_OUT: "direction zero left out",
    targets.NO_SCALE: "no scale for the target",
    targets.NO_LABEL: "no label given",
}
# Why a run holds no complete window yet, by what it begins after.
_BEGINNINGS = {
    NEW_SYMBOL: "warm-up of the window",
    JUMP: "roll or split in the window",
    NEW_SESSION: "session boundary in the window",
}
REASONS = (
    "symbol not selected",
    "outside the interval",
    "outside the session",
    "history too short",
    "symbol shorter than the window",
    *_BEGINNINGS.values(),
    "gap in the window",
    "not in the universe",
    "decision at a filled bar",
    "not on the stride",
    "missing value in the window",
    "last close of the window not positive",
    *_TARGET_REASONS.values(),
)


def build_index(
    pack: Pack, window: int, target: Targets, select: Select, normalize: Normalize = RAW, dilation: int = 1
) -> SampleIndex:
    """Find the samples.

    Parameters
    ----------
    pack : Pack
    window : int
        Rows of a window, at least 1.
    target : Target, Labels, a sequence of them, or None
        A row needs one of its targets to end a sample; None serves every complete window.
    select : Select
    normalize : Normalize
    dilation : int
        Rows from one row of a window to the next, at least 1.

    Returns
    -------
    SampleIndex

    Raises
    ------
    SampleError
        If there is no sample, naming the numbers that say why.
    """
    for name, value in (("window", window), ("dilation", dilation)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise SampleError(f"{name} is {value!r}; it must be an integer of at least 1 row")
    window, dilation = (int(window) - 1) * int(dilation) + 1, int(dilation)
    if pack.manifest.panel is not None:
        raise SampleError("the pack is a panel, which has no samples of its own here; give the pack it was made from")
    wanted, columns = as_targets(target), _columns(pack, select)
    breaks = find_breaks(pack, filters.sessions_of(pack, select), filters.jumps_of(pack, select))
    runs = breaks.runs(select.max_gap)
    filled = None
    if FILLED in pack.columns and not select.allow_filled:
        filled = pack.column(FILLED) != 0
    sources = tuple(source_of(pack, breaks, runs, one, filled) for one in wanted)
    reasons = dict.fromkeys(REASONS, 0)
    # A window longer than the pack is as good as one row longer, and fits int64.
    n_needed = min(window, pack.n_rows + 1)
    lows, highs = _candidates(pack, runs, n_needed, select, reasons)
    served = pack.columns if columns is None else columns
    methods = normalize.methods([pack.manifest.columns[pack.columns.index(name)] for name in served])
    by_close = methods is not None and LAST in methods
    masks = _masks(pack, select, served, filled, by_close, n_needed, dilation)
    y = None
    ends: list[LabelEnds] = []
    if not sources and not masks:
        keep = highs > lows
        span_rows, counts = lows[keep], (highs - lows)[keep]
    else:
        ok = _within(lows, highs, pack.n_rows)
        for reason, mask in masks.items():
            reasons[reason] = _drop(ok, ~mask())
        if sources:
            y, state, ends = label_rows(pack, sources, ok)
            why = keep_valid(state, ok)
            for code, reason in _TARGET_REASONS.items():
                reasons[reason] = int(why[code])
            y = y[:, 0] if isinstance(target, (Target, Labels)) else y
        edges = np.flatnonzero(np.diff(ok, prepend=False, append=False))
        span_rows, counts = edges[::2].copy(), edges[1::2] - edges[::2]
    span_ids = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    longest = int(runs.counts[~runs.outside].max(initial=0))
    if span_ids[-1] == 0:
        raise SampleError(_no_sample(pack, window, target, select, reasons, longest))
    chosen = None if columns is None else np.array([pack.columns.index(name) for name in columns])
    index = SampleIndex(
        window, span_rows, span_ids, y, reasons, longest, int((~runs.outside).sum()), breaks, tuple(ends),
        chosen, methods, pack.columns.index("close"), warnings=filters.doubted_splits(pack, select),
        dilation=dilation,
    )  # fmt: skip
    return index.refit(pack)


def _columns(pack: Pack, select: Select) -> tuple[str, ...] | None:
    """The columns that are served; None for all as they are."""
    if select.columns is None:
        return None
    if unknown := [name for name in select.columns if name not in pack.columns]:
        raise SampleError(f"the pack has no column {unknown[0]!r}; it has: {', '.join(pack.columns)}")
    return None if select.columns == pack.columns else tuple(select.columns)


def _masks(
    pack: Pack,
    select: Select,
    served: tuple[str, ...],
    filled: filters.BoolArray | None,
    by_close: bool,
    window: int,
    dilation: int,
) -> dict[str, Callable[[], filters.BoolArray]]:
    """What is left to look at row by row, in the order of the reasons."""
    masks: dict[str, Callable[[], filters.BoolArray]] = {}
    if select.universe is not None:
        masks["not in the universe"] = lambda: filters.members(pack, select)
    if filled is not None:
        masks["decision at a filled bar"] = lambda: ~filled
    if select.stride > 1:
        masks["not on the stride"] = lambda: filters.on_stride(pack, int(select.stride))
    incomplete = [column.name for column in pack.manifest.columns if column.n_missing and column.name in served]
    if incomplete:
        masks["missing value in the window"] = lambda: filters.complete_windows(pack, incomplete, window, dilation)
    if by_close:
        masks["last close of the window not positive"] = lambda: filters.positive(pack, "close")
    return masks


def _within(lows: IntArray, highs: IntArray, n_rows: int) -> filters.BoolArray:
    """(n_rows,) bool: the row lies in one of the half-open ranges, which follow each other without overlap."""
    edges = np.column_stack([lows, highs]).ravel()
    lengths = np.diff(edges, prepend=0, append=n_rows)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def _candidates(
    pack: Pack, runs: Runs, window: int, select: Select, reasons: dict[str, int]
) -> tuple[IntArray, IntArray]:
    """Per run the half-open range of rows that end a complete window and are selected."""
    first_selected, last_selected = pack.first_rows.copy(), pack.first_rows + pack.counts
    if select.symbols is not None:
        known = {symbol: index for index, symbol in enumerate(pack.symbols)}
        if unknown := [symbol for symbol in select.symbols if symbol not in known]:
            raise SampleError(
                f"the pack has no symbol {unknown[0]!r}; it has {len(known)}: {', '.join(pack.symbols[:8])}"
                + (", ..." if len(known) > 8 else "")
            )
        chosen = np.zeros(len(known), bool)
        chosen[[known[symbol] for symbol in select.symbols]] = True
        reasons["symbol not selected"] = int(pack.counts[~chosen].sum())
        last_selected[~chosen] = first_selected[~chosen]
    if select.interval is not None:
        start, end = select.bounds
        before = int((last_selected - first_selected).sum())
        for index in np.flatnonzero(last_selected > first_selected):
            rows = slice(int(first_selected[index]), int(last_selected[index]))
            inside = np.searchsorted(pack.interval.available(pack.times[rows]), [start, end])
            first_selected[index], last_selected[index] = rows.start + inside
        reasons["outside the interval"] = before - int((last_selected - first_selected).sum())
    symbol_of_run = np.searchsorted(pack.first_rows, runs.first_rows, side="right") - 1
    lows = np.maximum(runs.first_rows, first_selected[symbol_of_run])
    highs = np.maximum(lows, np.minimum(runs.ends, last_selected[symbol_of_run]))
    reasons["outside the session"] = int((highs - lows)[runs.outside].sum())
    highs[runs.outside] = lows[runs.outside]
    if select.min_history > 0:
        historic = np.clip(filters.historic_rows(pack, int(select.min_history))[symbol_of_run], lows, highs)
        reasons["history too short"] = int((historic - lows).sum())
        lows = historic
    complete = np.clip(runs.first_rows + (window - 1), lows, highs)
    lost = complete - lows
    short = pack.counts[symbol_of_run] < window
    reasons["symbol shorter than the window"] = int(lost[short].sum())
    for boundary, reason in _BEGINNINGS.items():
        reasons[reason] = int(lost[~short & (runs.missing == boundary)].sum())
    reasons["gap in the window"] = int(lost[~short & (runs.missing < NEW_SESSION)].sum())
    return complete, highs


def _drop(ok: filters.BoolArray, out: filters.BoolArray) -> int:
    dropped = int((ok & out).sum())
    ok &= ~out
    return dropped


def _no_sample(pack: Pack, window: int, target: Targets, select: Select, reasons: dict[str, int], longest: int) -> str:
    nearest = min(as_targets(target), key=lambda one: one.reach, default=None)
    reach = 0 if nearest is None else nearest.reach
    told = "; ".join(f"{n:,} rows: {reason}" for reason, n in reasons.items() if n)
    if longest == 0:
        remedy = f"no bar opens inside the session {select.session!r}; look at its hours and its zone"
    elif longest < window + reach:
        remedy = (
            f"the longest run has {longest:,} rows, the window needs {window:,}"
            + (
                f" and the target {reach:,} more (delay {nearest.delay}, horizon {nearest.horizon})"
                if isinstance(nearest, Target)
                else ""
            )
            + f"; shorten them, or let runs span gaps (max_gap is {select.max_gap})"
        )
    else:
        remedy = "widen the selection, or change the target"
    return f"no sample in {pack.n_rows:,} rows: {remedy}. Rows by reason: {told}"
