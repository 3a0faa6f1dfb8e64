"""What is found in rows while they are read: duplicates, their order, and the relation of their prices."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from stager.bars.arrange import Arranged
from stager.bars.findings import Finding, Place, counted, named, share, stamps
from stager.bars.options import PRICES, Duplicates
from stager.bars.relation import Relation
from stager.bars.settle import Timestamps
from stager.bars.taken import Taken


@dataclass(frozen=True)
class Sorting:
    """What became of rows when they were brought into order.

    Attributes
    ----------
    n_rows, n_symbols : int
        Rows that were kept, and symbols that have one.
    n_duplicates, n_conflicts : int
        Rows that were dropped: identical to the one kept of their symbol and time, and differing from it.
    conflict : tuple of (str, int) or None
        Symbol and time of the first of the latter.
    n_backward : int
        Rows that came after a later one of their symbol.
    unordered : list of str
        The symbols that have such rows, sorted.
    backward : tuple of (str, int) or None
        The first of these symbols, and the time of its first such row.
    """

    n_rows: int
    n_symbols: int
    n_duplicates: int
    n_conflicts: int
    conflict: tuple[str, int] | None
    n_backward: int
    unordered: list[str]
    backward: tuple[str, int] | None

    @classmethod
    def of(cls, arranged: Arranged, symbols: Sequence[str]) -> Sorting:
        """Of rows in memory, whose symbols' numbers count in ``symbols``."""

        def named(place: tuple[int, int] | None) -> tuple[str, int] | None:
            return None if place is None else (symbols[place[0]], place[1])

        return cls(
            len(arranged.times),
            int(np.count_nonzero(arranged.counts)),
            arranged.n_duplicates,
            arranged.n_conflicts,
            named(arranged.conflict),
            arranged.n_backward,
            [symbols[number] for number in arranged.unordered],
            named(arranged.backward),
        )

    @property
    def n_came(self) -> int:
        """Rows before any was dropped."""
        return self.n_rows + self.n_duplicates + self.n_conflicts


def duplicates_found(sorting: Sorting, timestamps: Timestamps, duplicates: Duplicates) -> Finding:
    """Rows that were dropped because there is another one of their symbol and time."""
    n, n_rows = sorting.n_duplicates + sorting.n_conflicts, sorting.n_came
    if n == 0:
        return Finding(check="duplicates", severity="fine", text="no two rows of one symbol and time", n_of=n_rows)
    parts = []
    if sorting.n_duplicates:
        parts.append(
            f"{counted(sorting.n_duplicates, 'row')} dropped: the same as another one of their symbol and time"
        )
    places: list[Place] = []
    if sorting.conflict is not None:
        places = [_place(sorting.conflict, timestamps)]
        parts.append(
            f"{counted(sorting.n_conflicts, 'row')} dropped that differed from another one of their symbol and time, "
            f"the {duplicates} of which was kept: first {places[0].words}"
        )
    return Finding(
        check="duplicates",
        severity="warning" if places else "note",
        text="; ".join(parts),
        n=n,
        n_of=n_rows,
        places=places,
    )


def order_found(sorting: Sorting, timestamps: Timestamps) -> Finding:
    """Rows that came after a later one."""
    n_rows = sorting.n_came
    if sorting.backward is None:
        return Finding(check="order", severity="fine", text="the rows of every symbol ascend in time", n_of=n_rows)
    place = _place(sorting.backward, timestamps)
    most = sorting.n_rows - sorting.n_symbols
    how = "newest first" if sorting.n_backward == most else "out of order"
    return Finding(
        check="order",
        severity="note",
        text=f"{counted(sorting.n_backward, 'row')} of {named(sorting.unordered)} came after a later one ({how}), "
        f"first {place.words}; sorted",
        n=sorting.n_backward,
        n_of=n_rows,
        places=[place],
    )


@dataclass(frozen=True)
class InputRelation:
    """How the prices of one input lie to each other.

    Attributes
    ----------
    name : str
        The input.
    columns : tuple of str
        Its columns that are read as open, high, low and close.
    relation : Relation
    first : tuple of (str, int) or None
        Symbol and time of the first violation.
    """

    name: str
    columns: tuple[str, ...]
    relation: Relation
    first: tuple[str, int] | None

    @classmethod
    def of(cls, taken: Taken) -> InputRelation:
        """That of an input whose rows were checked."""
        related = reduce(add, (part.relation for part in taken.checked), Relation())
        return cls(taken.name, taken.price_names, related, taken.first_violation)

    def places(self, timestamps: Timestamps) -> list[Place]:
        """The first violation, if there is one."""
        return [] if self.first is None else [_place(self.first, timestamps)]


def relation_found(inputs: Sequence[InputRelation], timestamps: Timestamps) -> list[Finding]:
    """Bars whose high is not the highest or whose low is not the lowest price; swapped columns are named."""
    found: list[Finding] = []
    left: list[InputRelation] = []
    swapped: dict[tuple[str, str], list[InputRelation]] = {}
    for one in inputs:
        if one.relation.swapped is None:
            left.append(one)
        else:
            swapped.setdefault(_swapped(one.columns, one.relation.swapped), []).append(one)
    for (text, remedy), some in swapped.items():
        total = reduce(add, (one.relation for one in some))
        where = "" if len(inputs) == 1 else f"{named([one.name for one in some])}: "
        found.append(
            Finding(
                check="relation",
                severity="warning",
                text=f"{where}{share(total.n_violations, total.n_bars)} have a high below or a low above their open or "
                f"close: {text}",
                remedy=remedy,
                n=total.n_violations,
                n_of=total.n_bars,
                places=some[0].places(timestamps),
            )
        )
    total = reduce(add, (one.relation for one in left), Relation())
    if total.n_violations:
        found.append(_violated(left, total, len(inputs) > 1, timestamps))
    if not found:
        text = "high and low enclose open and close in every bar"
        found.append(Finding(check="relation", severity="fine", text=text, n_of=total.n_bars))
    return found


def _violated(inputs: Sequence[InputRelation], left: Relation, of_several: bool, timestamps: Timestamps) -> Finding:
    at_fault = [one for one in inputs if one.relation.n_violations]
    places = at_fault[0].places(timestamps)
    text = (
        f"{share(left.n_violations, left.n_bars)} have a high below or a low above their open or close "
        f"({left.worst}), first {places[0].words}"
    )
    if of_several:
        text += f", in {named([one.name for one in at_fault])}"
    if left.n_gross == 0:
        text += "; by less than a millionth, which is rounding"
    only_close = left.faults[0] == left.faults[2] == left.faults[4] == 0
    return Finding(
        check="relation",
        severity="warning" if left.n_gross else "note",
        text=text,
        remedy="if it is many, columns are swapped or mixed"
        + (": only close is outside, so it may be adjusted and the others not" if only_close else "")
        if left.n_gross
        else "",
        n=left.n_violations,
        n_of=left.n_bars,
        places=places,
    )


def _swapped(names: Sequence[str], pair: tuple[int, int]) -> tuple[str, str]:
    """What is swapped in a file, and the options that set it right."""
    highest, lowest = pair
    text = (
        f"columns are swapped, {names[highest]!r}, read as {PRICES[highest]}, holds the highest price and "
        f"{names[lowest]!r}, read as {PRICES[lowest]}, the lowest"
    )
    remedy = f"say --column high={shlex.quote(names[highest])} --column low={shlex.quote(names[lowest])}"
    if pair != (2, 1):
        others = [name for number, name in enumerate(names) if number not in pair]
        remedy += f", and with --column open=NAME --column close=NAME which of {others[0]!r} and {others[1]!r} is which"
    return text, remedy


def _place(place: tuple[str, int], timestamps: Timestamps) -> Place:
    symbol, time = place
    return Place(symbol, stamps(np.array([time]), timestamps)[0])
