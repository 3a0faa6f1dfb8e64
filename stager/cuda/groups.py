"""Batches from a GPU: many are gathered at once, on a stream of their own, while those before are in use.

A group lies in a slot of memory. When the first batch of one is asked for, the gather of the next is queued; with the
group whose last batch the caller's loop still refers to, three slots go round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import cupy
from cupy.cuda import nvtx, runtime

from stager.config import format_nbytes
from stager.cuda.capture import relaxed
from stager.cuda.exports import Export, Framework, WholeDevice, export_to
from stager.cuda.fields import Field, lay_out
from stager.cuda.gather import WindowGather
from stager.cuda.serving_times import GroupEvents, ServingTimes
from stager.cuda.slots import Slot, Slots
from stager.cuda.tables import Schedule
from stager.errors import CaptureActiveError, StagingMemoryError

# Of a group: a part of the device's memory, within bounds. The first are smaller, so that the first batch comes soon.
_SHARE = 256
_LEAST_NBYTES, _MOST_NBYTES = 16 << 20, 512 << 20
_FIRST_NBYTES, _GROWTH = 8 << 20, 4
_MOST_LAYOUTS = 64
# Of groups that a few kept batches hold; then batches come as copies, and one that is kept holds itself alone.
_MOST_WASTED = 3


class GatherStream:
    """The stream that gathers, and the device as slots need it.

    Parameters
    ----------
    device : int
    """

    def __init__(self, device: int) -> None:
        self.device = cupy.cuda.Device(device)
        with self.device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._event = cupy.cuda.Event(disable_timing=True)
            self.group_nbytes = min(max(runtime.memGetInfo()[1] // _SHARE, _LEAST_NBYTES), _MOST_NBYTES)

    def allocate(self, nbytes: int) -> Any:
        """Memory of its own, not of the user's arena or pool."""
        try:
            with relaxed():
                return cupy.cuda.Memory(nbytes)
        except (MemoryError, runtime.CUDARuntimeError) as error:
            free = format_nbytes(runtime.memGetInfo()[0])
            raise StagingMemoryError(
                f"a group of batches needs {format_nbytes(nbytes)} on the GPU, {free} are free ({error}); keep fewer "
                f"batches, use a smaller batch_size, or free memory"
            ) from error

    def wait_for(self, streams: Iterable[Any]) -> bool:
        """Make the gather wait for all that is queued on the streams by now; false where one captures a graph."""
        streams = list(streams)
        if any(_is_capturing(stream) for stream in streams):
            return False
        for stream in streams:
            if isinstance(stream, WholeDevice):
                self.device.synchronize()
            else:
                self._event.record(stream)
                self.stream.wait_event(self._event)
        return True


class Group:
    """Some batches in a slot."""

    def __init__(
        self, slot: Slot, fields: Sequence[Field], offsets: Sequence[int], sizes: list[int], events: GroupEvents
    ) -> None:
        self.slot, self.sizes, self.events = slot, sizes, events
        self._fields, self._offsets = fields, offsets

    def hand_to(self, stream: Any) -> None:
        """Let the stream wait for the gather, and the next gather into the slot for the stream.

        Raises
        ------
        CaptureActiveError
        """
        key = _identity(stream)
        if key in self.slot.streams:
            return
        if _is_capturing(stream):
            raise CaptureActiveError(
                "the current stream captures a CUDA graph, of which a batch that is handed out is no part; take "
                "batches outside the capture, or capture a stager.cuda.GraphBatch"
            )
        events = self.events
        if isinstance(stream, WholeDevice):
            started = time.perf_counter()
            events.ready.synchronize()
            events.waited_seconds = time.perf_counter() - started
        elif events.is_handed:
            stream.wait_event(events.ready)
        else:
            events.asked, events.got = cupy.cuda.Event(), cupy.cuda.Event()
            events.asked.record(stream)
            stream.wait_event(events.ready)
            events.got.record(stream)
        self.slot.streams[key] = stream

    def split(self, export: Export, reuse: bool) -> Iterator[tuple[Any, ...]]:
        """The arrays of each batch."""
        size, n = self.sizes[0], len(self.sizes)
        if not reuse or any(one != size for one in self.sizes[:-1]):
            self.slot.drop()
            return self._make(export, 0, n)
        n_full = n - (self.sizes[-1] != size)
        layout = tuple(self._fields), tuple(self._offsets), size
        kept = self.slot.kept(layout)
        if len(kept) < n_full:
            kept = [*kept, *self._make(export, len(kept), n_full)]
            self.slot.keep(layout, kept)
        return chain(islice(kept, n_full), self._make(export, n_full, n))

    def _make(self, export: Export, first: int, stop: int) -> Iterator[tuple[Any, ...]]:
        """The arrays of batches ``first : stop`` of the group."""
        before, sizes = sum(self.sizes[:first]), self.sizes[first:stop]
        made = [
            export.split(cupy.cuda.MemoryPointer(self.slot.memory, offset + before * field.nbytes), field, sizes)
            for field, offset in zip(self._fields, self._offsets, strict=True)
        ]
        self.slot.n_handed = sum(n for _, n in made)
        return zip(*(arrays for arrays, _ in made), strict=True)


class Groups:
    """Serves the batches of one Stager.

    Parameters
    ----------
    gathers : sequence of WindowGather
        What is gathered for the same samples.
    device : int
    fields : sequence of Field, optional
        The shapes in which their fields are served, one after the other, of as many bytes.
    like : Groups, optional
        Another one over the same rows; stream and slots are shared with it.
    """

    def __init__(
        self,
        gathers: Sequence[WindowGather],
        device: int,
        fields: Sequence[Field] | None = None,
        like: Groups | None = None,
    ) -> None:
        self._gathers, self._device, self._owns = tuple(gathers), device, like is None
        self._gatherer: GatherStream = GatherStream(device) if like is None else like._gatherer
        self._slots: Slots = Slots(self._gatherer) if like is None else like._slots
        self._fields = [field for gather in gathers for field in gather.fields] if fields is None else list(fields)
        #: What was served, and how long it took.
        self.times = ServingTimes()
        self._layouts: dict[int, tuple[list[int], int]] = {}
        self._sample_nbytes = sum(field.nbytes for field in self._fields)

    def batches(
        self,
        schedule: Schedule,
        first: int,
        stop: int,
        to: Framework | None = None,
        streams: Sequence[Any] = (),
        reuse: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """The fields of batches ``first : stop`` of an epoch, in order.

        Parameters
        ----------
        schedule : Schedule
        first, stop : int
        to : {"torch", "jax", "numpy"}, optional
        streams : sequence of cupy.cuda.Stream
            Streams that will use them, beside the one that is current when a batch is asked for.
        reuse : bool
            Hand out the same CuPy arrays again when a slot is used again and nothing refers to them.
        """
        export = export_to(to, self._device, self._gatherer.stream)
        spans = self._spans(schedule, first, stop)
        group = ahead = None
        n_handed, copied = 0, False
        try:
            ahead = self._begin(schedule, next(spans, None))
            while ahead is not None:
                group, ahead = ahead, None
                stream = export.stream()
                for consumer in (stream, *streams):
                    group.hand_to(consumer)
                ahead = self._begin(schedule, next(spans, None))
                copied = self._slots.n_wasted >= _MOST_WASTED
                n_handed = 0
                for batch in group.split(export, reuse and to is None):
                    now = export.stream()
                    if now is not stream:
                        group.hand_to(now)
                        stream = now
                    n_handed += 1
                    yield tuple(map(export.copy, batch)) if copied else batch
                    del batch
                done, group = group, None
                self._put_back(done, n_handed, copied)
        finally:
            if group is not None:
                self._put_back(group, n_handed, copied)
            if ahead is not None:
                self._slots.give_back(ahead.slot)

    def _put_back(self, group: Group, n_handed: int, copied: bool) -> None:
        n_samples = sum(group.sizes[:n_handed])
        self.times.add(n_handed, n_samples, n_samples * self._sample_nbytes, n_handed if copied else 0, group.events)
        self._slots.give_back(group.slot)

    def close(self) -> None:
        """Wait until every gather queued so far has read its rows, and give back what is not in use."""
        self._gatherer.stream.synchronize()
        if self._owns:
            self._slots.forget()
        for gather in self._gathers:
            gather.close()

    def _spans(self, schedule: Schedule, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """First and last batch of each group, and the samples of a full group."""
        batch_nbytes = schedule.typical_size * self._sample_nbytes
        full = min(max(1, self._gatherer.group_nbytes // batch_nbytes), stop - first)
        n = max(1, _FIRST_NBYTES // batch_nbytes)
        while first < stop:
            end = min(first + min(n, full), stop)
            yield first, end, full * schedule.typical_size
            first, n = end, _GROWTH * n

    def _layout(self, count: int) -> tuple[list[int], int]:
        """Where the fields, and then the scratch of each gather, begin in a group of `count` samples; its bytes."""
        layout = self._layouts.get(count)
        if layout is None:
            sizes = [count * field.nbytes for field in self._fields]
            sizes += [gather.scratch_nbytes(count) for gather in self._gathers]
            layout = lay_out(sizes)
            # Batches of whole instants have any number of samples.
            if len(self._layouts) > _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[count] = layout
        return layout

    def _begin(self, schedule: Schedule, span: tuple[int, int, int] | None) -> Group | None:
        """Queue the gather of a group."""
        if span is None:
            return None
        first, stop, full = span
        edges = schedule.offsets(first, stop)
        count = int(edges[-1])
        # As of a full group, so that batches lie at the same places in all.
        offsets, nbytes = self._layout(max(count, full))
        n_fields = len(self._fields)
        with self._gatherer.device:
            events = GroupEvents()
            events.queued.record(self._gatherer.stream)
            slot = self._slots.take(nbytes)
            nvtx.RangePush(f"stager: gather {count} samples")
            try:
                group = Group(slot, self._fields, offsets[:n_fields], (edges[1:] - edges[:-1]).tolist(), events)
                places = [slot.memory.ptr + offset for offset in offsets]
                fields, scratches = places[:n_fields], places[n_fields:]
                with self._gatherer.stream:
                    events.begun.record()
                    for gather, scratch in zip(self._gathers, scratches, strict=True):
                        gather.fill(fields[: gather.n_fields], scratch, schedule, first, stop, count)
                        del fields[: gather.n_fields]
                    events.ready.record()
            except BaseException:
                self._slots.give_back(slot)
                raise
            finally:
                nvtx.RangePop()
        return group


def _identity(stream: Any) -> tuple[int, int]:
    """What tells streams apart: the per-thread default stream is another one in each thread, under the same pointer."""
    return stream.ptr, threading.get_ident() if stream.ptr == runtime.streamPerThread else 0


def _is_capturing(stream: Any) -> bool:
    # The legacy stream can't capture, and asking it would disturb the capture of another one.
    return stream.ptr not in (0, 1) and bool(runtime.streamIsCapturing(stream.ptr))
