"""What is found in rows while they are read: duplicates, their order, and the relation of their prices."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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
            f"the {duplicates} of which was kept: first {_where(places[0])}"
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
        f"{_where(place)}; sorted",
        n=arranged.n_backward,
        n_of=n_rows,
        places=[place],
    )


def relation_found(
    inputs: Sequence[Decoded], checked: Sequence[Sequence[Checked]], symbols: Sequence[str], timestamps: Timestamps
) -> list[Finding]:
    """Bars whose high is not the highest or whose low is not the lowest price; swapped columns are named."""
    of_inputs = [reduce(add, (part.relation for part in parts), Relation()) for parts in checked]
    found: list[Finding] = []
    left = Relation()
    swapped: dict[tuple[str, str], list[int]] = {}
    for number, (one, each) in enumerate(zip(inputs, of_inputs, strict=True)):
        if each.swapped is None:
            left += each
        else:
            swapped.setdefault(_swapped(one, each.swapped), []).append(number)
    for (text, remedy), numbers in swapped.items():
        some = reduce(add, (of_inputs[number] for number in numbers))
        where = "" if len(inputs) == 1 else f"{named([inputs[number].name for number in numbers])}: "
        found.append(
            Finding(
                check="relation",
                severity="warning",
                text=f"{where}{share(some.n_violations, some.n_bars)} have a high below or a low above their "
                f"open or close: {text}",
                remedy=remedy,
                n=some.n_violations,
                n_of=some.n_bars,
                places=_first(some, symbols, timestamps),
            )
        )
    if left.n_violations:
        found.append(_violated(inputs, of_inputs, left, _first(left, symbols, timestamps)))
    if not found:
        text = "high and low enclose open and close in every bar"
        found.append(Finding(check="relation", severity="fine", text=text, n_of=left.n_bars))
    return found


def _violated(inputs: Sequence[Decoded], of_inputs: Sequence[Relation], left: Relation, places: list[Place]) -> Finding:
    text = (
        f"{share(left.n_violations, left.n_bars)} have a high below or a low above their open or close "
        f"({left.worst}), first {_where(places[0])}"
    )
    at_fault = [one.name for one, each in zip(inputs, of_inputs, strict=True) if each.n_violations and not each.swapped]
    if len(inputs) > 1:
        text += f", in {named(at_fault)}"
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


def _swapped(one: Decoded, pair: tuple[int, int]) -> tuple[str, str]:
    """What is swapped in a file, and the options that set it right."""
    roles = one.layout.roles
    names = [one.layout.names[roles[price]] if price in roles else price for price in PRICES]
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


def _first(some: Relation, symbols: Sequence[str], timestamps: Timestamps) -> list[Place]:
    return [] if some.first is None else [_place(some.first, symbols, timestamps)]


def _place(place: tuple[int, int], symbols: Sequence[str], timestamps: Timestamps) -> Place:
    symbol, time = place
    return Place(symbols[symbol], stamps(np.array([time]), timestamps)[0])


def _where(place: Place) -> str:
    return f"{place.symbol} at {place.time}"
