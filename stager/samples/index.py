"""From runs to samples: which rows end a complete window with a target, without an entry per sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples import targets
from stager.samples.runs import Breaks, IntArray, Runs, find_breaks
from stager.samples.select import Select
from stager.samples.targets import Target

# First match in this order, for each row that ends no sample.
REASONS = (
    "symbol not selected",
    "outside the interval",
    "run shorter than the window",
    "warm-up of the window",
    "missing value in the window",
    "label beyond the end of the run",
    "missing value in the target",
    "base of the target not positive",
    "direction zero left out",
)


@dataclass(frozen=True)
class SampleIndex:
    """The samples of a Stager, numbered 0..n_samples-1 in row order.

    A span is a stretch of consecutive rows that all end a sample; samples are found by binary search over spans.

    Attributes
    ----------
    window : int
        Rows of a window.
    span_rows : (n_spans,) int64
        The first decision row of each span.
    span_ids : (n_spans + 1,) int64
        The sample at that row; the number of samples last.
    y : (n_rows,) float32 or None
        The target of each decision row; None without a target.
    reasons : dict of str to int
        Rows that end no sample, by reason; with the samples they add up to the rows.
    longest_run : int
    n_runs : int
    breaks : Breaks
    """

    window: int
    span_rows: IntArray
    span_ids: IntArray
    y: npt.NDArray[np.float32] | None
    reasons: dict[str, int]
    longest_run: int
    n_runs: int
    breaks: Breaks

    @property
    def n_samples(self) -> int:
        return int(self.span_ids[-1])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables, target included."""
        return self.span_rows.nbytes + self.span_ids.nbytes + (0 if self.y is None else self.y.nbytes)

    @cached_property
    def spans_by_row(self) -> IntArray:
        """(n_spans,) int64: the spans in the order of their rows; that of their samples may be another."""
        return np.argsort(self.span_rows, kind="stable")

    def rows(self, ids: IntArray) -> IntArray:
        """Decision rows of samples, int64, shape of `ids`."""
        spans = np.searchsorted(self.span_ids, ids, side="right") - 1
        return self.span_rows[spans] + (ids - self.span_ids[spans])

    def rows_between(self, first: int, stop: int) -> IntArray:
        """(stop - first,) int64: decision rows of the samples ``first : stop``, without a search for each."""
        lo = int(np.searchsorted(self.span_ids, first, side="right")) - 1
        hi = int(np.searchsorted(self.span_ids, stop, side="left"))
        ids = self.span_ids[lo : hi + 1]
        counts = np.minimum(ids[1:], stop) - np.maximum(ids[:-1], first)
        return np.arange(first, stop) + np.repeat(self.span_rows[lo:hi] - ids[:-1], counts)

    def at_gap(self, max_gap: int, reach: int) -> int:
        """Complete windows with room for a label if runs could span `max_gap` missing bars, all symbols."""
        counts = self.breaks.runs(max_gap).counts
        return int(np.maximum(counts - (self.window - 1) - reach, 0).sum())


def build_index(pack: Pack, window: int, target: Target | None, select: Select) -> SampleIndex:
    """Find the samples.

    Parameters
    ----------
    pack : Pack
    window : int
        Rows of a window, at least 1.
    target : Target or None
        None serves every complete window.
    select : Select

    Returns
    -------
    SampleIndex

    Raises
    ------
    SampleError
        If there is no sample, naming the numbers that say why.
    """
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
        raise SampleError(f"window is {window!r}; it must be an integer of at least 1 row")
    breaks = find_breaks(pack)
    runs = breaks.runs(select.max_gap)
    reasons = dict.fromkeys(REASONS, 0)
    # A window longer than the pack is as good as one row longer, and fits int64.
    n_needed = min(int(window), pack.n_rows + 1)
    lows, highs = _candidates(pack, runs, n_needed, select, reasons)
    y = state = None
    if target is not None:
        y, state = targets.compute(pack, runs, target)
    incomplete = [column.name for column in pack.manifest.columns if column.n_missing]
    if state is None and not incomplete:
        keep = highs > lows
        span_rows, counts = lows[keep], (highs - lows)[keep]
    else:
        ok = _covered(lows, highs, pack.n_rows)
        if incomplete:
            reasons["missing value in the window"] = _drop(ok, ~_complete_windows(pack, incomplete, n_needed))
        if state is not None:
            why = np.bincount(state[ok], minlength=5)
            for code, reason in zip((targets.BEYOND_RUN, targets.MISSING, targets.NOT_POSITIVE, targets.LEFT_OUT),
                                    REASONS[5:], strict=True):  # fmt: skip
                reasons[reason] = int(why[code])
            ok &= state == targets.VALID
        edges = np.flatnonzero(np.diff(ok, prepend=False, append=False))
        span_rows, counts = edges[::2].copy(), edges[1::2] - edges[::2]
    span_ids = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    longest = int(runs.counts.max())
    if span_ids[-1] == 0:
        raise SampleError(_no_sample(pack, window, target, select, reasons, longest))
    return SampleIndex(int(window), span_rows, span_ids, y, reasons, longest, len(runs), breaks)


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
    short = runs.counts < window
    reasons["run shorter than the window"] = int((highs - lows)[short].sum())
    complete = np.minimum(np.maximum(lows, runs.first_rows + window - 1), highs)
    reasons["warm-up of the window"] = int((complete - lows)[~short].sum())
    complete[short] = highs[short]
    return complete, highs


def _covered(lows: IntArray, highs: IntArray, n_rows: int) -> npt.NDArray[np.bool_]:
    """(n_rows,) bool: the row lies in one of the half-open ranges."""
    steps = np.zeros(n_rows + 1, np.int32)
    np.add.at(steps, lows, 1)
    np.add.at(steps, highs, -1)
    return np.cumsum(steps[:-1], dtype=np.int32) > 0


def _complete_windows(pack: Pack, columns: list[str], window: int) -> npt.NDArray[np.bool_]:
    """(n_rows,) bool: no value is missing in the `window` rows up to this one."""
    bad = np.zeros(pack.n_rows, bool)
    for name in columns:
        bad |= ~np.isfinite(pack.column(name))
    rows = np.flatnonzero(bad)
    return ~_covered(rows, np.minimum(rows + window, pack.n_rows), pack.n_rows)


def _drop(ok: npt.NDArray[np.bool_], out: npt.NDArray[np.bool_]) -> int:
    dropped = int((ok & out).sum())
    ok &= ~out
    return dropped


def _no_sample(
    pack: Pack, window: int, target: Target | None, select: Select, reasons: dict[str, int], longest: int
) -> str:
    reach = 0 if target is None else target.reach
    told = "; ".join(f"{n:,} rows: {reason}" for reason, n in reasons.items() if n)
    if longest < window + reach:
        remedy = (
            f"the longest run has {longest:,} rows, the window needs {window:,}"
            + (f" and the target {reach:,} more (delay {target.delay}, horizon {target.horizon})" if target else "")
            + f"; shorten them, or let runs span gaps (max_gap is {select.max_gap})"
        )
    else:
        remedy = "widen the selection, or change the target"
    return f"no sample in {pack.n_rows:,} rows: {remedy}. Rows by reason: {told}"
