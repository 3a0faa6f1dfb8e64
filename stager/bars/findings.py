"""What checks find, in types that are printed, written as JSON, and kept in a pack's manifest as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Check: TypeAlias = Literal[
    "bars", "duplicates", "order", "relation", "grid", "signs", "volume", "jumps", "gaps", "unfinished"
]
Severity: TypeAlias = Literal["fine", "note", "warning", "error"]

# Symbols or places that a sentence names.
_NAMED = 3


class Place(msgspec.Struct, frozen=True):
    """A bar: its symbol, and its open as ISO 8601 UTC (of session dates, the date)."""

    symbol: str
    time: str

    @property
    def words(self) -> str:
        """The place as sentences name it."""
        return f"{self.symbol} at {spoken(self.time)}"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes
    ----------
    check : str
        ``bars``, ``duplicates``, ``order``, ``relation`` (of open, high, low and close), ``grid``, ``signs`` (of
        prices), ``volume``, ``jumps``, ``gaps`` or ``unfinished``.
    severity : {"fine", "note", "warning", "error"}
        ``"error"``: `stager pack` refuses the bars. ``"warning"``: it packs them and keeps the sentence.
    text : str
        What was found.
    remedy : str
        What to do about it, or what follows from it; may be empty.
    n, n_of : int
        Bars (of gaps and jumps: places) that it concerns, and how many were looked at.
    places : list of Place
        The first of them.
    """

    check: Check
    severity: Severity
    text: str
    remedy: str = ""
    n: int = 0
    n_of: int = 0
    places: list[Place] = []

    @property
    def sentence(self) -> str:
        """Text and remedy as one line."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


class Gap(msgspec.Struct, frozen=True):
    """Missing bars of a symbol.

    Attributes
    ----------
    symbol : str
    after, until : str
        Opens of the bars before and after.
    n_missing : int
        Bars missing, by the interval; of daily and longer bars, by the sessions in which any symbol has a bar.
    n_elsewhere : int
        Of those, how many have a bar of another symbol.
    """

    symbol: str
    after: str
    until: str
    n_missing: int
    n_elsewhere: int


class Jump(msgspec.Struct, frozen=True):
    """A change of price from one bar to the next that looks like no market.

    Attributes
    ----------
    symbol, time : str
        The first bar of the new price.
    ratio : float
        New price over old.
    near : str
        The ratio that it is close to, such as ``"1/2"``; empty for a spike.
    kind : {"split", "scale", "spike"}
        ``"scale"``: a power of ten. ``"spike"``: the old price comes back within five bars.
    """

    symbol: str
    time: str
    ratio: float
    near: str
    kind: Literal["split", "scale", "spike"]


class SymbolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one symbol.

    ``n_elsewhere`` of the missing bars are there of another symbol. ``longest_gap`` and ``longest_zero_volume`` are
    numbers of bars, ``gap_after`` is the bar before the longest gap.
    """

    symbol: str
    n_bars: int
    first: str
    last: str
    n_gaps: int
    n_missing: int
    n_elsewhere: int
    longest_gap: int
    gap_after: str | None
    n_off_grid: int
    n_not_positive: int
    n_zero_volume: int
    longest_zero_volume: int
    n_jumps: int


class GapLength(msgspec.Struct, frozen=True):
    """How many gaps are of one length, in bars."""

    n_missing: int
    n_gaps: int


class Input(msgspec.Struct, frozen=True):
    """A file that was read, its rows, and those of them without a price."""

    name: str
    size_nbytes: int
    n_rows: int
    n_dropped: int


class Decided(msgspec.Struct, frozen=True):
    """What was decided while reading, and from what."""

    what: str
    value: str
    source: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found in some bars.

    Attributes
    ----------
    n_bars, n_symbols : int
    interval : str or None
    timestamps : {"utc", "session"}
    span : tuple of str or None
        First and last bar's open.
    findings : list of Finding
        One or more of each check, in the order of the checks.
    symbols : list of SymbolFacts
    worst_gaps : list of Gap
        At most a hundred: those first in which other symbols have most bars, then the longest.
    gap_lengths : list of GapLength
        At most twenty, the most frequent first.
    jumps : list of Jump
        At most a thousand, the earliest of each symbol first.
    n_gaps, n_gap_lengths, n_jumps : int
        How many there are in all.
    inputs : list of Input
    decisions : list of Decided
    warnings : list of str
        What else reading told.
    """

    n_bars: int
    n_symbols: int
    interval: str | None
    timestamps: Literal["utc", "session"]
    span: tuple[str, str] | None
    findings: list[Finding]
    symbols: list[SymbolFacts]
    worst_gaps: list[Gap]
    gap_lengths: list[GapLength]
    jumps: list[Jump]
    n_gaps: int
    n_gap_lengths: int
    n_jumps: int
    inputs: list[Input]
    decisions: list[Decided]
    warnings: list[str]

    @property
    def is_refused(self) -> bool:
        """Whether `stager pack` refuses these bars."""
        return any(finding.severity == "error" for finding in self.findings)


def stamps(times: npt.NDArray[np.int64], timestamps: Literal["utc", "session"]) -> list[str]:
    """ISO 8601 of instants (ndarray of int64 nanoseconds, shape (n,)), without zeros that say nothing."""
    if timestamps == "session":
        return [str(day) for day in np.datetime_as_string(times.view("datetime64[ns]"), unit="D")]
    texts = np.datetime_as_string(times.view("datetime64[ns]"), unit="ns")
    return [f"{str(text).rstrip('0').removesuffix('.'):0<19}Z" for text in texts]


def spoken(stamp: str) -> str:
    """A stamp as people read it, the same as :func:`stager.bars.clock.instant_text`."""
    day, _, clock = stamp.partition("T")
    return f"{day} {clock.removesuffix('Z').removesuffix(':00')}Z" if clock else day


def share(n: int, n_of: int) -> str:
    """``12 of 3,400 bars (0.353 %)``."""
    return f"{n:,} of {n_of:,} bars ({100 * n / n_of:.3g} %)"


def counted(n: int, one: str) -> str:
    """``1 bar``, ``2,000 bars``."""
    return f"{n:,} {one}" + ("" if n == 1 else "s")


def named(symbols: Sequence[str]) -> str:
    """The first of some symbols, and how many more there are."""
    more = f" and {len(symbols) - _NAMED:,} more" if len(symbols) > _NAMED else ""
    return ", ".join(symbols[:_NAMED]) + more
