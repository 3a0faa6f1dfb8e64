"""What all rows mean and show when they are in order, in memory or in sheets alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stager.bars.checks import Piece
from stager.bars.clock import time_text
from stager.bars.findings import Finding
from stager.bars.merge import Merged
from stager.bars.options import ReadOptions
from stager.bars.row_findings import InputRelation, Sorting, duplicates_found, order_found, relation_found
from stager.bars.settle import Opens, SortedTimes, settle_adjustment, settle_interval, settle_label
from stager.bars.taken import Taken
from stager.bars.unfinished import unfinished
from stager.errors import BarsError


@dataclass(frozen=True)
class InputFile:
    """One input that was read.

    Attributes
    ----------
    name : str
        Path or URI as given; ``"table"`` for a table.
    size_nbytes : int
        Size on disk (of a table: in memory).
    n_rows : int
        Rows in it.
    n_dropped : int
        Rows of it without a price, which are no bars.
    """

    name: str
    size_nbytes: int
    n_rows: int
    n_dropped: int


@dataclass(frozen=True)
class Came:
    """Rows as they came, before any was dropped.

    Attributes
    ----------
    symbols : sequence of str
        What codes of the pieces count in.
    inputs : sequence of iterable of Piece
        The rows of each input.
    is_table : bool
        Whether the input is a table, which was never written.
    """

    symbols: Sequence[str]
    inputs: Sequence[Iterable[Piece]]
    is_table: bool


@dataclass(frozen=True)
class Settled:
    """What all inputs mean, when their rows are in order, and what was found in the rows."""

    opens: Opens
    adjustment: Literal["raw", "split", "total", "unknown"]
    inputs: list[InputFile]
    dropped: dict[str, int]
    findings: tuple[Finding, ...]


def conclude(
    taken: Sequence[Taken],
    merged: Merged,
    times: SortedTimes,
    symbols: Sequence[str],
    sorting: Sorting,
    came: Came,
    options: ReadOptions,
) -> Settled:
    """Interval, label, adjustment and warnings, noted in ``merged``; and where the rows came from.

    Parameters
    ----------
    taken : sequence of Taken
    merged : Merged
    times : SortedTimes
    symbols : sequence of str
        Those that have a row, sorted.
    sorting : Sorting
    came : Came
        The rows; those of an input are asked for only if some of its bars may be unfinished.
    options : ReadOptions

    Raises
    ------
    BarsError
        As :func:`stager.bars.read.read`.
    """
    path, notes, label = taken[0].name if len(taken) == 1 else None, merged.notes, settle_label(taken, options)
    order = order_found(sorting, merged.timestamps)
    if sorting.n_backward:
        notes.decide("order", "sorted by time", order.text.removesuffix("; sorted"))
    opens = settle_interval(times, symbols, merged.timestamps, merged.all_midnight, options, label, notes, path)
    findings = (
        duplicates_found(sorting, opens.timestamps, options.duplicates),
        order,
        *relation_found([InputRelation.of(one) for one in taken], opens.timestamps),
        unfinished(
            [None if came.is_table else one.name for one in taken],
            came.inputs,
            came.symbols,
            opens.interval,
            label[0],
            opens.timestamps,
            n_bars=sum(one.n_bars for one in taken),
            latest=[one.latest for one in taken],
        ),
    )
    adjustment = settle_adjustment(taken, options, notes)
    notes.warnings += [one.sentence for one in findings if one.severity == "warning"]
    inputs = [InputFile(one.name, one.size_nbytes, one.n_rows, one.n_dropped) for one in taken]
    dropped = {"null price": sum(one.n_dropped for one in taken), "duplicate": sorting.n_duplicates}
    if sorting.n_conflicts:
        dropped["conflicting duplicate"] = sorting.n_conflicts
    return Settled(opens, adjustment, inputs, dropped, findings)


def conflicting(symbol: str, time: int, n_conflicts: int, path: str | None) -> BarsError:
    """The error of rows that differ and are of one symbol and time."""
    return BarsError(
        f"symbol {symbol!r} has rows of the same time {time_text(time)} that "
        f"differ; {n_conflicts} pairs of symbol and time are like that; keep one row of each, or say which with "
        "--duplicates first or --duplicates last",
        path=path,
    )
