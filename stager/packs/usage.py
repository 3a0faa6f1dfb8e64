"""What packing takes: memory and scratch disk, as told beforehand and as measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stager.bars.memory import anonymous_nbytes, available_nbytes, group_peak_nbytes, total_nbytes
from stager.bars.sources import BarFile
from stager.bars.threads import thread_count
from stager.config import format_nbytes
from stager.errors import PackError

_MiB = 1 << 20
# Beside rows: what allocators keep, and small things.
_SPARE = 64 * _MiB
_LEAST = 64 * _MiB
_SECONDS = 0.02
# Decoding takes so many times the bytes of a file, most likely: of plain text, and of others, which are compressed.
_TEXT_GROWTH, _GROWTH = 4, 12
# Parts of rows that are put in order need so much.
_LEAST_PART = 32 * _MiB
# Memory for each worker, unless their number is told.
_WORKER = 128 * _MiB


@dataclass
class Usage:
    """What a pack took; filled in while it is written.

    Attributes
    ----------
    memory_nbytes : int
        The memory that it may take.
    anonymous_nbytes : int
        The most that the process held at once, without files that are mapped.
    group_nbytes : int or None
        The most that its control group has ever held, page cache included; None where the system does not tell.
    scratch_nbytes : int
        Disk taken beside the pack, while it was written.
    n_workers : int
    n_processes : int
        Processes of a cluster, each of which may take `memory_nbytes`; 0 without one.
    n_kept : int
        Inputs that were not read, because an earlier attempt had.
    read_again : list of str
        Inputs that an earlier attempt had read, and that were changed since.
    """

    memory_nbytes: int = 0
    anonymous_nbytes: int = 0
    group_nbytes: int | None = None
    scratch_nbytes: int = 0
    n_workers: int = 0
    n_processes: int = 0
    n_kept: int = 0
    read_again: list[str] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Watch the memory of the process meanwhile."""
        stop = threading.Event()

        def look() -> None:
            self.anonymous_nbytes = max(self.anonymous_nbytes, anonymous_nbytes())

        def watch() -> None:
            while not stop.wait(_SECONDS):
                look()

        watcher = threading.Thread(target=watch, name="stager-memory", daemon=True)
        look()
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
            self.group_nbytes = group_peak_nbytes()


@dataclass(frozen=True)
class Budget:
    """How memory is shared out.

    Attributes
    ----------
    memory_nbytes : int
        All of it.
    n_workers : int
    room_nbytes : int
        For decoding one input, of which every worker has one.
    held_nbytes : int
        For rows that stay in memory.
    part_nbytes : int
        For the rows that a worker brings into order at a time.
    """

    memory_nbytes: int
    n_workers: int
    room_nbytes: int
    held_nbytes: int
    part_nbytes: int

    @classmethod
    def of(cls, memory_nbytes: int | None, n_workers: int | None, files: Sequence[BarFile] = ()) -> Budget:
        """Share out memory; None: a quarter of the machine, or of the container, if so much is available.

        Decoding gets no more than the largest of the files may need, and rows get the rest.

        Raises
        ------
        PackError
            If that is too little, or more than is available.
        """
        if n_workers is not None and n_workers < 1:
            raise PackError(f"workers is {n_workers}; give 1 or more")
        available, held = available_nbytes(), anonymous_nbytes()
        if memory_nbytes is None:
            # A quarter of a small machine, or of one whose process holds much already, may be too little.
            memory = min(max(total_nbytes() // 4, held + _SPARE + 4 * _LEAST), available + held)
        else:
            memory = memory_nbytes
        if memory > available + held:
            raise PackError(
                f"memory is {format_nbytes(memory)}, {format_nbytes(available)} are available; give less, or free some"
            )
        free = memory - held - _SPARE
        if free < _LEAST:
            raise PackError(
                f"memory is {format_nbytes(memory)}, and the process itself takes {format_nbytes(held)}; give at least "
                f"{format_nbytes(-(-(held + _SPARE + _LEAST) // _MiB) * _MiB)}"
            )
        # With less for each, files are read in many parts, or refused.
        workers = max(1, min(thread_count(), free // _WORKER)) if n_workers is None else n_workers
        room = 2 * free // 5 // workers
        used = min(room, max((_decoded_nbytes(file) for file in files), default=room))
        # What is read and what is written is never in memory at once.
        return cls(memory, workers, room, 4 * free // 5 - workers * max(used, _LEAST_PART), free // 5 // workers)


def _decoded_nbytes(file: BarFile) -> int:
    is_text = file.path.lower().endswith((".csv", ".txt", ".tsv"))
    return file.size_nbytes * (_TEXT_GROWTH if is_text else _GROWTH)
