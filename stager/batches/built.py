"""Everything that is served from some bars, in the form in which the leak test compares it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stager.batches.host import HostGather
from stager.batches.resident import as_pack
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.derive import Derive, derive
from stager.samples.index import SampleIndex
from stager.samples.labelling import Targets, as_targets
from stager.samples.normalize import Normalize
from stager.samples.panel import Panel, panel, panel_plan
from stager.samples.panel_index import PanelIndex, find_samples
from stager.samples.schemes import Scheme
from stager.samples.select import Select
from stager.samples.tables import EventTable, TableSource
from stager.samples.targets import Target

Prepare: TypeAlias = Derive | Callable[[Pack], Pack] | None
Chosen: TypeAlias = Select | Callable[[Pack], Select]
Int64 = npt.NDArray[np.int64]

# How the mask of a panel is called beside the columns of its symbols.
MASK = "mask"

_NOT_A_TIME = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Request:
    """What is made of bars and served from them."""

    window: int
    dilation: int
    target: Targets
    select: Chosen
    normalize: Normalize
    prepare: Prepare
    panel: Panel | None
    split: Scheme | None
    #: Of bars that lack symbols of the original ones.
    lacking: bool = False

    @property
    def of_window(self) -> Normalize:
        """Normalisation without what each fold fits on its own training, which is checked with the folds."""
        return self.normalize if self.split is None else replace(self.normalize, fit="window")

    def prepared(self, bars: Pack) -> Pack:
        """What is derived from bars, and set side by side."""
        if isinstance(self.prepare, Derive):
            made = derive(bars, self.prepare)
        else:
            made = bars if self.prepare is None else as_pack(self.prepare(bars))
        if self.panel is None:
            return made
        recipe = self.panel
        if self.lacking and recipe.symbols is not None:
            absent = panel_plan(made, replace(recipe, symbols=None)).left_out
            there = set(made.symbols).difference(absent)
            recipe = replace(recipe, symbols=[symbol for symbol in recipe.symbols if symbol in there])
        return panel(made, recipe)

    def without_the_vanished(self, bars: Pack) -> Request:
        """The same request of bars that lack symbols of the original ones, without what is said of those alone."""
        prepare, select = self.prepare, self.select
        if isinstance(prepare, Derive):
            prepare = replace(prepare, rolls=_of_symbols(prepare.rolls, bars), splits=_of_symbols(prepare.splits, bars))
        if isinstance(select, Select):
            select = replace(select, rolls=_of_symbols(select.rolls, bars), splits=_of_symbols(select.splits, bars))
        return replace(self, prepare=prepare, select=select, lacking=True)

    def selected(self, pack: Pack) -> Select:
        """The selection from a prepared pack."""
        if callable(self.select):
            return self.select(pack)
        layout, select = pack.manifest.panel, self.select
        symbols = pack.symbols if layout is None else layout.symbols
        if self.lacking and select.symbols is not None:
            select = replace(select, symbols=[symbol for symbol in select.symbols if symbol in set(symbols)])
        return select


@dataclass(frozen=True)
class Places:
    """Symbols and decisions of some samples; of a panel, of its instants, or of its symbols at some of them.

    Attributes
    ----------
    symbols : tuple of str
    owners : (n,) int64
        The symbol of each, by its place in `symbols`.
    decisions : (n,) int64
    rows : (n,) int64
        Decision rows of the index.
    """

    symbols: tuple[str, ...]
    owners: Int64
    decisions: Int64
    rows: Int64

    @classmethod
    def of_rows(cls, pack: Pack, rows: Int64) -> Places:
        """Those of some decision rows of a pack."""
        owners = np.searchsorted(pack.first_rows, rows, side="right") - 1
        return cls(pack.symbols, owners, pack.available_at(rows), rows)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, some: npt.NDArray[np.bool_] | Int64) -> Places:
        """Some of them."""
        return Places(self.symbols, self.owners[some], self.decisions[some], self.rows[some])

    def decided_by(self, instant: int) -> Places:
        """Those that are decided by then."""
        return self.of(self.decisions <= instant)

    def earliest(self, some: npt.NDArray[np.bool_] | None = None) -> int:
        """The number of the earliest of them."""
        numbers = np.arange(len(self)) if some is None else np.flatnonzero(some)
        return int(numbers[np.argmin(self.decisions[numbers])])

    def place(self, number: int) -> tuple[str, int]:
        """Symbol and decision of one of them."""
        return self.symbols[int(self.owners[number])], int(self.decisions[number])

    def keys(self, symbols: tuple[str, ...]) -> npt.NDArray[np.void]:
        """Symbol and decision of each, by the place of its symbol in `symbols`, -1 for others."""
        known = {symbol: number for number, symbol in enumerate(symbols)}
        owners = np.array([known.get(symbol, -1) for symbol in self.symbols], np.int64)
        found = np.empty(len(self), [("owner", np.int64), ("decision", np.int64)])
        found["owner"], found["decision"] = owners[self.owners], self.decisions
        return found


@dataclass(frozen=True)
class Labelled:
    """The labels of one target, and when each becomes known."""

    places: Places
    y: npt.NDArray[np.float32]
    ends: Int64

    def known_by(self, instant: int) -> Labelled:
        """Those that are known by then."""
        return self.of(self.ends <= instant)

    def of(self, some: npt.NDArray[np.bool_]) -> Labelled:
        """Some of them."""
        return Labelled(self.places.of(some), self.y[some], self.ends[some])


class Built:
    """What is served from some bars.

    Parameters
    ----------
    bars : Pack
    request : Request
    strict : bool
        Whether it is an error if no sample has a label.

    Attributes
    ----------
    pack : Pack
        Whose rows decisions are.
    samples : Places
        Without a target, because a label needs the future.
    cells : Places or None
        Of a panel, the symbols that are served at each instant.
    symbols : tuple of str
        Of a panel, its symbols; else empty.
    columns : tuple of str
        Served of each symbol, and the mask of a panel.
    targets : list of Target
        Without labels that the user gives, which are not computed from bars.

    Raises
    ------
    SampleError
        If there is no sample.
    """

    def __init__(self, bars: Pack, request: Request, *, strict: bool = False) -> None:
        self.request = request
        self.prepared = prepared = request.prepared(bars)
        self._select = request.selected(prepared)
        self.pack, self.index = self.find(None, request.of_window)
        self.samples = Places.of_rows(self.pack, self.index.rows_between(0, self.index.n_samples))
        self.cells: Places | None = None
        self.symbols: tuple[str, ...] = ()
        layout, gathered = prepared.manifest.panel, self.index
        names = prepared.columns if layout is None else tuple(column.name for column in layout.columns)
        served = self.index.columns
        self.columns = names if served is None else tuple(names[column] for column in served)
        if isinstance(self.index, PanelIndex):
            self.symbols, self.columns = self.index.symbols, (*self.columns, MASK)
            instants, owners = np.nonzero(self.index.cells[self.samples.rows])
            of_cells = self.samples.of(instants)
            self.cells = Places(self.symbols, owners, of_cells.decisions, of_cells.rows)
            gathered = self.index.of_rows_as_they_lie()
        self._gather = HostGather(prepared.rows, gathered)
        self.targets = [target for target in as_targets(request.target) if isinstance(target, Target)]
        self._labelled: SampleIndex | None = None
        if self.targets:
            with contextlib.nullcontext() if strict else contextlib.suppress(SampleError):  # no sample has a label yet
                self._labelled = self.find(self.targets, request.of_window)[1]

    def find(self, target: Targets, normalize: Normalize) -> tuple[Pack, SampleIndex]:
        """The samples with a target."""
        return find_samples(self.prepared, self.request.window, target, self._select, normalize, self.request.dilation)

    def windows(self, rows: Int64) -> npt.NDArray[np.float32]:
        """(n, window, n_symbols, n_columns) float32: what is served at decision rows, the mask of a panel as a column.

        Bars that are not of a panel have one symbol here.
        """
        index = self.index
        x = self._gather.gather(rows)[0].reshape(len(rows), index.length, max(1, len(self.symbols)), -1)
        if not isinstance(index, PanelIndex):
            return x
        seen = index.mask[rows[:, None] + np.arange(1 - index.window, 1, index.dilation)].astype(np.float32)
        return np.concatenate([x, seen[..., None]], axis=-1)

    @cached_property
    def labels(self) -> tuple[Labelled, ...]:
        """Of each target; empty where no sample has one."""
        if self._labelled is None:
            return ()
        return tuple(self._labels_of(self._labelled, number) for number in range(len(self.targets)))

    def _labels_of(self, index: SampleIndex, number: int) -> Labelled:
        rows = index.rows_between(0, index.n_samples)
        assert index.y is not None
        shape = len(rows), max(1, len(self.symbols)), len(self.targets)
        y: npt.NDArray[Any] = index.y[rows].reshape(shape)[..., number]
        ends = index.label_ends(rows).reshape(shape)[..., number]
        samples, owners = there = np.nonzero(ends != _NOT_A_TIME)
        ends = ends[there]
        if self.targets[number].exit_column == "open":
            # What becomes of a bar that has opened is changed as a whole, its open too.
            ends = self.pack.interval.available(ends)
        places = Places.of_rows(self.pack, rows[samples])
        if self.symbols:
            places = replace(places, symbols=self.symbols, owners=owners)
        return Labelled(places, y[there], ends)


def _of_symbols(table: TableSource, bars: Pack) -> TableSource:
    """The table of events, or None where it tells nothing about any of the symbols."""
    if table is None or (isinstance(table, str) and table in bars.columns):
        return table
    return table if (EventTable(table, "events").codes(bars.symbols) >= 0).any() else None
