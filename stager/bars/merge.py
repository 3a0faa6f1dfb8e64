"""Inputs made alike: one set of columns, one kind of times, and what was decided and found in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stager.bars.checks import describe
from stager.bars.options import PRICES, ReadOptions
from stager.bars.settle import Notes, Timestamps, settle_zone
from stager.bars.taken import AS_TOLD, Taken


@dataclass(frozen=True)
class Merged:
    """What all inputs are together.

    Attributes
    ----------
    names : list of str
        Columns of the bars: the prices, volume, further ones.
    empty : list of str
        Columns left out because they hold no value.
    columns : list of list of int
        Of each input, where in ``Taken.names`` the columns are.
    timestamps : {"utc", "session"}
    all_midnight : bool
        Whether every time is at 00:00.
    notes : Notes
    """

    names: list[str]
    empty: list[str]
    columns: list[list[int]]
    timestamps: Timestamps
    all_midnight: bool
    notes: Notes


def merge(inputs: Sequence[Taken], options: ReadOptions) -> Merged:
    """Bring inputs to one set of columns, and tell what was decided and found in all of them.

    Raises
    ------
    BarsError
        If they don't fit together.
    """
    notes = Notes()
    _note_decisions(notes, inputs, with_times=False)
    inputs = [replace(one, warnings=list(one.warnings)) for one in inputs]
    names, empty = _common_columns(inputs)
    for one in inputs:
        if one.symbol is not None:
            notes.decide(one.symbol.what, one.symbol.value, one.symbol.source)
    timestamps = settle_zone(inputs, options, notes)
    _note_decisions(notes, inputs, with_times=True)
    _add_warnings(notes, inputs)
    columns = [[one.names.index(name) for name in names] for one in inputs]
    notes.warnings += describe(
        [
            replace(
                part,
                n_infinite=tuple(part.n_infinite[i - len(PRICES)] for i in where[len(PRICES) :]),
                n_missing=tuple(part.n_missing[i - len(PRICES)] for i in where[len(PRICES) :]),
            )
            for one, where in zip(inputs, columns, strict=True)
            for part in one.checked
        ],
        names,
    )
    return Merged(names, empty, columns, timestamps, all(one.all_midnight for one in inputs), notes)


def refuse_unlike(one: Taken, first: Taken) -> None:
    """Refuse an input that does not fit the first; :func:`merge` would, when all are read.

    Raises
    ------
    BarsError
    """
    for has, lacks in ((first, one), (one, first)):
        if "volume" in has.names and "volume" not in lacks.names:
            raise lacks.error(
                f"there is no column for volume, and {has.name} has one; name it with --column volume=NAME, or "
                "read the files apart"
            )
    is_unlike = None not in (one.path_symbol, first.path_symbol) and one.path_symbol != first.path_symbol
    if is_unlike and one.symbol is not None and one.symbol.source == AS_TOLD:
        raise one.error(
            f"its name says {one.path_symbol!r}, and that of {first.name} {first.path_symbol!r}, so they are not all "
            f"of the symbol {one.symbol.value!r} that was given; leave out --symbol, or read the files apart"
        )


def _note_decisions(notes: Notes, inputs: Sequence[Taken], *, with_times: bool) -> None:
    """Every decision once; those that differ from file to file with the files they hold for."""
    decided = [
        one.decisions + [one.time] * (with_times and all(each.what != "time" for each in one.decisions))
        for one in inputs
    ]
    files: dict[tuple[str, str], list[str]] = {}
    for one, decisions in zip(inputs, decided, strict=True):
        for decision in decisions:
            files.setdefault((decision.what, decision.value), []).append(one.name)
    for decisions in decided:
        for decision in decisions:
            named = files[decision.what, decision.value]
            source = decision.source
            if len(named) < len(inputs):
                source += f"; in {named[0]}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
            notes.decide(decision.what, decision.value, source)


def _add_warnings(notes: Notes, inputs: Sequence[Taken]) -> None:
    by_text: dict[str, list[str]] = {}
    for one in inputs:
        for text in one.warnings:
            by_text.setdefault(text, []).append(one.name)
    for text, files in by_text.items():
        where = "" if len(inputs) == 1 else f"{files[0]}: "
        notes.warnings.append(where + text + (f" (so in {len(files) - 1} more files)" if len(files) > 1 else ""))


def _common_columns(inputs: Sequence[Taken]) -> tuple[list[str], list[str]]:
    """Prices, volume and the further columns that all inputs have and that hold a value; those that hold none."""
    first = inputs[0]
    for one in inputs[1:]:
        refuse_unlike(one, first)
    shared = [name for name in first.names if all(name in one.names for one in inputs)]
    for one in inputs:
        one.warnings += [
            f"column {name!r} is left out: not every file has it" for name in one.names if name not in shared
        ]
    names = [name for name in shared if name not in PRICES]
    n_rows = sum(one.n_rows for one in inputs)
    empty = [name for name in names if n_rows and n_rows == sum(one.n_null[name] for one in inputs)]
    first.warnings += [f"column {name!r} has no value in any row and is left out" for name in empty]
    return [*PRICES, *(name for name in names if name not in empty)], empty
