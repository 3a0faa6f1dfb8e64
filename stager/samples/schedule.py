"""The schedule of an epoch: which samples are in which batch, a pure function of seed, epoch and batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.instants import by_instant
from stager.samples.order import Order
from stager.samples.runs import IntArray


@dataclass(frozen=True)
class Schedule:
    """The batches of one epoch.

    A batch is `batch_size` consecutive positions of the order: of samples, or of decision instants, each of which
    brings all of its samples.

    Parameters
    ----------
    order : Order
        Over samples, or over instants.
    batch_size : int
        Positions of a batch; the last one may have fewer.
    instants : (n_instants + 1,) int64, optional
        Where samples are numbered by time: the first sample of each instant, and the number of samples.
    """

    order: Order
    batch_size: int
    instants: IntArray | None = None

    @property
    def typical_size(self) -> int:
        """Samples of a batch, on average, at least 1."""
        if self.instants is None:
            return self.batch_size
        return max(1, int(self.instants[-1]) * self.batch_size // self.order.n)

    def offsets(self, first: int, stop: int) -> IntArray:
        """(stop - first + 1,) int64: where batches ``first : stop`` begin and end among their samples."""
        if self.instants is not None:
            _, counts = self._blocks(first, stop)
            counts = np.add.reduceat(counts, np.arange(0, len(counts), self.batch_size)) if len(counts) else counts
            return np.append(0, np.cumsum(counts))
        count = self._positions(first, stop)[1]
        return np.minimum(np.arange(stop - first + 1) * min(self.batch_size, count), count)

    def sample_ids(self, first: int, stop: int) -> IntArray:
        """(n,) int64: the samples of batches ``first : stop``, one after the other."""
        if self.instants is None:
            return self.order.sample_ids(*self._positions(first, stop))
        samples, counts = self._blocks(first, stop)
        ends = np.cumsum(counts)
        ids: IntArray = np.arange(counts.sum()) + np.repeat(samples - (ends - counts), counts)
        return ids

    def sample_id(self, batch: int, sample: int) -> int:
        """One sample of a batch."""
        if self.instants is not None:
            return int(self.sample_ids(batch, batch + 1)[sample])
        return int(self.order.sample_ids(batch * self.batch_size + sample, 1)[0])

    def blocks(self, first: int, stop: int) -> tuple[IntArray, IntArray] | None:
        """The samples of batches ``first : stop`` as blocks of consecutive ones; None where the order tells each.

        Returns
        -------
        places, samples : (n_blocks,) int64
            Where each block begins among the samples, and its first sample.
        """
        if self.instants is None:
            return None
        samples, counts = self._blocks(first, stop)
        return np.cumsum(counts) - counts, samples

    def _positions(self, first: int, stop: int) -> tuple[int, int]:
        """The first position of the batches, and how many there are."""
        start = min(first * self.batch_size, self.order.n)
        return start, min(stop * self.batch_size, self.order.n) - start

    def _blocks(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """The first sample of each instant of the batches, and how many samples it has."""
        assert self.instants is not None
        chosen = self.order.sample_ids(*self._positions(first, stop))
        samples = self.instants[chosen]
        return samples, self.instants[chosen + 1] - samples


def by_time(pack: Pack, index: SampleIndex) -> SampleIndex:
    """The same samples numbered by decision, those of one instant in the order of symbols: 16 bytes a sample."""
    rows = index.rows_between(0, index.n_samples)
    return index.of_rows(rows[by_instant(pack.available_at(rows), pack.interval)])


def instants_of(pack: Pack, index: SampleIndex) -> IntArray:
    """(n_instants + 1,) int64: the first sample of each decision instant, of samples numbered by time; their number."""
    decisions = pack.available_at(index.rows_between(0, index.n_samples))
    return np.append(np.flatnonzero(np.diff(decisions, prepend=decisions[0] - 1)), index.n_samples)
