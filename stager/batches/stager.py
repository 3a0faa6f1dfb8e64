"""The facade: samples of staged rows, served as batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import pyarrow as pa

from stager.batches.batch import Batch
from stager.batches.configured import read_configuration
from stager.batches.epochs import EpochOptions, Last, Sampling, Shuffle
from stager.batches.folds import Fold
from stager.batches.frameworks import Framework
from stager.batches.provenance import locate, newest, to_table
from stager.batches.ranks import Ranks
from stager.batches.resident import PackSource, Placement, Resident, stage, stage_as
from stager.batches.served import Served, is_index
from stager.errors import ConfigError, SampleError
from stager.samples.folds import cut_folds
from stager.samples.index import SampleIndex
from stager.samples.labelling import Targets
from stager.samples.normalize import DType, Normalize, as_normalize
from stager.samples.panel_index import find_samples
from stager.samples.schedule import by_time
from stager.samples.schemes import Scheme, read_scheme
from stager.samples.select import Select, check_select


class Stager(Served):
    """Serves batches of windows from staged rows.

    Position is (epoch, batch), two integers; there is no hidden cursor.

    Parameters
    ----------
    source : Resident, Pack, path, pyarrow.Table or data frame
        Of a :func:`panel`, a sample is an instant with all of its symbols. A Resident is borrowed: ``close()`` frees
        nothing of it. Anything else is staged and owned.
    window : int
        Rows of a window, the decision row last.
    dilation : int
        Rows from one row of a window to the next: with 5, a window of 64 rows spans 316, all of one run.
    target : Target, Labels, or a sequence of them, optional
        One gives ``batch.y (batch,)``, a sequence ``(batch, n_targets)``, where a sample has at least one of them.
        None serves every complete window, the newest included.
    batch_size : int
        Samples of a batch on each rank; with ``shuffle="time"``, decision instants.
    seed : int
        With the epoch it decides the order: a pure function, equal on every device.
    shuffle : {"full", "block", "time", False}
        "block" keeps blocks of consecutive samples together, in a keyed order and shuffled inside, so that batches read
        rows that lie close together, as ``placement="host"`` likes it; where blocks begin is another in every epoch.
        "time" shuffles decision instants, each with its samples of all symbols, which come in the order of symbols:
        the cross-section of an instant is never torn. Samples are then numbered by time.
    block : int, optional
        Samples of a block; default 4,096.
    last : {"keep", "drop", "pad"}
        Whether an epoch's last, shorter batch is served. "pad" fills it up from the beginning of the same epoch's
        order, as often as it takes; what fills it up is false in ``batch.valid``. Several ranks need "drop" or "pad".
    ranks : Ranks
        Which part of every batch this process serves.
    sampling : {"once", "weighted"}
        "weighted" draws ``n_samples`` positions an epoch with replacement, each sample in proportion to its weight.
    weights : (n_samples,) array or "uniqueness", optional
        With ``sampling="weighted"``: numbers by sample id, or ``batch.weight``. Of a fold, those of its samples.
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
        dilation: int = 1,
        target: Targets = None,
        batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = "full",
        block: int | None = None,
        last: Last = "keep",
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
        sampling: Sampling = "once",
        weights: Any = None,
        select: Select = Select(),  # noqa: B008 - frozen
        normalize: str | Normalize = "none",
        dtype: DType = "float32",
        device: str = "auto",
        placement: Placement = "auto",
    ) -> None:
        # Checked before staging, which may take a while.
        options = EpochOptions(
            batch_size=batch_size, seed=seed, shuffle=shuffle, block=block, last=last, ranks=ranks, sampling=sampling,
            weights=weights,
        )  # fmt: skip
        for name, value in (("window", window), ("dilation", dilation)):
            if not is_index(value, 1 << 62) or value == 0:
                raise SampleError(f"{name} is {value!r}; it must be an integer of at least 1 row")
        if isinstance(source, Resident) and (device, placement) != ("auto", "auto"):
            raise ConfigError("device and placement belong to stage(); a Resident lies where it was staged")
        if dtype not in get_args(DType):
            raise SampleError(f"dtype is {dtype!r}; there are {', '.join(map(repr, get_args(DType)))}")
        self.target, self.window, self.dilation, self.dtype = target, int(window), int(dilation), dtype
        self._scaling = as_normalize(normalize)
        check_select(select)
        self._owned = not isinstance(source, Resident)
        if isinstance(source, Resident):
            resident = source
        else:
            resident = stage(source, device=device, placement=placement)
        self._resident: Resident | None = resident
        try:
            self._pack, index = find_samples(resident.pack, window, target, select, self._scaling, dilation)
            if options.by_instant:
                index = by_time(self._pack, index)
            self._open(resident, index.with_tables(resident.shared), options)
        except BaseException:
            self.close()
            raise

    def _part(self, index: SampleIndex, fold: str, part: Literal["train", "test", "latest"]) -> Stager:
        """A Stager of some of the samples, over the same rows; all but training comes in order, whole on any rank."""
        resident, made = self.resident, copy.copy(self)
        made._owned = False
        options = self._epochs.options_of(index) if part == "train" else self._epochs.options.in_order()
        if part == "latest":
            options = replace(options, by_instant=False, batch_size=index.n_samples)
        made._open(resident, index, options, fold)
        return made

    def on_rank(self, ranks: Ranks) -> Stager:
        """The same samples for another rank, over the same rows and tables, for as long as these are not closed."""
        resident, made = self.resident, copy.copy(self)
        made._owned = False
        made._open(resident, self._index, replace(self._epochs.options, ranks=ranks))
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

    def latest(self, *, to: Framework | None = None) -> Batch:
        """The newest window of every symbol that has one, as one batch in the order of the symbols.

        ``batch.times`` tells how new each is. Windows end at the newest bars only with ``target=None``.

        Parameters
        ----------
        to : {"torch", "jax", "numpy"}, optional
            As in :meth:`batches`.

        Raises
        ------
        SampleError
            With a target: the windows whose label is not known yet are no samples then.
        """
        self._check_open()
        made = self._part(newest(self._pack, self._index, self.target), "", "latest")
        (batch,) = made.batches(to=to)
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
            the other, without what ``batch.valid`` marks false; of a shuffled epoch, ``predictions[batch.sample_ids] =
            ...``. NumPy, CuPy, torch or a list.

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
        padded = self._epochs.options.last == "pad"
        return to_table(self._pack, self._index, self._about, predictions, padded=padded)

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
