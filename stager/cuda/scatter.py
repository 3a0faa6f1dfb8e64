"""Rows that lie in pieces, sent as they lie and put in order on the device; within one allocation.

::

    | rows, in order | sources | places | two rooms a lane |

A lane sends whole rows into one of its rooms, and a kernel brings them from there to their places. Sources and places
are the table of pieces, int64. Nothing here imports CuPy, see :mod:`stager.cuda.upload`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.cuda import upload
from stager.cuda.ring import Driver, Fill, Place, Rows
from stager.cuda.watch import Watch

_ALIGN_NBYTES = 256


class Scattered:
    """Rows in pieces, and how their allocation is laid out.

    Parameters
    ----------
    n_rows, row_nbytes : int
    sources, places : (n_pieces,) int64
        Row ``sources[i] + k`` of those that lie goes to ``places[i] + k``; `sources` ascends from 0.
    n_lanes : int
        Lanes that may be used.

    Attributes
    ----------
    table : (2, n_pieces) int64
    spans : list of (first, stop)
        Bytes that are sent at once: whole rows.
    nbytes : int
        Bytes of the allocation.
    """

    def __init__(
        self,
        n_rows: int,
        row_nbytes: int,
        sources: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        n_lanes: int,
    ) -> None:
        self.row_nbytes, self.table = row_nbytes, np.stack([sources, places])
        size = n_rows * row_nbytes
        step = max(1, upload.RING_NBYTES // row_nbytes) * row_nbytes
        self.spans = [(first, min(first + step, size)) for first in range(0, size, step)]
        self.n_lanes = max(1, min(n_lanes, upload.N_LANES, len(self.spans)))
        self._table_at = _aligned(size)
        self._rooms_at = _aligned(self._table_at + self.table.nbytes)
        self._room_nbytes = _aligned(min(step, size))
        self.nbytes = self._rooms_at + 2 * self.n_lanes * self._room_nbytes

    def at_table(self, memory: Any) -> Part:
        """Where the table lies in the allocation."""
        return Part(memory, memory.ptr + self._table_at)

    def place_of(self, memory: Any) -> Callable[[int], Place]:
        """For the number of a lane: the rows of some bytes, in one of its two rooms."""

        def of_lane(lane: int) -> Place:
            rooms = memory.ptr + self._rooms_at + 2 * lane * self._room_nbytes

            def rows(first: int, stop: int, slot: int) -> Rows:
                sources_ptr = memory.ptr + self._table_at
                return Rows(
                    room_ptr=rooms + slot * self._room_nbytes,
                    first=first // self.row_nbytes,
                    count=(stop - first) // self.row_nbytes,
                    n_columns=self.row_nbytes // 4,
                    sources_ptr=sources_ptr,
                    places_ptr=sources_ptr + self.table[0].nbytes,
                    n_pieces=self.table.shape[1],
                )

            return rows

        return of_lane


@dataclass(frozen=True)
class Part:
    """A part of an allocation, which it keeps alive."""

    memory: Any
    ptr: int


def copy_scattered(
    scattered: Scattered,
    fill: Fill,
    memory: Any,
    driver: Driver,
    watch: Watch,
    *,
    read_ahead: Callable[[int, int], None] | None = None,
) -> str:
    """Send the table and the rows; returns when all rows are in their places. As :func:`upload.copy_filled`."""
    upload.copy_array(scattered.table, scattered.at_table(memory), driver, watch)
    return upload.copy_filled(
        scattered.spans,
        fill,
        memory,
        driver,
        watch,
        n_lanes=scattered.n_lanes,
        read_ahead=read_ahead,
        place_of=scattered.place_of(memory),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
