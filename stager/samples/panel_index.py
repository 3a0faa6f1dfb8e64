"""Samples of a panel: decision instants with a complete window of the axis, and a label for any of the symbols.

Labels are those of the symbols' own bars: a panel is taken apart into them, so every target, selection and label end is
computed as for any other pack, and put side by side again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.packs.manifest import Column, PanelLayout
from stager.samples import filters
from stager.samples.building import build_index
from stager.samples.fill import FILLED
from stager.samples.index import SampleIndex
from stager.samples.labelling import Targets
from stager.samples.normalize import FITTED, LAST, RAW, Normalize, fit
from stager.samples.panel import empty_places
from stager.samples.runs import IntArray
from stager.samples.select import Select, check_select

BoolArray = npt.NDArray[np.bool_]

NO_CELL = "no symbol with a sample"
JUMP_IN_WINDOW = "roll or split in the window"

_NEVER = np.iinfo(np.int64).min
_CHUNK_ROWS = 1 << 12


@dataclass(frozen=True)
class Cells:
    """What the places of a panel hold.

    Attributes
    ----------
    n_symbols : int
    fill : float
        Share of the places whose bar was observed, with all served columns.
    n_bars : int
        Bars, filled ones included.
    empty : dict of str to int
        Places without a bar; with `n_bars` they add up to all.
    n_cells : int
        Bars whose symbol is served at their decision: selected, and with a target where one is asked for.
    reasons : dict of str to int
        The other bars by reason; with `n_cells` they add up to `n_bars`.
    """

    n_symbols: int
    fill: float
    n_bars: int
    empty: dict[str, int]
    n_cells: int
    reasons: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PanelIndex(SampleIndex):
    """The samples of a panel. Rows are instants of its axis; a symbol at an instant is a cell.

    Attributes
    ----------
    y : (n_times, n_symbols) or (n_times, n_symbols, n_targets) float32, or None
        The target of each cell, NaN where there is none.
    columns : (n_columns,) int64 or None
        The columns of each symbol that are served.
    symbols : tuple of str
    mask : (n_times, n_symbols) bool
        The bar was observed: it is there, was not filled in, and misses none of the served columns.
    cells : (n_times, n_symbols) bool
        The symbol is selected at this decision, and has a target where one is asked for.
    keys : (n_bars,) int64
        Ascending: ``symbol * n_times + instant`` of each bar.
    bar_ends : (n_bars,) or (n_bars, n_targets) int64, or None
        When the label of each bar becomes known, NaT's number for none.
    known : (n_times,) int64 or None
        When all labels of an instant are known.
    n_columns : int
        Columns of each symbol in the rows.
    counts : Cells
    """

    symbols: tuple[str, ...]
    mask: BoolArray
    cells: BoolArray
    keys: IntArray
    bar_ends: IntArray | None
    known: IntArray | None
    n_columns: int
    counts: Cells

    def of_rows_as_they_lie(self) -> SampleIndex:
        """The same windows as of a pack whose columns are those of all symbols, without targets."""
        n_symbols = len(self.symbols)
        columns = np.arange(self.n_columns) if self.columns is None else self.columns
        first = np.arange(n_symbols)[:, None] * self.n_columns
        of_closes = first + np.full(len(columns), self.close_column)
        return replace(
            self,
            y=None,
            columns=None if self.columns is None else (first + columns).reshape(-1),
            methods=None if self.methods is None else np.tile(self.methods, n_symbols),
            fitted=None if self.fitted is None else np.tile(self.fitted, n_symbols),
            close_columns=of_closes.reshape(-1),
        )

    def refit(self, pack: Pack) -> SampleIndex:
        """The same samples, with what is fitted for normalisation fitted on their cells, of all symbols together."""
        if self.methods is None or FITTED not in self.methods:
            return self
        columns = np.arange(self.n_columns) if self.columns is None else self.columns
        instants = self.rows_between(0, self.n_samples)
        places, owners = np.nonzero(self.cells[instants] & self.mask[instants])
        rows = pack.rows.reshape(-1, self.n_columns)
        return replace(self, fitted=fit(rows, instants[places] * len(self.symbols) + owners, columns))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables, target and mask included."""
        return (
            self.span_rows.nbytes + self.span_ids.nbytes + (0 if self.y is None else self.y.nbytes) + self.mask.nbytes
        )

    def label_ends(self, rows: IntArray) -> IntArray:
        """When the labels of instants become known, nanoseconds UTC.

        Returns
        -------
        (n, n_symbols) or (n, n_symbols, n_targets) int64
            As `y`; the number of NaT, the least int64, where a cell has none.
        """
        assert self.bar_ends is not None
        wanted = np.arange(len(self.symbols)) * len(self.mask) + rows[:, None]
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        found = self.bar_ends[place]
        found[self.keys[place] != wanted] = _NEVER
        return found

    def known_at(self, rows: IntArray) -> IntArray:
        """(n,) int64: when all labels of instants that end a sample are known, nanoseconds UTC."""
        assert self.known is not None
        return self.known[rows]


class _Bars:
    """The bars of a panel, symbol after symbol. Columns are put together when asked for."""

    def __init__(self, pack: Pack, layout: PanelLayout, there: BoolArray, owners: IntArray, places: IntArray) -> None:
        self.times, self.rows = pack.times[places], pack.rows
        self._panel, self._layout, self._there, self._owners = pack, layout, there, owners

    def column(self, name: str) -> npt.NDArray[np.float64]:
        return np.concatenate(
            [
                self._panel.column(self._layout.name(symbol, name))[self._there[:, number]]
                for number, symbol in enumerate(self._layout.symbols)
            ]
        )

    @property
    def bars(self) -> pa.Table:
        symbols = pa.DictionaryArray.from_arrays(
            pa.array(self._owners, pa.int32()), pa.array(self._layout.symbols, pa.string())
        )
        times = pa.array(self.times, pa.int64()).view(pa.timestamp("ns", "UTC"))
        names = [column.name for column in self._layout.columns]
        return pa.table({"symbol": symbols, "time": times, **{name: pa.array(self.column(name)) for name in names}})

    def pack(self) -> Pack:
        """A pack of one symbol after the other; its rows are those of the panel."""
        layout, manifest = self._layout, self._panel.manifest
        counts = np.bincount(self._owners, minlength=len(layout.symbols))
        manifest = msgspec.structs.replace(
            manifest, panel=None, columns=layout.columns, n_rows=len(self._owners), n_symbols=len(layout.symbols)
        )
        return Pack(None, manifest, self, tuple(layout.symbols), np.cumsum(counts) - counts, counts)


def find_samples(
    pack: Pack, window: int, target: Targets, select: Select, normalize: Normalize = RAW, dilation: int = 1
) -> tuple[Pack, SampleIndex]:
    """The samples of any pack, and the pack whose rows decisions are: that of a panel has its axis as one symbol.

    Raises
    ------
    SampleError
        As :func:`stager.samples.building.build_index`.
    """
    check_select(select)
    layout = pack.manifest.panel
    if layout is None:
        return pack, build_index(pack, window, target, select, normalize, dilation)
    axis = _axis(pack, layout)
    on_axis = Select(
        interval=select.interval, max_gap=select.max_gap, session=select.session, columns=select.columns,
        close_inclusive=select.close_inclusive, stride=select.stride, allow_filled=True,
    )  # fmt: skip
    index = build_index(axis, window, None, on_axis, dilation=dilation)
    names = [column.name for column in layout.columns]
    there = _there(pack, names, ["close"], filled=True)
    owners, places = np.nonzero(there.T)
    bars = _Bars(pack, layout, there, owners, places).pack()
    found = build_index(bars, 1, target, select)
    rows, reasons = found.rows_between(0, found.n_samples), dict(found.reasons)
    jumps = filters.jumps_of(bars, select)
    if jumps is not None and len(jumps):
        last = jumps[np.maximum(np.searchsorted(jumps, rows, side="right") - 1, 0)]
        spanned = (last <= rows) & (owners[last] == owners[rows]) & (places[last] > places[rows] - (index.window - 1))
        rows, reasons[JUMP_IN_WINDOW] = rows[~spanned], reasons[JUMP_IN_WINDOW] + int(spanned.sum())
    cells = np.zeros(there.shape, bool)
    cells[places[rows], owners[rows]] = True
    y = bar_ends = known = None
    if found.y is not None:
        y = np.full((*there.shape, *found.y.shape[1:]), np.nan, np.float32)
        y[places[rows], owners[rows]] = found.y[rows]
        ends = found.label_ends(rows)
        bar_ends = np.full(found.y.shape, _NEVER)
        bar_ends[rows] = ends
        known = np.full(len(there), _NEVER)
        np.maximum.at(known, places[rows], ends if ends.ndim == 1 else ends.max(axis=1))
    served = names if index.columns is None else [names[column] for column in index.columns]
    mask = _there(pack, names, ["close", *served], filled=False)
    methods = normalize.methods([layout.columns[names.index(name)] for name in served])
    if methods is not None and LAST in methods:
        _check_positive(pack, layout, names.index("close"))
    made = PanelIndex(
        **{field.name: getattr(index, field.name) for field in fields(SampleIndex)}
        | {"y": y, "methods": methods, "close_column": names.index("close"), "warnings": found.warnings},
        symbols=tuple(layout.symbols),
        mask=mask,
        cells=cells,
        keys=owners * len(there) + places,
        bar_ends=bar_ends,
        known=known,
        n_columns=len(names),
        counts=Cells(
            there.shape[1],
            float(mask.mean()),
            len(owners),
            empty_places(owners, places, len(there)),
            len(rows),
            reasons,
        ),
    )
    instants = made.rows_between(0, made.n_samples)
    occupied: BoolArray = np.asarray(cells.any(axis=1))
    kept = instants[occupied[instants]]
    if not len(kept):
        raise SampleError(
            f"no sample in {len(there):,} instants of the panel: {len(instants):,} end a complete window, and none of "
            f"these has a symbol with a sample; widen the selection, or change the target"
        )
    return axis, made.of_rows(kept, {NO_CELL: len(instants) - len(kept)}).refit(axis)


def _check_positive(pack: Pack, layout: PanelLayout, close: int) -> None:
    """Raise if some close can't be divided by: of a panel, a window can't be left out for one of its symbols."""
    rows = pack.rows.reshape(pack.n_rows, len(layout.symbols), -1)
    for first in range(0, len(rows), _CHUNK_ROWS):
        bad = np.argwhere(rows[first : first + _CHUNK_ROWS, :, close] <= 0)
        if len(bad):
            place, symbol = bad[0]
            name, value = layout.symbols[symbol], float(rows[first + place, symbol, close])
            raise SampleError(
                f"normalize divides prices by a close, and that of {name} at "
                f"{np.datetime64(int(pack.times[first + place]), 'ns')} is {value:g}; use Normalize(price='zscore'), "
                f"or a panel without {name}"
            )


def _axis(pack: Pack, layout: PanelLayout) -> Pack:
    """The panel as a pack of one symbol, whose bars are there at every instant."""
    columns = [Column(column.name, column.role, 0) for column in layout.columns]
    manifest = msgspec.structs.replace(pack.manifest, columns=columns, panel=None)
    return Pack(pack.path, manifest, pack.held, pack.symbols, pack.first_rows, pack.counts)


def _there(pack: Pack, names: list[str], needed: list[str], *, filled: bool) -> BoolArray:
    """(n_times, n_symbols) bool: the bar is there with all of the columns; `filled` ones count or don't."""
    places = sorted({names.index(name) for name in needed})
    flag = names.index(FILLED) if FILLED in names and not filled else None
    rows = pack.rows.reshape(pack.n_rows, -1, len(names))
    found = np.empty(rows.shape[:2], bool)

    def look(first: int) -> None:
        part, out = rows[first : first + _CHUNK_ROWS], found[first : first + _CHUNK_ROWS]
        np.isfinite(part[:, :, places[0]], out=out)
        for place in places[1:]:
            out &= np.isfinite(part[:, :, place])
        if flag is not None:
            out &= part[:, :, flag] == 0

    parallel(look, range(0, len(rows), _CHUNK_ROWS))
    return found
