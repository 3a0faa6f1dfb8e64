"""Sample weights by the uniqueness of labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.labelling import LabelEnds


def uniqueness(pack: Pack, index: SampleIndex, ends: LabelEnds | None) -> npt.NDArray[np.float32]:
    """A weight for each decision row: the average uniqueness of its label among the samples of its symbol.

    A label covers the steps from bar to bar between decision and label end, at least one. The uniqueness of a step is
    1 by the number of labels that cover it; that of a label is the mean over its steps (M. Lopez de Prado, "Advances in
    Financial Machine Learning", 2018, sections 4.2 to 4.4). Labels of samples that are not in the index don't count.

    Parameters
    ----------
    pack : Pack
    index : SampleIndex
    ends : callable, optional
        Label ends of decision rows; without labels all weights are 1.

    Returns
    -------
    (n_rows,) float32
        The weights, of mean 1 over the samples; 0 for rows that end no sample.
    """
    weights = np.zeros(pack.n_rows, np.float32)
    order = index.spans_by_row
    span_ids = np.append(0, np.cumsum(np.diff(index.span_ids)[order]))
    rows = replace(index, span_rows=index.span_rows[order], span_ids=span_ids).rows_between(0, index.n_samples)
    if ends is None:
        weights[rows] = 1
        return weights

    def weigh(symbol: int) -> float:
        first = int(pack.first_rows[symbol])
        stop = first + int(pack.counts[symbol])
        lo, hi = np.searchsorted(rows, [first, stop])
        if lo == hi:
            return 0.0
        decisions = rows[lo:hi]
        # Step i leads from bar i to the next; a label that ends while a bar goes on covers the step to that bar.
        last = np.searchsorted(pack.times[first:stop], ends(decisions), side="left") - 1
        begin = decisions - first
        end = np.maximum(last, begin + 1)
        labels = np.bincount(begin, minlength=stop - first + 1) - np.bincount(end, minlength=stop - first + 1)
        np.cumsum(labels, out=labels)
        unique = np.zeros(len(labels) + 1)
        np.cumsum(np.divide(1.0, labels, out=np.zeros(len(labels)), where=labels > 0), out=unique[1:])
        found = (unique[end] - unique[begin]) / (end - begin)
        weights[decisions] = found
        return float(found.sum())

    total = sum(parallel(weigh, range(len(pack.symbols))))
    weights *= np.float32(index.n_samples / total)
    return weights
