"""The facade: samples of staged rows, served as batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from stager.batches.batch import About, Batch
from stager.batches.configured import read_configuration
from stager.batches.folds import Fold
from stager.batches.frameworks import Framework, check_framework
from stager.batches.gathers import Arrays, consumer_streams, make_gather
from stager.batches.graph import GraphSource, graph_source
from stager.batches.position import go_on, state_of
from stager.batches.provenance import locate, newest, to_table
from stager.batches.resident import PackSource, Placement, Resident, stage, stage_as
from stager.errors import ClosedError, ConfigError, SampleError
from stager.samples.folds import cut_folds
from stager.samples.index import SampleIndex
from stager.samples.labelling import Targets
from stager.samples.normalize import DType, Normalize, as_normalize
from stager.samples.order import Order
from stager.samples.panel_index import find_samples
from stager.samples.plan import Plan, make_plan
from stager.samples.schedule import Schedule, by_time, instants_of
from stager.samples.schemes import Scheme, read_scheme
from stager.samples.select import Select


class Stager:
    """Serves batches of windows from staged rows.

    Position is (epoch, batch), two integers; there is no hidden cursor.

    Parameters
    ----------
    source : Resident, Pack, path, or pyarrow.Table
        Of a :func:`panel`, a sample is an instant with all of its symbols. A Resident is borrowed: ``close()`` frees
        nothing of it. Anything else is staged and owned.
    window : int
        Rows of a window, the decision row last.
    target : Target, Labels, or a sequence of them, optional
        One gives ``batch.y (batch,)``, a sequence ``(batch, n_targets)``, where a sample has at least one of them.
        None serves every complete window, the newest included.
    batch_size : int
        Samples of a batch; with ``shuffle="time"``, decision instants of a batch.
    seed : int
        With the epoch it decides the order: a pure function, equal on every device.
    shuffle : {"full", "time", False}
        "time" shuffles decision instants, each with its samples of all symbols, which come in the order of symbols:
        the cross-section of an instant is never torn. Samples are then numbered by time.
    last : {"keep", "drop"}
        Whether an epoch's last, shorter batch is served.
    select : Select
    normalize : {"none", "last", "zscore"} or Normalize
        How ``batch.x`` is scaled, from what each window holds alone. "last" divides prices by the window's last close
        and subtracts 1, and takes the logarithm of volumes; "zscore" is of every column.
    dtype : {"float32", "float16", "bfloat16"}
        What ``batch.x`` is cast to on the way, after it was scaled; to the nearest, ties to even. NumPy and CuPy know
        bfloat16 through the package ml_dtypes.
    device, placement : str
        As in :func:`stage`; not with a Resident.

    Raises
    ------
    SampleError
        If the request leaves no sample or a value is not allowed.
    BarsError, PackError, DeviceError, StagingError
        As :func:`stage`.

    Examples
    --------
    >>> with Stager("bars.pack", window=64, target=Target(horizon=5), batch_size=256) as st:  # doctest: +SKIP
    ...     for epoch in range(50):
    ...         for batch in st.batches(epoch):
    ...             train(batch.x, batch.y)
    """

    _scheme: Scheme | None = None

    def __init__(
        self,
        source: Resident | PackSource,
        *,
        window: int,
        target: Targets = None,
        batch_size: int,
        seed: int = 0,
        shuffle: Literal["full", "time"] | bool = "full",
        last: Literal["keep", "drop"] = "keep",
        select: Select = Select(),  # noqa: B008 - frozen
        normalize: str | Normalize = "none",
        dtype: DType = "float32",
        device: str = "auto",
        placement: Placement = "auto",
    ) -> None:
        for name, value, unit in (("batch_size", batch_size, "sample"), ("window", window, "row")):
            if not _is_index(value, 1 << 62) or value == 0:
                raise SampleError(f"{name} is {value!r}; it must be an integer of at least 1 {unit}")
        if last not in ("keep", "drop"):
            raise SampleError(f"last is {last!r}; there are 'keep' and 'drop'")
        if isinstance(source, Resident) and (device, placement) != ("auto", "auto"):
            raise ConfigError("device and placement belong to stage(); a Resident lies where it was staged")
        if shuffle is not False and shuffle not in ("full", "time"):
            raise SampleError(f"shuffle is {shuffle!r}; there are 'full', 'time' and False")
        if dtype not in get_args(DType):
            raise SampleError(f"dtype is {dtype!r}; there are {', '.join(map(repr, get_args(DType)))}")
        # Checked before staging, which may take a while.
        Order(1, seed)
        scaling = as_normalize(normalize)
        self.seed, self.shuffle, self.last, self.batch_size = int(seed), shuffle, last, int(batch_size)
        self.target, self.window, self.dtype = target, window, dtype
        self._by_time = shuffle == "time"
        self._owned = not isinstance(source, Resident)
        if isinstance(source, Resident):
            resident = source
        else:
            resident = stage(source, device=device, placement=placement)
        self._resident: Resident | None = resident
        try:
            self._scaling = scaling
            self._pack, index = find_samples(resident.pack, window, target, select, scaling)
            self._open(resident, by_time(self._pack, index) if self._by_time else index)
        except BaseException:
            self.close()
            raise

    def _open(self, resident: Resident, index: SampleIndex, fold: str = "") -> None:
        """Serve the samples of an index."""
        like = getattr(self, "_gather", None)
        self._index = index
        self._instants = instants_of(self._pack, index) if self._by_time else None
        if self.last == "drop" and self._n_positions < self.batch_size:
            what = "decision instants" if self._by_time else "samples"
            raise SampleError(
                f"{self._n_positions:,} {what} fill no batch of {self.batch_size:,}, and last='drop' serves no "
                f"shorter one; use a smaller batch_size or last='keep'"
            )
        self._about = About(self._pack, index)
        self._gather = make_gather(resident, index, self.dtype, like)
        resident.on_close(self._gather.close)
        #: What is served and what it takes.
        self.plan: Plan = make_plan(
            self._pack, index, self.target, self._scaling, batch_size=self.batch_size, n_batches=len(self),
            device=str(resident.device), placement=resident.placement, path=resident.path, fold=fold,
            n_instants=None if self._instants is None else self._n_positions,
        )  # fmt: skip

    def _part(self, index: SampleIndex, fold: str, part: Literal["train", "test", "latest"]) -> Stager:
        """A Stager of some of the samples, over the same rows; all but training comes unshuffled, all of it."""
        resident, made = self.resident, copy.copy(self)
        made._owned = False
        if part != "train":
            made.shuffle, made.last = False, "keep"
        if part == "latest":
            made._by_time, made.batch_size = False, index.n_samples
        made._open(resident, index, fold)
        return made

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> Stager:
        """A Stager from a TOML file; argument > environment > TOML > default.

        Parameters
        ----------
        path : str or Path
            ``source``, a path relative to the file, and tables ``[batches]``, ``[target]``, ``[select]``,
            ``[split]``, ``[staging]``; see ``configs/default.toml``.
        **overrides
            Arguments of :class:`Stager`.

        Raises
        ------
        ConfigError
        """
        scheme = read_scheme(path)
        told = read_configuration(path, overrides)
        owned = told.staging is not None
        resident = told.source if told.staging is None else stage_as(told.prepared(), told.staging)
        try:
            made = cls(resident, **told.arguments)
        except BaseException:
            if owned:
                resident.close()
            raise
        made._owned, made._scheme = owned, scheme
        return made

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

    def __len__(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self._n_positions, self.batch_size)
        return full + (1 if rest and self.last == "keep" else 0)

    @property
    def _n_positions(self) -> int:
        """What is shuffled: samples, or decision instants."""
        return self.n_samples if self._instants is None else len(self._instants) - 1

    def batches(
        self, epoch: int = 0, *, start: int = 0, to: Framework | None = None, stream: Any = None, reuse: bool = False
    ) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on.

        Every sample comes exactly once (but for a dropped last batch). Leaving the loop early is fine. A batch is valid
        for as long as it is referred to.

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
        if not _is_index(start, len(self) + 1):
            raise SampleError(f"start is {start!r}; an epoch has batches 0 to {len(self) - 1}")
        streams = [] if self.resident.device.index is None else consumer_streams(stream, self.resident.device.index)
        served = self._gather.batches(schedule, int(start), len(self), to, streams, reuse)
        return self._serve(int(epoch), int(start), schedule, served)

    def graph_source(self) -> GraphSource:
        """What :class:`stager.cuda.graphs.GraphBatch` needs.

        Raises
        ------
        SampleError
            If batches can't be served inside a CUDA graph, saying why.
        """
        self._check_open()
        return graph_source(self, self._gather, lambda epoch: self._schedule(epoch).order)

    def state_dict(self, epoch: int, next_batch: int) -> dict[str, Any]:
        """Where a training is, as a few values that JSON keeps.

        Parameters
        ----------
        epoch, next_batch : int
            The batch that would come next; ``len(st)`` at the end of an epoch.

        Raises
        ------
        SampleError
            If there is no such place.
        """
        return state_of(self, self._index, epoch, next_batch)

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Where to go on: ``epoch, start = st.resume(state)``, and ``st.batches(epoch, start=start)`` serves what the
        interrupted training would have been served next.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` gave.

        Raises
        ------
        SampleError
            If data, order, batch size, seed, or what is served are others than those of the state, naming which.
        """
        return go_on(self, self._index, state)

    def sample_id(self, epoch: int, batch: int, sample: int) -> int:
        """The sample at a place of an epoch, 0..n_samples-1.

        Raises
        ------
        SampleError
            If there is no such batch or sample.
        """
        schedule = self._schedule(epoch)
        if not _is_index(batch, len(self)):
            raise SampleError(f"there is no batch {batch!r}; an epoch has batches 0 to {len(self) - 1}")
        size = int(schedule.offsets(batch, batch + 1)[-1])
        if not _is_index(sample, size):
            raise SampleError(f"there is no sample {sample!r} in batch {batch}; it has samples 0 to {size - 1}")
        return schedule.sample_id(batch, sample)

    def view(self, epoch: int, batch: int, sample: int) -> Any:
        """(window, n_columns) float32 raw rows of one sample, all columns of the pack, zero copy: do not write.

        Of a panel ``(window, n_symbols, n_columns)``. The view keeps the staged rows alive, also after ``close()``.
        """
        rows = self.resident.rows
        decision = int(self._index.rows(np.array([self.sample_id(epoch, batch, sample)]))[0])
        window = rows[decision - self.window + 1 : decision + 1]
        panel = self.resident.pack.manifest.panel
        return window if panel is None else window.reshape(self.window, len(panel.symbols), -1)

    def split(self, scheme: Scheme | None = None) -> list[Fold]:
        """Folds over decision time; all of them, and this Stager, serve from the same rows.

        Parameters
        ----------
        scheme : WalkForward, PurgedKFold or Combinatorial, optional
            Default: that of the configuration's table ``[split]``.

        Returns
        -------
        list of Fold
            ``fold.train`` and ``fold.test`` are Stagers that borrow the rows: they serve for as long as these are not
            closed. Training samples whose label reaches into a test are purged, see :mod:`stager.samples.folds`.

        Raises
        ------
        SampleError
            If a fold has no sample to train or to test on.
        """
        scheme = self._scheme if scheme is None else scheme
        if not isinstance(scheme, Scheme):
            raise SampleError(
                f"split() got {scheme!r}; give WalkForward(5), PurgedKFold(5) or Combinatorial(10, 2), or write a "
                f"table [split] into the configuration"
            )
        self._check_open()
        folds = cut_folds(self._pack, self._index, self._about.ends, scheme)
        return [Fold(self._pack, self._index, fold, scheme, self._part) for fold in folds]

    def latest(self) -> Batch:
        """The newest window of every symbol that has one, as one batch in the order of the symbols.

        ``batch.times`` tells how new each is. Windows end at the newest bars only with ``target=None``.

        Raises
        ------
        SampleError
            With a target: the windows whose label is not known yet are no samples then.
        """
        self._check_open()
        made = self._part(newest(self._pack, self._index, self.target), "", "latest")
        (batch,) = made.batches()
        made.close()
        return batch

    def locate(self, symbol: str, time: Any) -> int:
        """The sample of a symbol and a decision, as in ``batch.sample_ids``.

        Parameters
        ----------
        symbol : str
        time : str, datetime or numpy.datetime64
            The decision, as in ``batch.times``; without a zone it is UTC.

        Raises
        ------
        SampleError
            If there is none, saying what there is.
        """
        self._check_open()
        return locate(self._pack, self._index, symbol, time)

    def to_table(self, predictions: Any = None) -> pa.Table:
        """The samples with what was predicted for them.

        Parameters
        ----------
        predictions : (n_samples,) or (n_samples, n_outputs) array, optional
            By sample: as an epoch without shuffling serves them, so for ``fold.test`` those of its batches one after
            the other; of a shuffled epoch, ``predictions[batch.sample_ids] = ...``. NumPy, CuPy, torch or a list.

        Returns
        -------
        pyarrow.Table
            symbol, time (the bar's stamp), decision, label_end, target, prediction; a row each sample. Without a target
            label_end and target are null. Several targets or outputs have a column each, ``target_0``, ... Of a panel,
            predictions are by sample and symbol, and the table has a row for each symbol that is selected at the
            decision and has a target, where one is asked for.

        Raises
        ------
        SampleError
            If there is not one prediction for each sample.
        """
        self._check_open()
        return to_table(self._pack, self._index, self._about, predictions)

    def close(self) -> None:
        """Refuse further use; owned rows are closed too, see :meth:`Resident.close`."""
        resident, self._resident = self._resident, None
        if resident is None:
            return
        if hasattr(self, "_gather"):
            self._gather.close()
        if self._owned:
            resident.close()

    def __enter__(self) -> Stager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._resident is None else ""
        return f"<Stager{state}: {self.n_samples:,} samples of {self.window} rows, {len(self):,} batches>"

    def _schedule(self, epoch: int) -> Schedule:
        self._check_open()
        shuffle = "full" if self.shuffle else False
        return Schedule(Order(self._n_positions, self.seed, epoch, shuffle), self.batch_size, self._instants)

    def _check_open(self) -> None:
        if self._resident is None or self._resident.closed:
            raise ClosedError("this Stager, or the rows it borrowed, was closed")

    def _serve(self, epoch: int, start: int, schedule: Schedule, served: Iterator[Arrays]) -> Iterator[Batch]:
        # The iterator may be begun, or gone on with, long after it was made.
        self._check_open()
        about = self._about
        for number, arrays in enumerate(served, start):
            yield Batch(epoch, number, about, schedule, *arrays)
            if self._resident is None or self._resident.closed:
                self._check_open()


def _is_index(value: Any, stop: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and 0 <= int(value) < stop
