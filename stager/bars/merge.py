"""Inputs made alike: one set of columns, symbol numbers and times, and their rows checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stager.bars import symbols as symbol_numbers
from stager.bars.checks import Checked, Mask, check, describe
from stager.bars.columns import Decoded
from stager.bars.options import PRICES, ReadOptions
from stager.bars.settle import Notes, Timestamps, settle_zone
from stager.bars.symbols import Codes, SymbolColumn
from stager.bars.threads import parallel
from stager.bars.times import Times, read_times, year_window

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Merged:
    """All inputs, checked.

    Attributes
    ----------
    symbols : tuple of str
        Sorted; the codes of the pieces count in it. Some may have no row.
    names : list of str
        Columns of the pieces: the prices, volume, further ones.
    empty : list of str
        Columns left out because they hold no value.
    checked : list of list of Checked
        The pieces of each input.
    timestamps : {"utc", "session"}
    all_midnight : bool
        Whether every time is at 00:00.
    notes : Notes
    """

    symbols: tuple[str, ...]
    names: list[str]
    empty: list[str]
    checked: list[list[Checked]]
    timestamps: Timestamps
    all_midnight: bool
    notes: Notes


@dataclass(frozen=True)
class Unified:
    """All rows as they came.

    Attributes
    ----------
    symbols : tuple of str
        Sorted.
    codes : list of list of ndarray
        Each row's place in ``symbols``, for each input and chunk.
    times : list of Times
        Of each input: UTC instants or session dates.
    timestamps : {"utc", "session"}
    """

    symbols: tuple[str, ...]
    codes: list[list[Codes]]
    times: list[Times]
    timestamps: Timestamps


def merge(inputs: Sequence[Decoded], options: ReadOptions) -> Merged:
    """Bring inputs to one set of columns, symbol numbers and UTC times, and check their rows.

    Raises
    ------
    BarsError
        If they don't fit together, a zone is missing or wrong, or a row is wrong.
    """
    notes = Notes()
    _note_decisions(notes, inputs)
    names, empty = _common_columns(inputs)
    for one in inputs:
        wide = one.layout.wide
        lacking = [
            role for role in PRICES if wide is not None and not any(role in each for each in wide.symbols.values())
        ]
        if lacking:
            raise one.error(
                f"the file holds no {', '.join(lacking)}, and a bar has all of open, high, low and close; join the "
                "files of the fields to one, with columns such as AAPL:open and AAPL:close"
            )
    unified = unify(inputs, options, notes)
    _note_decisions(notes, inputs)
    checked = _check_all(inputs, unified.symbols, unified.codes, unified.times, names, options)
    _add_warnings(notes, inputs)
    notes.warnings += describe([part for parts in checked for part in parts], names)
    all_midnight = all(each.all_midnight for each in unified.times)
    return Merged(unified.symbols, names, empty, checked, unified.timestamps, all_midnight, notes)


def unify(inputs: Sequence[Decoded], options: ReadOptions, notes: Notes) -> Unified:
    """One set of symbol numbers, and UTC times, for all rows as they came; what was decided goes to ``notes``.

    Raises
    ------
    BarsError
        If inputs don't fit together, or a zone is missing or wrong.
    """
    symbols, codes = symbol_numbers.encode(_symbol_columns(inputs, options, notes))
    years = year_window(options.allow_years)

    def times_of(one: Decoded) -> Times:
        return read_times(one.columns["time"], years, one.is_text, lambda text, row: one.error(text, row, "time"))

    times = [times_of(one) for one in inputs]
    for one, each in zip(inputs, times, strict=True):
        if not any(decision.what == "time" for decision in one.decisions):
            one.decisions.append(each.decision)
    return Unified(symbols, codes, times, settle_zone(inputs, times, codes, options, notes))


def _note_decisions(notes: Notes, inputs: Sequence[Decoded]) -> None:
    """Every decision once; those that differ from file to file with the files they hold for."""
    files: dict[tuple[str, str], list[str]] = {}
    for one in inputs:
        for decision in one.decisions:
            files.setdefault((decision.what, decision.value), []).append(one.name)
    for one in inputs:
        for decision in one.decisions:
            named = files[decision.what, decision.value]
            source = decision.source
            if len(named) < len(inputs):
                source += f"; in {named[0]}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
            notes.decide(decision.what, decision.value, source)


def _add_warnings(notes: Notes, inputs: Sequence[Decoded]) -> None:
    by_text: dict[str, list[str]] = {}
    for one in inputs:
        for text in one.warnings:
            by_text.setdefault(text, []).append(one.name)
    for text, files in by_text.items():
        where = "" if len(inputs) == 1 else f"{files[0]}: "
        notes.warnings.append(where + text + (f" (so in {len(files) - 1} more files)" if len(files) > 1 else ""))


def _common_columns(inputs: Sequence[Decoded]) -> tuple[list[str], list[str]]:
    """Prices, volume and the further columns that all inputs have and that hold a value; those that hold none."""
    first = inputs[0]
    for one in inputs[1:]:
        for has, lacks in ((first, one), (one, first)):
            if "volume" in has.columns and "volume" not in lacks.columns:
                raise lacks.error(
                    f"there is no column for volume, and {has.name} has one; name it with --column volume=NAME, or "
                    "read the files apart"
                )
    shared = [name for name in first.columns if all(name in one.columns for one in inputs)]
    for one in inputs:
        one.warnings += [
            f"column {name!r} is left out: not every file has it" for name in one.columns if name not in shared
        ]
    names = [name for name in shared if name not in ("time", "symbol", *PRICES)]
    names.sort(key=lambda name: name != "volume")
    n_rows = sum(one.n_rows for one in inputs)
    empty = [name for name in names if n_rows and n_rows == sum(one.columns[name].null_count for one in inputs)]
    first.warnings += [f"column {name!r} has no value in any row and is left out" for name in empty]
    return [*PRICES, *(name for name in names if name not in empty)], empty


def _symbol_columns(inputs: Sequence[Decoded], options: ReadOptions, notes: Notes) -> list[SymbolColumn]:
    columns: list[SymbolColumn] = []
    for one in inputs:
        lengths = [len(chunk) for chunk in one.columns["time"].chunks]
        if "symbol" in one.columns:
            if options.symbol is not None:
                named = one.layout.names[one.layout.roles["symbol"]]
                raise one.error(
                    f"the symbol {options.symbol!r} was given, but the column {named!r} holds symbols; leave out "
                    "--symbol, or remove the column"
                )
            columns.append(one.columns["symbol"])
        elif options.symbol is not None:
            notes.decide("symbol", options.symbol, "as told")
            columns.append(symbol_numbers.constant(options.symbol, lengths))
        elif one.symbol is not None:
            notes.decide("symbol", one.symbol, "the path")
            columns.append(symbol_numbers.constant(one.symbol, lengths))
        elif one.stem is not None and len(inputs) == 1:
            notes.decide("symbol", one.stem, "the file's name")
            columns.append(symbol_numbers.constant(one.stem, lengths))
        else:
            raise one.error(
                "there is no column for symbol; name it with --column symbol=NAME, or say with --symbol which symbol "
                "all rows belong to"
            )
    return columns


def _check_all(
    inputs: Sequence[Decoded],
    symbols: Sequence[str],
    codes: Sequence[Sequence[Codes]],
    times: Sequence[Times],
    names: Sequence[str],
    options: ReadOptions,
) -> list[list[Checked]]:
    empty_code = 0 if symbols and symbols[0] == "" else None
    jobs: list[tuple[int, int, Codes, Int64, Mask | None, int]] = []
    for number, each in enumerate(times):
        first_row = 0
        for chunk, (code, part, present) in enumerate(zip(codes[number], each.parts, each.present, strict=True)):
            jobs.append((number, chunk, code, part, present, first_row))
            first_row += len(part)

    def run(job: tuple[int, int, Codes, Int64, Mask | None, int]) -> Checked:
        number, chunk, code, part, present, first_row = job
        one = inputs[number]
        return check(
            code,
            part,
            present,
            [one.columns[name].chunk(chunk) for name in names],
            empty_code=empty_code,
            first_row=first_row,
            nan=options.nan,
            refuse=one.error,
        )

    checked: list[list[Checked]] = [[] for _ in inputs]
    for job, result in zip(jobs, parallel(run, jobs), strict=True):
        checked[job[0]].append(result)
    return checked
