"""All inputs that are meant, several at a time: decoded, checked, and their rows handed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Protocol, TypeAlias

import pyarrow as pa

from stager.bars.checks import Piece
from stager.bars.decode import Track, decode, decode_table
from stager.bars.intake import take
from stager.bars.merge import refuse_unlike
from stager.bars.options import ReadOptions
from stager.bars.room import Room
from stager.bars.settle import ZoneMissing, mixed_forms, no_zone
from stager.bars.sources import BarFile, PathLike, find
from stager.bars.taken import Taken, joined
from stager.bars.threads import thread_count
from stager.errors import BarsError


class DataFrame(Protocol):
    """What Arrow can take over, such as a data frame of pandas or Polars."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


# A path, URI, glob or directory, a sequence of those, or a table or data frame in memory.
Source: TypeAlias = PathLike | Sequence[PathLike] | pa.Table | DataFrame
Progress: TypeAlias = Callable[[str, int, int], object]


# Begins to take the rows of an input, by its number, in another process; and whether dates may be kept as they are.
Elsewhere: TypeAlias = Callable[[int, bool], "Future[Taken]"]


class Keeper(Protocol):
    """Where the rows of inputs are kept; called by several threads."""

    def begin(self, number: int) -> None:
        """The rows of an input follow; any that are there already are to be forgotten."""

    def keep(self, number: int, symbols: tuple[str, ...], pieces: list[Piece]) -> None:
        """Some rows of it, in their order; their codes count in ``symbols``, which are sorted."""

    def end(self, number: int, taken: Taken) -> None:
        """There are no more."""


def find_inputs(source: Source) -> list[BarFile] | pa.Table:
    """The files that are meant, or the table; raises BarsError if something does not exist or holds no bar files."""
    if isinstance(source, pa.Table):
        return source
    if not hasattr(source, "__arrow_c_stream__"):
        return find(source)
    try:
        return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise BarsError(f"the {type(source).__name__} can't be taken over by Arrow: {error}") from error


def take_inputs(
    inputs: Sequence[BarFile] | pa.Table,
    options: ReadOptions,
    keeper: Keeper,
    *,
    done: Collection[Taken | None] | None = None,
    room_nbytes: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> list[Taken]:
    """Read inputs and hand their checked rows on.

    Parameters
    ----------
    inputs : sequence of BarFile, or pyarrow.Table
    options : ReadOptions
    keeper : Keeper
    done : collection of Taken or None, optional
        Of each input, what is known of it if its rows are kept already.
    room_nbytes : int, optional
        Memory for decoding one input; what needs more is decoded in parts, or refused. None: no limit.
    workers : int, optional
        Inputs that are read at once; by default as many as there are cores.
    progress : callable, optional
        Called on this thread with ("parse", bytes done, bytes in all).
    elsewhere : callable, optional
        Takes an input with :func:`take_input` in another process, whose keeper has the rows then.

    Returns
    -------
    list of Taken
        In the order of the inputs.

    Raises
    ------
    BarsError
        If an input can't be read as bars: of several, the first.
    """
    n_inputs = 1 if isinstance(inputs, pa.Table) else len(inputs)
    known: list[Taken | None] = list(done) if done is not None else [None] * n_inputs
    tells: dict[int, Callable[[], int]] = {}
    stopped = threading.Event()

    def run(number: int, dates: bool = True) -> Taken:
        def track(tell: Callable[[], int]) -> None:
            tells[number] = tell

        source = inputs if isinstance(inputs, pa.Table) else inputs[number]
        # The last ones have all cores.
        n_threads = max(1, thread_count() // max(1, min(n_workers, len(missing) - len(ended))))
        room = Room(source.name if isinstance(source, BarFile) else "table", room_nbytes, n_threads)
        taken = take_input(source, number, options, keeper, track, n_inputs == 1, dates, room, stopped)
        ended.append(number)
        if isinstance(source, BarFile):
            tells[number] = lambda: source.size_nbytes
        return taken

    def begin(number: int, dates: bool = True) -> Future[Taken]:
        if elsewhere is None or isinstance(inputs, pa.Table):
            return pool.submit(run, number, dates)
        future, size_nbytes = elsewhere(number, dates), inputs[number].size_nbytes
        future.add_done_callback(lambda _: tells.update({number: lambda: size_nbytes}))
        return future

    missing = [number for number, one in enumerate(known) if one is None]
    n_workers = min(max(1, len(missing)), workers or thread_count())
    # Inputs of which nothing is left to be read; appended to by several threads.
    ended: list[int] = []
    if n_inputs == 1 and progress is None and elsewhere is None:
        try:
            return [run(0)] if missing else [one for one in known if one is not None]
        except ZoneMissing as error:
            raise _better(error, []) from None
    total = 0 if isinstance(inputs, pa.Table) else sum(source.size_nbytes for source in inputs)
    if not isinstance(inputs, pa.Table):
        for number, one in enumerate(known):
            if one is not None:
                tells[number] = partial(int, inputs[number].size_nbytes)
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="stager-bars")
    try:
        _watch({number: begin(number) for number in missing}, known, tells, total, progress)
        again = _dates_among_others([one for one in known if one is not None])
        _watch({number: begin(number, False) for number in again}, known, tells, total, progress)
    finally:
        # Nothing may be written for a reader that is gone, and a large file is not read to its end.
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return [one for one in known if one is not None]


def take_input(
    source: BarFile | pa.Table,
    number: int,
    options: ReadOptions,
    keeper: Keeper,
    track: Track,
    is_only: bool,
    dates: bool,
    room: Room,
    stopped: threading.Event,
) -> Taken:
    """Decode and check one input, in parts if it is large, and hand its rows on."""
    parts: list[Taken] = []
    keeper.begin(number)
    decoded = [decode_table(source, options)] if isinstance(source, pa.Table) else decode(source, options, track, room)
    may_be_dates = dates
    missing: ZoneMissing | None = None
    for each in decoded:
        if stopped.is_set():
            raise InterruptedError
        try:
            taken, symbols, pieces = take(each, options, is_only=is_only, dates=may_be_dates)
        except ZoneMissing as error:
            if error.has_clock:
                raise
            # A later part may show a time that is no date.
            missing = missing or error
            continue
        finally:
            del each
        if any(part.is_dates for part in parts) and taken.n_rows and not taken.is_dates:
            # What looked like dates is not, and was handed on for nothing.
            return take_input(source, number, options, keeper, track, is_only, False, room, stopped)
        may_be_dates &= not taken.n_rows or taken.is_dates
        keeper.keep(number, symbols, pieces)
        del pieces
        parts.append(taken)
    if missing is not None:
        raise missing
    whole = joined(parts)
    keeper.end(number, whole)
    return whole


def _dates_among_others(taken: Sequence[Taken]) -> list[int]:
    """Inputs whose times were kept as dates, where those of others have a clock."""
    naive = [(number, one) for number, one in enumerate(taken) if one.n_rows and one.form == "naive"]
    if all(one.is_dates for _, one in naive) or len(naive) < sum(one.n_rows > 0 for one in taken):
        return []
    return [number for number, one in naive if one.is_dates]


def _watch(
    futures: dict[int, Future[Taken]],
    known: list[Taken | None],
    tells: dict[int, Callable[[], int]],
    total: int,
    progress: Progress | None,
) -> None:
    """Report how far the files are read until all are, or one failed; in ``known`` is then what is known of them."""
    pending: set[Future[Taken]] = set(futures.values())
    failed = False
    while pending and not failed:
        done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
        failed = any(future.exception() is not None for future in done)
        if progress is not None and not failed and total:
            progress("parse", min(total, sum(_told(tell) for tell in list(tells.values()))), total)
    first = next((one for one in known if one is not None), None)
    for number, future in futures.items():
        try:
            known[number] = one = future.result()
        except ZoneMissing as error:
            raise _better(error, [each for each in known[:number] if each is not None]) from None
        first = first or one
        refuse_unlike(one, first)


def _better(error: ZoneMissing, before: Sequence[Taken]) -> BarsError:
    """The error of a missing zone, or of what an earlier input shows."""
    aware = next((one for one in before if one.n_rows and one.form == "instant"), None)
    if aware is not None:
        return BarsError(mixed_forms(aware.name), path=error.path, column=error.column)
    dates = next((one for one in before if one.is_dates), None)
    if dates is not None:
        return BarsError(no_zone(dates.first_time), path=dates.name, line=dates.first_line, column=dates.time_name)
    return BarsError(error.message, path=error.path, line=error.line, column=error.column)


def _told(tell: Callable[[], int]) -> int:
    try:
        return tell()
    except ValueError:  # the stream was closed a moment ago
        return 0
