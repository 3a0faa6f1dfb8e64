"""CSV text to Arrow columns, by :mod:`pyarrow.csv` on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import IO, Any, Literal, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from stager.bars import blame
from stager.bars.columns import SYMBOLS, Column, Decoded, aligned, number_hint, warn_inexact
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
from stager.bars.options import ReadOptions
from stager.bars.sources import Opened
from stager.bars.threads import parallel, thread_count
from stager.bars.times import time_type, year_window
from stager.errors import BarsError

Kind: TypeAlias = Literal["time", "text", "number"]
Track: TypeAlias = Callable[[Callable[[], int]], None]

# A blank before or after a null word is no part of it.
_NULLS = [padded for word in NULL_WORDS for padded in (word, f" {word}", f"{word} ")] + ["  ", "   "]
_MiB = 1 << 20
# A mapped file is parsed in segments, a thread each: Arrow's own threads wait for the one that cuts the blocks. None is
# so large that progress is told too seldom.
_SEGMENT_NBYTES = 2 * _MiB
_MOST_SEGMENT_NBYTES = 256 * _MiB
_MOST_BLOCK_NBYTES = 16 * _MiB
_LINE_NBYTES = 4096


def decode_csv(opened: Opened, options: ReadOptions, track: Track) -> Decoded:
    """The columns of a CSV file.

    Parameters
    ----------
    opened : Opened
    options : ReadOptions
    track : callable
        Takes a callable that tells how many bytes of the file were read.

    Raises
    ------
    BarsError
        If the file can't be read as bars, naming file, line and column.
    """
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
    table = aligned(table.select(order))
    columns = {names[key]: table[key] for key in order}
    if "symbol" in columns:
        columns["symbol"] = _trimmed(columns["symbol"], refuse)
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
            warn_inexact(decoded, names[key])
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
        types[str(i)] = SYMBOLS if role == "symbol" else pa.float64()
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
    track: Track,
) -> pa.Table:
    """The wanted columns, named by their positions."""

    def blank_rows(row: Any) -> Literal["skip", "error"]:
        return "error" if row.text.strip(" \t") else "skip"

    def read(types: dict[str, pa.DataType]) -> pa.Table:
        segments = _segments(opened, track)
        # A block is a piece for all that follows; one a segment spares the overhead of more.
        block = min(8 * _MiB, max(_MiB, opened.source.size_nbytes // (8 * thread_count())))
        if len(segments) > 1:
            block = min(_MOST_BLOCK_NBYTES, max(segment.size() for segment in segments) + 1)

        def parse(number: int) -> pa.Table:
            return pacsv.read_csv(
                cast(IO[Any], segments[number]),
                read_options=pacsv.ReadOptions(
                    column_names=[str(i) for i in range(len(sample.names))],
                    skip_rows=0 if number else sample.header_line,
                    block_size=block,
                    use_threads=len(segments) == 1,
                ),
                parse_options=pacsv.ParseOptions(delimiter=sample.delimiter, invalid_row_handler=blank_rows),
                convert_options=pacsv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=_NULLS,
                    strings_can_be_null=False,
                ),
            )

        def tell(n_done: int, n_all: int) -> None:
            track(partial(int, opened.source.size_nbytes * n_done // n_all))

        if len(segments) == 1:
            return parse(0)
        return pa.concat_tables(parallel(parse, range(len(segments)), done=tell, threads=thread_count()))

    while True:
        try:
            return read(types)
        except MemoryError:
            raise BarsError("there is not enough memory to read the file", path=opened.source.name) from None
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
        wrong = min((name for name in faults if name in roles), key=lambda name: faults[name].row, default=None)
        if wrong is not None:
            raise BarsError(
                faults[wrong].message + number_hint(roles[wrong]),
                path=opened.source.name,
                line=blame.line_of(opened, sample, faults[wrong].row),
                column=layout.names[int(wrong)],
            )
        for name, fault in faults.items():
            layout.further.remove(int(name))
            layout.warnings.append(
                _text_column(layout.names[int(name)], fault.message.partition(" is no ")[0].strip("'\""))
            )
            del types[name], kinds[name]


def _segments(opened: Opened, track: Track) -> list[pa.NativeFile]:
    """Streams that together hold the file; each but the first begins at the start of a line."""
    size = opened.source.size_nbytes
    stream = opened.stream()
    if opened.compression is not None or opened.source.filesystem is not None:
        track(opened.tell)
        return [stream]
    n_segments = max(1, min(size // _SEGMENT_NBYTES, 8 * thread_count()))
    n_segments = max(n_segments, size // _MOST_SEGMENT_NBYTES)
    with stream:
        cuts = {0}
        for number in range(1, n_segments):
            start = size * number // n_segments
            stream.seek(start)
            line_end, looked = -1, 0
            while line_end < 0 and looked < _MiB and (some := stream.read(_LINE_NBYTES)):
                line_end = some.find(b"\n")
                looked += len(some) if line_end < 0 else line_end
            if line_end >= 0 and start + looked + 1 < size:
                cuts.add(start + looked + 1)
        segments: list[pa.NativeFile] = []
        for first, last in pairwise([*sorted(cuts), size]):
            stream.seek(first)
            segments.append(pa.BufferReader(stream.read_buffer(last - first)))
        return segments


def _trimmed(column: Column, refuse: Callable[[str], BarsError]) -> Column:
    """Symbols without the blanks around them."""
    chunks: list[Any] = []
    for chunk in column.chunks:
        trimmed = pc.utf8_trim_whitespace(chunk.dictionary)
        if pc.any(pc.match_substring(trimmed, "\0")).as_py():
            raise refuse("a symbol holds a NUL byte; the file is damaged, get it again")
        if not trimmed.equals(chunk.dictionary):
            chunk = pc.take(trimmed, chunk.indices).dictionary_encode()
        chunks.append(chunk)
    return pa.chunked_array(chunks, type=SYMBOLS)
