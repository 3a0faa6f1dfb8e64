"""The samples of a Stager, without an entry per sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack
from stager.samples.labelling import LabelEnds, label_ends
from stager.samples.normalize import FITTED, Fitted, fit
from stager.samples.runs import Breaks, IntArray

# Of so few samples a binary search is as fast as looking at stretches; so many spans are stepped over one by one.
_FEW_SAMPLES, _STEPS = 64, 3


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
