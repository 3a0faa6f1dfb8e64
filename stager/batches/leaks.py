"""Finding what depended on the future: what is served from some bars, compared with what is served from others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stager.batches.host import HostGather
from stager.batches.resident import as_pack
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.samples.derive import Derive, derive
from stager.samples.index import SampleIndex, build_index
from stager.samples.labelling import Targets, as_targets
from stager.samples.normalize import Normalize
from stager.samples.schemes import Scheme
from stager.samples.select import Select
from stager.samples.targets import Target

Prepare: TypeAlias = Derive | Callable[[Pack], Pack] | None
Chosen: TypeAlias = Select | Callable[[Pack], Select]
Int64 = npt.NDArray[np.int64]

# Windows compared after a change: the last ones before it, where most leaks show, and as many of all others.
_MOST_WINDOWS = 2048
_NOT_A_TIME = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Leak:
    """Something that depended on the future.

    Attributes
    ----------
    kind : {"input", "sample", "label", "fold", "statistics"}
        A value of a window; whether there is a sample at all; a target; a training label that overlaps a test; what
        normalisation fitted for a fold.
    change : str
        What was done to later bars; of a fold, which one.
    symbol : str
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


@dataclass(frozen=True)
class Request:
    """What is made of bars and served from them."""

    window: int
    target: Targets
    select: Chosen
    normalize: Normalize
    prepare: Prepare
    split: Scheme | None

    @property
    def of_window(self) -> Normalize:
        """Normalisation without what each fold fits on its own training, which is checked with the folds."""
        return self.normalize if self.split is None else replace(self.normalize, fit="window")

    def prepared(self, bars: Pack) -> Pack:
        """What is derived from bars."""
        if isinstance(self.prepare, Derive):
            return derive(bars, self.prepare)
        return bars if self.prepare is None else as_pack(self.prepare(bars))


class Samples:
    """The samples of an index in the order of their rows, with symbol and decision of each."""

    def __init__(self, pack: Pack, index: SampleIndex, rows: Int64 | None = None) -> None:
        self.pack, self.index = pack, index
        self.rows = index.rows_between(0, index.n_samples) if rows is None else rows
        self.owners = np.searchsorted(pack.first_rows, self.rows, side="right") - 1
        self.decisions = pack.available_at(self.rows)

    def of(self, some: npt.NDArray[np.bool_] | Int64) -> Samples:
        """Some of them."""
        return Samples(self.pack, self.index, self.rows[some])

    def known_by(self, instant: int, target: int, at_open: bool) -> Samples:
        """Those that have a label of one of the targets by then; `at_open`: which the open of a bar makes known."""
        ends = self.index.label_ends(self.rows).reshape(len(self.rows), -1 if len(self.rows) else 1)[:, target]
        # What becomes of a bar that has opened is changed as a whole, its open too.
        whole = self.pack.interval.available(ends) if at_open else ends
        return self.of((whole <= instant) & (ends != _NOT_A_TIME))

    def labels(self, target: int) -> npt.NDArray[np.float32]:
        """(n,) float32: their labels of one of the targets."""
        y = self.index.y
        assert y is not None
        return y[self.rows] if y.ndim == 1 else y[self.rows, target]

    def decided_by(self, instant: int) -> Samples:
        """Those that are decided by then."""
        return self.of(self.decisions <= instant)

    def label_ends(self) -> Int64:
        """When their labels are known; without labels, their decisions."""
        return self.decisions if self.index.y is None else self.index.known_at(self.rows)

    def earliest(self, some: npt.NDArray[np.bool_] | None = None) -> int:
        """The place of the earliest of them."""
        places = np.arange(len(self.rows)) if some is None else np.flatnonzero(some)
        return int(places[np.argmin(self.decisions[places])])

    def place(self, number: int) -> tuple[str, int]:
        """Symbol and decision of one of them."""
        return self.pack.symbols[int(self.owners[number])], int(self.decisions[number])


class Built:
    """Everything that is served from some bars; symbols that they lack are not asked for.

    Raises
    ------
    SampleError
        If there is no sample; with `strict`, also if none has a label.
    """

    def __init__(self, bars: Pack, request: Request, *, strict: bool = False) -> None:
        self.pack = pack = request.prepared(bars)
        select = request.select(pack) if callable(request.select) else request.select
        if select.symbols is not None and not callable(request.select):
            select = replace(select, symbols=[symbol for symbol in select.symbols if symbol in set(pack.symbols)])
        self.request, self.select = request, select
        # Without a target, because a label needs the future.
        self.inputs = self.samples(None, request.of_window)
        self.gather = HostGather(pack.rows, self.inputs.index)
        served = self.inputs.index.columns
        self.columns = pack.columns if served is None else tuple(pack.columns[column] for column in served)
        # Labels that the user gives are not computed from bars.
        self.targets = [target for target in as_targets(request.target) if isinstance(target, Target)]
        self.labelled: Samples | None = None
        if self.targets:
            with contextlib.nullcontext() if strict else contextlib.suppress(SampleError):  # no sample has a label yet
                self.labelled = self.samples(self.targets, request.of_window)

    def samples(self, target: Targets, normalize: Normalize) -> Samples:
        """The samples with a target."""
        return Samples(self.pack, build_index(self.pack, self.request.window, target, self.select, normalize))


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


def compare(
    now: Built, later: Built | None, instant: int, change: str, rng: np.random.Generator, found: Findings
) -> None:
    """Compare what is served up to an instant, after the bars behind it were changed; None: nothing is served then."""
    here = now.inputs.decided_by(instant)
    if later is None:
        _tell(here, here.earliest(), "is not there", instant, change, found)
        return
    here, there = _paired(here, later.inputs.decided_by(instant), instant, change, found)
    found.n_samples += len(here.rows)
    if now.columns != later.columns:
        names = sorted(set(now.columns) ^ set(later.columns)) or list(later.columns)
        text = f"the columns {', '.join(names)} depend on bars after {stamp(instant)}"
        found.add("input", change, here.place(here.earliest()), text)
    else:
        _compare_windows(now, later, here, there, instant, change, rng, found)
    # One by one: that a sample lacks one label yet changes nothing about another.
    for target, told in enumerate(now.targets):
        assert now.labelled is not None
        at_open = told.exit_column == "open"
        known = now.labelled.known_by(instant, target, at_open)
        if later.labelled is not None:
            again = later.labelled.known_by(instant, target, at_open)
            known, again = _paired(known, again, instant, change, found)
            _compare_labels(known.labels(target), again.labels(target), known, instant, change, found)
        elif len(known.rows):
            _tell(known, known.earliest(), "is not there", instant, change, found)


def _paired(one: Samples, other: Samples, instant: int, change: str, found: Findings) -> tuple[Samples, Samples]:
    """The samples that are in both, by symbol and decision; the rest are leaks."""
    places = {symbol: number for number, symbol in enumerate(one.pack.symbols)}
    # A symbol that there was not before has no bar by the instant, and no sample.
    owners = np.array([places.get(symbol, -1) for symbol in other.pack.symbols], np.int64)
    mine, theirs = _keys(one.owners, one.decisions), _keys(owners[other.owners], other.decisions)
    if np.array_equal(mine, theirs):
        return one, other
    lost, new = ~np.isin(mine, theirs), ~np.isin(theirs, mine)
    if lost.any():
        _tell(one, one.earliest(lost), "is not there", instant, change, found)
    # A label may be known sooner when there is less to wait for, as the last of a cross-section.
    if new.any() and one.index.y is None:
        _tell(other, other.earliest(new), "is there only", instant, change, found)
    return one.of(~lost), other.of(~new)


def _keys(owners: Int64, decisions: Int64) -> npt.NDArray[np.void]:
    keys = np.empty(len(owners), [("owner", np.int64), ("decision", np.int64)])
    keys["owner"], keys["decision"] = owners, decisions
    return keys


def _tell(samples: Samples, number: int, what: str, instant: int, change: str, found: Findings) -> None:
    symbol, decision = samples.place(number)
    known = "" if samples.index.y is None else ", whose label is known by then,"
    text = f"the sample of {symbol} at {stamp(decision)}{known} {what} when bars after {stamp(instant)} are {change}"
    found.add("sample", change, (symbol, decision), text)


def _compare_windows(
    now: Built, later: Built, here: Samples, there: Samples, instant: int, change: str, rng: np.random.Generator,
    found: Findings,
) -> None:  # fmt: skip
    n = len(here.rows)
    if n > 2 * _MOST_WINDOWS:
        newest = np.argpartition(here.decisions, -_MOST_WINDOWS)[-_MOST_WINDOWS:]
        some = np.union1d(newest, rng.choice(n, _MOST_WINDOWS, replace=False))
        here, there = here.of(some), there.of(some)
    found.n_windows += len(here.rows)
    one, other = now.gather.gather(here.rows)[0], later.gather.gather(there.rows)[0]
    differ = one.view(np.uint32) != other.view(np.uint32)
    samples = differ.any(axis=(1, 2))
    if not samples.any():
        return
    first = here.earliest(samples)
    bar, column = np.argwhere(differ[first])[-1]
    names = [now.columns[number] for number in np.flatnonzero(differ.any(axis=(0, 1)))]
    symbol, decision = here.place(first)
    text = (
        f"{', '.join(names)} of {symbol} at {stamp(decision)} depends on bars after {stamp(instant)}: when they are "
        f"{change}, {now.columns[column]} {len(one[first]) - 1 - bar} bars before is {other[first, bar, column]:.7g} "
        f"instead of {one[first, bar, column]:.7g}; so in {int(samples.sum()):,} of {len(here.rows):,} windows"
    )
    found.add("input", change, (symbol, decision), text)


def _compare_labels(
    one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], samples: Samples, instant: int, change: str,
    found: Findings,
) -> None:  # fmt: skip
    found.n_labels += len(one)
    differ = one.view(np.uint32) != other.view(np.uint32)
    if differ.any():
        first = samples.earliest(differ)
        symbol, decision = samples.place(first)
        text = (
            f"the target of {symbol} decided at {stamp(decision)}, said to be known by {stamp(instant)}, is "
            f"{other[first]} instead of {one[first]} when later bars are {change}"
        )
        found.add("label", change, (symbol, decision), text)


def stamp(instant: int | np.datetime64) -> str:
    """An instant (nanoseconds UTC, or of that precision) for people."""
    text = str(np.int64(instant).view("datetime64[ns]"))
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "Z"
