"""Finding what a fold's training knows of its test."""

from __future__ import annotations

import numpy as np

from stager.bars.clock import instant_text
from stager.batches.built import Built, Places
from stager.batches.leaks import Findings
from stager.packs.layout import Pack
from stager.samples.folds import FoldSamples, cut_folds, in_time
from stager.samples.normalize import FITTED
from stager.samples.panel_index import PanelIndex


def check_folds(now: Built, found: Findings) -> int:
    """Look at each fold for training labels that overlap its test, from decision to label end, and for statistics that
    are not those of its training; returns the number of folds."""
    request = now.request
    if request.split is None:
        return 0
    pack, index = now.find(request.target, request.normalize)
    folds = cut_folds(pack, index, None if index.y is None else index.known_at, request.split)
    for fold in folds:
        _check_statistics(pack, fold, found)
        tests = in_time(pack, index, fold)
        train, test = (Places.of_rows(pack, part.rows_between(0, part.n_samples)) for part in (fold.train, tests))
        # Without labels a sample ends with its decision.
        ends, tested = (some.decisions if index.y is None else index.known_at(some.rows) for some in (train, test))
        order = np.argsort(test.decisions, kind="stable")
        latest = np.maximum.accumulate(tested[order])
        # Of the tests that are decided before a training label ends, the last label end.
        n_before = np.searchsorted(test.decisions[order], ends, side="left")
        overlap = (n_before > 0) & (latest[np.maximum(n_before, 1) - 1] > train.decisions)
        if overlap.any():
            first = train.earliest(overlap)
            symbol, decision = train.place(first)
            text = (
                f"fold {fold.number + 1} trains on {int(overlap.sum()):,} samples whose labels overlap its test; the "
                f"first is of {symbol}, decided at {instant_text(decision)}, its label known at "
                f"{instant_text(int(ends[first]))}"
            )
            found.add("fold", f"fold {fold.number + 1}", (symbol, decision), text)
    return len(folds)


def _check_statistics(pack: Pack, fold: FoldSamples, found: Findings) -> None:
    index = fold.train.refit(pack)
    if index.fitted is None or index.methods is None:
        return
    train = Places.of_rows(pack, index.rows_between(0, index.n_samples))
    rows, firsts = train.rows, np.zeros(len(train), np.int64)
    if isinstance(index, PanelIndex):
        # What was observed of the symbols that are served at an instant that trains.
        instants, owners = np.nonzero(index.cells[train.rows] & index.mask[train.rows])
        rows, firsts = train.rows[instants], owners * index.n_columns
    for place in np.flatnonzero(index.methods == FITTED):
        column = int(place) if index.columns is None else int(index.columns[place])
        values = pack.rows[rows, firsts + column].astype(np.float64)
        wanted = np.array([values.mean(), values.std() or 1.0])
        if not np.allclose(index.fitted[:, place], wanted, rtol=1e-6, atol=1e-9 * np.abs(values).max()):
            name = f"fold {fold.number + 1}"
            text = (
                f"{name} normalises {pack.columns[column]} by mean {index.fitted[0, place]:.7g} and deviation "
                f"{index.fitted[1, place]:.7g}; those of its training are {wanted[0]:.7g} and {wanted[1]:.7g}"
            )
            found.add("statistics", name, train.place(train.earliest()), text)
