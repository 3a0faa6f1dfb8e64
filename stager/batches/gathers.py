"""Which gather serves from some rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from stager.batches.host import HostGather
from stager.batches.resident import Resident
from stager.samples.index import SampleIndex
from stager.samples.panel_index import PanelIndex
from stager.samples.schedule import Schedule


def make_gather(resident: Resident, index: SampleIndex, like: Any = None) -> Any:
    """The gather for the rows' device; on a GPU it shares memory with `like`, one over the same rows."""
    if isinstance(index, PanelIndex):
        return PanelGather(resident, index, like)
    return _make(resident, resident.rows, index, like)


def _make(resident: Resident, rows: Any, index: SampleIndex, like: Any = None) -> Any:
    if resident.device.index is None:
        return HostGather(rows, index)
    from stager.cuda.gather import CudaGather

    return CudaGather(rows, index, resident.stall_timeout, like)


class PanelGather:
    """Gathers the batches of a panel: from the rows, and from its mask and targets as if they were rows too.

    Parameters
    ----------
    resident : Resident
    index : PanelIndex
    like : PanelGather, optional
        Another one over the same rows; mask and targets are shared with it.
    """

    def __init__(self, resident: Resident, index: PanelIndex, like: PanelGather | None = None) -> None:
        n_symbols, window = len(index.symbols), index.window
        self._x_shape, self._n_symbols = (window, n_symbols, -1), n_symbols
        self._y_shape = () if index.y is None else index.y.shape[1:]
        self._tables: tuple[Any, Any] = self._load(resident, index) if like is None else like._tables
        mask, y = self._tables
        self._x: Any = _make(
            resident,
            resident.rows,
            replace(index, columns=index.wide_columns, y=None),
            None if like is None else like._x,
        )
        plain = replace(index, columns=None, y=None, close_column=0)
        self._mask = _make(resident, mask, plain, self._x)
        self._y = None if y is None else _make(resident, y, replace(plain, window=1), self._x)

    def _load(self, resident: Resident, index: PanelIndex) -> tuple[Any, Any]:
        """Mask and targets where the gather reads them, as float32 whose bits are copied: four symbols' masks each."""
        mask = np.zeros((len(index.mask), -(-self._n_symbols // 4) * 4), bool)
        mask[:, : self._n_symbols] = index.mask
        tables = mask.view(np.float32), None if index.y is None else index.y.reshape(len(index.y), -1)
        if resident.device.index is None:
            return tables
        from stager.cuda.gather import load

        device, timeout = resident.device.index, resident.stall_timeout
        return load(tables[0], device, timeout), None if tables[1] is None else load(tables[1], device, timeout)

    def batches(self, schedule: Schedule, first: int, stop: int) -> Iterator[tuple[Any, Any, Any]]:
        """Batches ``first : stop`` of an epoch, in order: x, y and mask."""
        ys = repeat((None, None)) if self._y is None else self._y.batches(schedule, first, stop)
        masks = self._mask.batches(schedule, first, stop)
        for (x, _), (mask, _), (y, _) in zip(self._x.batches(schedule, first, stop), masks, ys, strict=False):
            size = len(x)
            yield (
                x.reshape(size, *self._x_shape),
                None if y is None else y.reshape(size, *self._y_shape),
                mask.view(np.bool_)[:, :, : self._n_symbols],
            )

    def close(self) -> None:
        """Wait for gathers that were begun, and forget the rows."""
        for gather in (self._x, self._mask, self._y):
            if gather is not None:
                gather.close()
        self._tables = None, None
