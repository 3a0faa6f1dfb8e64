"""Folds: the samples that train and those that test, with what lies between them left out.

A sample's label is known at its end instant. Training must know nothing of a test block, and a test block nothing of
the training, so a sample of a fold's training intervals is left out

- by purge, where its label ends after the first decision of the next test block, or where its decision lies before the
  last label end of an earlier one;
- by embargo, where its decision lies less than the embargo after that label end; without an embargo of its own, where
  its window begins before that label end.

Everything else is about which rows end a sample, so that all folds read the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars.clock import instant_text
from stager.bars.threads import parallel
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.instants import by_instant, distinct
from stager.samples.labelling import LabelEnds
from stager.samples.runs import IntArray
from stager.samples.schemes import Division, Scheme, embargo_of

# Why a row that ends a sample of the whole set ends none of a fold's; first match, in this order, after REASONS.
FOLD_REASONS = ("outside the fold", "purge", "embargo")

# What happens to a sample in a fold.
_OUTSIDE, _TRAIN, _TEST, _BEFORE, _AFTER, _EMBARGO = range(6)
_KINDS = ("", "train", "test", "purge", "purge", "embargo")

_NEVER, _EVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_CHUNK_SAMPLES = 1 << 18

# Decision rows -> instants at which their labels are known, nanoseconds UTC.


@dataclass(frozen=True)
class Zone:
    """Samples of a fold that share what happens to them, in one stretch of time.

    Attributes
    ----------
    kind : {"train", "purge", "test", "embargo"}
    first, last : int
        Their first and last decision, nanoseconds UTC.
    label_end : int
        When the last of their labels is known.
    n_samples : int
    """

    kind: str
    first: int
    last: int
    label_end: int
    n_samples: int


@dataclass(frozen=True)
class FoldSamples:
    """The samples of one fold.

    Attributes
    ----------
    number, n_folds : int
        Which fold, from 0, of how many.
    zones : tuple of Zone
        By first decision. Where symbols differ in their gaps, zones may overlap.
    train : SampleIndex
        In the order of the whole set.
    """

    number: int
    n_folds: int
    zones: tuple[Zone, ...]
    train: SampleIndex

    def of(self, kind: str) -> list[Zone]:
        """The zones of a kind."""
        return [zone for zone in self.zones if zone.kind == kind]

    def count(self, kind: str) -> int:
        """Samples of a kind."""
        return sum(zone.n_samples for zone in self.of(kind))


def cut_folds(pack: Pack, index: SampleIndex, ends: LabelEnds | None, scheme: Scheme) -> list[FoldSamples]:
    """The folds of a set of samples.

    Parameters
    ----------
    pack : Pack
    index : SampleIndex
        The whole set.
    ends : callable, optional
        Label ends of decision rows; without labels a sample ends with its decision.
    scheme : Scheme

    Raises
    ------
    SampleError
        If the scheme does not fit the decisions, or a fold has no sample to train or to test on.
    """
    decisions, known = np.empty(index.n_samples, np.int64), np.empty(index.n_samples, np.int64)

    def look(part: slice) -> None:
        rows = index.rows_between(part.start, part.stop)
        decisions[part] = pack.available_at(rows)
        known[part] = decisions[part] if ends is None else ends(rows)

    parallel(look, _parts(index.n_samples))
    division = scheme.divide(distinct(decisions, pack.interval))
    # Interval 0 is before the first edge, the last one after the last.
    n_groups = len(division.edges) + 1
    groups = np.empty(index.n_samples, np.min_scalar_type(n_groups))

    def group(part: slice) -> None:
        groups[part] = np.searchsorted(division.edges, decisions[part], side="right")

    parallel(group, _parts(index.n_samples))
    samples = _Samples(pack, index, decisions, known, groups, n_groups, embargo_of(scheme))
    whole = samples.table(lambda part: groups[part].astype(np.intp), n_groups)
    return [_cut(samples, whole, division, number) for number in range(len(division.folds))]


def in_time(pack: Pack, index: SampleIndex, fold: FoldSamples) -> SampleIndex:
    """The test samples of a fold, in the order of their decisions; those of one decision in the order of symbols.

    Parameters
    ----------
    pack : Pack
    index : SampleIndex
        The whole set.
    fold : FoldSamples
    """
    blocks = fold.of("test")
    firsts, lasts = np.array([block.first for block in blocks]), np.array([block.last for block in blocks])

    def look(part: slice) -> tuple[IntArray, IntArray]:
        rows = index.rows_between(part.start, part.stop)
        decisions = pack.available_at(rows)
        block = np.searchsorted(firsts, decisions, side="right") - 1
        inside = np.flatnonzero((block >= 0) & (decisions <= lasts[block]))
        return rows[inside], decisions[inside]

    parts = parallel(look, _parts(index.n_samples))
    rows, decisions = (np.concatenate(part) for part in zip(*parts, strict=True))
    reasons = dict.fromkeys(FOLD_REASONS, 0) | {"outside the fold": index.n_samples - len(rows)}
    known = {reason: index.reasons.get(reason, 0) + n for reason, n in reasons.items()}
    return index.of_rows(rows[by_instant(decisions, pack.interval)], known)


@dataclass(frozen=True)
class _Table:
    """Of each group of samples: first and last decision, last label end, number."""

    firsts: IntArray
    lasts: IntArray
    ends: IntArray
    counts: IntArray


@dataclass(frozen=True)
class _Samples:
    """Facts about each sample of the whole set; `groups` numbers the interval of its decision."""

    pack: Pack
    index: SampleIndex
    decisions: IntArray
    ends: IntArray
    groups: npt.NDArray[Any]
    n_groups: int
    embargo: int | None

    def table(self, key: Callable[[slice], npt.NDArray[Any]], n_keys: int) -> _Table:
        """Facts by a key of each sample, which is computed for a part of them at a time."""
        total = _Table(
            np.full(n_keys, _EVER), np.full(n_keys, _NEVER), np.full(n_keys, _NEVER), np.zeros(n_keys, np.int64)
        )
        lock = threading.Lock()

        def add(part: slice) -> None:
            keys = key(part)
            # Neighbours mostly have the same key, and a reduction of stretches is much faster than one by keys.
            starts = np.flatnonzero(np.diff(keys, prepend=-1))
            keys = keys[starts]
            firsts = np.minimum.reduceat(self.decisions[part], starts)
            lasts = np.maximum.reduceat(self.decisions[part], starts)
            ends = np.maximum.reduceat(self.ends[part], starts)
            counts = np.diff(starts, append=part.stop - part.start)
            with lock:
                np.minimum.at(total.firsts, keys, firsts)
                np.maximum.at(total.lasts, keys, lasts)
                np.maximum.at(total.ends, keys, ends)
                np.add.at(total.counts, keys, counts)

        parallel(add, _parts(len(self.decisions)))
        return total


def _cut(samples: _Samples, whole: _Table, division: Division, number: int) -> FoldSamples:
    train, test = (numbers + 1 for numbers in division.folds[number])
    name = f"fold {number + 1} of {len(division.folds)}"
    roles = np.full(samples.n_groups, _OUTSIDE, np.uint8)
    roles[train], roles[test] = _TRAIN, _TEST
    tested = (roles == _TEST) & (whole.counts > 0)
    if not tested.any():
        # Edges may lie a nanosecond behind the last decision.
        start, stop = (instant_text(int(division.edges[edge]) // 10**9 * 10**9) for edge in (test[0] - 1, test[-1]))
        raise SampleError(f"{name} has no sample to test on from {start} to {stop}; use fewer folds or longer tests")
    # Of each interval: the first decision of the next test, and the last label end of the tests before.
    ahead = np.minimum.accumulate(np.where(tested, whole.firsts, _EVER)[::-1])[::-1]
    behind = np.maximum.accumulate(np.where(tested, whole.ends, _NEVER))
    ahead, behind = np.append(ahead[1:], _EVER), np.append(_NEVER, behind[:-1])
    trains = roles == _TRAIN
    spans: dict[int, tuple[IntArray, IntArray]] = {}

    def judge(part: slice) -> npt.NDArray[Any]:
        groups, decisions = samples.groups[part], samples.decisions[part]
        rows = samples.index.rows_between(part.start, part.stop)
        state, is_train, after = roles[groups], trains[groups], behind[groups]
        if samples.embargo is not None:
            late = decisions < _plus(behind, samples.embargo)[groups]
        elif behind.max() > _NEVER:
            late = samples.pack.times[rows - (samples.index.window - 1)] < after
        else:
            late = np.zeros(len(rows), bool)
        for fate, found in (
            (_EMBARGO, late),
            (_AFTER, decisions < after),
            (_BEFORE, samples.ends[part] > ahead[groups]),
        ):
            state[found & is_train] = fate
        spans[part.start] = _spans(rows[state == _TRAIN])
        keys: npt.NDArray[Any] = groups.astype(np.intp) * len(_KINDS) + state
        return keys

    zones = _zones(samples.table(judge, samples.n_groups * len(_KINDS)), whole)
    fold = FoldSamples(number, len(division.folds), zones, samples.index)
    reasons = {kind: fold.count(kind) for kind in ("purge", "embargo")}
    if not (n_train := fold.count("train")):
        raise SampleError(
            f"{name} has no sample to train on: of {sum(reasons.values()):,} in its training intervals, "
            f"{reasons['purge']:,} are purged and {reasons['embargo']:,} lie in the embargo; use fewer folds, longer "
            f"training, a shorter horizon or embargo"
        )
    reasons["outside the fold"] = samples.index.n_samples - n_train - sum(reasons.values())
    return replace(fold, train=_part(samples.index, [spans[start] for start in sorted(spans)], reasons))


def _zones(table: _Table, whole: _Table) -> tuple[Zone, ...]:
    """Neighbouring intervals in which the same happens are one zone."""
    shape = (len(whole.counts), len(_KINDS))
    occupied = np.flatnonzero(whole.counts)
    firsts, lasts, ends, counts = (
        facts.reshape(shape)[occupied] for facts in (table.firsts, table.lasts, table.ends, table.counts)
    )
    zones = []
    for state in range(_OUTSIDE + 1, len(_KINDS)):
        there = counts[:, state] > 0
        edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
        for lo, hi in zip(edges[::2], edges[1::2], strict=True):
            part = slice(lo, hi), state
            zones.append(
                Zone(
                    _KINDS[state],
                    int(firsts[part].min()),
                    int(lasts[part].max()),
                    int(ends[part].max()),
                    int(counts[part].sum()),
                )
            )
    return tuple(sorted(zones, key=lambda zone: (zone.first, zone.last, zone.kind)))


def _parts(n: int) -> list[slice]:
    return [slice(first, min(first + _CHUNK_SAMPLES, n)) for first in range(0, n, _CHUNK_SAMPLES)]


def _plus(instants: IntArray, nanoseconds: int) -> IntArray:
    """The instants so much later, and the last possible one instead of one beyond it; `_NEVER` stays."""
    later = np.minimum(instants, _EVER - nanoseconds) + nanoseconds
    return np.where(instants == _NEVER, _NEVER, later)


def _spans(rows: IntArray) -> tuple[IntArray, IntArray]:
    """First rows and lengths of stretches of consecutive rows."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return rows[starts], np.diff(starts, append=len(rows))


def _part(index: SampleIndex, spans: list[tuple[IntArray, IntArray]], reasons: dict[str, int]) -> SampleIndex:
    """The samples of some spans of rows, and why the others are left out."""
    rows, counts = (np.concatenate(facts) for facts in zip(*spans, strict=True))
    # Where spans were found in parts, one may go on in the next.
    goes_on = np.zeros(len(rows), bool)
    goes_on[1:] = rows[:-1] + counts[:-1] == rows[1:]
    ids = np.append(np.cumsum(counts) - counts, counts.sum())
    known = {reason: index.reasons.get(reason, 0) + reasons.get(reason, 0) for reason in FOLD_REASONS}
    return replace(
        index,
        span_rows=rows[~goes_on],
        span_ids=ids[np.append(~goes_on, True)],
        reasons=index.reasons | known,
    )
