"""A batch, and what can be asked about it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.packs.layout import Pack
from stager.samples.index import SampleIndex
from stager.samples.panel_index import PanelIndex
from stager.samples.schedule import Schedule
from stager.samples.uniqueness import uniqueness


class Batch:
    """Consecutive positions of an epoch, of samples or of decision instants, gathered.

    ``x`` and ``y`` are copies of the staged rows: they stay right for as long as they are referred to, and may be
    written to. What is told about the samples is computed on the host when asked for.

    Attributes
    ----------
    epoch, number : int
        Where in the training this batch is.
    x : (size, window, n_columns) float32
        NumPy or CuPy. Windows, oldest row first, normalised if that was asked for. Of a panel ``(size, window,
        n_symbols, n_columns)``, NaN where a symbol has no bar.
    y : (size,) or (size, n_targets) float32, or None
        The target, or a column for each of a list of targets, NaN where a sample lacks it; None without a target. Of a
        panel ``(size, n_symbols)`` or ``(size, n_symbols, n_targets)``.
    mask : (size, window, n_symbols) bool, or None
        Of a panel, where `x` is: the bar was observed, with all served columns, and not filled in. None otherwise.
    """

    __slots__ = ("_about", "_schedule", "epoch", "mask", "number", "x", "y")

    def __init__(
        self, epoch: int, number: int, about: About, schedule: Schedule, x: Any, y: Any = None, mask: Any = None
    ) -> None:
        self.epoch, self.number, self.x, self.y, self.mask = epoch, number, x, y, mask
        self._about, self._schedule = about, schedule

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def __repr__(self) -> str:
        return f"<Batch {self.number} of epoch {self.epoch}: x {self.x.shape}>"

    @property
    def sample_ids(self) -> npt.NDArray[np.int64]:
        """(size,) int64 on the host."""
        return self._schedule.sample_ids(self.number, self.number + 1)

    @property
    def symbols(self) -> list[str]:
        """The symbol of each sample; of a panel, its symbols."""
        return self._about.symbols(self.sample_ids)

    @property
    def times(self) -> npt.NDArray[np.datetime64]:
        """(size,) datetime64[ns] UTC: the decision, when the window's last bar became available."""
        return self._about.times(self.sample_ids)

    @property
    def label_times(self) -> npt.NDArray[np.datetime64] | None:
        """datetime64[ns] UTC, shape of `y`: when each target became known, NaT for none; None without a target."""
        return self._about.label_times(self.sample_ids)

    @property
    def y_valid(self) -> npt.NDArray[np.bool_] | None:
        """bool on the host, shape of `y`: false where a sample lacks a target, whose `y` is served as NaN."""
        return self._about.y_valid(self.sample_ids)

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """(size,) float32 on the host: average uniqueness of the label among those of its symbol, of mean 1.

        Over all samples of the Stager, so for ``fold.train`` over those that the purge left; 1 without a target.
        """
        return self._about.weights(self.sample_ids)

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """(size,) bool on the host: false for what fills up the last batch of an epoch, with ``last="pad"``."""
        return self._schedule.valid(self.number)


class About:
    """Facts about samples, by sample id."""

    def __init__(self, pack: Pack, index: SampleIndex) -> None:
        self._pack, self._index = pack, index
        #: When all labels of decision rows are known; None without labels.
        self.ends = None if index.y is None else index.known_at

    def symbols(self, ids: npt.NDArray[np.int64]) -> list[str]:
        if isinstance(self._index, PanelIndex):
            return list(self._index.symbols)
        owners = np.searchsorted(self._pack.first_rows, self._index.rows(ids), side="right") - 1
        return [self._pack.symbols[owner] for owner in owners]

    def times(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.datetime64]:
        return self._pack.available_at(self._index.rows(ids)).view("datetime64[ns]")

    def label_times(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.datetime64] | None:
        if self._index.y is None:
            return None
        return self._index.label_ends(self._index.rows(ids)).view("datetime64[ns]")

    def y_valid(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        return None if self._index.y is None else ~np.isnan(self._index.y[self._index.rows(ids)])

    def weights(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self._weights[self._index.rows(ids)]

    @cached_property
    def _weights(self) -> npt.NDArray[np.float32]:
        return uniqueness(self._pack, self._index, self.ends)
