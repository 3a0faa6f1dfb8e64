"""The labels of all rows: any number of targets, as float32, and why a row has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.labels import Labels, TableLabels
from stager.samples.runs import Breaks, IntArray, Runs
from stager.samples.scaling import across_symbols, last_of_instant
from stager.samples.targets import MISSING, VALID, PriceLabels, StateArray, Target

AnyTarget: TypeAlias = Target | Labels
LabelSource: TypeAlias = PriceLabels | TableLabels
# Decision rows with a label -> when it becomes known, nanoseconds UTC.
LabelEnds: TypeAlias = Callable[[IntArray], IntArray]
# What a user gives: one gives y (batch,), a sequence gives (batch, n_targets).
Targets: TypeAlias = AnyTarget | Sequence[AnyTarget] | None

_CHUNK_ROWS = 1 << 18


def as_targets(target: Targets) -> tuple[AnyTarget, ...]:
    """The targets as a tuple.

    Raises
    ------
    SampleError
        If it is neither a target nor a sequence of at least one.
    """
    if target is None:
        return ()
    targets = tuple(target) if isinstance(target, (list, tuple)) else (target,)
    for one in targets:
        if not isinstance(one, (Target, Labels)):
            raise SampleError(f"target is {one!r}; give a Target, Labels, or a list of them")
    if not targets:
        raise SampleError("target is an empty list; leave it out to serve every complete window")
    return targets


def source_of(
    pack: Pack, breaks: Breaks, runs: Runs, target: AnyTarget, filled: npt.NDArray[np.bool_] | None
) -> LabelSource:
    """A target over a pack; raises SampleError if they don't fit."""
    return TableLabels(pack, target) if isinstance(target, Labels) else PriceLabels(pack, breaks, runs, target, filled)


def label_rows(
    pack: Pack, sources: Sequence[LabelSource], ok: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float32], StateArray, list[LabelEnds]]:
    """The labels of every decision row.

    Parameters
    ----------
    pack : Pack
    sources : sequence of LabelSource
    ok : (n_rows,) bool
        The rows that a cross-section is made of, where they have a label.

    Returns
    -------
    y : (n_rows, n_targets) float32
        NaN where there is no label.
    state : (n_rows,) uint8
        VALID if there is any label, else why there is not the first.
    ends : list of callable
        When the labels of each target become known.
    """
    y = np.full((pack.n_rows, len(sources)), np.nan, np.float32)
    first_state, any_valid = np.zeros(0, np.uint8), np.zeros(pack.n_rows, bool)
    ends: list[LabelEnds] = []
    for number, source in enumerate(sources):
        state, known = _label(pack, source, ok, y[:, number])
        ends.append(known)
        first_state = first_state if number else state
        any_valid |= state == VALID
    if len(sources) > 1:
        first_state[any_valid] = VALID
    return y, first_state, ends


def _label(
    pack: Pack, source: LabelSource, ok: npt.NDArray[np.bool_], out: npt.NDArray[np.float32]
) -> tuple[StateArray, LabelEnds]:
    """Write the labels of one target to `out`."""
    state = np.empty(pack.n_rows, np.uint8)
    is_relative = source.scale in ("rank", "demean")
    exact = np.full(pack.n_rows, np.nan) if is_relative else None

    def fill(first: int) -> None:
        stop = min(first + _CHUNK_ROWS, pack.n_rows)
        values, state[first:stop] = source.evaluate(first, stop)
        if exact is None:
            _keep(values, state[first:stop], out[first:stop])
        else:
            exact[first:stop] = values

    parallel(fill, range(0, pack.n_rows, _CHUNK_ROWS))
    if exact is None:
        return state, source.ends
    # A value beyond float32 is no label, and none to compare others with.
    _keep(exact, state, out)
    out.fill(np.nan)
    rows = np.flatnonzero(ok & (state == VALID))
    instants = pack.available_at(rows)
    out[rows] = across_symbols(exact[rows], instants, str(source.scale))
    # What a label is compared with must be known too.
    known = last_of_instant(source.ends(rows), instants)
    return state, lambda asked: known[np.searchsorted(rows, asked)]


def _keep(values: npt.NDArray[np.float64], state: StateArray, out: npt.NDArray[np.float32]) -> None:
    # Cast before the mask: a target beyond float32 is infinite, which is no number to train on.
    with np.errstate(over="ignore"):
        short = values.astype(np.float32)
    state[(state == VALID) & ~np.isfinite(short)] = MISSING
    short[state != VALID] = np.nan
    out[:] = short


def label_ends(ends: Sequence[LabelEnds], y: npt.NDArray[np.float32], rows: IntArray) -> IntArray:
    """(n, n_targets) int64: when each label of decision rows becomes known, nanoseconds UTC; NaT's number for none."""
    found = np.full((len(rows), len(ends)), np.iinfo(np.int64).min)
    for number, known in enumerate(ends):
        valid = np.flatnonzero(~np.isnan(y[rows, number]))
        found[valid, number] = known(rows[valid])
    return found
