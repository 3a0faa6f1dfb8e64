"""Memory of groups of batches: used again when nothing refers to it and what was queued on it is done."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol


class SlotDriver(Protocol):
    """What slots need of the device."""

    def allocate(self, nbytes: int) -> Any:
        """Memory that its references keep."""
        ...

    def wait_for(self, streams: Iterable[Any]) -> bool:
        """Make the gather wait for all that is queued on the streams by now; false where one can't be asked."""
        ...


class Slot:
    """The memory of one group.

    Attributes
    ----------
    memory : object
        Every array in it holds a reference.
    streams : dict
        The streams whose work may use it, by identity.
    n_handed : int
        References that the group's arrays took when they were handed out; 0 where one stands for all.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.streams: dict[Any, Any] = {}
        self.n_handed = 0
        self._kept: tuple[Any, list[tuple[Any, ...]], list[int]] | None = None
        self._at_rest = 0

    def rest(self) -> None:
        """Take the references to the memory that there are now for those that no array holds."""
        self._at_rest = sys.getrefcount(self.memory)

    @property
    def n_alive(self) -> int:
        """References by arrays that are alive, but for kept ones."""
        return sys.getrefcount(self.memory) - self._at_rest

    @property
    def is_free(self) -> bool:
        """No array of it is referred to."""
        return self.n_alive == 0 and (self._kept is None or _references(self._kept[1]) == self._kept[2])

    @property
    def is_wasted(self) -> bool:
        """It is held by less than half of what was handed out, as far as that is known."""
        return not self.is_free and (self.n_handed == 0 or 2 * self.n_alive < self.n_handed)

    def kept(self, layout: Any) -> list[tuple[Any, ...]]:
        """The arrays that are kept of a layout; those of another are dropped. The slot is free."""
        if self._kept is not None and self._kept[0] == layout:
            return self._kept[1]
        self.drop()
        return []

    def keep(self, layout: Any, batches: list[tuple[Any, ...]]) -> None:
        """Keep a layout's arrays, which nothing else refers to yet, to hand out the same objects again."""
        self._kept = layout, batches, _references(batches)
        self.rest()

    def drop(self) -> None:
        """Keep no arrays. The slot is free."""
        if self._kept is not None:
            self._kept = None
            self.rest()


class Slots:
    """The slots of all gathers over the same rows.

    Parameters
    ----------
    driver : SlotDriver
    """

    def __init__(self, driver: SlotDriver) -> None:
        self._driver = driver
        self._idle: list[Slot] = []
        # An iterator that nobody refers to any more gives its slot back while garbage is collected, perhaps inside
        # take(): so it only appends.
        self._returned: deque[Slot] = deque()
        # Threads may serve batches of the same rows.
        self._lock = threading.Lock()

    @property
    def n_wasted(self) -> int:
        """Slots that a few batches keep; not counting the last, whose last batch the caller's loop still refers to."""
        with self._lock:
            self._collect()
            return sum(slot.is_wasted for slot in self._idle[:-1])

    def take(self, nbytes: int) -> Slot:
        """A slot of at least so many bytes; the gather's stream waits for the work that may use it.

        Raises
        ------
        StagingMemoryError
            If there is none and no memory for one.
        """
        with self._lock:
            self._collect()
            for number, slot in enumerate(self._idle):
                if slot.nbytes >= nbytes and slot.is_free and self._driver.wait_for(slot.streams.values()):
                    slot.streams.clear()
                    return self._idle.pop(number)
            # What is too small would hardly be used again.
            self._idle = [slot for slot in self._idle if slot.nbytes >= nbytes or not slot.is_free]
            slot = Slot(self._driver.allocate(nbytes), nbytes)
            slot.rest()
            return slot

    def give_back(self, slot: Slot) -> None:
        """The slot may be taken again once its arrays have died."""
        self._returned.append(slot)

    def forget(self) -> None:
        """Let go of all; what arrays still hold returns with the last of them."""
        with self._lock:
            self._collect()
            self._idle = []

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())


def _references(batches: list[tuple[Any, ...]]) -> list[int]:
    """References to arrays and to their pointers, which views of them share."""
    arrays = [array for batch in batches for array in batch]
    return [sys.getrefcount(array) for array in arrays] + [sys.getrefcount(array.data) for array in arrays]
