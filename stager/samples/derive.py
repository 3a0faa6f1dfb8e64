"""Derived packs: bars filled in and columns computed, built once from a pack and cached beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from stager.bars.arrange import Arranged
from stager.bars.detect import Decision
from stager.bars.read import Bars
from stager.bars.zones import Zone
from stager.errors import SampleError
from stager.packs.derived import beside, check_out, key_of, made_before
from stager.packs.layout import Pack, open_pack
from stager.packs.manifest import Role
from stager.packs.packing import hold, write
from stager.samples import features, filters
from stager.samples.features import Feature, FloatArray, Stretches
from stager.samples.fill import FILLED, fill_bars
from stager.samples.runs import IntArray
from stager.samples.select import Select
from stager.samples.sessions import Hours, Sessions
from stager.samples.tables import TableSource
from stager.samples.timeframes import TimeFrame, aggregate

# Part of the name of cached packs: raised when the same recipe gives other values.
_VERSION = 1


@dataclass(frozen=True)
class Derive:
    """What is added to the bars of a pack.

    Parameters
    ----------
    columns : sequence of str, TimeFrame or Feature
        Computed in float64 from the pack's float64 columns, filled bars included. Built in: ``"log_return"`` (since the
        symbol's bar before), ``"range"`` (high less low, by the close), ``"dollar_volume"`` (close times volume, where
        both are adjusted for the same) and ``"time_of_day"`` (sine and cosine of the local time at the bar's close, as
        ``time_of_day_sin`` and ``time_of_day_cos``); a :class:`TimeFrame` is a longer interval, a
        :class:`Feature` a function of the user's.
    fill : {"none", "previous"}
        "previous" fills the first `cap` missing bars after every bar, whatever follows, up to the last instant of the
        pack: prices are the close before, volume is 0, and a column ``is_filled`` tells them. Never backwards, and
        never across symbols.
    cap : int, optional
        Bars filled at one place at most; needed with ``fill="previous"``.
    keep : sequence of str
        Further columns that keep their value before in filled bars; the others are missing there.
    session, close_inclusive, rolls, splits
        As in :class:`Select`: bars are filled inside the session of the bar before, and no column looks back across a
        contract roll or a split.
    zone : str, optional
        Zone of the time of day; default the zone of the session's hours, else UTC.

    Raises
    ------
    SampleError, ConfigError
        If a value is not allowed.
    """

    columns: Sequence[str | TimeFrame | Feature] = ()
    _: KW_ONLY
    fill: Literal["none", "previous"] = "none"
    cap: int | None = None
    keep: Sequence[str] = ()
    session: str | None = None
    close_inclusive: bool = False
    rolls: TableSource = None
    splits: TableSource = None
    zone: str | None = None

    def __post_init__(self) -> None:
        for name in ("columns", "keep"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise SampleError(f"{name} is {value!r}; give a sequence such as ({value!r},)")
            object.__setattr__(self, name, tuple(value))
        names = self.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise SampleError(f"the derived column {min(twice)!r} is asked for twice")
        if self.fill not in ("none", "previous"):
            raise SampleError(f"fill is {self.fill!r}; there are 'none' and 'previous'")
        if self.fill == "none" and (self.cap is not None or self.keep):
            raise SampleError("cap and keep belong to fill='previous'")
        cap = self.cap
        if self.fill != "none" and (isinstance(cap, bool) or not isinstance(cap, (int, np.integer)) or cap < 1):
            raise SampleError(f"cap is {cap!r}; fill='previous' needs an integer of at least 1 bar")
        if not names and self.fill == "none":
            raise SampleError("nothing is derived; name columns, or fill='previous'")
        _ = self.bounds, self.clock

    @property
    def names(self) -> list[str]:
        """The columns that are computed."""
        return [
            name
            for column in self.columns
            for name in (column.names if isinstance(column, TimeFrame) else features.names_of(column))
        ]

    @property
    def bounds(self) -> Select:
        """What bounds sessions and what prices compare."""
        return Select(session=self.session, close_inclusive=self.close_inclusive, rolls=self.rolls, splits=self.splits)

    @property
    def clock(self) -> Zone:
        """The zone of the time of day."""
        if self.zone is not None:
            return Zone.parse(self.zone)
        hours = None if self.session is None else Hours.parse(self.session)
        return Zone.parse("UTC") if hours is None else hours.zone


def derive(pack: Pack | str | Path, recipe: Derive, out: str | Path | None = None, *, overwrite: bool = False) -> Pack:
    """The pack with bars and columns added.

    Parameters
    ----------
    pack : Pack or path
    recipe : Derive
    out : path, optional
        Where to write it. By default it is kept beside the pack under a name that tells pack and recipe
        (``bars-0f3c....pack``), and opened instead of built the next time. What a user's function would give can't be
        known from a name, so with a :class:`Feature`, or from a pack in memory, it is held in memory.
    overwrite : bool
        Replace a pack at `out`.

    Returns
    -------
    Pack

    Raises
    ------
    SampleError
        If recipe and pack don't fit.
    PackError
        If it can't be written.
    BarsError
        If a derived value is too large for float32.
    """
    if not isinstance(recipe, Derive):
        raise SampleError(f"derive() got {recipe!r:.80}; give Derive(columns, fill=...)")
    pack = pack if isinstance(pack, Pack) else open_pack(pack)
    if pack.manifest.panel is not None:
        raise SampleError("the pack is a panel; derive from the bars that it was made of, and make the panel of that")
    check_out(out, overwrite)
    sessions, jumps = _limits(pack, recipe)
    if out is not None:
        return write(_build(pack, recipe, sessions, jumps), Path(out), overwrite)
    if pack.path is None or any(isinstance(column, Feature) for column in recipe.columns):
        return hold(_build(pack, recipe, sessions, jumps))
    place = beside(pack.path, _key(pack, recipe, sessions, jumps))
    return made_before(place) or write(_build(pack, recipe, sessions, jumps), place, overwrite=True)


def _limits(pack: Pack, recipe: Derive) -> tuple[Sessions | None, IntArray]:
    jumps = filters.jumps_of(pack, recipe.bounds)
    return filters.sessions_of(pack, recipe.bounds), np.empty(0, np.int64) if jumps is None else jumps


def _key(pack: Pack, recipe: Derive, sessions: Sessions | None, jumps: IntArray) -> str:
    told = _VERSION, recipe.columns, recipe.fill, recipe.cap, recipe.keep, recipe.clock.name
    return key_of(pack, told, [jumps, *(() if sessions is None else (sessions.opens, sessions.closes))])


def _build(pack: Pack, recipe: Derive, sessions: Sessions | None, jumps: IntArray) -> Bars:
    manifest = pack.manifest
    added = ([FILLED] if recipe.fill != "none" else []) + recipe.names
    if there := [name for name in added if name in pack.columns]:
        raise SampleError(f"the pack already has a column {there[0]!r}; leave it out of the recipe")
    if unknown := [name for name in recipe.keep if name not in pack.columns]:
        raise SampleError(f"the pack has no column {unknown[0]!r} to keep; it has: {', '.join(pack.columns)}")
    times, counts = pack.times, pack.counts
    columns = {column.name: pack.column(column.name) for column in manifest.columns}
    if recipe.fill != "none":
        # A cap beyond the span of all time is as good as none.
        filling = fill_bars(pack, min(int(recipe.cap or 0), 1 << 62), sessions)
        times, counts = filling.times, filling.counts
        jumps = np.searchsorted(filling.source, jumps)
        columns = {
            column.name: filling.column(columns[column.name], columns["close"], column.name, column.role, recipe.keep)
            for column in manifest.columns
        }
        columns[FILLED] = filling.filled.astype(np.float64)
    first_rows = np.cumsum(counts) - counts
    roles: dict[str, Role] = {column.name: column.role for column in manifest.columns}
    stretches = Stretches(np.union1d(first_rows, jumps), len(times))
    for wanted in recipe.columns:
        if isinstance(wanted, Feature):
            bars = _table(pack.symbols, counts, times, columns)
            columns[wanted.name] = features.evaluate(wanted, bars, first_rows, counts, stretches)
        elif isinstance(wanted, TimeFrame):
            columns |= aggregate(wanted, pack.interval, times, columns, roles, stretches, sessions)
            roles |= {name: roles[column] for name, column in zip(wanted.names, wanted.columns, strict=True)}
        else:
            columns |= _built_in(wanted, pack, recipe, times, columns, stretches)
    roles["dollar_volume"] = "volume"
    names = tuple(columns)
    # What is infinite is no number to train on, and is excluded as missing.
    for name in added:
        columns[name][~np.isfinite(columns[name])] = np.nan
    origin = Decision("derived", ", ".join(added), f"from the pack {pack.fingerprint}")
    return Bars(
        arranged=Arranged(times, first_rows, counts, len(names), [], _columns=list(columns.values())),
        names=names,
        symbols=pack.symbols,
        first_rows=first_rows,
        counts=counts,
        interval=pack.interval,
        timestamps=manifest.timestamps,
        adjustment=manifest.adjustment,
        decisions=(*manifest.decisions, origin),
        inputs=tuple(manifest.inputs),
        dropped=dict(manifest.dropped),
        warnings=tuple(manifest.warnings),
        roles={name: role for name, role in roles.items() if name in columns},
    )


def _built_in(
    name: str, pack: Pack, recipe: Derive, times: IntArray, columns: dict[str, FloatArray], stretches: Stretches
) -> dict[str, FloatArray]:
    if name == "log_return":
        return {name: features.log_return(columns["close"], stretches)}
    if name == "range":
        return {name: features.relative_range(columns["high"], columns["low"], columns["close"])}
    if name == "dollar_volume":
        if "volume" not in columns:
            raise SampleError(f"dollar_volume needs a column 'volume'; the pack has: {', '.join(pack.columns)}")
        return {name: features.dollar_volume(columns["close"], columns["volume"], pack.manifest.adjustment)}
    if pack.interval.is_session:
        raise SampleError(f"time_of_day tells nothing about bars of {pack.interval.text}; leave it out")
    sine, cosine = features.time_of_day(pack.interval.available(times), recipe.clock)
    return {"time_of_day_sin": sine, "time_of_day_cos": cosine}


def _table(symbols: tuple[str, ...], counts: IntArray, times: IntArray, columns: dict[str, FloatArray]) -> Any:
    codes = np.repeat(np.arange(len(symbols), dtype=np.int32), counts)
    symbol = pa.DictionaryArray.from_arrays(codes, pa.array(symbols, pa.string()))
    stamps: Any = pa.array(times.view("datetime64[ns]")).cast(pa.timestamp("ns", "UTC"))
    return pa.table({"symbol": symbol, "time": stamps, **{name: pa.array(values) for name, values in columns.items()}})
