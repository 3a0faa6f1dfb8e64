"""From runs to samples: which rows end a complete window with a target, without an entry per sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples import filters, targets
from stager.samples.fill import FILLED
from stager.samples.labelling import LabelEnds, Targets, as_targets, keep_valid, label_ends, label_rows, source_of
from stager.samples.labels import Labels
from stager.samples.normalize import FITTED, LAST, RAW, Fitted, Normalize, fit
from stager.samples.runs import JUMP, NEW_SESSION, NEW_SYMBOL, Breaks, IntArray, Runs, find_breaks
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
# Of so few samples a binary search is as fast as looking at stretches; so many spans are stepped over one by one.
_FEW_SAMPLES, _STEPS = 64, 3

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


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a Stager, numbered 0..n_samples-1 in row order.

    A span is a stretch of consecutive rows that all end a sample; samples are found by binary search over spans.

    Attributes
    ----------
    window : int
        Rows from a window's first to its last.
    dilation : int
        Rows from one row of a window to the next.
    span_rows : (n_spans,) int64
        The first decision row of each span.
    span_ids : (n_spans + 1,) int64
        The sample at that row; the number of samples last.
    y : (n_rows,) or (n_rows, n_targets) float32, or None
        The target of each decision row, NaN where there is none; two-dimensional for a list of targets, None without.
    reasons : dict of str to int
        Rows that end no sample, by reason; with the samples they add up to the rows.
    longest_run : int
    n_runs : int
    breaks : Breaks
    ends : tuple of callable
        For each target: when the labels of decision rows become known, int64 nanoseconds UTC.
    columns : (n_columns,) int64 or None
        The columns of the rows that are served, in this order; None for all as they are.
    methods : (n_served,) int32 or None
        How each served column is normalised; None for raw values.
    close_column : int
        The column of the rows that prices are normalised by.
    close_columns : (n_served,) int64 or None
        Of a panel, the same for each served column: that of its symbol.
    fitted : (2, n_served) float64 or None
        Mean and deviation of each served column, where some are normalised by what was fitted.
    warnings : tuple of str
        What the bars contradict.
    """

    window: int
    span_rows: IntArray
    span_ids: IntArray
    y: npt.NDArray[np.float32] | None
    reasons: dict[str, int]
    longest_run: int
    n_runs: int
    breaks: Breaks
    ends: tuple[LabelEnds, ...] = ()
    columns: IntArray | None = None
    methods: npt.NDArray[np.int32] | None = None
    close_column: int = 0
    fitted: Fitted | None = None
    close_columns: IntArray | None = None
    dilation: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def n_samples(self) -> int:
        return int(self.span_ids[-1])

    @property
    def length(self) -> int:
        """Rows of a window."""
        return (self.window - 1) // self.dilation + 1

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables, target included."""
        return self.span_rows.nbytes + self.span_ids.nbytes + (0 if self.y is None else self.y.nbytes)

    @cached_property
    def digest(self) -> str:
        """Hash of what decides which sample is which and what it holds, beyond the data themselves."""
        state = hashlib.blake2b(
            f"{self.window}{'' if self.dilation == 1 else f' every {self.dilation}'}".encode(), digest_size=16
        )
        for table in (self.span_rows, self.span_ids, self.columns, self.methods, self.fitted, self.y):
            if table is None:
                state.update(b"none")
            else:
                state.update(f"{table.dtype.str}{table.shape}".encode())
                state.update(np.ascontiguousarray(table).data)
        return state.hexdigest()

    def with_tables(self, keep: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Self:
        """The same, with equal tables in place of its own: whatever `keep` gives for each."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        kept: dict[str, Any] = {name: keep(one) for name, one in values.items() if isinstance(one, np.ndarray)}
        return replace(self, **kept)

    @cached_property
    def spans_by_row(self) -> IntArray:
        """(n_spans,) int64: the spans in the order of their rows; that of their samples may be another."""
        return np.argsort(self.span_rows, kind="stable")

    def rows(self, ids: IntArray) -> IntArray:
        """Decision rows of samples, int64, shape of `ids`."""
        spans = self._spans(ids)
        return self.span_rows[spans] + (ids - self.span_ids[spans])

    def _spans(self, ids: IntArray) -> IntArray:
        """The span of each sample, the last that begins at or before it.

        Stretches of samples as long as most spans tell where to begin, so that few steps are left; a binary search for
        each of many samples takes three times as long.
        """
        if np.size(ids) < _FEW_SAMPLES:
            found: IntArray = np.searchsorted(self.span_ids, ids, side="right") - 1
            return found
        shift, firsts = self._stretches
        spans: IntArray = firsts[ids >> shift]
        for _ in range(_STEPS):
            behind = self.span_ids[spans + 1] <= ids
            if not behind.any():
                return spans
            spans += behind
        # Many short spans in one stretch.
        late = self.span_ids[spans + 1] <= ids
        if late.any():
            spans[late] = np.searchsorted(self.span_ids, ids[late], side="right") - 1
        return spans

    @cached_property
    def _stretches(self) -> tuple[int, IntArray]:
        """Samples of a stretch as a power of two, and the span of the first sample of each stretch."""
        # At least 8, or this table would be as large as those of spans where these are short.
        shift = max(3, (self.n_samples // len(self.span_rows)).bit_length() - 1)
        starts = np.arange(0, self.n_samples, 1 << shift)
        return shift, np.searchsorted(self.span_ids, starts, side="right") - 1

    def of_rows(self, rows: IntArray, reasons: Mapping[str, int] = MappingProxyType({})) -> SampleIndex:
        """The samples that end at some of the decision rows, numbered in the order given; reasons are added."""
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        return replace(
            self, span_rows=rows[starts], span_ids=np.append(starts, len(rows)), reasons=self.reasons | dict(reasons)
        )

    def label_ends(self, rows: IntArray) -> IntArray:
        """When the labels of decision rows that end a sample become known, nanoseconds UTC.

        Returns
        -------
        (n,) or (n, n_targets) int64
            As `y`; the number of NaT, the least int64, for a target that a sample does not have.
        """
        assert self.y is not None
        ends = label_ends(self.ends, self.y.reshape(len(self.y), -1), rows)
        return ends[:, 0] if self.y.ndim == 1 else ends

    def known_at(self, rows: IntArray) -> IntArray:
        """(n,) int64: when all labels of decision rows that end a sample are known, nanoseconds UTC."""
        ends = self.label_ends(rows)
        return ends if ends.ndim == 1 else ends.max(axis=1)

    def rows_between(self, first: int, stop: int) -> IntArray:
        """(stop - first,) int64: decision rows of the samples ``first : stop``, without a search for each."""
        lo = int(np.searchsorted(self.span_ids, first, side="right")) - 1
        hi = int(np.searchsorted(self.span_ids, stop, side="left"))
        ids = self.span_ids[lo : hi + 1]
        counts = np.minimum(ids[1:], stop) - np.maximum(ids[:-1], first)
        return np.arange(first, stop) + np.repeat(self.span_rows[lo:hi] - ids[:-1], counts)

    def refit(self, pack: Pack) -> SampleIndex:
        """The same samples, with what is fitted for normalisation fitted on them."""
        if self.methods is None or FITTED not in self.methods:
            return self
        columns = np.arange(len(pack.columns)) if self.columns is None else self.columns
        return replace(self, fitted=fit(pack.rows, self.rows_between(0, self.n_samples), columns))

    def at_gap(self, max_gap: int, reach: int) -> int:
        """Complete windows with room for a label if runs could span `max_gap` missing bars, all symbols."""
        runs = self.breaks.runs(max_gap)
        counts = runs.counts[~runs.outside]
        return int(np.maximum(counts - (self.window - 1) - reach, 0).sum())


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
