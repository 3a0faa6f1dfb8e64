"""Panels: derived packs in which a row holds the bars of all symbols at one instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stager.bars.arrange import Arranged
from stager.bars.clock import instant_text
from stager.bars.detect import Decision
from stager.bars.memory import available_nbytes
from stager.bars.read import Bars
from stager.bars.threads import parallel
from stager.config import format_nbytes
from stager.errors import SampleError
from stager.packs.derived import beside, check_out, key_of, made_before
from stager.packs.layout import Pack, open_pack
from stager.packs.manifest import Column, PanelLayout
from stager.packs.packing import hold, write
from stager.samples import filters
from stager.samples.instants import distinct
from stager.samples.runs import IntArray, session_positions
from stager.samples.select import Select
from stager.samples.sessions import Sessions

# Part of the name of cached packs: raised when the same recipe gives other values.
_VERSION = 1
# The one symbol of a panel's pack.
PANEL = "panel"


@dataclass(frozen=True)
class Panel:
    """Which bars are set side by side.

    Parameters
    ----------
    symbols : sequence of str, optional
        These, in this order; None for all.
    columns : sequence of str, optional
        These, in this order, the close among them; None for all.
    session, close_inclusive
        As in :class:`Select`: bars outside of all sessions are left out.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    symbols: Sequence[str] | None = None
    _: KW_ONLY
    columns: Sequence[str] | None = None
    session: str | None = None
    close_inclusive: bool = False

    def __post_init__(self) -> None:
        select = self.select
        object.__setattr__(self, "symbols", select.symbols)
        object.__setattr__(self, "columns", select.columns)
        if self.symbols is not None and (not self.symbols or len(set(self.symbols)) < len(self.symbols)):
            raise SampleError(f"symbols is {self.symbols!r}; name at least one, and each once")
        if self.columns is not None and "close" not in self.columns:
            raise SampleError(
                f"columns is {self.columns!r}; a panel needs 'close', which tells the bars that are there. What is "
                f"served can be chosen later: Select(columns=...)"
            )

    @property
    def select(self) -> Select:
        """The same as a selection of samples."""
        return Select(
            symbols=self.symbols, columns=self.columns, session=self.session, close_inclusive=self.close_inclusive
        )


@dataclass(frozen=True)
class PanelPlan:
    """What a panel takes, known before anything is allocated. ``str(plan)`` is a table for people.

    Attributes
    ----------
    n_times, n_symbols : int
        Rows, and symbols in each.
    n_bars : int
        Bars that are there, of ``n_times * n_symbols`` places.
    empty : dict of str to int
        The other places by where they lie among the bars of their symbol. What comes later decides that, so it is told
        here and never served: the mask says observed or not.
    columns : tuple of str
    left_out : tuple of str
        Symbols without any bar in the session.
    rows_nbytes : int
        The rows, as they are staged.
    mask_nbytes : int
        The mask, which each Stager keeps beside the rows.
    disk_nbytes : int
        The pack.
    host_nbytes : int
        Host memory that making it needs for a while.
    """

    n_times: int
    n_symbols: int
    n_bars: int
    empty: dict[str, int]
    columns: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def fill(self) -> float:
        """Share of the places that hold a bar."""
        return self.n_bars / (self.n_times * self.n_symbols)

    @property
    def n_values(self) -> int:
        return self.n_times * self.n_symbols * len(self.columns)

    @property
    def rows_nbytes(self) -> int:
        return 4 * self.n_values

    @property
    def mask_nbytes(self) -> int:
        return self.n_times * -(-self.n_symbols // 4) * 4

    @property
    def disk_nbytes(self) -> int:
        return 12 * self.n_values + 12 * self.n_times

    @property
    def host_nbytes(self) -> int:
        return 12 * self.n_values

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        nbytes = {name: getattr(self, name) for name in ("rows_nbytes", "mask_nbytes", "disk_nbytes", "host_nbytes")}
        return asdict(self) | {"fill": self.fill} | nbytes

    def lines(self) -> list[tuple[str, str]]:
        """The table for people."""
        lines = [
            ("panel", f"{self.n_times:,} instants of {self.n_symbols:,} symbols, {', '.join(self.columns)}"),
            ("filled", f"{self.fill:.1%}: {self.n_bars:,} bars"),
            *((f"- {where}", f"{n:,} places") for where, n in self.empty.items() if n),
            ("memory", f"{format_nbytes(self.rows_nbytes)} rows, {format_nbytes(self.mask_nbytes)} mask; "
                       f"{format_nbytes(self.host_nbytes)} to make it, {format_nbytes(self.disk_nbytes)} on disk"),
        ]  # fmt: skip
        if self.left_out:
            lines.append(("left out", f"{len(self.left_out):,} symbols without a bar: {', '.join(self.left_out[:8])}"))
        return lines

    def __str__(self) -> str:
        lines = self.lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def empty_places(owners: IntArray, places: IntArray, n_times: int) -> dict[str, int]:
    """The places without a bar, of bars that lie symbol after symbol, in the order of time."""
    edges = np.flatnonzero(owners[1:] != owners[:-1])
    firsts, lasts = places[np.append(0, edges + 1)], places[np.append(edges, len(places) - 1)]
    before, after = int(firsts.sum()), int((n_times - 1 - lasts).sum())
    return {
        "before the first bar": before,
        "between bars": n_times * len(firsts) - len(places) - before - after,
        "after the last bar": after,
    }


@dataclass(frozen=True)
class _Axis:
    """The instants of a panel, and where bars lie in it.

    Attributes
    ----------
    times : (n_times,) int64
    symbols : tuple of str
    rows, places, owners : (n_bars,) int64
        Rows of the pack, and the place in the axis and the symbol of each.
    plan : PanelPlan
    """

    times: IntArray
    symbols: tuple[str, ...]
    rows: IntArray
    places: IntArray
    owners: IntArray
    plan: PanelPlan


def panel_plan(pack: Pack | str | Path, recipe: Panel = Panel()) -> PanelPlan:
    """What :func:`panel` would make; looks at the times alone.

    Parameters
    ----------
    pack : Pack or path
    recipe : Panel

    Raises
    ------
    SampleError
        As :func:`panel`.
    """
    pack = pack if isinstance(pack, Pack) else open_pack(pack)
    return _lay(pack, recipe, filters.sessions_of(pack, recipe.select)).plan


def panel(
    pack: Pack | str | Path,
    recipe: Panel = Panel(),
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
) -> Pack:
    """A derived pack with a row for every instant at which any of the symbols has a bar.

    A row holds the columns of all symbols side by side, NaN where a symbol has no bar: whether one was observed says
    nothing of the future. A Stager over it serves ``x (batch, window, n_symbols, n_columns)`` with ``batch.mask``.

    Parameters
    ----------
    pack : Pack or path
    recipe : Panel
    out : path, optional
        Where to write it. By default it is kept beside the pack under a name that tells pack and recipe, and opened
        instead of made the next time; from a pack in memory it is held in memory.
    overwrite : bool
        Replace a pack at `out`.

    Returns
    -------
    Pack

    Raises
    ------
    SampleError
        If recipe and pack don't fit, or the host lacks memory to make it.
    PackError
        If it can't be written.
    """
    pack = pack if isinstance(pack, Pack) else open_pack(pack)
    check_out(out, overwrite)
    sessions = filters.sessions_of(pack, recipe.select)
    if out is None and pack.path is not None:
        out, overwrite = beside(pack.path, _key(pack, recipe, sessions)), True
        if made := made_before(out):
            return made
    axis = _lay(pack, recipe, sessions)
    needed, available = axis.plan.host_nbytes, available_nbytes()
    if needed > available:
        raise SampleError(
            f"making the panel takes {format_nbytes(needed)} of host memory, {format_nbytes(available)} are available: "
            f"{axis.plan.n_times:,} instants of {axis.plan.n_symbols:,} symbols, {axis.plan.fill:.1%} filled; choose "
            f"fewer symbols or columns, or a session"
        )
    bars, layout = _build(pack, axis)
    return hold(bars, panel=layout) if out is None else write(bars, Path(out), overwrite, panel=layout)


def _key(pack: Pack, recipe: Panel, sessions: Sessions | None) -> str:
    told = _VERSION, "panel", recipe.symbols, recipe.columns, recipe.close_inclusive
    return key_of(pack, told, () if sessions is None else (sessions.opens, sessions.closes))


def _lay(pack: Pack, recipe: Panel, sessions: Sessions | None) -> _Axis:
    """Where the bars lie in the panel."""
    if pack.manifest.panel is not None:
        raise SampleError("the pack is a panel already; give the pack that it was made from")
    columns = pack.columns if recipe.columns is None else tuple(recipe.columns)
    wanted = pack.symbols if recipe.symbols is None else tuple(recipe.symbols)
    known = {symbol: number for number, symbol in enumerate(pack.symbols)}
    for what, unknown in (
        ("symbol", [symbol for symbol in wanted if symbol not in known]),
        ("column", [column for column in columns if column not in pack.columns]),
    ):
        if unknown:
            raise SampleError(f"the pack has no {what} {unknown[0]!r}")
    numbers = np.full(len(known), -1)
    numbers[[known[symbol] for symbol in wanted]] = np.arange(len(wanted))
    keep = np.repeat(numbers >= 0, pack.counts)
    if sessions is not None:
        keep &= sessions.of(pack.times) >= 0
    rows = np.flatnonzero(keep)
    if not len(rows):
        raise SampleError(f"no bar of the symbols lies in the session {recipe.session!r}")
    owners = np.repeat(numbers, pack.counts)[rows]
    present = np.bincount(owners, minlength=len(wanted)) > 0
    absent = tuple(symbol for symbol, is_there in zip(wanted, present, strict=True) if not is_there)
    if absent and recipe.symbols is not None:
        raise SampleError(f"{absent[0]} has no bar in the session {recipe.session!r}; leave it out")
    owners = (np.cumsum(present) - 1)[owners]
    times, places = _instants(pack, rows)
    # Bars of one symbol ascend in time.
    if np.any(twice := (places[1:] == places[:-1]) & (owners[1:] == owners[:-1])):
        row = int(rows[np.flatnonzero(twice)[0] + 1])
        raise SampleError(
            f"{wanted[int(owners[np.flatnonzero(twice)[0]])]} has two bars of the {pack.interval.text} session of "
            f"{instant_text(int(pack.times[row]))}; a panel has one place for them"
        )
    symbols = tuple(symbol for symbol, is_there in zip(wanted, present, strict=True) if is_there)
    plan = PanelPlan(len(times), len(symbols), len(rows), empty_places(owners, places, len(times)), columns, absent)
    return _Axis(times, symbols, rows, places, owners, plan)


def _instants(pack: Pack, rows: IntArray) -> tuple[IntArray, IntArray]:
    """The union of the bars' times, and the place of each in it."""
    times = pack.times[rows]
    if not pack.interval.is_session:
        axis = distinct(times, pack.interval)
        return axis, np.searchsorted(axis, times)
    # Bars of one session may be stamped differently; all of them are known at the latest close.
    position = session_positions(pack)[rows]
    seen = np.zeros(int(position.max()) + 1, bool)
    seen[position] = True
    places = (np.cumsum(seen) - 1)[position]
    axis = np.full(int(seen.sum()), np.iinfo(np.int64).min)
    np.maximum.at(axis, places, times)
    return axis, places


def _build(pack: Pack, axis: _Axis) -> tuple[Bars, PanelLayout]:
    manifest, chosen = pack.manifest, {column.name: column for column in pack.manifest.columns}
    n_times, n_columns = len(axis.times), len(axis.plan.columns)
    dense = np.full((n_columns, len(axis.symbols), n_times), np.nan)

    def place(number: int) -> Column:
        column = chosen[axis.plan.columns[number]]
        values = pack.column(column.name)[axis.rows]
        dense[number, axis.owners, axis.places] = values
        return Column(column.name, column.role, int((~np.isfinite(values)).sum()))

    layout = PanelLayout(list(axis.symbols), parallel(place, range(n_columns)))
    names = layout.names
    if len(set(names)) < len(names):
        raise SampleError("two columns of the panel would have the same name; rename a symbol or a column with a dot")
    left_out = [f"{symbol} has no bar in the session and is not in the panel" for symbol in axis.plan.left_out]
    zero, count = np.zeros(1, np.int64), np.array([n_times])
    columns = [dense[number, owner] for owner in range(len(axis.symbols)) for number in range(n_columns)]
    bars = Bars(
        arranged=Arranged(axis.times, zero, count, len(names), [], _columns=columns),
        names=tuple(names),
        symbols=(PANEL,),
        first_rows=zero,
        counts=count,
        interval=pack.interval,
        timestamps=manifest.timestamps,
        adjustment=manifest.adjustment,
        decisions=(*manifest.decisions, Decision("derived", PANEL, f"from the pack {pack.fingerprint}")),
        inputs=tuple(manifest.inputs),
        dropped=dict(manifest.dropped),
        warnings=(*manifest.warnings, *left_out),
        roles=dict(zip(names, [column.role for column in layout.columns] * len(axis.symbols), strict=True)),
    )
    return bars, layout
