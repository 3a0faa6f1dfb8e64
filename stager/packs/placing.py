"""All rows of a pack brought into order part by part, and each part written to where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from stager.bars.arrange import Conflict
from stager.bars.checks import all_finite
from stager.bars.cuts import Share, Whole, whole_of
from stager.bars.facts import Facts, facts_of, join
from stager.bars.interval import Interval, Steps
from stager.bars.options import PRICES, Duplicates
from stager.bars.settle import Opens, SortedTimes, lacks_to_the_close
from stager.bars.sheets import Part, Sheets
from stager.packs import layout
from stager.packs.fingerprints import digest, of_digests
from stager.packs.manifest import Segment
from stager.packs.segment import Progress, SegmentFiles

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
T = TypeVar("T")
R = TypeVar("R")

# Parts of more rows leave the processor's cache; from a file, those of fewer are read in too small pieces.
_MOST_ROWS, _MOST_STORED_ROWS = 1 << 17, 1 << 20
_CHUNK_ROWS = 1 << 18
_CLOSE = PRICES.index("close")


@dataclass(frozen=True)
class _Look:
    """What the times of a part show.

    Attributes
    ----------
    counts : ndarray of int64
        Rows of each of its symbols, identical ones once.
    n_duplicates, n_conflicts : int
    conflict : (int, int) or None
        The symbol's place among all, and the time, of the first row that differs from the one kept.
    steps : Steps
    lacks : set of int
        As :func:`stager.bars.settle.lacks_to_the_close`.
    first, low, high, last : int
        First, least, largest and last time.
    """

    counts: Int64
    n_duplicates: int
    n_conflicts: int
    conflict: tuple[int, int] | None
    steps: Steps
    lacks: set[int]
    first: int
    low: int
    high: int
    last: int


@dataclass
class Looked:
    """What the times of all rows show.

    Attributes
    ----------
    times : SortedTimes
    counts : ndarray of int64, shape (n_symbols,)
        Rows of each symbol, identical ones once.
    n_duplicates, n_conflicts : int
        Rows dropped that are identical to the one kept of their symbol and time, and that differ from it.
    conflict : (int, int) or None
        Place of the symbol, and time, of the first of the latter.
    span : (int, int)
        The least and the largest time.
    """

    times: SortedTimes
    counts: Int64
    n_duplicates: int
    n_conflicts: int
    conflict: tuple[int, int] | None
    span: tuple[int, int]


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes
    ----------
    fingerprint : str
    n_missing : list of int
        Values of each column that are NaN or infinite.
    facts : Facts
        What all bars show, without short stretches that have no volume.
    """

    fingerprint: str
    n_missing: list[int]
    facts: Facts


@dataclass(frozen=True)
class _Part:
    """What a part adds to that: facts, or of a symbol that is cut its share of what all of its bars tell."""

    digests: list[bytes]
    n_missing: list[int]
    facts: Facts | None
    share: Share | None


@dataclass(frozen=True)
class WrittenTo:
    """Where parts are written to, and what their times mean."""

    files: SegmentFiles
    opens: Opens
    interval: Interval
    symbols: Sequence[str]


@dataclass
class Placing:
    """Rows on their way to a segment.

    Attributes
    ----------
    sheets : Sheets
    parts : list of Part
    duplicates : {"error", "first", "last"}
    n_workers : int
        Parts that are worked on at once.
    """

    sheets: Sheets
    parts: list[Part]
    duplicates: Duplicates
    n_workers: int
    _looks: list[_Look] = field(default_factory=list)

    @classmethod
    def of(cls, sheets: Sheets, duplicates: Duplicates, part_nbytes: int, n_workers: int) -> Self:
        """Cut rows into parts that take at most about so many bytes each."""
        # Times, columns, the same once more where they are sorted or read, and their float32 rows.
        most = max(1, part_nbytes // (2 * 8 * (1 + sheets.n_columns) + 16))
        fastest = _MOST_STORED_ROWS if sheets.is_stored else _MOST_ROWS
        return cls(sheets, sheets.cut(min(most, fastest)), duplicates, n_workers)

    def look(self, progress: Callable[[int, int], None]) -> Looked:
        """Bring all times into order, and tell what they show.

        Raises
        ------
        Conflict
            If rows of one symbol and time differ, and no duplicates may; of all of them, the first.
        """
        looks = self._over(Placing._look_first, self.parts, progress)
        if conflicts := [each for each in looks if isinstance(each, Conflict)]:
            first = min(conflicts, key=lambda each: (each.symbol, each.time))
            raise Conflict(first.symbol, first.time, sum(each.n_conflicts for each in conflicts))
        self._looks = [look for look in looks if not isinstance(look, Conflict)]
        counts = np.zeros(len(self.sheets.counts), np.int64)
        for part, look in zip(self.parts, self._looks, strict=True):
            counts[part.first : part.last] += look.counts
        lacks = set.intersection(*(look.lacks for look in self._looks))
        times = SortedTimes(int(counts.sum()), self._looks[0].first, max(lacks, default=0), self._infer)
        span = min(look.low for look in self._looks), max(look.high for look in self._looks)
        return Looked(
            times,
            counts,
            sum(look.n_duplicates for look in self._looks),
            sum(look.n_conflicts for look in self._looks),
            min((look.conflict for look in self._looks if look.conflict is not None), default=None),
            span,
        )

    def write(
        self, files: SegmentFiles, opens: Opens, symbols: Sequence[str], counts: Int64, progress: Progress | None
    ) -> Written:
        """Write all rows, and look at them.

        Raises
        ------
        BarsError
            If a value is too large for float32.
        """
        starts = np.cumsum([0, *(int(look.counts.sum()) for look in self._looks)])
        first_rows, n_rows = starts[:-1].tolist(), np.diff(starts).tolist()
        n_bytes = 4 * self.sheets.n_columns * int(starts[-1])
        assert opens.interval is not None  # there are rows
        segment = WrittenTo(files, opens, opens.interval, symbols)

        def tell(done: int, total: int) -> None:
            if progress:
                progress("write", n_bytes * done // total, n_bytes)

        def quietly(done: int, total: int) -> None:
            if progress:
                progress("write", n_bytes, n_bytes)

        written = self._over(Placing._write, list(zip(self.parts, first_rows, strict=True)), tell, segment)
        n_missing = [sum(each) for each in zip(*(each.n_missing for each in written), strict=True)]
        all_first = np.cumsum(counts) - counts
        cut = [
            (symbol, int(all_first[symbol]), int(all_first[symbol] + counts[symbol]))
            for symbol in sorted({part.first for part in self.parts if part.is_cut})
        ]
        of_cut = dict(
            zip((symbol for symbol, _, _ in cut), self._over(Placing._digest, cut, quietly, segment), strict=True)
        )
        digests: list[bytes] = []
        for part, each in zip(self.parts, written, strict=True):
            digests += [of_cut.pop(part.first)] if part.first in of_cut else each.digests
        shares: dict[int, list[Share]] = {}
        for part, each in zip(self.parts, written, strict=True):
            if each.share is not None:
                shares.setdefault(part.first, []).append(each.share)
        of_all = {symbol: whole_of(some) for symbol, some in shares.items()}
        # Those of cut symbols by what all of their bars tell, which is known now.
        again = [
            (part.first, first, n, of_all[part.first])
            for part, first, n in zip(self.parts, first_rows, n_rows, strict=True)
            if part.is_cut
        ]
        late = iter(self._over(Placing._look_again, again, quietly, segment))
        facts = join([next(late) if each.facts is None else each.facts for each in written])
        return Written(of_digests(["time", *files.names], digests), n_missing, facts)

    def checksums(self, file: Path) -> list[str]:
        """Of each block of a file of the segment."""
        return layout.block_checksums(file)

    def _write(self, place: tuple[Part, int], segment: WrittenTo) -> _Part:
        """Write a part from a row of the segment on."""
        part, first_row = place
        files, interval = segment.files, segment.interval
        arranged = self.sheets.arrange(part, self.duplicates)
        times, columns = segment.opens.of(arranged.times), arranged.columns
        numbers = np.repeat(np.arange(part.first, part.last, dtype=np.int32), arranged.counts)
        files.put(first_row, numbers, times, columns)
        missing = [0 if all_finite(column) else int((~np.isfinite(column)).sum()) for column in columns]
        if part.is_cut:
            return _Part([], missing, None, Share.of(times, columns[_CLOSE], interval))
        symbols = segment.symbols[part.first : part.last]
        rows = [slice(first, first + n) for first, n in zip(arranged.first_rows, arranged.counts, strict=True)]
        digests = [
            digest(symbol, ([column[some]] for column in (times, *columns)))
            for symbol, some in zip(symbols, rows, strict=True)
        ]
        facts = _facts(files.names, symbols, times, columns, interval, arranged.counts)
        return _Part(digests, missing, facts, None)

    def _digest(self, place: tuple[int, int, int], segment: WrittenTo) -> bytes:
        """That of a symbol whose bars were written: its place among the symbols, and where its rows begin and end."""
        symbol, first, stop = place
        return digest(segment.symbols[symbol], _columns(segment.files, first, stop))

    def _look_again(self, place: tuple[int, int, int, Whole], segment: WrittenTo) -> Facts:
        """What rows of a symbol that is cut show: its place, their first row and number, and what all rows tell."""
        symbol, first, n_rows, whole = place
        times, columns = _read_again(segment.files, first, n_rows)
        names = segment.files.names
        return _facts(names, [segment.symbols[symbol]], times, columns, segment.interval, np.array([n_rows]), whole)

    def _look_first(self, part: Part) -> _Look | Conflict:
        try:
            return self._look(part)
        except Conflict as conflict:
            return Conflict(part.first + conflict.symbol, conflict.time, conflict.n_conflicts)

    def _look(self, part: Part, usual: int | None = None) -> _Look:
        arranged = self.sheets.arrange(part, self.duplicates)
        has_rows = arranged.counts > 0
        first_rows, counts, times = arranged.first_rows[has_rows], arranged.counts[has_rows], arranged.times
        steps = Steps.of(times, first_rows, counts, usual)
        return _Look(
            arranged.counts,
            arranged.n_duplicates,
            arranged.n_conflicts,
            None if arranged.conflict is None else (part.first + arranged.conflict[0], arranged.conflict[1]),
            steps,
            lacks_to_the_close(times),
            int(times[0]),
            int(times[first_rows].min()),
            int(times[first_rows + counts - 1].max()),
            int(times[-1]),
        )

    def _infer(self) -> tuple[Interval, list[tuple[int, int]]]:
        parts = [look.steps for look in self._looks]
        by_symbol: dict[int, list[Steps]] = {}
        for number, part in enumerate(self.parts):
            if part.is_cut:
                mine = by_symbol.setdefault(part.first, [])
                if mine:
                    # From the last time of the part before.
                    step = np.array([self._looks[number].first - self._looks[number - 1].last])
                    mine.append(Steps(step, np.ones(1, np.int64), 0, {}))
                mine.append(parts[number])
        whole = [steps for part, steps in zip(self.parts, parts, strict=True) if not part.is_cut]
        interval = Steps.together([*whole, *(steps for some in by_symbol.values() for steps in some)]).interval()
        if interval.months:
            return interval, []
        deviants: list[tuple[int, int]] = []
        for part, steps in zip(self.parts, parts, strict=True):
            if part.is_cut:
                continue
            if steps.usual != interval.nanoseconds:
                steps = self._look(part, interval.nanoseconds).steps
            deviants += [(part.first + symbol, step) for symbol, step in steps.own.items()]
        for symbol, some in by_symbol.items():
            own = Steps.together(some)
            if len(own.numbers):
                frequent = own.values[own.numbers == own.numbers.max()]
                if interval.nanoseconds not in frequent:
                    deviants.append((symbol, int(frequent[0])))
        return interval, sorted(deviants)

    def _over(
        self,
        function: Callable[..., R],
        items: Sequence[Any],
        progress: Callable[[int, int], None],
        segment: WrittenTo | None = None,
    ) -> list[R]:
        """A method of every item, and of a segment if one is given, several at once.

        Ends soon if one fails, or this thread is interrupted.
        """
        if not items:
            return []
        more = () if segment is None else (segment,)
        pool = ThreadPoolExecutor(min(self.n_workers, len(items)), thread_name_prefix="stager-packs")
        try:
            futures = [pool.submit(function, self, item, *more) for item in items]
            pending: set[Future[R]] = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                if any(future.exception() is not None for future in done):
                    break
                progress(len(futures) - len(pending), len(futures))
            return [future.result() for future in futures]
        finally:
            # Nothing may be written to a place that is being removed.
            pool.shutdown(wait=True, cancel_futures=True)


def _facts(
    names: Sequence[str],
    symbols: Sequence[str],
    times: Int64,
    columns: Sequence[Float64],
    interval: Interval,
    counts: Int64,
    whole: Whole | None = None,
) -> Facts:
    """What some rows show; of rows of a symbol that is cut, by what all of its rows tell."""
    facts = facts_of(
        symbols,
        times,
        columns[: len(PRICES)],
        columns[names.index("volume")] if "volume" in names else None,
        np.cumsum(counts) - counts,
        counts,
        interval,
        is_cut=whole is not None,
        whole=whole,
    )
    return facts.without_short_stretches()


def _read_again(files: SegmentFiles, first: int, n_rows: int) -> tuple[Int64, list[Float64]]:
    """Times, prices and volume of some rows that were written."""
    n_columns = len(PRICES) + ("volume" in files.names)
    times, columns = np.empty(n_rows, np.int64), [np.empty(n_rows, np.float64) for _ in range(n_columns)]
    for number, values in enumerate((times, *columns)):
        files.column(number, first, values)
    return times, columns


def _columns(files: SegmentFiles, first: int, stop: int) -> Iterator[Iterator[npt.NDArray[np.int64 | np.float64]]]:
    """Times and columns of one symbol that were written, each in pieces."""

    def pieces(number: int) -> Iterator[npt.NDArray[np.int64 | np.float64]]:
        for start in range(first, stop, _CHUNK_ROWS):
            n_rows = min(_CHUNK_ROWS, stop - start)
            values = np.empty(n_rows, np.int64) if number == 0 else np.empty(n_rows, np.float64)
            files.column(number, start, values)
            yield values

    return (pieces(number) for number in range(1 + len(files.names)))


def write_segment_of(
    placing: Placing,
    folder: Path,
    names: Sequence[str],
    symbols: Sequence[str],
    looked: Looked,
    opens: Opens,
    target: Path,
    progress: Progress | None,
) -> tuple[Segment, Written]:
    """Write all rows as the segment `folder`, synced."""
    with SegmentFiles(folder, names, symbols, looked.counts, target) as files:
        written = placing.write(files, opens, symbols, looked.counts, progress)
        return files.finish(progress, placing.checksums), written
