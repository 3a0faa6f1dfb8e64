"""Schemes of folds: which intervals of decision instants a fold trains on, and which it tests on."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stager.bars.clock import instant_text
from stager.bars.interval import Interval
from stager.config import read_toml, resolve
from stager.errors import ConfigError, SampleError
from stager.samples.runs import IntArray

# Text such as "30d", "12h" or "90min", datetime.timedelta, or numpy.timedelta64.
Duration: TypeAlias = Any

_MOST_FOLDS = 10_000
_LONGEST = 1 << 62
_NANOSECONDS = {
    "W": 7 * 86_400 * 10**9,
    "D": 86_400 * 10**9,
    "h": 3_600 * 10**9,
    "m": 60 * 10**9,
    "s": 10**9,
    "ms": 10**6,
    "us": 10**3,
    "ns": 1,
}


@dataclass(frozen=True)
class Division:
    """Consecutive intervals of decision instants, and what each fold does with them.

    Attributes
    ----------
    edges : (n_intervals + 1,) int64
        Ascending; interval g holds the decisions ``edges[g] <= decision < edges[g + 1]``, nanoseconds UTC.
    folds : tuple of (train, test)
        Numbers of the intervals that each fold trains on and tests on, ascending.
    """

    edges: IntArray
    folds: tuple[tuple[IntArray, IntArray], ...]


@dataclass(frozen=True)
class WalkForward:
    """Train on the past, test on what follows, move on.

    Parameters
    ----------
    folds : int
        Number of folds, one test block each; the blocks follow each other and end with the last decision.
    train : duration, optional
        Length of the first fold's training interval, which ends where its test begins; default: from the first
        decision on.
    test : duration, optional
        Length of each test block. By default the decision instants after `train` are divided evenly over the folds;
        without `train` each block has 1 in ``folds + 1`` of all instants.
    expanding : bool
        Whether later folds train from the same instant on as the first; else the training interval keeps its length
        and moves along.
    embargo : duration, optional
        As in :class:`PurgedKFold`. It is counted after a test block, and here no training follows the test of its
        fold, so it leaves nothing out.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    folds: int
    _: KW_ONLY
    train: Duration = None
    test: Duration = None
    expanding: bool = True
    embargo: Duration = None

    def __post_init__(self) -> None:
        _check_count("folds", self.folds, 1)
        if not isinstance(self.expanding, bool):
            raise SampleError(f"expanding is {self.expanding!r}; there are True and False")
        for name in ("train", "test"):
            _nanoseconds(name, getattr(self, name), least=1)
        _nanoseconds("embargo", self.embargo, least=0)

    def divide(self, instants: IntArray) -> Division:
        """Divide the distinct decision instants, ascending."""
        train, test = (_nanoseconds(name, getattr(self, name), least=1) for name in ("train", "test"))
        first, end = int(instants[0]), int(instants[-1]) + 1
        _check_enough(instants, self.folds + (train is None), f"{self.folds:,} test blocks and training before them")
        if test is not None:
            starts = [end - (self.folds - i) * test for i in range(self.folds)]
        elif train is not None:
            rest = instants[np.searchsorted(instants, min(first + train, end), side="left") :]
            _check_enough(rest, self.folds, f"{self.folds:,} test blocks after training of {duration_text(train)}")
            starts = _even(rest, self.folds)
        else:
            size = len(instants) // (self.folds + 1)
            starts = [int(instants[len(instants) - (self.folds - i) * size]) for i in range(self.folds)]
        begin = first if train is None else starts[0] - train
        if begin < first or starts[0] <= first:
            raise SampleError(
                f"{self.folds:,} folds of test {duration_text(test or 0)}"
                + (f" and train {duration_text(train)}" if train else " and some training before them")
                + f" are longer than the {duration_text(end - first)} from {instant_text(first)} to "
                f"{instant_text(end - 1)}; use fewer folds, or shorter ones"
            )
        begins = [begin if self.expanding else begin + start - starts[0] for start in starts]
        edges = np.array(sorted({*begins, *starts, end}), np.int64)
        stops = [*starts[1:], end]
        return Division(
            edges,
            tuple(
                (_between(edges, one, start), _between(edges, start, stop))
                for one, start, stop in zip(begins, starts, stops, strict=True)
            ),
        )


@dataclass(frozen=True)
class PurgedKFold:
    """Each of several blocks of decision instants is the test once; all others train.

    Parameters
    ----------
    folds : int
        Number of blocks, with as many decision instants as can be made equal; at least 2.
    embargo : duration, optional
        After a test block, decisions up to this long after its last label end don't train. By default no window of
        training begins before that label end. "0min" turns it off.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    folds: int
    _: KW_ONLY
    embargo: Duration = None

    def __post_init__(self) -> None:
        _check_count("folds", self.folds, 2)
        _nanoseconds("embargo", self.embargo, least=0)

    def divide(self, instants: IntArray) -> Division:
        """Divide the distinct decision instants, ascending."""
        return _choose(instants, self.folds, ((i,) for i in range(self.folds)))


@dataclass(frozen=True)
class Combinatorial:
    """Every choice of k among n blocks of decision instants is a test once; all other blocks train.

    The combinatorial purged cross-validation of M. Lopez de Prado, "Advances in Financial Machine Learning" (2018),
    chapter 12. Blocks of a test that follow each other are one.

    Parameters
    ----------
    n : int
        Number of blocks, with as many decision instants as can be made equal; at least 2.
    k : int
        Blocks of a test, 1 to n - 1.
    embargo : duration, optional
        As in :class:`PurgedKFold`.

    Raises
    ------
    SampleError
        If a value is not allowed.
    """

    n: int
    k: int
    _: KW_ONLY
    embargo: Duration = None

    def __post_init__(self) -> None:
        _check_count("n", self.n, 2)
        _check_count("k", self.k, 1)
        if self.k >= self.n:
            raise SampleError(f"k is {self.k}; of n = {self.n} blocks 1 to {self.n - 1} can test")
        if (n_folds := math.comb(self.n, self.k)) > _MOST_FOLDS:
            raise SampleError(f"{self.k} of {self.n} blocks make {n_folds:,} folds; at most {_MOST_FOLDS:,} are made")
        _nanoseconds("embargo", self.embargo, least=0)

    def divide(self, instants: IntArray) -> Division:
        """Divide the distinct decision instants, ascending."""
        return _choose(instants, self.n, itertools.combinations(range(self.n), self.k))


Scheme: TypeAlias = WalkForward | PurgedKFold | Combinatorial

SCHEMES: dict[str, type[Scheme]] = {
    "walk_forward": WalkForward,
    "purged_kfold": PurgedKFold,
    "combinatorial": Combinatorial,
}


class _SchemeName(msgspec.Struct, frozen=True):
    scheme: str


def read_scheme(path: str | Path) -> Scheme | None:
    """The scheme of table ``[split]``; None without the table.

    Raises
    ------
    ConfigError, SampleError
        If it names no scheme, or a value of the scheme is not allowed.
    """
    table = read_toml(path).get("split")
    if table is None:
        return None
    named = {name: table[name] for name in table if name == "scheme"} if isinstance(table, dict) else table
    name = resolve(_SchemeName, "split", toml=named).scheme
    if name not in SCHEMES:
        raise ConfigError(f"[split] scheme is {name!r}; there are: {', '.join(SCHEMES)}")
    return resolve(SCHEMES[name], "split", toml={name: value for name, value in table.items() if name != "scheme"})


def embargo_of(scheme: Scheme) -> int | None:
    """The embargo of a scheme in nanoseconds; None for the clock span of each window."""
    return _nanoseconds("embargo", scheme.embargo, least=0)


def _choose(instants: IntArray, n: int, tests: Iterable[tuple[int, ...]]) -> Division:
    _check_enough(instants, n, f"{n:,} blocks")
    edges = np.array([*_even(instants, n), int(instants[-1]) + 1], np.int64)
    numbers = np.arange(n)
    return Division(edges, tuple((np.delete(numbers, test), np.array(test)) for test in tests))


def _even(instants: IntArray, n: int) -> list[int]:
    """The first instants of n parts, of which the first ones have one instant more where it doesn't divide."""
    size, rest = divmod(len(instants), n)
    return [int(instants[i * size + min(i, rest)]) for i in range(n)]


def _between(edges: IntArray, start: int, stop: int) -> IntArray:
    """Numbers of the intervals from one edge to another."""
    lo, hi = np.searchsorted(edges, [start, stop])
    return np.arange(lo, hi)


def _check_enough(instants: IntArray, n: int, what: str) -> None:
    if len(instants) < n:
        raise SampleError(
            f"{len(instants):,} decision instants are too few for {what}; use fewer, shorter training, or more bars"
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= _MOST_FOLDS:
        raise SampleError(f"{name} is {value!r}; it must be an integer from {least} to {_MOST_FOLDS:,}")


def _nanoseconds(name: str, value: Duration, *, least: int) -> int | None:
    """Nanoseconds of a duration; None for None."""
    if value is None:
        return None
    found: int | None = None
    if isinstance(value, str):
        found = _parse(value)
    elif isinstance(value, np.timedelta64):
        unit, count = np.datetime_data(value.dtype)
        if unit in _NANOSECONDS and not np.isnat(value):
            found = int(value.astype(np.int64)) * count * _NANOSECONDS[unit]
    elif isinstance(value, dt.timedelta):
        found = ((value.days * 86_400 + value.seconds) * 10**6 + value.microseconds) * 1000
    if found is None:
        raise SampleError(
            f"{name} is {value!r}; write a duration of fixed length such as '30d', '12h' or '90min', "
            f"or give a timedelta"
        )
    if not least <= found < _LONGEST:
        raise SampleError(f"{name} is {value!r}; it must be {'longer than' if least else 'at least'} 0, and finite")
    return found


def _parse(text: str) -> int | None:
    """Nanoseconds, or None where the text is no duration of fixed length."""
    # Zero is no interval of bars, but a duration.
    if re.fullmatch(r"\s*0+\s*[a-z]*\s*", text.lower()):
        return 0
    try:
        interval = Interval.parse(text)
    except ConfigError:
        return None
    return None if interval.months else interval.nanoseconds


def duration_text(nanoseconds: int) -> str:
    """As ``datetime.timedelta`` writes it, where it can."""
    if nanoseconds % 1000:
        return f"{nanoseconds:,} ns"
    return str(dt.timedelta(microseconds=nanoseconds // 1000)) if nanoseconds else "0"
