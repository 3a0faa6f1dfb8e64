"""Rows in blocks, each in the memory of another GPU, from which one GPU gathers.

Block b holds the rows from ``b * base_rows`` on, and after its own ``base_rows`` as many of the next block's first rows
as a window may reach over the border: so every window lies in one piece, and a kernel finds it by its first row.

Nothing here imports CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.cuda import device_memory, upload
from stager.cuda.ring import Driver, Fill
from stager.cuda.watch import Watch, forget
from stager.errors import StagingError

#: Rows after its own ones that a block holds: 1.3 MB of five columns.
HALO_ROWS = 1 << 16


@dataclass(frozen=True)
class Layout:
    """Which rows are in which block.

    Attributes
    ----------
    n_rows : int
    base_rows : int
        A block's own rows; of the last one, at most.
    halo : int
        Rows that follow them in it.
    """

    n_rows: int
    base_rows: int
    halo: int = HALO_ROWS

    @classmethod
    def of(cls, n_rows: int, n_blocks: int, halo: int = HALO_ROWS) -> Layout:
        """For at most so many blocks."""
        return cls(n_rows, max(1, -(-n_rows // n_blocks)), halo)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The rows that each block holds."""
        return tuple(
            (first, min(self.n_rows, first + self.base_rows + self.halo))
            for first in range(0, max(1, self.n_rows), self.base_rows)
        )

    def check_reach(self, reach: int) -> None:
        """Raise StagingError unless windows of so many rows, from the first to the last, lie in one block."""
        if reach > self.halo + 1 and len(self.spans) > 1:
            raise StagingError(
                f"windows reach over {reach:,} rows, and rows that are spread over GPUs serve at most "
                f"{self.halo + 1:,}; use a shorter window or a smaller dilation, or placement='host'"
            )

    def block_of(self, start: int, stop: int) -> int:
        """The block that holds rows ``start : stop``; raises StagingError if none holds all of them."""
        block = min(max(0, start) // self.base_rows, len(self.spans) - 1)
        if stop > self.spans[block][1]:
            raise StagingError(
                f"rows {start:,} to {stop:,} lie on several GPUs, so there is no view of all of them; take fewer rows"
            )
        return block


class SpreadRows:
    """The rows of all blocks, as far as they can be taken for one array.

    Parameters
    ----------
    layout : Layout
    blocks : sequence of device array
        Each (rows of its span, n_columns) float32.
    device_id : int
        The GPU that gathers.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, layout: Layout, blocks: Sequence[Any], device_id: int) -> None:
        self.layout, self.blocks, self.device_id = layout, list(blocks), device_id
        self.shape: tuple[int, int] = (layout.n_rows, blocks[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, each counted once."""
        return 4 * self.shape[0] * self.shape[1]

    @property
    def pointers(self) -> list[int]:
        """Where each block begins."""
        return [int(block.data.ptr) for block in self.blocks]

    def __getitem__(self, key: int | slice) -> Any:
        """A view of consecutive rows, on the GPU that holds them; raises StagingError if no block holds all."""
        start, stop, step = (key, key + 1, 1) if not isinstance(key, slice) else key.indices(len(self))
        if not 0 <= start <= stop <= len(self) or step < 1:
            raise IndexError(f"rows are taken by numbers 0 to {len(self) - 1} and slices that ascend, not {key!r}")
        block = self.layout.block_of(start, stop)
        first = self.layout.spans[block][0]
        rows = self.blocks[block][start - first : stop - first : step]
        return rows if isinstance(key, slice) else rows[0]

    def let_go(self, live_views: Callable[[Any], int]) -> int:
        """Forget the blocks; how many views of them are alive, as `live_views` counts those of one."""
        views = 0
        while self.blocks:
            block = self.blocks.pop()
            views += live_views(block)
        return views


def copy_blocks(
    source: npt.NDArray[np.float32],
    layout: Layout,
    drivers: Sequence[Driver],
    watch: Watch,
    *,
    fill: Fill | None = None,
    read_ahead: Callable[[int, int], None] | None = None,
    read_only: bool = False,
    n_cores: int,
    remedy: str,
) -> tuple[list[Any], str]:
    """Copy each block into one allocation on a GPU of its own; arguments as :func:`stager.cuda.upload.copy_array`.

    Parameters
    ----------
    source : (n_rows, n_columns) float32
    layout : Layout
    drivers : sequence of Driver
        Of as many GPUs as there are blocks.

    Returns
    -------
    memories : list of device memory
    path : str

    Raises
    ------
    StagingError
        As :func:`stager.cuda.device_memory.load`; nothing stays allocated on any of them.
    """
    memories: list[Any] = []
    paths: set[str] = set()
    row_nbytes = 4 * source.shape[1]
    try:
        for (first, stop), driver in zip(layout.spans, drivers, strict=True):
            memory, path = _copy_block(
                source[first:stop], first * row_nbytes, driver, watch, fill, read_ahead, read_only, n_cores, remedy
            )
            memories.append(memory)
            paths.add(path)
            del memory
    except BaseException as error:
        memories.clear()
        forget(error)
        raise
    return memories, " and ".join(sorted(paths))


def _copy_block(
    rows: npt.NDArray[np.float32],
    offset: int,
    driver: Driver,
    watch: Watch,
    fill: Fill | None,
    read_ahead: Callable[[int, int], None] | None,
    read_only: bool,
    n_cores: int,
    remedy: str,
) -> tuple[Any, str]:
    def some(out: npt.NDArray[np.uint8], first: int) -> None:
        assert fill is not None
        fill(out, offset + first)

    def ahead(first: int, stop: int) -> None:
        assert read_ahead is not None
        read_ahead(offset + first, offset + stop)

    def copy(memory: Any) -> str:
        return upload.copy_array(
            rows,
            memory,
            driver,
            watch,
            fill=None if fill is None else some,
            read_ahead=None if read_ahead is None else ahead,
            read_only=read_only,
            n_cores=n_cores,
        )

    return device_memory.load(driver, rows.nbytes, watch, remedy, copy)
