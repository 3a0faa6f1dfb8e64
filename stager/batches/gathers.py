"""Which gather serves from some rows: on the host, or on their GPU; of a panel, from its targets and mask too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from stager.batches.frameworks import Framework, hand_out
from stager.batches.host import HostGather
from stager.batches.resident import Resident
from stager.batches.stats import ServingStats
from stager.samples.index import SampleIndex
from stager.samples.normalize import DType
from stager.samples.panel_index import PanelIndex
from stager.samples.sampling import Draws
from stager.samples.schedule import Schedule

Arrays = tuple[Any, ...]


class Gather(Protocol):
    """Serves the batches of one Stager."""

    def batches(
        self, schedule: Schedule, first: int, stop: int, to: Framework | None, streams: Sequence[Any], reuse: bool
    ) -> Iterator[Arrays]:
        """x, y where there are targets, and of a panel y or None and mask, of batches ``first : stop``, in order."""
        ...

    @property
    def stats(self) -> ServingStats:
        """What was served so far."""
        ...

    def close(self) -> None:
        """Wait for gathers that were begun, and forget the rows."""
        ...


def make_gather(
    resident: Resident, index: SampleIndex, dtype: DType = "float32", like: Any = None, draws: Draws | None = None
) -> Gather:
    """The gather for the rows' device, which shares memory with `like`, one over the same rows."""
    if resident.device.index is None:
        return OnHost(resident, index, dtype, like)
    return OnGpu(resident, index, dtype, like, draws)


def consumer_streams(stream: Any, device: int) -> list[Any]:
    """The streams that a caller names, as CuPy's.

    Raises
    ------
    SampleError
        If something is no stream.
    """
    if stream is None:
        return []
    from stager.cuda.exports import as_stream

    return [as_stream(one, device) for one in (stream if isinstance(stream, (list, tuple)) else [stream])]


class OnHost:
    """NumPy gathers.

    Parameters
    ----------
    resident : Resident
    index : SampleIndex
    dtype : {"float32", "float16", "bfloat16"}
    like : OnHost, optional
        Another one over the same rows.
    """

    def __init__(self, resident: Resident, index: SampleIndex, dtype: DType, like: OnHost | None) -> None:
        self._bfloat16 = dtype == "bfloat16"
        self._panel = index if isinstance(index, PanelIndex) else None
        self._tables: list[Any] = []
        parts = [index]
        if self._panel is not None:
            self._tables = _tables(resident, self._panel) if like is None else like._tables
            parts = _parts(self._panel)
        self._parts = [HostGather(resident.rows, parts[0], dtype)]
        self._parts += [HostGather(table, part) for table, part in zip(self._tables, parts[1:], strict=True)]

    def batches(
        self, schedule: Schedule, first: int, stop: int, to: Framework | None, streams: Sequence[Any], reuse: bool
    ) -> Iterator[Arrays]:
        """See :class:`Gather`; there are no streams, and arrays are made afresh."""
        served = self._of_panel(schedule, first, stop) if self._panel else self._parts[0].batches(schedule, first, stop)
        if to in (None, "numpy") and not self._bfloat16:
            return served
        return (
            (
                hand_out(x, to, bfloat16=self._bfloat16),
                *(None if array is None else hand_out(array, to) for array in more),
            )
            for x, *more in served
        )

    @property
    def stats(self) -> ServingStats:
        """See :class:`Gather`."""
        first, *more = (part.stats for part in self._parts)
        nbytes, gathered = (sum(getattr(one, name) for one in more) for name in ("nbytes", "gather_nbytes"))
        return replace(
            first,
            nbytes=first.nbytes + nbytes,
            gather_nbytes=first.gather_nbytes + gathered,
            gather_seconds=first.gather_seconds + sum(one.gather_seconds for one in more),
            consumer_waited_seconds=first.consumer_waited_seconds + sum(one.consumer_waited_seconds for one in more),
        )

    def close(self) -> None:
        """See :class:`Gather`."""
        for part in self._parts:
            part.close()

    def _of_panel(self, schedule: Schedule, first: int, stop: int) -> Iterator[Arrays]:
        assert self._panel is not None
        served = [part.batches(schedule, first, stop) for part in self._parts]
        n_symbols, y_shape = len(self._panel.symbols), _y_shape(self._panel)
        ys = repeat((None,)) if y_shape is None else served[2]
        for (x, *_), (mask, *_), (y, *_) in zip(served[0], served[1], ys, strict=False):
            yield (
                x.reshape(*x.shape[:2], n_symbols, -1),
                None if y is None or y_shape is None else y.reshape(len(y), *y_shape),
                mask.view(np.bool_)[:, :, :n_symbols],
            )


class OnGpu:
    """Gathers into groups on the rows' GPU.

    Parameters
    ----------
    resident : Resident
    index : SampleIndex
    dtype : {"float32", "float16", "bfloat16"}
    like : OnGpu, optional
        Another one over the same rows.
    draws : Draws, optional
        Where samples are drawn by weight.
    """

    def __init__(
        self, resident: Resident, index: SampleIndex, dtype: DType, like: OnGpu | None, draws: Draws | None = None
    ) -> None:
        from stager.cuda.fields import Field
        from stager.cuda.gather import WindowGather
        from stager.cuda.groups import Groups

        device, timeout = resident.device.index, resident.stall_timeout
        assert device is not None
        self._n_symbols, fields = 0, None
        parts, dtypes = [index], [dtype]
        #: What is gathered from beside the rows; kept for as long as it may be read.
        self._tables: list[Any] = []
        if isinstance(index, PanelIndex):
            self._n_symbols, parts, y_shape = len(index.symbols), _parts(index), _y_shape(index)
            if like is None:
                self._tables = [resident.on_device(table) for table in _tables(resident, index)]
            else:
                self._tables = like._tables
            dtypes = [dtype, "float32", "float32"][: len(parts)]
            n_served = len(parts[0].columns) if parts[0].columns is not None else resident.rows.shape[1]
            fields = [
                Field((index.length, self._n_symbols, n_served // self._n_symbols), dtype),
                Field((index.length, _padded(self._n_symbols)), "bool"),
                *(() if y_shape is None else (Field(y_shape),)),
            ]
        self._gathers: list[WindowGather] = [
            WindowGather(
                rows, part, timeout, None if like is None else like._gathers[number], dtypes[number], draws,
                resident.on_device,
            )
            for number, (rows, part) in enumerate(zip([resident.rows, *self._tables], parts, strict=True))
        ]  # fmt: skip
        self._groups: Groups = Groups(self._gathers, device, fields, None if like is None else like._groups)

    @property
    def of_panel(self) -> bool:
        return self._n_symbols > 0

    @property
    def windows(self) -> Any:
        """The gather of windows and targets."""
        return self._gathers[0]

    def batches(
        self, schedule: Schedule, first: int, stop: int, to: Framework | None, streams: Sequence[Any], reuse: bool
    ) -> Iterator[Arrays]:
        """See :class:`Gather`."""
        served = self._groups.batches(schedule, first, stop, to, streams, reuse)
        if not self._n_symbols:
            return served
        return ((x, more[0] if more else None, mask[:, :, : self._n_symbols]) for x, mask, *more in served)

    @property
    def stats(self) -> ServingStats:
        """See :class:`Gather`."""
        times = self._groups.times.look()
        return ServingStats(
            times.n_batches, times.n_samples, times.nbytes, times.n_copied, times.gather_seconds, times.timed_nbytes,
            times.consumer_waited_seconds, times.gather_waited_seconds,
        )  # fmt: skip

    def close(self) -> None:
        """See :class:`Gather`."""
        self._groups.close()
        self._tables = []


def _tables(resident: Resident, panel: PanelIndex) -> list[Any]:
    """Mask and targets of a panel as if they were rows of float32, whose bits are copied: four symbols' masks each."""
    mask = np.zeros((len(panel.mask), _padded(len(panel.symbols))), bool)
    mask[:, : len(panel.symbols)] = panel.mask
    return [resident.shared(mask.view(np.float32)), *(() if panel.y is None else (panel.y.reshape(len(panel.y), -1),))]


def _parts(panel: PanelIndex) -> list[SampleIndex]:
    """What is gathered for a sample of a panel: windows of rows and mask, and the decision row of the targets."""
    plain = replace(panel, columns=None, methods=None, fitted=None, y=None, close_column=0)
    windows = panel.of_rows_as_they_lie()
    return [windows, plain, *(() if panel.y is None else (replace(plain, window=1, dilation=1),))]


def _y_shape(panel: PanelIndex) -> tuple[int, ...] | None:
    return None if panel.y is None else panel.y.shape[1:]


def _padded(n_symbols: int) -> int:
    return -(-n_symbols // 4) * 4
