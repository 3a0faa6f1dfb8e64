"""The rows of one input, as far as they are settled without the others: symbols, instants, checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stager.bars import symbols as symbol_numbers
from stager.bars.checks import Checked, Mask, Piece, check
from stager.bars.columns import Decoded
from stager.bars.detect import Decision
from stager.bars.options import PRICES, ReadOptions
from stager.bars.settle import Notes, localise
from stager.bars.symbols import Codes, SymbolColumn
from stager.bars.taken import AS_TOLD, Taken
from stager.bars.threads import parallel
from stager.bars.times import Times, read_times, year_window

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """All rows of one input as they came.

    Attributes
    ----------
    symbols : tuple of str
        Sorted as text; also those without a row.
    codes : list of ndarray
        Each row's place in ``symbols``, for each chunk.
    symbol : Decision or None
        As in :class:`Taken`.
    times : Times
        UTC instants, or dates.
    is_dates : bool
        As in :class:`Taken`.
    notes : Notes
        What was decided about the zone.
    """

    symbols: tuple[str, ...]
    codes: list[Codes]
    symbol: Decision | None
    times: Times
    is_dates: bool
    notes: Notes


def rows_of(one: Decoded, options: ReadOptions, *, is_only: bool, dates: bool = True) -> Rows:
    """Symbol numbers and UTC times.

    Parameters
    ----------
    one : Decoded
    options : ReadOptions
    is_only : bool
        Whether there is no other input; the symbol may then be the file's name.
    dates : bool
        Keep dates without a zone as they are; false: bring them to UTC as other wall-clock times.

    Raises
    ------
    BarsError
        If the symbol, or a zone, is missing, or a time is wrong.
    """
    column, decision = _symbol_column(one, options, is_only)
    symbols, (codes,) = symbol_numbers.encode([column])
    if "symbol" in one.columns and one.folder is not None and "symbol" not in options.columns:
        _refuse_other(one, one.folder, symbols, codes)
    times = read_times(
        one.columns["time"],
        year_window(options.allow_years),
        one.is_text,
        lambda text, row: one.error(text, row, "time"),
    )
    notes = Notes()
    is_dates = localise(one, times, codes, options, notes, dates)
    return Rows(symbols, codes, decision, times, is_dates, notes)


def take(
    one: Decoded, options: ReadOptions, *, is_only: bool, dates: bool = True
) -> tuple[Taken, tuple[str, ...], list[Piece]]:
    """Check the rows of an input.

    Returns
    -------
    Taken
    symbols : tuple of str
        Sorted as text; the codes of the pieces count in it.
    pieces : list of Piece
        The bars; their columns are ``Taken.names``.

    Raises
    ------
    BarsError
        As :func:`rows_of`, and if a row is wrong.
    """
    _refuse_lacking(one)
    rows = rows_of(one, options, is_only=is_only, dates=dates)
    names = [name for name in one.columns if name not in ("time", "symbol")]
    names.sort(key=lambda name: PRICES.index(name) if name in PRICES else len(PRICES) + (name != "volume"))
    checked = _check(one, rows, names, options)
    described, roles = one.layout.format, one.layout.roles
    violations = (part.relation.first for part in checked)
    violation = next((first for first in violations if first is not None), None)
    taken = Taken(
        name=one.name,
        size_nbytes=one.size_nbytes,
        n_rows=one.n_rows,
        names=names,
        n_null={name: one.columns[name].null_count for name in names},
        decisions=list(one.decisions),
        symbol=rows.symbol,
        time=rows.times.decision,
        zone=rows.notes.decisions,
        time_name=one.layout.names[one.layout.roles["time"]],
        form=rows.times.form,
        all_midnight=rows.times.all_midnight,
        extremes=rows.times.extremes,
        is_dates=rows.is_dates,
        first_time=next((int(part[0]) for part in rows.times.parts if rows.is_dates), 0),
        first_line=one.line_of(0) if rows.is_dates else 0,
        warnings=[*one.warnings, *([_MULTIPLIED] if described is None and _seem_multiplied(one) else [])],
        zone_warnings=rows.notes.warnings,
        format=None if described is None else described.name,
        label=None if described is None else described.label,
        adjustment="unknown" if described is None else described.adjustment,
        price_names=tuple(one.layout.names[roles[price]] if price in roles else price for price in PRICES),
        latest=max((int(part.piece.times.max()) for part in checked if len(part.piece)), default=None),
        first_violation=None if violation is None else (rows.symbols[violation[0]], violation[1]),
        checked=[replace(part, piece=_NONE) for part in checked],
        path_symbol=one.symbol,
    )
    return taken, rows.symbols, [part.piece for part in checked]


_LARGE = 10**6
_MULTIPLIED = (
    "prices are whole numbers above a million; if they are stored multiplied, give a format with their price_scale"
)
_NONE = Piece(np.empty(0, np.uint8), np.empty(0, np.int64), ())


def _seem_multiplied(one: Decoded) -> bool:
    """Whether the first prices are whole numbers so large that they may have been multiplied by a power of ten."""
    for price in PRICES:
        some: Any = one.columns[price].slice(0, 1000).drop_null().to_numpy()
        if not len(some) or (np.abs(some) < _LARGE).any() or (some != np.floor(some)).any():
            return False
    return True


def _refuse_lacking(one: Decoded) -> None:
    wide = one.layout.wide
    lacking = [role for role in PRICES if wide is not None and not any(role in each for each in wide.symbols.values())]
    if lacking:
        raise one.error(
            f"the file holds no {', '.join(lacking)}, and a bar has all of open, high, low and close; join the "
            "files of the fields to one, with columns such as AAPL:open and AAPL:close"
            + (
                ""
                if "close" in lacking
                else "; if there are only closes, repeat them as open, high and low, and leave "
                "those columns out with Select(columns=...)"
            )
        )


def _symbol_column(one: Decoded, options: ReadOptions, is_only: bool) -> tuple[SymbolColumn, Decision | None]:
    lengths = [len(chunk) for chunk in one.columns["time"].chunks]
    if "symbol" in one.columns:
        if options.symbol is not None:
            named = one.layout.names[one.layout.roles["symbol"]]
            raise one.error(
                f"the symbol {options.symbol!r} was given, but the column {named!r} holds symbols; leave out "
                "--symbol, or remove the column"
            )
        return one.columns["symbol"], None
    if options.symbol is not None:
        decision = Decision("symbol", options.symbol, AS_TOLD)
    elif one.symbol is not None:
        decision = Decision("symbol", one.symbol, "the path")
    elif one.stem is not None and is_only:
        decision = Decision("symbol", one.stem, "the file's name")
    else:
        raise one.error(
            "there is no column for symbol; name it with --column symbol=NAME, or say with --symbol which symbol "
            "all rows belong to"
        )
    return symbol_numbers.constant(decision.value, lengths), decision


def _refuse_other(one: Decoded, folder: str, symbols: tuple[str, ...], codes: list[Codes]) -> None:
    """Refuse rows of another symbol than the folder's."""
    row = 0
    for part in codes:
        for code in np.unique(part).tolist():
            if symbols[code] != folder:
                first = row + int(np.argmax(part == code))
                named = one.layout.names[one.layout.roles["symbol"]]
                raise one.error(
                    f"the symbol is {symbols[code]!r}, and the folder says {folder!r}; if the column is right, say "
                    f"--column symbol={named}",
                    first,
                    "symbol",
                )
        row += len(part)


def _check(one: Decoded, rows: Rows, names: list[str], options: ReadOptions) -> list[Checked]:
    empty_code = 0 if rows.symbols and rows.symbols[0] == "" else None
    jobs: list[tuple[int, Codes, Int64, Mask | None, int]] = []
    first_row = 0
    for chunk, (code, part, present) in enumerate(zip(rows.codes, rows.times.parts, rows.times.present, strict=True)):
        jobs.append((chunk, code, part, present, first_row))
        first_row += len(part)

    def run(job: tuple[int, Codes, Int64, Mask | None, int]) -> Checked:
        chunk, code, part, present, first_row = job
        arrays: list[Any] = [one.columns[name].chunk(chunk) for name in names]
        return check(
            code,
            part,
            present,
            arrays,
            empty_code=empty_code,
            first_row=first_row,
            nan=options.nan,
            refuse=one.error,
        )

    return parallel(run, jobs)
