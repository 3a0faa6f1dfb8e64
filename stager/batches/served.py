"""Samples of an index, served as batches from staged rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stager.batches.batch import About, Batch
from stager.batches.epochs import EpochOptions, Epochs, Last, Shuffle
from stager.batches.frameworks import Framework, check_framework
from stager.batches.gathers import Arrays, Gather, consumer_streams, make_gather
from stager.batches.graph import GraphSource, graph_source
from stager.batches.position import begin_of, go_on, state_of
from stager.batches.ranks import Ranks
from stager.batches.resident import Resident
from stager.batches.stats import ServingStats
from stager.errors import ClosedError, SampleError
from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.labelling import Targets
from stager.samples.normalize import DType, Normalize
from stager.samples.plan import Plan, make_plan
from stager.samples.schedule import Schedule


class Served:
    """What a :class:`stager.Stager` does with the samples of an index, whichever they are: all, or those of a fold.

    Attributes
    ----------
    plan : Plan
        What is served and what it takes.
    window, dilation : int
    target : Target, Labels, a sequence of them, or None
    dtype : {"float32", "float16", "bfloat16"}
    """

    plan: Plan
    window: int
    dilation: int
    target: Targets
    dtype: DType
    _scaling: Normalize
    _pack: Pack
    _index: SampleIndex
    _about: About
    _epochs: Epochs
    _gather: Gather
    _resident: Resident | None

    def _open(self, resident: Resident, index: SampleIndex, options: EpochOptions, fold: str = "") -> None:
        """Serve the samples of an index."""
        like = getattr(self, "_gather", None)
        about = About(self._pack, index)
        epochs = Epochs(options, self._pack, index, about, fold)
        # Those of a fold go with it; what is shared stays until the rows are let go.
        if epochs.draws is not None and not fold:
            epochs.draws.table = resident.shared(epochs.draws.table)
        self._index, self._about, self._epochs = index, about, epochs
        self._gather = make_gather(resident, index, self.dtype, like, epochs.draws)
        resident.on_close(self._gather.close)
        self.plan = make_plan(
            self._pack, index, self.target, self._scaling, batch_size=options.batch_size, n_batches=len(epochs),
            device=str(resident.device), placement=resident.placement, path=resident.path, fold=fold,
            n_instants=None if epochs.instants is None else epochs.n_positions, world_size=options.ranks.world_size,
            draws_nbytes=0 if epochs.draws is None else epochs.draws.table.nbytes,
        )  # fmt: skip

    @property
    def resident(self) -> Resident:
        """The staged rows.

        Raises
        ------
        ClosedError
        """
        if self._resident is None:
            raise ClosedError("this Stager was closed")
        return self._resident

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""
        return self._index.n_samples

    @property
    def batch_size(self) -> int:
        """Samples, or decision instants, of a batch of one rank."""
        return self._epochs.options.batch_size

    @property
    def seed(self) -> int:
        """What decides the order, with the epoch."""
        return self._epochs.options.seed

    @property
    def shuffle(self) -> Shuffle:
        """How the order is shuffled; of ``fold.test``, not at all."""
        return self._epochs.options.shuffle

    @property
    def last(self) -> Last:
        """What becomes of an epoch's last, shorter batch; of ``fold.test``, it is kept."""
        return self._epochs.options.last

    @property
    def ranks(self) -> Ranks:
        """Which part of every batch is served; of ``fold.test`` all of it."""
        return self._epochs.options.ranks

    def __len__(self) -> int:
        """Batches of an epoch on each rank."""
        return len(self._epochs)

    def batches(
        self, epoch: int = 0, *, start: int = 0, to: Framework | None = None, stream: Any = None, reuse: bool = False
    ) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on.

        Over all ranks every sample comes exactly once, but for a dropped last batch, what fills a padded one up, and
        what is drawn by weight. Leaving the loop early is fine. A batch is valid for as long as it is referred to.

        Parameters
        ----------
        epoch, start : int
        to : {"torch", "jax", "numpy"}, optional
            What ``x``, ``y`` and ``mask`` are, without a copy but for "numpy" on a GPU. None is CuPy on a GPU, NumPy
            without one.
        stream : stream or sequence of streams, optional
            On a GPU, batches are right on the stream that is current (CuPy's, or torch's with ``to="torch"``) when they
            are asked for, and on these: name those on which work on a batch is queued later. Of CuPy or torch, or
            anything with ``__cuda_stream__``.
        reuse : bool
            On a GPU and with ``to=None``, hand out the same array objects again once nothing refers to them, which
            takes half the time of making them. Don't change an array's shape then.

        Raises
        ------
        SampleError
            If `epoch` or `start` is out of range, or `to` is none of these.
        ConfigError
            If the framework is not installed, or is one for CPUs and the rows are on a GPU.
        CaptureActiveError
            If the current stream captures a CUDA graph.
        ClosedError
        """
        check_framework(to)
        schedule = self._schedule(epoch)
        if not is_index(start, len(self) + 1):
            raise SampleError(f"start is {start!r}; an epoch has batches 0 to {len(self) - 1}")
        streams = [] if self.resident.device.index is None else consumer_streams(stream, self.resident.device.index)
        served = self._gather.batches(schedule, int(start), len(self), to, streams, reuse)
        return self._serve(int(epoch), int(start), schedule, served)

    def stats(self) -> ServingStats:
        """What was served so far, how long gathers took, and who waited for whom; not what a graph serves."""
        return self._gather.stats

    def graph_source(self) -> GraphSource:
        """What :class:`stager.cuda.GraphBatch` needs.

        Raises
        ------
        SampleError
            If batches can't be served inside a CUDA graph, saying why.
        """
        self._check_open()
        return graph_source(self, self._gather, self._schedule)

    def state_dict(self, epoch: int, next_batch: int) -> dict[str, Any]:
        """Where a training is, as a few values that JSON keeps.

        Parameters
        ----------
        epoch, next_batch : int
            The batch that would come next; ``len(st)`` at the end of an epoch.

        Returns
        -------
        dict
            Integers and texts, the same on every rank: version, place, seed, the algorithm of the order and how it is
            cut into batches, the fingerprint of the data, and a digest of what else decides the samples.

        Raises
        ------
        SampleError
            If there is no such place.
        """
        return state_of(self._begin, len(self), epoch, next_batch)

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Where to go on: ``epoch, start = st.resume(state)``, and ``st.batches(epoch, start=start)`` serves what the
        interrupted training would have been served next, also with another number of ranks, as long as all of them
        together have the same batches: ``world_size * batch_size`` is the same.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` gave.

        Raises
        ------
        SampleError
            If data, order, global batch, seed, or what is served are others than those of the state, naming which.
        """
        return go_on(self._begin, len(self), state)

    def sample_id(self, epoch: int, batch: int, sample: int) -> int:
        """The sample at a place of an epoch, 0..n_samples-1.

        Raises
        ------
        SampleError
            If there is no such batch or sample.
        """
        schedule = self._schedule(epoch)
        if not is_index(batch, len(self)):
            raise SampleError(f"there is no batch {batch!r}; an epoch has batches 0 to {len(self) - 1}")
        size = int(schedule.offsets(batch, batch + 1)[-1])
        if not is_index(sample, size):
            raise SampleError(f"there is no sample {sample!r} in batch {batch}; it has samples 0 to {size - 1}")
        return schedule.sample_id(batch, sample)

    def view(self, epoch: int, batch: int, sample: int) -> Any:
        """(window, n_columns) float32 raw rows of one sample, all columns of the pack, zero copy: do not write.

        Of a panel ``(window, n_symbols, n_columns)``. The view keeps the staged rows alive, also after ``close()``.
        """
        rows = self.resident.rows
        decision = int(self._index.rows(np.array([self.sample_id(epoch, batch, sample)]))[0])
        window = rows[decision - self._index.window + 1 : decision + 1 : self._index.dilation]
        panel = self.resident.pack.manifest.panel
        return window if panel is None else window.reshape(self.window, len(panel.symbols), -1)

    @property
    def _begin(self) -> dict[str, Any]:
        return begin_of(self._epochs, self.resident.pack.fingerprint)

    def _schedule(self, epoch: int) -> Schedule:
        self._check_open()
        return self._epochs.schedule(epoch)

    def _check_open(self) -> None:
        if self._resident is None or self._resident.closed:
            raise ClosedError("this Stager, or the rows it borrowed, was closed")

    def _serve(self, epoch: int, start: int, schedule: Schedule, served: Iterator[Arrays]) -> Iterator[Batch]:
        # The iterator may be begun, or gone on with, long after it was made.
        self._check_open()
        about = self._about
        for number, arrays in enumerate(self.resident.counted(served), start):
            yield Batch(epoch, number, about, schedule, *arrays)
            if self._resident is None or self._resident.closed:
                self._check_open()


def is_index(value: Any, stop: int) -> bool:
    """Whether the value is an integer from 0 to stop - 1."""
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and 0 <= int(value) < stop
