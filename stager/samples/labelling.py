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
from stager.samples.scaling import across_symbols
from stager.samples.targets import MISSING, N_STATES, VALID, PriceLabels, StateArray, Target

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
    y, state = np.empty((pack.n_rows, len(sources)), np.float32), np.empty(pack.n_rows, np.uint8)
    # What is compared across symbols is compared before it is rounded.
    exact = {
        number: np.empty(pack.n_rows) for number, source in enumerate(sources) if source.scale in ("rank", "demean")
    }

    def fill(first: int) -> None:
        stop = min(first + _CHUNK_ROWS, pack.n_rows)
        for number, source in enumerate(sources):
            values, why = source.evaluate(first, stop)
            _keep(values, why, y[first:stop, number])
            if number in exact:
                exact[number][first:stop] = values
            if number == 0:
                state[first:stop] = why
            else:
                state[first:stop][why == VALID] = VALID

    parallel(fill, range(0, pack.n_rows, _CHUNK_ROWS))
    ends = [
        _compare(pack, source, ok, exact[number], y[:, number]) if number in exact else source.ends
        for number, source in enumerate(sources)
    ]
    return y, state, ends


def _compare(
    pack: Pack,
    source: LabelSource,
    ok: npt.NDArray[np.bool_],
    exact: npt.NDArray[np.float64],
    out: npt.NDArray[np.float32],
) -> LabelEnds:
    """Set the labels of the chosen rows in relation to those of the same instant; when those are all known."""
    chosen = ok & ~np.isnan(out)
    instants, known = across_symbols(pack, exact, chosen, str(source.scale), source.ends, out)
    out[~chosen] = np.nan
    return lambda asked: known[np.searchsorted(instants, pack.available_at(asked))]


def keep_valid(state: StateArray, ok: npt.NDArray[np.bool_]) -> IntArray:
    """Leave chosen only what is VALID; how many were left out for each state, by its number."""

    def count(first: int) -> IntArray:
        part = slice(first, first + _CHUNK_ROWS)
        lost = ok[part] & (state[part] != VALID)
        ok[part] ^= lost
        return np.bincount(state[part][lost], minlength=N_STATES)

    total: IntArray = np.sum(parallel(count, range(0, len(state), _CHUNK_ROWS)), axis=0, dtype=np.int64)
    return total


def _keep(values: npt.NDArray[np.float64], state: StateArray, out: npt.NDArray[np.float32]) -> None:
    # Cast before the mask: a target beyond float32 is infinite, which is no number to train on.
    with np.errstate(over="ignore"):
        short = values.astype(np.float32)
    np.copyto(state, MISSING, where=(state == VALID) & ~np.isfinite(short))
    np.copyto(short, np.nan, where=state != VALID)
    out[:] = short


def label_ends(ends: Sequence[LabelEnds], y: npt.NDArray[np.float32], rows: IntArray) -> IntArray:
    """(n, n_targets) int64: when each label of decision rows becomes known, nanoseconds UTC; NaT's number for none."""
    found = np.full((len(rows), len(ends)), np.iinfo(np.int64).min)
    for number, known in enumerate(ends):
        valid = np.flatnonzero(~np.isnan(y[rows, number]))
        found[valid, number] = known(rows[valid])
    return found
