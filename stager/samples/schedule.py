"""The schedule of an epoch: which samples are in which batch, a pure function of seed, epoch and batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.instants import by_instant
from stager.samples.order import Order
from stager.samples.runs import IntArray
from stager.samples.sampling import WeightedOrder


@dataclass(frozen=True)
class Schedule:
    """The batches of one epoch, or those of one rank.

    A batch is `batch_size` consecutive positions of the order: of samples, or of decision instants, each of which
    brings all of its samples. Batch b begins at position ``b * stride + shift``.

    Parameters
    ----------
    order : Order or WeightedOrder
        Over samples, or over instants.
    batch_size : int
        Positions of a batch; without `pad` the last one may have fewer.
    instants : (n_instants + 1,) int64, optional
        Where samples are numbered by time: the first sample of each instant, and the number of samples.
    global_batch : int, optional
        Positions of the batches of all ranks together; default: of one rank.
    shift : int
        Where the batch of this rank begins among them.
    pad : bool
        Whether the last batch is filled up: past the end of the epoch, positions go on at its beginning, over and over.
        Otherwise batches of several ranks must lie within the epoch.
    """

    order: Order | WeightedOrder
    batch_size: int
    instants: IntArray | None = None
    global_batch: int | None = None
    shift: int = 0
    pad: bool = False

    @property
    def stride(self) -> int:
        """Positions from one batch to the next."""
        return self.batch_size if self.global_batch is None else self.global_batch

    def first_position(self, batch: int) -> int:
        """Where a batch begins; past the end of the epoch for padding alone."""
        return batch * self.stride + self.shift

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
        count = self._count(first, stop)
        return np.minimum(np.arange(stop - first + 1) * min(self.batch_size, count), count)

    def sample_ids(self, first: int, stop: int) -> IntArray:
        """(n,) int64: the samples of batches ``first : stop``, one after the other."""
        if self.instants is None:
            return self._chosen(first, stop)
        samples, counts = self._blocks(first, stop)
        ends = np.cumsum(counts)
        ids: IntArray = np.arange(counts.sum()) + np.repeat(samples - (ends - counts), counts)
        return ids

    def sample_id(self, batch: int, sample: int) -> int:
        """One sample of a batch."""
        if self.instants is not None:
            return int(self.sample_ids(batch, batch + 1)[sample])
        return int(self.order.sample_ids((self.first_position(batch) + sample) % self.order.n, 1)[0])

    def valid(self, batch: int) -> npt.NDArray[np.bool_]:
        """(size,) bool: false for the samples of a batch that fill it up."""
        valid = self._positions(batch, batch + 1) < self.order.n
        return valid if self.instants is None else np.repeat(valid, self._blocks(batch, batch + 1)[1])

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

    def _count(self, first: int, stop: int) -> int:
        """How many positions the batches have."""
        if self.pad or self.stride != self.batch_size:
            return (stop - first) * self.batch_size
        return max(0, min(stop * self.batch_size, self.order.n) - first * self.batch_size)

    def _positions(self, first: int, stop: int) -> IntArray:
        """(n,) int64: the positions of the batches, those of padding past the end of the epoch."""
        begin, count, between = self.first_position(first), self._count(first, stop), self.stride - self.batch_size
        positions = np.arange(begin, begin + count)
        if between:
            positions += (positions - begin) // self.batch_size * between
        return positions

    def _chosen(self, first: int, stop: int) -> IntArray:
        """(n,) int64: the samples, or instants, at the positions of the batches."""
        positions = self._positions(first, stop)
        if len(positions) and positions[-1] >= self.order.n:
            positions %= self.order.n
        return self.order.at(positions)

    def _blocks(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """The first sample of each instant of the batches, and how many samples it has."""
        assert self.instants is not None
        chosen = self._chosen(first, stop)
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
