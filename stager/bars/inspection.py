"""All checks of some bars, for `stager check` and `stager pack` alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from stager.bars import jumps as jump_kinds
from stager.bars.facts import Facts, facts_of
from stager.bars.findings import Decided, Finding, Gap, GapLength, Input, Jump, Report, SymbolFacts, stamps
from stager.bars.gaps import Gaps, find_gaps
from stager.bars.inputs import Progress, Source
from stager.bars.options import ReadOptions
from stager.bars.read import Bars, read
from stager.bars.series_findings import bars_found, series_found

Int64 = npt.NDArray[np.int64]

_ORDER = ("bars", "duplicates", "order", "relation", "grid", "signs", "volume", "jumps", "gaps", "unfinished")
_MOST_GAPS, _MOST_LENGTHS, _MOST_JUMPS = 100, 20, 1000
_KINDS: dict[int, Literal["split", "scale", "spike"]] = {
    jump_kinds.SPLIT: "split",
    jump_kinds.SCALE: "scale",
    jump_kinds.SPIKE: "spike",
}
_DEFAULTS = ReadOptions()


@dataclass(frozen=True)
class Inspection:
    """Some bars, and what was found in them.

    Attributes
    ----------
    bars : Bars
    findings : tuple of Finding
        One or more of each check, in the order of the checks.
    facts : Facts or None
    gaps : Gaps or None
        None if there are no bars, both.
    """

    bars: Bars
    findings: tuple[Finding, ...]
    facts: Facts | None
    gaps: Gaps | None

    def report(self) -> Report:
        """Everything, in types that can be written."""
        bars, times = self.bars, self.bars.arranged.times
        span = stamps(np.array([times.min(), times.max()]), bars.timestamps) if len(times) else None
        report = Report(
            n_bars=len(times),
            n_symbols=len(bars.symbols),
            interval=None if bars.interval is None else bars.interval.text,
            timestamps=bars.timestamps,
            span=None if span is None else (span[0], span[1]),
            findings=list(self.findings),
            symbols=[],
            worst_gaps=[],
            gap_lengths=[],
            jumps=[],
            n_gaps=0,
            n_gap_lengths=0,
            n_jumps=0,
            inputs=[Input(one.name, one.size_nbytes, one.n_rows, one.n_dropped) for one in bars.inputs],
            decisions=[Decided(one.what, one.value, one.source) for one in bars.decisions],
            warnings=[text for text in bars.warnings if all(text != one.sentence for one in bars.findings)],
        )
        if self.facts is None or self.gaps is None:
            return report
        values, numbers = np.unique(self.gaps.n_missing, return_counts=True)
        frequent = np.argsort(-numbers, kind="stable")[:_MOST_LENGTHS]
        return msgspec.structs.replace(
            report,
            symbols=_symbols(bars, self.facts, self.gaps),
            worst_gaps=_worst(bars, self.facts, self.gaps),
            gap_lengths=[GapLength(int(values[number]), int(numbers[number])) for number in frequent],
            jumps=_jumps(bars, self.facts),
            n_gaps=len(self.gaps),
            n_gap_lengths=len(values),
            n_jumps=len(self.facts.jumps),
        )


def check(source: Source, options: ReadOptions = _DEFAULTS, *, progress: Progress | None = None) -> Inspection:
    """Read bars as `stager pack` does, and check them; rows that conflict are a finding instead of an exception.

    Raises
    ------
    BarsError
        As :func:`stager.bars.read.read`, but for rows of one symbol and time that differ.
    """
    if options.duplicates != "error":
        return inspect(read(source, options, progress=progress))
    bars = read(source, msgspec.structs.replace(options, duplicates="first"), progress=progress)
    if bars.arranged.n_conflicts:
        refused = [_refused(one) if one.check == "duplicates" else one for one in bars.findings]
        told = {one.sentence for one in bars.findings if one.check == "duplicates"}
        warnings = tuple(text for text in bars.warnings if text not in told)
        bars = replace(bars, findings=tuple(refused), warnings=warnings)
    return inspect(bars)


def inspect(bars: Bars) -> Inspection:
    """Check bars that were read."""
    n_bars, n_rows = len(bars.arranged.times), sum(one.n_rows for one in bars.inputs)
    findings = [bars_found(n_bars, n_rows, bars.dropped), *bars.findings]
    facts = _facts(bars)
    if facts is None:
        return Inspection(bars, tuple(findings), None, None)
    gaps = find_gaps(bars.arranged.times, bars.first_rows, facts.interval)
    findings += series_found(facts, bars.timestamps, gaps)
    # What is found besides a check that is fine replaces it.
    worse = {one.check for one in findings if one.severity != "fine"}
    findings = [one for one in findings if one.severity != "fine" or one.check not in worse]
    findings.sort(key=lambda one: _ORDER.index(one.check))
    return Inspection(bars, tuple(findings), facts, gaps)


def with_findings(bars: Bars) -> Bars:
    """The same bars; their warnings tell what all checks found."""
    facts = _facts(bars)
    return bars if facts is None else replace(bars, warnings=(*bars.warnings, *warnings_of(facts, bars.timestamps)))


def warnings_of(facts: Facts, timestamps: Literal["utc", "session"]) -> Iterable[str]:
    """Sentences about sorted bars that a pack keeps."""
    return [one.sentence for one in series_found(facts, timestamps) if one.severity == "warning"]


def _facts(bars: Bars) -> Facts | None:
    arranged = bars.arranged
    if bars.interval is None or not len(arranged.times):
        return None
    columns = arranged.columns
    return facts_of(
        bars.symbols,
        arranged.times,
        columns[:4],
        columns[bars.names.index("volume")] if "volume" in bars.names else None,
        bars.first_rows,
        bars.counts,
        bars.interval,
    )


def _worst(bars: Bars, facts: Facts, gaps: Gaps) -> list[Gap]:
    """Those gaps first in which other symbols have most bars, then the longest."""
    order = np.lexsort((-gaps.n_missing, -gaps.n_elsewhere))[:_MOST_GAPS]
    return [
        Gap(bars.symbols[symbol], after, until, n_missing, n_elsewhere)
        for symbol, after, until, n_missing, n_elsewhere in zip(
            facts.symbols_of(gaps.rows[order]),
            stamps(gaps.times[order], bars.timestamps),
            stamps(gaps.until[order], bars.timestamps),
            gaps.n_missing[order].tolist(),
            gaps.n_elsewhere[order].tolist(),
            strict=True,
        )
    ]


def _jumps(bars: Bars, facts: Facts) -> list[Jump]:
    """The first jumps, symbol by symbol."""
    some = facts.jumps.where(np.arange(len(facts.jumps)) < _MOST_JUMPS)
    return [
        Jump(bars.symbols[symbol], time, ratio, near, _KINDS[kind])
        for symbol, time, ratio, near, kind in zip(
            facts.symbols_of(some.rows),
            stamps(some.times, bars.timestamps),
            some.ratios.tolist(),
            some.near,
            some.kinds.tolist(),
            strict=True,
        )
    ]


def _symbols(bars: Bars, facts: Facts, gaps: Gaps) -> list[SymbolFacts]:
    n, owner = len(bars.symbols), facts.symbols_of(gaps.rows)
    # The last that is written stays: the longest gap, of equal ones the first.
    order = np.lexsort((-gaps.rows, gaps.n_missing))
    longest, after = np.zeros(n, np.int64), np.zeros(n, np.int64)
    longest[owner[order]], after[owner[order]] = gaps.n_missing[order], gaps.times[order]
    n_missing, n_elsewhere = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.add.at(n_missing, owner, gaps.n_missing)
    np.add.at(n_elsewhere, owner, gaps.n_elsewhere)
    zero, still = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if facts.volume is not None:
        zero = facts.volume.zero.of_symbols
        np.maximum.at(still, facts.symbols_of(facts.volume.rows), facts.volume.lengths)
    first, last, gap_after = (
        stamps(times, bars.timestamps) for times in (bars.arranged.times[bars.first_rows], facts.last_times, after)
    )
    n_gaps, n_jumps = facts.per_symbol(gaps.rows), facts.per_symbol(facts.jumps.rows)
    return [
        SymbolFacts(
            symbol=symbol,
            n_bars=int(facts.counts[i]),
            first=first[i],
            last=last[i],
            n_gaps=int(n_gaps[i]),
            n_missing=int(n_missing[i]),
            n_elsewhere=int(n_elsewhere[i]),
            longest_gap=int(longest[i]),
            gap_after=gap_after[i] if n_gaps[i] else None,
            n_off_grid=int(facts.off_grid.of_symbols[i]),
            n_not_positive=int(facts.not_positive.of_symbols[i]),
            n_zero_volume=int(zero[i]),
            longest_zero_volume=int(still[i]),
            n_jumps=int(n_jumps[i]),
        )
        for i, symbol in enumerate(bars.symbols)
    ]


def _refused(found: Finding) -> Finding:
    return msgspec.structs.replace(
        found,
        severity="error",
        text=found.text.replace(", the first of which was kept", ""),
        remedy="keep one row of each, or say which with --duplicates first or --duplicates last",
    )
