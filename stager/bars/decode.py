"""Bytes to Arrow columns: one input at a time, text by :mod:`pyarrow.csv` and Parquet by :mod:`pyarrow.parquet`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Literal, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from stager.bars import blame
from stager.bars.detect import (
    NULL_WORDS,
    Decision,
    Layout,
    Sample,
    cannot_tell,
    find_columns,
    is_number,
    mixed_zones,
    sample_csv,
    time_form,
)
from stager.bars.options import PRICES, ReadOptions
from stager.bars.sources import BarFile, Opened, damaged, look
from stager.bars.threads import parallel, thread_count
from stager.bars.times import time_type, year_window
from stager.errors import BarsError

# The stubs of pyarrow know chunks of one type only.
Column: TypeAlias = Any
Kind: TypeAlias = Literal["time", "text", "number"]

# A blank before or after a null word is no part of it.
_NULLS = [padded for word in NULL_WORDS for padded in (word, f" {word}", f"{word} ")] + ["  ", "   "]
_SYMBOLS: Any = pa.dictionary(pa.int32(), pa.string())
_MiB = 1 << 20
# Above this float64 no longer holds every whole number.
_EXACT = 2**53


@dataclass
class Decoded:
    """The columns of one input.

    Attributes
    ----------
    name : str
        Path or URI as given, or ``"table"``.
    size_nbytes : int
    stem : str or None
        What may serve as symbol; None for a table.
    columns : dict
        The roles that were found, then further columns by their names. Time as it was stored, symbol as a dictionary,
        others float64; all chunked alike.
    is_text : bool
        Whether the input was text.
    """

    name: str
    size_nbytes: int
    stem: str | None
    layout: Layout
    columns: dict[str, Column]
    is_text: bool
    line_of: Callable[[int], int]
    n_rows: int = 0
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def error(self, message: str, row: int | None = None, column: str | None = None) -> BarsError:
        """The error of a row (counted from 0) and a role or column."""
        line = None if row is None else self.line_of(row)
        role = next((role for role in self.layout.roles if role == column), None)
        if role is not None:
            column = self.layout.names[self.layout.roles[role]]
        return BarsError(message, path=self.name, line=line, column=column)


def decode(source: BarFile, options: ReadOptions, track: Callable[[Callable[[], int]], None]) -> Decoded:
    """The columns of a file.

    Parameters
    ----------
    source : BarFile
    options : ReadOptions
    track : callable
        Takes a callable that tells how many bytes of the file were read.

    Raises
    ------
    BarsError
        If the file can't be read as bars, naming file, line and column.
    """
    opened = look(source)
    if opened.content == "parquet":
        return _decode_parquet(opened, options)
    return _decode_csv(opened, options, track)


def _decode_csv(opened: Opened, options: ReadOptions, track: Callable[[Callable[[], int]], None]) -> Decoded:
    source = opened.source
    sample = sample_csv(opened, options)

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=source.name, line=sample.header_line)

    layout = find_columns(sample.names, options, refuse)
    kinds, types = _csv_types(opened, sample, layout)
    if sample.is_header_only:
        table = pa.table({name: pa.array([], kind) for name, kind in types.items()})
    else:
        table = _parse(opened, sample, layout, options, kinds, types, track)
    names = {str(i): layout.names[i] for i in layout.further} | {str(i): role for role, i in layout.roles.items()}
    order = [*(str(i) for i in layout.roles.values()), *(str(i) for i in layout.further)]
    table = _aligned(table.select(order))
    columns = {names[key]: table[key] for key in order}
    if "symbol" in columns:
        columns["symbol"] = _trimmed(columns["symbol"])
    decoded = Decoded(
        source.name,
        source.size_nbytes,
        source.stem,
        layout,
        columns,
        True,
        lambda row: blame.line_of(opened, sample, row),
        n_rows=table.num_rows,
        decisions=[*layout.decisions, _delimiter_decision(sample, options)],
        warnings=layout.warnings,
    )
    for key in order:
        cells = [cells[int(key)].strip() for _, cells in sample.rows if len(cells) == len(sample.names)]
        if kinds[key] == "number" and all(cell.lstrip("+-").isdigit() for cell in cells if cell not in NULL_WORDS):
            _warn_inexact(decoded, names[key])
    if opened.compression is None and table.num_rows:
        with opened.stream() as stream:
            stream.seek(source.size_nbytes - 1)
            if stream.read(1) not in (b"\n", b"\r"):
                decoded.warnings.append(
                    "the last line has no line end; if the file was cut there, its last value is wrong"
                )
    return decoded


def _delimiter_decision(sample: Sample, options: ReadOptions) -> Decision:
    shown = "tab" if sample.delimiter == "\t" else sample.delimiter
    return Decision("delimiter", shown, "as told" if options.delimiter else "the header line")


def _csv_types(opened: Opened, sample: Sample, layout: Layout) -> tuple[dict[str, Kind], dict[str, pa.DataType]]:
    """What each column, named by its position, is and is parsed into; further columns of text leave the layout."""
    kinds: dict[str, Kind] = {}
    types: dict[str, pa.DataType] = {}
    for role, i in layout.roles.items():
        kinds[str(i)] = "time" if role == "time" else "text" if role == "symbol" else "number"
        types[str(i)] = _SYMBOLS if role == "symbol" else pa.float64()
    types[str(layout.roles["time"])] = _time_type(opened, sample, layout.roles["time"])
    for i in list(layout.further):
        text = next((c[i] for _, c in sample.rows if len(c) == len(sample.names) and not is_number(c[i])), None)
        if text is not None:
            layout.further.remove(i)
            layout.warnings.append(_text_column(layout.names[i], text))
        else:
            kinds[str(i)], types[str(i)] = "number", pa.float64()
    return kinds, types


def _text_column(name: str, cell: str) -> str:
    return f"column {name!r} holds text ({cell.strip()[:40]!r}) and is left out"


def _time_type(opened: Opened, sample: Sample, column: int) -> pa.DataType:
    first: tuple[str, str] | None = None
    needs_trimming = False
    for line, cells in sample.rows:
        if len(cells) != len(sample.names):
            continue
        cell = cells[column].strip()
        needs_trimming |= cell != cells[column]
        if cell in NULL_WORDS:
            continue
        form = time_form(cell)
        message = None
        if form is None:
            message = cannot_tell(cell)
        elif first is None:
            first = (cell, form)
        elif (form == "aware") != (first[1] == "aware") and "integer" not in (form, first[1]):
            message = mixed_zones(cell, first[0])
        if message is not None:
            raise BarsError(message, path=opened.source.name, line=line, column=sample.names[column].strip())
    if needs_trimming:
        return pa.string()
    return time_type(None if first is None else first[1])


def _parse(
    opened: Opened,
    sample: Sample,
    layout: Layout,
    options: ReadOptions,
    kinds: dict[str, Kind],
    types: dict[str, pa.DataType],
    track: Callable[[Callable[[], int]], None],
) -> pa.Table:
    """The wanted columns, named by their positions."""
    block = min(8 * _MiB, max(_MiB, opened.source.size_nbytes // (8 * thread_count())))

    def blank_rows(row: Any) -> Literal["skip", "error"]:
        return "error" if row.text.strip(" \t") else "skip"

    def read(types: dict[str, pa.DataType]) -> pa.Table:
        with opened.stream() as stream:
            track(opened.tell)
            return pacsv.read_csv(
                cast(IO[Any], stream),
                read_options=pacsv.ReadOptions(
                    column_names=[str(i) for i in range(len(sample.names))],
                    skip_rows=sample.header_line,
                    block_size=block,
                ),
                parse_options=pacsv.ParseOptions(delimiter=sample.delimiter, invalid_row_handler=blank_rows),
                convert_options=pacsv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=_NULLS,
                    strings_can_be_null=False,
                ),
            )

    while True:
        try:
            return read(types)
        except (pa.ArrowException, OSError):
            error = opened.damage() or blame.find_ragged(opened, sample)
            if error is not None:
                raise error from None
        texts: dict[str, pa.DataType] = {name: pa.binary() for name in types}
        try:
            faults = blame.find_faults(opened, sample, partial(read, texts), kinds, year_window(options.allow_years))
        except (pa.ArrowException, OSError):
            faults = {}
        roles = {str(i): role for role, i in layout.roles.items()}
        if not faults:
            raise BarsError("the file can't be read as CSV; it is damaged, or no CSV file", path=opened.source.name)
        for name in roles.keys() & faults.keys():
            raise BarsError(
                faults[name].message + _number_hint(roles[name]),
                path=opened.source.name,
                line=blame.line_of(opened, sample, faults[name].row),
                column=layout.names[int(name)],
            )
        for name, fault in faults.items():
            layout.further.remove(int(name))
            layout.warnings.append(
                _text_column(layout.names[int(name)], fault.message.partition(" is no ")[0].strip("'\""))
            )
            del types[name], kinds[name]


def _number_hint(role: str) -> str:
    if role in PRICES or role == "volume":
        return f"; {role} needs numbers such as 1234.5, without thousands separators, units or decimal commas"
    return ""


def _trimmed(column: Column) -> Column:
    """Symbols without the blanks around them."""
    chunks: list[Any] = []
    for chunk in column.chunks:
        trimmed = pc.utf8_trim_whitespace(chunk.dictionary)
        if not trimmed.equals(chunk.dictionary):
            chunk = (
                chunk.cast(pa.string()) if len(trimmed) == 0 else pc.take(trimmed, chunk.indices).dictionary_encode()
            )
        chunks.append(chunk)
    return pa.chunked_array(chunks, type=_SYMBOLS)


def _aligned(table: pa.Table) -> pa.Table:
    """The same table with all columns chunked alike, without empty chunks."""
    return pa.Table.from_batches([batch for batch in table.to_batches() if batch.num_rows], table.schema)


def _decode_parquet(opened: Opened, options: ReadOptions) -> Decoded:
    source = opened.source

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=source.name)

    try:
        if opened.compression is None:
            file: Any = source.open()
        else:
            with opened.stream() as stream:
                file = pa.BufferReader(stream.read())
    except (OSError, pa.ArrowException):
        raise damaged(source, opened.compression or "") from None
    # Damaged Parquet fails in many ways, also inside Thrift and with absurd sizes; the file is at fault in each.
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        schema = parquet.schema_arrow
    except Exception:
        raise refuse("the Parquet file is truncated or damaged (its footer can't be read); get it again") from None
    layout = find_columns(schema.names, options, refuse)
    wanted = _numeric_further(layout, schema)
    try:
        names = [schema.names[i] for i in (*layout.roles.values(), *wanted)]
        table = parquet.read(columns=names, use_pandas_metadata=False)
        table = pa.table({name: table[name] for name in names})
        table.validate(full=True)
    except Exception:
        raise refuse("the Parquet file is truncated or damaged (its pages can't be read); get it again") from None
    return _from_arrow(table, layout, wanted, source.name, source.size_nbytes, source.stem)


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
    table = table.select([*layout.roles.values(), *wanted])
    return _from_arrow(table, layout, wanted, "table", table.nbytes, None)


def _numeric_further(layout: Layout, schema: pa.Schema) -> list[int]:
    """The further columns with numbers; the others leave the layout."""
    for i in list(layout.further):
        kind = schema.field(i).type
        if not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or kind == pa.null()
        ):
            layout.further.remove(i)
            layout.warnings.append(f"column {layout.names[i]!r} has the type {kind} and is left out")
    return layout.further


def _from_arrow(
    table: pa.Table, layout: Layout, wanted: list[int], name: str, size_nbytes: int, stem: str | None
) -> Decoded:
    decoded = Decoded(
        name,
        size_nbytes,
        stem,
        layout,
        {},
        False,
        lambda row: row + 1,
        n_rows=table.num_rows,
        decisions=layout.decisions,
        warnings=layout.warnings,
    )
    keys = [*layout.roles, *(layout.names[i] for i in wanted)]
    table = _aligned(table.rename_columns([str(i) for i in range(len(keys))]))
    for position, key in enumerate(keys):
        column = table.column(position)
        if key == "symbol":
            column = _symbols(decoded, column)
        elif key != "time":
            column = _floats(decoded, column, key)
        decoded.columns[key] = column
    return decoded


def _symbols(decoded: Decoded, column: Column) -> Column:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type) if not _is_text(kind.value_type) else column
    elif pa.types.is_integer(kind):
        decoded.decisions.append(Decision("symbol", "text of the numbers", f"the type {kind}"))
    elif not _is_text(kind) and not pa.types.is_null(kind):
        raise decoded.error(f"symbols of the type {kind} are not read; give text", None, "symbol")
    if column.null_count:
        column = pc.fill_null(column.cast(pa.string()), "")
    if pa.types.is_dictionary(column.type):
        return column.cast(_SYMBOLS)
    return pa.chunked_array([chunk.dictionary_encode() for chunk in column.cast(pa.string()).chunks], type=_SYMBOLS)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _floats(decoded: Decoded, column: Column, key: str) -> Column:
    kind = column.type
    if pa.types.is_float64(kind):
        return column
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if _is_text(kind):
        text = pc.utf8_trim_whitespace(column.cast(pa.string()))
        column = pc.if_else(pc.is_in(text, value_set=pa.array(NULL_WORDS)), pa.scalar(None, pa.string()), text)
        try:
            return column.cast(pa.float64())
        except pa.ArrowInvalid:
            row, cell = next((i, v.as_py()) for i, v in enumerate(column) if v.is_valid and not is_number(v.as_py()))
            raise decoded.error(f"{cell!r} is no number{_number_hint(key)}", row, key) from None
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or kind == pa.null()):
        raise decoded.error(f"the column has the type {kind}; {key} needs numbers", None, key)
    floats = column.cast(pa.float64(), safe=False)
    if pa.types.is_integer(kind):
        decoded.columns[key] = floats
        _warn_inexact(decoded, key)
    return floats


def _warn_inexact(decoded: Decoded, key: str) -> None:
    """Report whole numbers that float64 doesn't hold exactly."""
    extremes: list[Any] = parallel(lambda chunk: pc.min_max(chunk).as_py(), decoded.columns[key].chunks)
    if any(e["min"] is not None and max(-e["min"], e["max"]) > _EXACT for e in extremes):
        decoded.warnings.append(f"column {key!r} holds whole numbers above 2^53, which float64 rounds")
