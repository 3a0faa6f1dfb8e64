"""Local time to UTC."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo

import numpy as np
import numpy.typing as npt

from stager.bars.threads import parallel
from stager.errors import BarsError, ConfigError

Int64 = npt.NDArray[np.int64]

_DAY, _NS = 86_400, 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Zone:
    """A time zone: an IANA name such as ``America/New_York``, or a fixed offset such as ``-05:00``."""

    name: str
    info: tzinfo

    @classmethod
    def parse(cls, text: str) -> Zone:
        """The zone meant by ``text``.

        Raises
        ------
        ConfigError
            If there is no such zone.
        """
        match = re.fullmatch(r"([+-])(\d\d):?(\d\d)", text.strip())
        if match is not None and int(match[2]) < 24 and int(match[3]) < 60:
            offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
            return cls(text.strip(), timezone(-offset if match[1] == "-" else offset))
        if text.strip().upper() in ("UTC", "Z"):
            return cls("UTC", UTC)
        try:
            return cls(text.strip(), zoneinfo.ZoneInfo(text.strip()))
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigError(
                f"zone is {text!r}, which is not known here; write an IANA name such as America/New_York or UTC, or a "
                "fixed offset such as -05:00 (names need the system's time zone data or the package tzdata)"
            ) from None

    @property
    def is_utc(self) -> bool:
        """Whether it is UTC under one of its names."""
        return self.name in ("UTC", "Etc/UTC", "GMT", "Etc/GMT", "Zulu") or self.info == UTC

    def offset(self, second: int) -> int:
        """Local time minus UTC, in seconds, at a UTC instant in seconds since 1970."""
        delta = (_EPOCH + timedelta(seconds=second)).astimezone(self.info).utcoffset()
        return 0 if delta is None else round(delta.total_seconds())

    def instant(self, day: int, minute: int, fold: int = 0) -> int:
        """Nanoseconds since 1970 UTC at which the clock shows so many minutes after midnight of a day since 1970.

        With `fold` 1 the second time, where it shows that twice; a time that it skips is told by the offset before the
        jump, and with `fold` 1 by the one after it.
        """
        local = datetime(1970, 1, 1) + timedelta(days=day, minutes=minute)
        return round(local.replace(tzinfo=self.info, fold=fold).timestamp()) * _NS

    def changes(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """Instants (seconds since 1970) between two instants at which the offset changes, and the offsets around them.

        The list of offsets has one entry more: entry i holds before change i.
        """
        instants: list[int] = []
        offsets = [self.offset(first)]
        for day in range(first, last, _DAY):
            low, high = day, day + _DAY
            after = self.offset(high)
            if after == offsets[-1]:
                continue
            while high - low > 1:
                middle = (low + high) // 2
                if self.offset(middle) == offsets[-1]:
                    low = middle
                else:
                    high = middle
            instants.append(high)
            offsets.append(after)
        return instants, offsets


def to_utc(
    local: list[Int64],
    codes: Callable[[], npt.NDArray[np.int32]],
    zone: Zone,
    error: Callable[[str, int], BarsError],
    *,
    is_part: bool = False,
) -> list[Int64]:
    """UTC instants of wall-clock times.

    Parameters
    ----------
    local : list of ndarray of int64
        Wall-clock nanoseconds since 1970, in file order.
    codes : callable
        Gives the symbol number of every row, ndarray of int32; called only if a time occurred twice.
    zone : Zone
    error : callable
        Makes the error of a message and a row.
    is_part : bool
        The file has other rows too, so that the order of all of a symbol's rows is not known.

    Returns
    -------
    list of ndarray of int64
        Nanoseconds since 1970 UTC, cut as ``local``. A time that occurred twice, because the clocks went back, is
        resolved by the order of the symbol's rows: the wall clock jumps back once between the two passes.

    Raises
    ------
    BarsError
        If a time never occurred in the zone, or occurred twice and the order of rows doesn't tell which is meant.
    """
    filled = [part for part in local if len(part)]
    if not filled:
        return local
    extremes = parallel(lambda part: (int(part.min()), int(part.max())), filled)
    first, last = min(low for low, _ in extremes), max(high for _, high in extremes)
    instants, offsets = zone.changes(first // _NS - 2 * _DAY, last // _NS + 2 * _DAY)
    shift = np.array(offsets, dtype=np.int64) * _NS
    change = np.array(instants, dtype=np.int64) * _NS
    # Between `begin` and `end` the wall clock either shows no time (it jumped ahead) or shows it for the second time.
    begin, end = change + np.minimum(shift[:-1], shift[1:]), change + np.maximum(shift[:-1], shift[1:])

    def convert(part: Int64) -> tuple[Int64, Int64]:
        if len(part) == 0:
            return part, part
        earliest = int(np.searchsorted(end, part.min(), "right"))
        if earliest == int(np.searchsorted(begin, part.max(), "right")):
            return part - shift[earliest], np.empty(0, dtype=np.int64)
        before = np.searchsorted(end, part, "right")
        unclear = np.flatnonzero(before != np.searchsorted(begin, part, "right"))
        return part - shift[before], unclear

    converted = parallel(convert, local)
    starts = np.cumsum([0, *(len(part) for part in local)])
    unclear = np.concatenate([rows + start for (_, rows), start in zip(converted, starts, strict=False)])
    if len(unclear) == 0:
        return [part for part, _ in converted]
    wall, utc = np.concatenate(local), np.concatenate([part for part, _ in converted])
    which = np.searchsorted(end, wall[unclear], "right")
    skipped = unclear[shift[which + 1] > shift[which]]
    if len(skipped):
        raise error(
            f"the time {_text(wall[skipped[0]])} never occurred in {zone.name}, because the clocks were put ahead; "
            "that proves a wrong zone, give the right one with --zone",
            int(skipped[0]),
        )
    if is_part:
        raise error(
            f"the time {_text(wall[unclear[0]])} occurred twice in {zone.name}, because the clocks were put back; the "
            "order of all rows tells which is meant, and the file is too large to be read at once: give more --memory "
            "or fewer --workers, split the file, or give stamps in UTC or with an offset",
            int(unclear[0]),
        )
    second = _second_passes(wall, codes(), unclear, which, zone, error)
    utc[second] = wall[second] - shift[np.searchsorted(end, wall[second], "right") + 1]
    return np.split(utc, starts[1:-1])


def _second_passes(
    wall: Int64,
    codes: npt.NDArray[np.int32],
    unclear: Int64,
    which: npt.NDArray[np.intp],
    zone: Zone,
    error: Callable[[str, int], BarsError],
) -> Int64:
    """The rows among ``unclear`` that belong to the second pass of the wall clock."""
    order = np.argsort(codes, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    sort = np.argsort(place[unclear])
    rows, which = unclear[sort], which[sort]
    new = (np.diff(place[rows]) != 1) | (np.diff(codes[rows]) != 0) | (np.diff(which) != 0)
    ends = np.searchsorted(codes[order], codes[rows], "right") - 1
    begins = np.searchsorted(codes[order], codes[rows], "left")
    newest_first = wall[order[begins]] > wall[order[ends]]
    second: list[Int64] = []
    for block, backwards in zip(
        np.split(rows, np.flatnonzero(new) + 1),
        newest_first[np.flatnonzero(np.concatenate([[True], new]))],
        strict=True,
    ):
        ascending = block[::-1] if backwards else block
        jumps = np.flatnonzero(np.diff(wall[ascending]) <= 0)
        if len(jumps) != 1:
            raise error(
                f"the time {_text(wall[block[0]])} occurred twice in {zone.name}, because the clocks were put back, "
                "and the order of the rows doesn't tell which is meant; give stamps in UTC or with an offset",
                int(block.min()),
            )
        second.append(ascending[jumps[0] + 1 :])
    return np.concatenate(second)


def _text(nanoseconds: np.int64) -> str:
    return str(np.datetime64(int(nanoseconds), "ns").astype("datetime64[s]")).replace("T", " ")
