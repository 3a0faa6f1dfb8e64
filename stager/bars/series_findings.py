"""What is found in the sorted bars of every symbol, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stager.bars.facts import BREAK, Facts
from stager.bars.findings import Check, Finding, Place, Severity, counted, named, share, stamps
from stager.bars.gaps import Gaps
from stager.bars.interval import DAY
from stager.bars.jumps import describe
from stager.bars.series import STRETCH_BARS, Counted
from stager.bars.settle import Timestamps

Int64 = npt.NDArray[np.int64]

_LENGTHS = 3
# Weeks of holidays are shorter.
_LONG_BREAK = 14 * DAY


def no_bars(dropped: Mapping[str, int]) -> str:
    """Why there is nothing to pack."""
    why = ", ".join(f"{n:,} rows dropped: {reason}" for reason, n in dropped.items() if n)
    return f"there is no bar in the input ({why or 'it has no rows'})"


def bars_found(n_bars: int, n_rows: int, dropped: Mapping[str, int]) -> Finding:
    """Whether there are bars, and how many rows were none."""
    n_null = dropped["null price"]
    if not n_bars:
        return Finding(check="bars", severity="error", text=no_bars(dropped), n_of=n_rows)
    if n_null:
        text = f"{counted(n_null, 'row')} without a price dropped: no bars"
        return Finding(check="bars", severity="note", text=text, n=n_null, n_of=n_rows)
    return Finding(check="bars", severity="fine", text="every row is a bar", n_of=n_rows)


def series_found(facts: Facts, timestamps: Timestamps, gaps: Gaps | None = None) -> list[Finding]:
    """All that sorted bars show.

    Parameters
    ----------
    facts : Facts
    timestamps : {"utc", "session"}
    gaps : Gaps, optional
        If not given, nothing is said about missing bars but long times without any session.
    """
    words = _Words(facts, timestamps)
    return [
        words.grid(),
        *words.last_off_grid(),
        words.signs(),
        words.volume(),
        *words.negative_volume(),
        words.jumps(),
        *words.gaps(gaps),
    ]


class _Words:
    def __init__(self, facts: Facts, timestamps: Timestamps) -> None:
        self.facts, self.timestamps, self.n_bars = facts, timestamps, facts.n_bars

    def grid(self) -> Finding:
        """Bars whose open is off the grid."""
        off, interval = self.facts.off_grid, self.facts.interval.text
        if off.first is None:
            text = f"all times lie on the grid of {interval}"
            return Finding(check="grid", severity="fine", text=text, n_of=self.n_bars)
        place = self._place(*off.first)
        return Finding(
            check="grid",
            severity="warning",
            text=f"{share(off.n, self.n_bars)} of {self._symbols(off)} lie off the grid of {interval}, first "
            f"{place.words}",
            remedy="they stay as they are; count of missing bars and alignment with other symbols are less sure there",
            n=off.n,
            n_of=self.n_bars,
            places=[place],
        )

    def last_off_grid(self) -> Iterator[Finding]:
        """Symbols of whose bars only the last one is off the grid, as vendors hand out the running bar."""
        facts = self.facts
        alone = np.flatnonzero(facts.last_is_off & (facts.off_grid.of_symbols == 1) & (facts.counts > 2))
        if len(alone):
            place = Place(facts.symbols[alone[0]], self._stamp(int(facts.last_times[alone[0]])))
            yield Finding(
                check="unfinished",
                severity="warning",
                text=f"of {self._named(alone)} the last bar alone lies off the grid, {place.words}",
                remedy="it may be unfinished: leave it out, or fetch it again",
                n=len(alone),
                n_of=len(facts.symbols),
                places=[place],
            )

    def signs(self) -> Finding:
        """Bars with a price of zero or below."""
        found = self.facts.not_positive
        if found.first is None:
            return Finding(check="signs", severity="fine", text="all prices are above zero", n_of=self.n_bars)
        return self._warning(
            "signs",
            found,
            f"have a price of zero or below, down to {self.facts.lowest:g}",
            "they are legal; returns and log returns are refused there, so such samples are left out",
        )

    def volume(self) -> Finding:
        """Bars without volume."""
        facts, found = self.facts, self.facts.volume
        if found is None or found.zero.first is None:
            text = "there is no volume" if found is None else "no bar has a volume of 0"
            return Finding(check="volume", severity="fine", text=text, n_of=self.n_bars)
        silent = found.zero.of_symbols == facts.counts
        long = np.flatnonzero((found.lengths >= STRETCH_BARS) & ~silent[facts.symbols_of(found.rows)])
        text = f"{share(found.zero.n, self.n_bars)} have a volume of 0"
        if silent.any():
            text += f"; every bar of {self._named(np.flatnonzero(silent))}"
        places: list[Place] = []
        if len(long):
            longest = long[np.argmax(found.lengths[long])]
            places = [self._place(int(found.rows[longest]), int(found.times[longest]))]
            stretches = f"{len(long):,} stretch" + ("" if len(long) == 1 else "es")
            text += (
                f"; {stretches} of {STRETCH_BARS} or more in a row, the longest of {found.lengths[longest]:,} from "
                f"{places[0].words}"
            )
        if found.flat:
            flat = "all" if found.flat == found.zero.n else f"{found.flat:,}"
            text += f"; {flat} of them are flat, as bars that a vendor has filled in"
        return Finding(
            check="volume",
            severity="warning" if len(long) else "note",
            text=text,
            remedy="nobody traded there, so no order would have been filled" if len(long) else "",
            n=found.zero.n,
            n_of=self.n_bars,
            places=places,
        )

    def negative_volume(self) -> Iterator[Finding]:
        """Bars whose volume is below zero, which some vendors write for a volume that they don't know."""
        found = self.facts.negative_volume
        if found.first is not None:
            yield self._warning(
                "volume",
                found,
                "have a volume below 0",
                "that mostly means that it is not known: leave the column out, or the bars",
            )

    def jumps(self) -> Finding:
        """Changes of price that look like splits, another unit, or wrong bars."""
        jumps = self.facts.jumps
        n_steps = self.n_bars - len(self.facts.symbols)
        if not len(jumps):
            text = "no price jumps as at a split or a change of unit"
            return Finding(check="jumps", severity="fine", text=text, n_of=n_steps)
        place = self._place(int(jumps.rows[0]), int(jumps.times[0]))
        symbols = np.unique(self.facts.symbols_of(jumps.rows))
        near = f", near {jumps.near[0]}" if jumps.near[0] else ""
        return Finding(
            check="jumps",
            severity="warning",
            text=f"{counted(len(jumps), 'jump')} of price in {self._named(symbols)}: "
            f"{describe(jumps.kinds.tolist())}; first {place.words}, new price over old {jumps.ratios[0]:.4g}{near}",
            remedy="take adjusted prices, or name splits with Select(splits=...); powers of ten are mostly another "
            "unit",
            n=len(jumps),
            n_of=n_steps,
            places=[place],
        )

    def gaps(self, gaps: Gaps | None) -> Iterator[Finding]:
        """Missing bars, and long times in which no symbol has a session."""
        facts = self.facts
        n_steps = self.n_bars - len(facts.symbols)
        is_session = facts.interval.is_session
        by = "sessions in which any symbol has a bar" if is_session else facts.interval.text
        breaks, severity, places = self._breaks()
        if gaps is None:
            if breaks:
                yield Finding(check="gaps", severity=severity, text=breaks, n_of=n_steps, places=places)
            return
        also = f"; {breaks}" if breaks else ""
        if not len(gaps):
            text = f"no bar is missing, counted by {by}{also}"
            yield Finding(check="gaps", severity=severity, text=text, n_of=n_steps, places=places)
            return
        longest = int(np.argmax(gaps.n_missing))
        place = self._place(int(gaps.rows[longest]), int(gaps.times[longest]))
        text = (
            f"{counted(len(gaps), 'gap')} in {self._named(np.unique(facts.symbols_of(gaps.rows)))}, "
            f"{counted(int(gaps.n_missing.sum()), 'bar')} missing by {by}, the longest {gaps.n_missing[longest]:,} "
            f"after {place.words}"
        )
        if len(facts.symbols) > 1 and not is_session:
            text += f"; for {int(gaps.n_elsewhere.sum()):,} of them another symbol has a bar"
        if len(gaps) > 1:
            values, numbers = np.unique(gaps.n_missing, return_counts=True)
            frequent = np.argsort(-numbers, kind="stable")[:_LENGTHS]
            text += "; most frequent lengths: " + ", ".join(f"{values[i]:,} ({numbers[i]:,} times)" for i in frequent)
        yield Finding(
            check="gaps",
            severity="note" if severity == "fine" else severity,
            text=text + also,
            remedy="windows don't span them, unless Select(max_gap=...) lets them",
            n=len(gaps),
            n_of=n_steps,
            places=[place, *places],
        )

    def _breaks(self) -> tuple[str, Severity, list[Place]]:
        """Long times between sessions that are no gap because no symbol has a session in them."""
        rows, times, lengths = self.facts.long_breaks()
        if not len(rows):
            return "", "fine", []
        longest = int(np.argmax(lengths))
        place = self._place(int(rows[longest]), int(times[longest]))
        length = self.facts.interval.nanoseconds or 31 * DAY
        severity: Severity = "warning" if int(lengths[longest]) > max(_LONG_BREAK, 3 * length) else "note"
        text = (
            f"{counted(len(rows), 'time')} no symbol has a bar for more than {max(BREAK, 2 * length) // DAY} days, the "
            f"longest for {int(lengths[longest]) // DAY:,} after {place.words}"
        )
        return text, severity, [place]

    def _warning(self, check: Check, found: Counted, what: str, remedy: str) -> Finding:
        """Of bars that there are: how many, of which symbols, and the first."""
        assert found.first is not None
        place = self._place(*found.first)
        return Finding(
            check=check,
            severity="warning",
            text=f"{share(found.n, self.n_bars)} of {self._symbols(found)} {what}, first {place.words}",
            remedy=remedy,
            n=found.n,
            n_of=self.n_bars,
            places=[place],
        )

    def _named(self, numbers: Sequence[int] | Int64) -> str:
        return named([self.facts.symbols[number] for number in numbers])

    def _symbols(self, found: Counted) -> str:
        return self._named(np.flatnonzero(found.of_symbols))

    def _place(self, row: int, time: int) -> Place:
        return Place(self.facts.symbols[int(self.facts.symbols_of(np.array([row]))[0])], self._stamp(time))

    def _stamp(self, time: int) -> str:
        return stamps(np.array([time]), self.timestamps)[0]
