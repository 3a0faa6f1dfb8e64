"""What an arena did over time, as a file of JSON lines that :mod:`stager.cuda.arena_page` draws.

Bytes are sampled rather than listed: each ``bytes`` line is a stretch of time with the bytes at its end and the most
inside it. Stretches grow as the recording does, so that hours fit in a few megabytes.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import msgspec

from stager.cuda.report import Site, where
from stager.errors import TimelineError

if TYPE_CHECKING:
    from stager.cuda.arena_pool import Pool

VERSION = 1
_STRETCH_NS = 1_000_000
_LINES_PER_STRETCH = 4_000
_EVENTS = 10_000
_SITES = 50


class Recorder:
    """Writes a timeline while ``arena.record(path)`` is open.

    Attributes
    ----------
    missed : int
        Events left out because another thread was being recorded at that moment.
    """

    def __init__(self, path: str | Path, pool: Pool) -> None:
        self.missed = 0
        self.freed: deque[tuple[int, Site]] = deque()  # destructors append here
        self._path, self._pool = Path(path), pool
        self._lock = threading.Lock()
        self._sites: dict[Site, list[int]] = {}  # allocations, bytes, live bytes, most live bytes
        self._steps: dict[int, int] = {}
        self._stretch = _STRETCH_NS
        self._lines = self._n_steps = self._n_overflows = self._allocations = 0

    def __enter__(self) -> Recorder:
        self._file = self._path.open("w", encoding="utf-8")
        self._began = self._last = perf_counter_ns()
        self._used = self._most = self._pool.stats().used_nbytes
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"kind": "arena", "version": VERSION, "capacity_nbytes": self._pool.capacity, "began": now,
                     "used": self._used})  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._settle()
            self._flush(perf_counter_ns())
            rows = sorted(self._sites.items(), key=lambda item: -item[1][3])[:_SITES]
            self._write({"kind": "sites", "rows": [
                {"site": where(site), "allocations": count, "nbytes": nbytes, "live_nbytes": live, "most_nbytes": most}
                for site, (count, nbytes, live, most) in rows
            ]})  # fmt: skip
            stats = self._pool.stats()
            self._write({"kind": "end", "t": self._seconds(perf_counter_ns()), "steps": self._n_steps,
                         "overflows": self._n_overflows, "missed": self.missed,
                         "stats": {name: getattr(stats, name) for name in stats.__slots__}})  # fmt: skip
            self._file.close()

    def _seconds(self, at: int) -> float:
        return round((at - self._began) / 1e9, 6)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def allocated(self, size: int, site: Site) -> None:
        """One allocation from the slab."""
        # Garbage collection inside here may allocate and come back, so nobody ever waits for this lock.
        if not self._lock.acquire(blocking=False):
            self.missed += 1
            return
        try:
            self._settle()
            self._used += size
            self._allocations += 1
            if self._used > self._most:
                self._most = self._used
            row = self._sites.get(site)
            if row is None:
                row = self._sites[site] = [0, 0, 0, 0]
            row[0] += 1
            row[1] += size
            row[2] += size
            if row[2] > row[3]:
                row[3] = row[2]
            now = perf_counter_ns()
            if now - self._last >= self._stretch:
                self._flush(now)
        finally:
            self._lock.release()

    def _settle(self) -> None:
        freed = self.freed
        while freed:
            size, site = freed.popleft()
            self._used -= size
            row = self._sites.get(site)
            if row is not None:
                row[2] -= size

    def _flush(self, now: int) -> None:
        pool = self._pool
        outside = pool.overflow.live()[1] if pool.overflow is not None else 0
        self._used = pool.blocks.live()[1]  # also what lived before the recording
        self._write({"kind": "bytes", "t": self._seconds(now), "used": self._used, "most": max(self._most, self._used),
                     "overflow": outside, "allocations": self._allocations})  # fmt: skip
        self._last, self._most = now, self._used
        self._lines += 1
        if self._lines % _LINES_PER_STRETCH == 0:
            self._stretch *= 2

    def overflowed(self, size: int, site: Site) -> None:
        """One allocation outside the slab."""
        if not self._lock.acquire(blocking=False):
            self.missed += 1
            return
        try:
            self._n_overflows += 1
            self._allocations += 1
            now = perf_counter_ns()
            if self._n_overflows <= _EVENTS:
                self._write({"kind": "overflow", "t": self._seconds(now), "nbytes": size, "site": where(site)})
            if now - self._last >= self._stretch:
                self._settle()
                self._flush(now)
        finally:
            self._lock.release()

    def step(self, number: int, what: str) -> None:
        """Begin or end of a step."""
        now = perf_counter_ns()
        if what == "begin":
            self._steps[number] = now
            return
        began = self._steps.pop(number, self._began)
        if not self._lock.acquire(blocking=False):
            self.missed += 1
            return
        try:
            self._n_steps += 1
            if self._n_steps <= _EVENTS or now - began >= self._stretch:
                span = {"begin": self._seconds(began), "end": self._seconds(now)}
                self._write({"kind": "step", "number": number, **span})
            if now - self._last >= self._stretch:
                self._settle()
                self._flush(now)
        finally:
            self._lock.release()


class Stretch(msgspec.Struct, tag_field="kind", tag="bytes"):
    t: float
    used: int
    most: int
    overflow: int
    allocations: int


class Header(msgspec.Struct, tag_field="kind", tag="arena"):
    version: int
    capacity_nbytes: int
    began: str
    used: int


class StepSpan(msgspec.Struct, tag_field="kind", tag="step"):
    number: int
    begin: float
    end: float


class OverflowEvent(msgspec.Struct, tag_field="kind", tag="overflow"):
    t: float
    nbytes: int
    site: str


class SiteRow(msgspec.Struct):
    site: str
    allocations: int
    nbytes: int
    live_nbytes: int
    most_nbytes: int


class Sites(msgspec.Struct, tag_field="kind", tag="sites"):
    rows: list[SiteRow]


class End(msgspec.Struct, tag_field="kind", tag="end"):
    t: float
    steps: int
    overflows: int
    missed: int
    stats: dict[str, int]


class Timeline(msgspec.Struct):
    """A recording, read back."""

    header: Header
    stretches: list[Stretch] = []
    steps: list[StepSpan] = []
    overflows: list[OverflowEvent] = []
    sites: list[SiteRow] = []
    end: End | None = None


def read_timeline(path: str | Path) -> Timeline:
    """The recording in ``path``; one that was cut short is read as far as it goes.

    Raises
    ------
    TimelineError
        If the file is missing or no timeline, with the line at fault.
    """
    decoder = msgspec.json.Decoder(Header | Stretch | StepSpan | OverflowEvent | Sites | End)
    timeline: Timeline | None = None
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise TimelineError(f"not readable: {error.strerror or error}", path=path) from error
    for number, text in enumerate(lines, start=1):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if timeline is not None and number == len(lines) and not text.endswith(b"\n"):
                break  # the recording process was killed while it wrote
            raise TimelineError(f"no timeline of an arena: {error}", path=path, line=number) from None
        if isinstance(line, Header):
            if line.version > VERSION:
                raise TimelineError(f"written by a newer stager (version {line.version})", path=path, line=number)
            timeline = Timeline(line)
        elif timeline is None:
            raise TimelineError("no timeline of an arena: the first line must describe it", path=path, line=number)
        elif isinstance(line, Stretch):
            timeline.stretches.append(line)
        elif isinstance(line, StepSpan):
            timeline.steps.append(line)
        elif isinstance(line, OverflowEvent):
            timeline.overflows.append(line)
        elif isinstance(line, Sites):
            timeline.sites = line.rows
        else:
            timeline.end = line
    if timeline is None:
        raise TimelineError("the file is empty; arena.record() writes it", path=path)
    return timeline
