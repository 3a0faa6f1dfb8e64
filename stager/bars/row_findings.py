"""What is found in rows while they are read: duplicates, their order, and the relation of their prices."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from stager.bars.arrange import Arranged
from stager.bars.checks import Checked
from stager.bars.columns import Decoded
from stager.bars.findings import Finding, Place, counted, named, share, stamps
from stager.bars.options import PRICES, Duplicates
from stager.bars.relation import Relation
from stager.bars.settle import Timestamps


def duplicates_found(
    arranged: Arranged, symbols: Sequence[str], timestamps: Timestamps, duplicates: Duplicates
) -> Finding:
    """Rows that were dropped because there is another one of their symbol and time."""
    n = arranged.n_duplicates + arranged.n_conflicts
    n_rows = len(arranged.times) + n
    if n == 0:
        return Finding(check="duplicates", severity="fine", text="no two rows of one symbol and time", n_of=n_rows)
    parts = []
    if arranged.n_duplicates:
        parts.append(
            f"{counted(arranged.n_duplicates, 'row')} dropped: the same as another one of their symbol and time"
        )
    places: list[Place] = []
    if arranged.conflict is not None:
        places = [_place(arranged.conflict, symbols, timestamps)]
        parts.append(
            f"{counted(arranged.n_conflicts, 'row')} dropped that differed from another one of their symbol and time, "
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


def order_found(arranged: Arranged, symbols: Sequence[str], timestamps: Timestamps) -> Finding:
    """Rows that came after a later one; to be called before symbols without rows are taken out."""
    n_rows = len(arranged.times) + arranged.n_duplicates + arranged.n_conflicts
    if arranged.backward is None:
        return Finding(check="order", severity="fine", text="the rows of every symbol ascend in time", n_of=n_rows)
    place = _place(arranged.backward, symbols, timestamps)
    unordered = [symbols[number] for number in arranged.unordered]
    most = len(arranged.times) - int(np.count_nonzero(arranged.counts))
    how = "newest first" if arranged.n_backward == most else "out of order"
    return Finding(
        check="order",
        severity="note",
        text=f"{counted(arranged.n_backward, 'row')} of {named(unordered)} came after a later one ({how}), first "
        f"{place.words}; sorted",
        n=arranged.n_backward,
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
    symbols : sequence of str
        What the symbol's number in ``relation.first`` counts in.
    """

    name: str
    columns: tuple[str, ...]
    relation: Relation
    symbols: Sequence[str]

    @classmethod
    def of(cls, one: Decoded, checked: Sequence[Checked], symbols: Sequence[str]) -> InputRelation:
        """That of an input whose rows were checked."""
        roles = one.layout.roles
        columns = tuple(one.layout.names[roles[price]] if price in roles else price for price in PRICES)
        return cls(one.name, columns, reduce(add, (part.relation for part in checked), Relation()), symbols)

    def places(self, timestamps: Timestamps) -> list[Place]:
        """The first violation, if there is one."""
        first = self.relation.first
        return [] if first is None else [_place(first, self.symbols, timestamps)]


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


def _place(place: tuple[int, int], symbols: Sequence[str], timestamps: Timestamps) -> Place:
    symbol, time = place
    return Place(symbols[symbol], stamps(np.array([time]), timestamps)[0])
