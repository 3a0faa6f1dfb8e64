"""Parquet files and Arrow tables to columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet as pq

from stager.bars.columns import SYMBOLS, Column, Decoded, aligned, alike, number_hint, warn_inexact
from stager.bars.detect import NULL_WORDS, Decision, Layout, find_columns, time_form
from stager.bars.formats import NumberRule
from stager.bars.matching import choose_named
from stager.bars.numbers import dot_may_group, may_group, scaled
from stager.bars.options import PRICES, ReadOptions
from stager.bars.patterns import possible
from stager.bars.room import Room
from stager.bars.sources import BarFile, Opened, damaged
from stager.bars.text import read_marked, read_times_text
from stager.bars.threads import parallel
from stager.errors import BarsError

# Rows that are decoded at once, of a file that does not fit into memory.
_MOST_PART_ROWS = 1 << 20


def decode_parquet(opened: Opened, options: ReadOptions, room: Room | None = None) -> Iterator[Decoded]:
    """The columns of a Parquet file; of one that is too large for memory, some rows after the other.

    Raises
    ------
    BarsError
        If the file is damaged, or can't be read as bars; or if there is no room for it, and it can't be read in parts.
    """
    source = opened.source
    room = Room(source.name) if room is None else room

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=source.name)

    try:
        if opened.data is None and opened.compression is None:
            file: Any = opened.raw()
        else:
            room.check(opened.unpacked_nbytes(), "compressed Parquet is not read in parts; unpack it")
            with opened.stream() as stream:
                file = pa.BufferReader(stream.read())
    except (OSError, pa.ArrowException):
        raise damaged(source, opened.compression or "") from None
    with _undamaged("footer", refuse):
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        schema, n_rows = parquet.schema_arrow, parquet.metadata.num_rows
    described, decisions = choose_named(schema, source.file_name, options, refuse)
    layout = find_columns(schema.names, options, refuse, described)
    layout.decisions[:0] = decisions
    wanted = _numeric_further(layout, schema)
    names = [schema.names[i] for i in _positions(layout, wanted)]
    # Columns as they are stored, and as they are used.
    row_nbytes = _row_nbytes([schema.field(name).type for name in names])
    if room.holds(row_nbytes * n_rows):
        with _undamaged("pages", refuse):
            table = parquet.read(columns=names, use_pandas_metadata=False)
            table = pa.table({name: table[name] for name in names})
            table.validate(full=True)
        yield _of_file(table, layout, wanted, source, options)
        return
    time_kind = schema.field(schema.names[layout.roles["time"]]).type
    if len(layout.time_columns) > 1 or _is_text(_plain(time_kind)):
        room.check(row_nbytes * n_rows, "how text of times is written is told by all of it; save time stamps")
    assert room.nbytes is not None  # else the file was read as a whole

    def marks_need_all() -> None:
        room.check(
            row_nbytes * n_rows,
            "numbers with thousands marks or decimal commas are told by all of their cells; save numbers, or say what "
            "the marks are with --decimal",
        )

    first_row = 0
    batches = parquet.iter_batches(max(1, min(_MOST_PART_ROWS, room.nbytes // row_nbytes)), columns=names)
    while True:
        with _undamaged("pages", refuse):
            batch = next(batches, None)
            if batch is not None:
                batch.validate(full=True)
        if batch is None:
            return
        table = pa.table({name: batch.column(name) for name in names})
        mine = replace(layout, decisions=list(layout.decisions), warnings=list(layout.warnings))
        decoded = _of_file(table, mine, wanted, source, options, first_row, marks_need_all)
        decoded.is_part = True
        first_row += table.num_rows
        yield decoded


@contextmanager
def _undamaged(what: str, refuse: Callable[[str], BarsError]) -> Iterator[None]:
    """Damaged Parquet fails in many ways, also inside Thrift and with absurd sizes; the file is at fault in each.

    Not where the file could not be read to its end, which is told as it is.
    """
    try:
        yield
    except BarsError:
        raise
    except Exception:
        raise refuse(f"the Parquet file is truncated or damaged (its {what} can't be read); get it again") from None


def _row_nbytes(kinds: list[pa.DataType]) -> int:
    """About what a row takes while it is decoded and sorted."""
    return sum(16 + (32 if _is_text(kind) or pa.types.is_nested(kind) else 8) for kind in kinds)


def read_ipc(opened: Opened) -> pa.Table:
    """The table in an Arrow IPC (Feather) file.

    Raises
    ------
    BarsError
        If it is damaged.
    """
    try:
        # Damaged files fail in many ways here too, and feather alone knows the old form.
        table = pa.feather.read_table(cast(Any, pa.BufferReader(opened.read())))
        table.validate(full=True)
    except BarsError:
        raise
    except Exception:
        raise BarsError("the Feather file is truncated or damaged; get it again", path=opened.source.name) from None
    return table


def decode_named(table: pa.Table, source: BarFile, options: ReadOptions) -> Decoded:
    """The columns of a table with names that was in a file.

    Raises
    ------
    BarsError
        If the table can't be read as bars.
    """

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=source.name)

    described, decisions = choose_named(table.schema, source.file_name, options, refuse)
    layout = find_columns(table.schema.names, options, refuse, described)
    layout.decisions[:0] = decisions
    wanted = _numeric_further(layout, table.schema)
    return _of_file(table.select(_positions(layout, wanted)), layout, wanted, source, options)


def _positions(layout: Layout, wanted: list[int]) -> list[int]:
    """The roles' columns, further ones, and those that hold more of the time."""
    return [*layout.roles.values(), *wanted, *layout.time_columns[1:]]


def _of_file(
    table: pa.Table,
    layout: Layout,
    wanted: list[int],
    source: BarFile,
    options: ReadOptions,
    first_row: int = 0,
    marks_need_all: Callable[[], None] | None = None,
) -> Decoded:
    decoded = _from_arrow(
        table, layout, wanted, source.name, source.size_nbytes, source.stem, options, first_row, marks_need_all
    )
    decoded.symbol = source.partition or (None if layout.format is None else layout.format.symbol_of(source.stem))
    if layout.format is not None:
        scale = layout.format.numbers.price_scale
        if scale > 1:
            for role in PRICES:
                decoded.columns[role] = scaled(decoded.columns[role], scale)
            decoded.columns = alike(decoded.columns)
            decoded.decisions.append(
                Decision("price scale", f"divided by {scale:,}", f"the format {layout.format.name}")
            )
    return decoded


def decode_table(table: pa.Table, options: ReadOptions) -> Decoded:
    """The columns of a table in memory.

    Raises
    ------
    BarsError
        If the table can't be read as bars.
    """

    def refuse(message: str) -> BarsError:
        return BarsError(message, path="table")

    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        raise refuse("the table is not valid; check it with table.validate(full=True)") from None
    layout = find_columns(table.schema.names, options, refuse)
    wanted = _numeric_further(layout, table.schema)
    table = table.select(_positions(layout, wanted))
    return _from_arrow(table, layout, wanted, "table", table.nbytes, None, options)


def _numeric_further(layout: Layout, schema: pa.Schema) -> list[int]:
    """The further columns with numbers; the others leave the layout."""
    for i in list(layout.further):
        kind = schema.field(i).type
        if layout.wide is not None and _is_text(_plain(kind)):
            continue
        if not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or kind == pa.null()
        ):
            layout.further.remove(i)
            layout.warnings.append(f"column {layout.names[i]!r} has the type {kind} and is left out")
    return layout.further


def _from_arrow(
    table: pa.Table,
    layout: Layout,
    wanted: list[int],
    name: str,
    size_nbytes: int,
    stem: str | None,
    options: ReadOptions,
    first_row: int = 0,
    marks_need_all: Callable[[], None] | None = None,
) -> Decoded:
    decoded = Decoded(
        name,
        size_nbytes,
        stem,
        layout,
        {},
        False,
        lambda row: first_row + row + 1,
        n_rows=table.num_rows,
        decisions=layout.decisions,
        warnings=layout.warnings,
    )
    keys = [*layout.roles, *(layout.names[i] for i in wanted)]
    table = aligned(table.rename_columns([str(i) for i in range(table.num_columns)]))
    texts: dict[str, Column] = {}
    for position, key in enumerate(keys):
        column = table.column(position)
        if key == "symbol":
            column = _symbols(decoded, column)
        elif key == "time":
            column = _times(decoded, [column, *table.columns[len(keys) :]], options)
        elif _is_text(_plain(column.type)):
            texts[key] = column = column.cast(pa.string())
        else:
            column = _floats(decoded, column, key)
        decoded.columns[key] = column
    if texts:
        decoded.columns |= _numbers(decoded, texts, options, marks_need_all)
    decoded.columns = alike(decoded.columns)
    return decoded


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values, also where they are numbered in a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _numbers(
    decoded: Decoded, texts: dict[str, Column], options: ReadOptions, marks_need_all: Callable[[], None] | None
) -> dict[str, Column]:
    """Numbers of columns of text: plain ones, or as they are written in a CSV file."""
    layout = decoded.layout
    rule = NumberRule() if layout.format is None else layout.format.numbers
    if not (
        options.decimal == "," or options.thousands or rule.decimal or rule.thousands or rule.suffixes or rule.nulls
    ):
        words = pa.array(NULL_WORDS)
        numbers: dict[str, Column] = {}
        for key, text in texts.items():
            trimmed = pc.utf8_trim_whitespace(text)
            given: Any = pc.if_else(pc.is_in(trimmed, value_set=words), pa.scalar(None, pa.string()), trimmed)
            try:
                numbers[key] = given.cast(pa.float64())
                pair = None if options.decimal else dot_may_group(given.drop_null().slice(0, 100).to_pylist())
                if pair is not None:
                    raise decoded.error(may_group(*pair), pc.index(given, pair[0]).as_py(), key)
            except pa.ArrowInvalid:
                break
        else:
            return numbers
    if marks_need_all is not None and options.decimal is None and rule.decimal is None:
        marks_need_all()
    places = dict(enumerate(texts))
    found, decision = read_marked(
        {place: texts[key] for place, key in places.items()},
        rule,
        options,
        lambda place: number_hint(places[place]),
        lambda message, row, place: decoded.error(message, row, places[place]),
    )
    decoded.decisions.append(decision)
    return {places[place]: column for place, column in found.items()}


def _times(decoded: Decoded, columns: list[Column], options: ReadOptions) -> Column:
    """The time column as it is, or what its texts, and those of a time of day beside it, say."""
    column, layout = columns[0], decoded.layout
    kind = _plain(column.type)
    is_told = options.time_pattern is not None or (layout.format is not None and layout.format.time.pattern is not None)
    if len(columns) == 1:
        if pa.types.is_float64(kind):
            return _whole_times(column.cast(kind))
        if not _is_text(kind):
            return column
        given = column.drop_null()
        first = None if len(given) == 0 else str(given[0].as_py()).strip()
        if not is_told and (first is None or time_form(first) is not None or not possible([first], None)):
            return column

    def error(message: str, row: int | None, position: int) -> BarsError:
        line = None if row is None else decoded.line_of(row)
        return BarsError(message, path=decoded.name, line=line, column=layout.names[position])

    texts = [each.cast(kind if pa.types.is_dictionary(each.type) else each.type).cast(pa.string()) for each in columns]
    found, decision = read_times_text(texts, layout, options, error)
    decoded.decisions.append(decision)
    return found


def _whole_times(column: Column) -> Column:
    """Whole numbers that were stored as float64, which holds them exactly.

    As they are, if one is no whole number, or if all of them have lost their last digits in a spreadsheet: 1.71500E+12.
    """
    values: Any = column.drop_null().to_numpy()
    if not np.isfinite(values).all() or (values != np.floor(values)).any() or (np.abs(values) >= 1 << 53).any():
        return column
    whole = values.astype(np.int64)
    n_digits = len(str(int(np.abs(whole).max(initial=0))))
    if len(whole) and n_digits > 8 and not (whole % 10 ** (n_digits - 6)).any():
        return column
    return column.cast(pa.int64())


def _symbols(decoded: Decoded, column: Column) -> Column:
    kind = column.type
    if pa.types.is_dictionary(kind):
        if not _is_text(kind.value_type) or any(chunk.dictionary.null_count for chunk in column.chunks):
            return _symbols(decoded, column.cast(kind.value_type))
    elif pa.types.is_integer(kind):
        decoded.decisions.append(Decision("symbol", "text of the numbers", f"the type {kind}"))
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        try:
            column = column.cast(pa.string())
        except pa.ArrowInvalid:
            raise decoded.error("symbols are bytes that are no UTF-8 text; give text", None, "symbol") from None
    elif not _is_text(kind) and not pa.types.is_null(kind):
        raise decoded.error(f"symbols of the type {kind} are not read; give text", None, "symbol")
    if column.null_count:
        column = pc.fill_null(column.cast(pa.string()), "")
    if pa.types.is_dictionary(column.type):
        return column.cast(SYMBOLS)
    chunks: list[Any] = parallel(lambda chunk: chunk.cast(pa.string()).dictionary_encode(), column.chunks)
    return pa.chunked_array(chunks, type=SYMBOLS)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _floats(decoded: Decoded, column: Column, key: str) -> Column:
    kind = column.type
    if pa.types.is_float64(kind):
        return column
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or kind == pa.null()):
        raise decoded.error(f"the column has the type {kind}; {key} needs numbers", None, key)
    floats = column.cast(pa.float64(), safe=False)
    if pa.types.is_integer(kind):
        decoded.columns[key] = floats
        warn_inexact(decoded, key)
    return floats
