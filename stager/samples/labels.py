"""Labels that a user supplies, with the instants at which they become known."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np

from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.runs import IntArray
from stager.samples.tables import LAST, EventTable, TableSource, rows_from
from stager.samples.targets import MISSING, NO_LABEL, VALID, FloatArray, StateArray, check_scale


@dataclass(frozen=True)
class Labels:
    """A target that is given instead of computed, as by the triple-barrier method.

    Parameters
    ----------
    table : pyarrow.Table, data frame or path
        A Parquet or CSV file, or a table, with a row for every labelled bar, or only for some of them. Columns:
        ``symbol``; the bar, as ``time`` (its stamp in the pack, the open) or as ``decision`` (its close); the value;
        and the instant at which the label becomes known, not before the decision. Instants without a zone are UTC.
    value : str
        Column of the value, a number; an empty or infinite one is no label.
    end : str
        Column of the instant at which the label becomes known.
    scale : {None, "rank", "demean"}
        As in :class:`Target`.

    Raises
    ------
    SampleError
        If a value is not allowed; when samples are made, if a row fits no bar or the table can't be used.
    """

    table: TableSource
    _: KW_ONLY
    value: str = "label"
    end: str = "label_end"
    scale: Literal["rank", "demean"] | None = None

    def __post_init__(self) -> None:
        for name, column in (("value", self.value), ("end", self.end)):
            if not isinstance(column, str) or not column:
                raise SampleError(f"labels {name} is {column!r}; it must be the name of a column")
        check_scale(self.scale, (None, "rank", "demean"))

    @property
    def reach(self) -> int:
        """Bars that a label needs after the decision: none that is known here."""
        return 0


class TableLabels:
    """Labels over a pack: one entry for each labelled row."""

    def __init__(self, pack: Pack, labels: Labels) -> None:
        self.labels, self._pack = labels, pack
        what = f"labels {labels.value!r}"
        table = EventTable(labels.table, what)
        if ("time" in table) == ("decision" in table):
            raise SampleError(
                f"{what}: the bar is told by a column 'time' (its open) or 'decision' (its close), one of the two"
            )
        key = "time" if "time" in table else "decision"
        codes, stamps = table.codes(pack.symbols), table.instants(key)
        values = table.numbers(labels.value)
        has_value = np.isfinite(values)
        ends = table.instants(labels.end, null=LAST)
        rows = self._rows(table, key, codes, stamps)
        order = np.argsort(rows, kind="stable")
        self._rows_sorted, self._values, self._ends = rows[order], values[order], ends[order]
        if np.any(twice := self._rows_sorted[1:] == self._rows_sorted[:-1]):
            row = int(order[np.flatnonzero(twice)[0] + 1])
            raise SampleError(f"{what}: {int(twice.sum()):,} bars have two labels, first {table.told(row, key)}")
        early = (ends < pack.available_at(rows)) & has_value
        endless = (ends == LAST) & has_value
        for bad, why in ((endless, "have no end"), (early, "end before the decision, at the close of their bar")):
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                raise SampleError(f"{what}: {int(bad.sum()):,} labels {why}, first {table.told(row, key, labels.end)}")

    def _rows(self, table: EventTable, key: str, codes: IntArray, stamps: IntArray) -> IntArray:
        """The row of each label; each must fit a bar."""
        pack = self._pack
        known = codes >= 0
        rows = np.zeros(len(codes), np.int64)
        rows[known] = rows_from(pack, codes[known], stamps[known], decision=key == "decision")
        fits = known & (rows < pack.first_rows[codes] + pack.counts[codes])
        there = rows[fits]
        fits[fits] = (pack.available_at(there) if key == "decision" else pack.times[there]) == stamps[fits]
        if not fits.all():
            row = int(np.flatnonzero(~fits)[0])
            raise SampleError(
                f"labels {self.labels.value!r}: {int((~fits).sum()):,} of {len(fits):,} fit no bar of the pack, first "
                f"{table.told(row, key)}; leave them out, or give each the {'close' if key == 'decision' else 'open'} "
                f"of its bar"
            )
        return rows

    @property
    def scale(self) -> str | None:
        return self.labels.scale

    def evaluate(self, first: int, stop: int) -> tuple[FloatArray, StateArray]:
        """Values and states of decision rows ``first : stop``."""
        values, why = np.full(stop - first, np.nan), np.full(stop - first, NO_LABEL, np.uint8)
        part = slice(*np.searchsorted(self._rows_sorted, [first, stop]))
        places, found = self._rows_sorted[part] - first, self._values[part]
        values[places] = found
        why[places] = np.where(np.isfinite(found), VALID, MISSING)
        return values, why

    def ends(self, rows: IntArray) -> IntArray:
        """When the labels of valid decision rows become known, nanoseconds UTC."""
        return self._ends[np.searchsorted(self._rows_sorted, rows)]
