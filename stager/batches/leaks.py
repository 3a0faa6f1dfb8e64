"""Finding what depended on the future: what is served from some bars, compared with what is served from others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars.clock import instant_text
from stager.batches.built import Built, Labelled, Places
from stager.errors import SampleError

# Windows compared after a change: the last ones before it, where most leaks show, and as many of all others.
_MOST_WINDOWS = 2048
# An instant of a panel has a window for each symbol; so many instants are compared at least.
_LEAST_INSTANTS = 16


@dataclass(frozen=True)
class Leak:
    """Something that depended on the future.

    Attributes
    ----------
    kind : {"input", "sample", "label", "fold", "statistics"}
        A value of a window, or of a panel's mask; whether there is a sample at all, or a symbol of a panel is served; a
        target; a training label that overlaps a test; what normalisation fitted for a fold.
    change : str
        What was done to later bars; of a fold, which one.
    symbol : str
        "panel" for an instant of a panel as a whole.
    decision : numpy.datetime64
        Of the earliest sample that showed it.
    text : str
        A sentence.
    """

    kind: str
    change: str
    symbol: str
    decision: np.datetime64
    text: str


class Findings:
    """What was compared, and the earliest leak of each kind and change."""

    def __init__(self) -> None:
        self.n_samples = self.n_windows = self.n_labels = 0
        self.leaks: dict[tuple[str, str], Leak] = {}

    def add(self, kind: str, change: str, place: tuple[str, int], text: str) -> None:
        """Keep a leak, if none of its kind and change was earlier."""
        symbol, decision = place[0], np.datetime64(place[1], "ns")
        known = self.leaks.get((kind, change))
        if known is None or decision < known.decision:
            self.leaks[kind, change] = Leak(kind, change, symbol, decision, text)


@dataclass(frozen=True)
class Change:
    """What is compared: up to which instant, what was done to the bars behind it, and what was found so far."""

    instant: int
    name: str
    rng: np.random.Generator
    found: Findings

    def add(self, kind: str, place: tuple[str, int], text: str) -> None:
        self.found.add(kind, self.name, place, text)


def compare(now: Built, later: Built | SampleError, change: Change) -> None:
    """Compare what is served up to an instant with what is served after a change; an error: nothing is served then."""
    here = now.samples.decided_by(change.instant)
    if isinstance(later, SampleError):
        _tell(here, here.earliest(), "is not there", change, f": {later}")
        return
    here, there = _paired(here, later.samples.decided_by(change.instant), change)
    change.found.n_samples += len(here)
    if now.cells is not None and later.cells is not None:
        _paired(now.cells.decided_by(change.instant), later.cells.decided_by(change.instant), change)
    if now.columns != later.columns:
        names = sorted(set(now.columns) ^ set(later.columns)) or list(later.columns)
        text = f"the columns {', '.join(names)} depend on bars after {instant_text(change.instant)}"
        change.add("input", here.place(here.earliest()), text)
    elif len(here):
        _compare_windows(now, later, here, there, change)
    # One by one: that a sample lacks one label yet changes nothing about another.
    for number, labels in enumerate(now.labels):
        known = labels.known_by(change.instant)
        if later.labels:
            _compare_labels(known, later.labels[number].known_by(change.instant), change)
        elif len(known.places):
            _tell(known.places, known.places.earliest(), "is not there", change, of_label=True)


def _paired(one: Places, other: Places, change: Change) -> tuple[Places, Places]:
    """The samples that are in both, by symbol and decision; the rest are leaks."""
    lost, new = _differing(one, other)
    if lost.any():
        _tell(one, one.earliest(lost), "is not there", change)
    if new.any():
        _tell(other, other.earliest(new), "is there only", change)
    return one.of(~lost), other.of(~new)


def _differing(one: Places, other: Places) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which are not among the other ones; a symbol that there was not before has no bar by the instant, and none."""
    mine, theirs = one.keys(one.symbols), other.keys(one.symbols)
    if np.array_equal(mine, theirs):
        return np.zeros(len(mine), bool), np.zeros(len(theirs), bool)
    return ~np.isin(mine, theirs), ~np.isin(theirs, mine)


def _tell(
    samples: Places, number: int, what: str, change: Change, because: str = "", *, of_label: bool = False
) -> None:
    symbol, decision = samples.place(number)
    known = ", whose label is known by then," if of_label else ""
    text = (
        f"the sample of {symbol} at {instant_text(decision)}{known} {what} when bars after "
        f"{instant_text(change.instant)} are {change.name}{because}"
    )
    change.add("sample", (symbol, decision), text)


def _compare_windows(now: Built, later: Built, here: Places, there: Places, change: Change) -> None:
    most = max(_LEAST_INSTANTS, _MOST_WINDOWS // max(1, len(now.symbols)))
    if len(here) > 2 * most:
        newest = np.argpartition(here.decisions, -most)[-most:]
        some = np.union1d(newest, change.rng.choice(len(here), most, replace=False))
        here, there = here.of(some), there.of(some)
    change.found.n_windows += len(here)
    one, other = now.windows(here.rows), later.windows(there.rows)
    symbols = now.symbols
    if now.symbols != later.symbols:
        # A symbol that is not there looks like one without any bar.
        symbols = tuple(dict.fromkeys(now.symbols + later.symbols))
        one, other = _of_symbols(one, now.symbols, symbols), _of_symbols(other, later.symbols, symbols)
    differ = one.view(np.uint32) != other.view(np.uint32)
    samples = differ.any(axis=(1, 2, 3))
    if not samples.any():
        return
    first = here.earliest(samples)
    bar, owner, column = np.argwhere(differ[first])[-1]
    names = [now.columns[number] for number in np.flatnonzero(differ.any(axis=(0, 1, 2)))]
    symbol, decision = here.place(first)
    if symbols:
        symbol = symbols[owner]
    was, became = (float(values[first, bar, owner, column]) for values in (one, other))
    text = (
        f"{', '.join(names)} of {symbol} at {instant_text(decision)} depends on bars after "
        f"{instant_text(change.instant)}: when they are {change.name}, {now.columns[column]} "
        f"{len(one[first]) - 1 - bar} bars before is {became:.7g} instead of {was:.7g}; so in "
        f"{int(samples.sum()):,} of {len(here):,} windows"
    )
    change.add("input", (symbol, decision), text)


def _of_symbols(
    windows: npt.NDArray[np.float32], there: tuple[str, ...], wanted: tuple[str, ...]
) -> npt.NDArray[np.float32]:
    """Windows of a panel with the symbols in another order; those that are not there have no value and no mask."""
    n, length, _, n_columns = windows.shape
    found = np.full((n, length, len(wanted), n_columns), np.nan, np.float32)
    found[..., -1] = 0
    places = {symbol: number for number, symbol in enumerate(wanted)}
    found[:, :, [places[symbol] for symbol in there]] = windows
    return found


def _compare_labels(known: Labelled, again: Labelled, change: Change) -> None:
    # A label may be known sooner when there is less to wait for, as the last of a cross-section.
    lost, new = _differing(known.places, again.places)
    if lost.any():
        _tell(known.places, known.places.earliest(lost), "is not there", change, of_label=True)
    known, again = known.of(~lost), again.of(~new)
    change.found.n_labels += len(known.y)
    differ = known.y.view(np.uint32) != again.y.view(np.uint32)
    if differ.any():
        first = known.places.earliest(differ)
        symbol, decision = known.places.place(first)
        text = (
            f"the target of {symbol} decided at {instant_text(decision)}, said to be known by "
            f"{instant_text(change.instant)}, is {again.y[first]} instead of {known.y[first]} when later bars are "
            f"{change.name}"
        )
        change.add("label", (symbol, decision), text)
