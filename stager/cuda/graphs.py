"""Batches inside the user's CUDA graph: the gather is captured with the training step and goes on with each replay."""

from __future__ import annotations

from typing import Any, Literal

import cupy
import numpy as np

from stager.cuda.exports import export_to
from stager.cuda.fields import Field, lay_out
from stager.cuda.gather import where
from stager.cuda.kernels import CURSOR
from stager.cuda.order import ORDER
from stager.errors import SampleError


class GraphBatch:
    """A batch at fixed addresses, whose gather is part of a CUDA graph.

    ``advance()`` gathers the next batch. Captured, it is one kernel; two where batches are large or windows are scaled
    or cast; three where they are scaled by statistics of their own. They read on the device where they are and go on by
    themselves: a replay serves the next batch, over the ends of epochs and into their new orders, without work on the
    host.

    Parameters
    ----------
    st : Stager
        Over rows on a GPU; with ``last="drop"`` or ``"pad"``, because a graph's batches are all of one size, and not
        with ``shuffle="time"`` or of a panel.
    to : {"torch"}, optional
        What the arrays are; None is CuPy.
    epochs : int
        Orders of so many epochs, from the one sought, lie on the device, 552 bytes each. Batches after them are missing
        values, and :meth:`position` says so.

    Attributes
    ----------
    x : (batch_size, window, n_columns)
    y : (batch_size,) or (batch_size, n_targets) float32, or None
    valid : (batch_size,) bool
        False for padding.

    Raises
    ------
    SampleError
        If `st` can't be served so.

    Examples
    --------
    >>> batch = GraphBatch(st, to="torch")  # doctest: +SKIP
    >>> with torch.cuda.graph(graph):  # doctest: +SKIP
    ...     batch.advance()
    ...     step(batch.x, batch.y)
    >>> for _ in range(len(st)):  # doctest: +SKIP
    ...     graph.replay()
    """

    def __init__(self, st: Any, *, to: Literal["torch"] | None = None, epochs: int = 1024) -> None:
        if to not in (None, "torch"):
            raise SampleError(f"to is {to!r}; a graph's arrays are of CuPy (None) or 'torch'")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise SampleError(f"epochs is {epochs!r}; it must be an integer of at least 1")
        self._source = source = st.graph_source()
        # Rows and tables stay for as long as a graph may be replayed.
        self._rows, self._gather = source.rows, source.gather
        self._held = self._gather.held
        self._epochs, self._first_epoch = epochs, -1
        self._device = cupy.cuda.Device(where(source.rows)[0])
        self._count = source.batch_size
        fields = [*self._gather.fields, Field((), "bool")]
        with self._device:
            stream = cupy.cuda.Stream(non_blocking=True)
            self._export = export_to(to, self._device.id, stream)
            sizes = [self._count * field.nbytes for field in fields]
            sizes += [
                self._gather.scratch_nbytes(self._count),
                source.window_nbytes,
                CURSOR.itemsize,
                epochs * ORDER.itemsize,
            ]
            offsets, nbytes = lay_out(sizes)
            memory = cupy.cuda.Memory(nbytes)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            arrays = [
                next(self._export.split(pointer + at, field, [self._count])[0])
                for field, at in zip(fields, offsets[: len(fields)], strict=True)
            ]
            self.x: Any = arrays[0]
            self.y: Any = arrays[1] if len(arrays) == 3 else None
            self.valid: Any = arrays[-1]
            scratch, nothing, cursor, orders = range(len(fields), len(fields) + 4)
            places = [memory.ptr + at for at in offsets]
            self._x, self._scratch = places[0], places[scratch]
            _bytes(pointer + offsets[nothing], source.window_nbytes).fill(0xFF)
            self._cursor = _bytes(pointer + offsets[cursor], CURSOR.itemsize)
            self._orders = _bytes(pointer + offsets[orders], epochs * ORDER.itemsize)
            self._next = self._gather.next_batch(
                count=self._count, cursor=places[cursor], orders=places[orders], n_orders=epochs,
                n_batches=source.n_batches, stride=source.stride, offset=source.offset, nothing=places[nothing],
                y=places[1] if self.y is not None else 0, valid=places[len(fields) - 1],
            )  # fmt: skip
        self.seek(0, 0)

    def advance(self) -> None:
        """Queue the gather of the next batch on the current stream, of CuPy or torch; capture it, or call it."""
        with self._device, self._export.stream():
            self._gather.fill_next(self._x, self._scratch, self._next)

    def seek(self, epoch: int, batch: int) -> None:
        """Let the next batch be that of an epoch; waits for what is queued on the device.

        Raises
        ------
        SampleError
            If there is no such batch.
        """
        self._source.check(epoch, batch)
        cursor = np.zeros(1, CURSOR)
        cursor["batch"] = batch
        with self._device as device:
            device.synchronize()
            if epoch != self._first_epoch:
                orders = np.stack([self._gather.parameters(self._source.order(epoch + k)) for k in range(self._epochs)])
                self._orders.set(orders.view(np.uint8).reshape(-1))
                self._first_epoch = int(epoch)
            self._cursor.set(cursor.view(np.uint8))
            device.synchronize()

    def position(self) -> tuple[int, int]:
        """Epoch and number of the next batch; waits for what is queued on the device.

        Raises
        ------
        SampleError
            If batches after the last known order were asked for.
        """
        with self._device as device:
            device.synchronize()
            cursor = self._cursor.get().view(CURSOR)[0]
        epoch, batch = int(cursor["epoch"]), int(cursor["batch"])
        if (epoch, batch) > (self._epochs, 0):
            raise SampleError(
                f"the graph was replayed past epoch {self._first_epoch + self._epochs - 1:,}, the last whose order was "
                f"on the device, and has served missing values since; seek() in time, or give GraphBatch more epochs"
            )
        return self._first_epoch + epoch, batch


def _bytes(pointer: Any, nbytes: int) -> Any:
    return cupy.ndarray((nbytes,), np.uint8, pointer)
