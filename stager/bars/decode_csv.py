"""CSV text to Arrow columns, by :mod:`pyarrow.csv` on all cores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import IO, Any, Literal, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from stager.bars import blame
from stager.bars.columns import SYMBOLS, Column, Decoded, aligned, alike, number_hint, warn_inexact
from stager.bars.csv_types import Kind, csv_types, marked_numbers, text_column
from stager.bars.detect import (
    NULL_WORDS,
    Decision,
    Layout,
    find_columns,
    is_number,
)
from stager.bars.formats import NumberRule, named
from stager.bars.matching import choose
from stager.bars.numbers import scaled
from stager.bars.options import PRICES, ReadOptions
from stager.bars.room import Room
from stager.bars.sample import Sample, sample_csv, with_names
from stager.bars.sources import Opened
from stager.bars.text import read_marked, read_times_text, time_of_day
from stager.bars.text_parts import count_lines, pieces_of_text
from stager.bars.threads import parallel
from stager.bars.times import year_window
from stager.errors import BarsError

Track: TypeAlias = Callable[[Callable[[], int]], None]

# A blank before or after a null word is no part of it.
_NULLS = [padded for word in NULL_WORDS for padded in (word, f" {word}", f"{word} ")] + ["  ", "   "]
_MiB = 1 << 20
# A mapped file is parsed in segments, a thread each: Arrow's own threads wait for the one that cuts the blocks. None is
# so large that progress is told too seldom.
_SEGMENT_NBYTES = 2 * _MiB
_MOST_SEGMENT_NBYTES = 64 * _MiB
_LINE_NBYTES = 4096
# A part of a file is at least so large, whatever the room: memory below is not worth counting.
_LEAST_PART_NBYTES = _MiB


def decode_csv(opened: Opened, options: ReadOptions, track: Track, room: Room | None = None) -> Iterator[Decoded]:
    """The columns of a CSV file; of one that is too large for memory, some rows after the other.

    Parameters
    ----------
    opened : Opened
    options : ReadOptions
    track : callable
        Takes a callable that tells how many bytes of the file were read.
    room : Room, optional
        Memory that decoding may take.

    Raises
    ------
    BarsError
        If the file can't be read as bars, naming file, line and column; or if there is no room for it, and it can't be
        read in parts.
    """
    room = Room(opened.source.name) if room is None else room
    told = None if options.format is None else named(options.format)
    if told is not None and told.skip:
        room.check(4 * opened.unpacked_nbytes(), "lines to skip are taken out of all of it; remove them")
        expression = "|".join(f"(?:{each})" for each in told.skip)
        opened.replace(re.sub(rf"(?m)^(?:{expression})(?=\r?$)".encode(), b"", opened.read()))
    sample = sample_csv(opened, options, told, room)
    plan = _plan(opened, sample, options)
    needed = 0 if room.nbytes is None else _needed_nbytes(opened, plan)
    if room.holds(needed):
        if plan.has_lines_to_drop:
            _drop_lines(opened, plan.repeated, plan.sample)
        yield _decoded(opened, plan, options, track, room.n_threads)
        return
    if plan.why_whole is not None:
        found = plan.not_plain
        if found is None:
            room.check(needed, plan.why_whole)
        else:
            line, column, cell = found
            why = f"{cell!r} is no plain number such as 1234.5, and {plan.why_whole}"
            room.check(needed, why, line=line, column=column)
    yield from _in_parts(opened, plan, options, track, room, needed)


@dataclass
class _Plan:
    """How a file is parsed, by its first lines."""

    sample: Sample
    layout: Layout
    kinds: dict[str, Kind]
    types: dict[str, pa.DataType]
    marked: set[str]
    decisions: list[Decision]
    symbol: str | None
    # In a part of a file, columns are what the first rows of the file say.
    is_part: bool = False
    # Whether the file ends here.
    is_end: bool = True

    @property
    def has_lines_to_drop(self) -> bool:
        """Whether lines that repeat the header are to be looked for."""
        is_text = bool(self.marked) or self.kinds[str(self.layout.time_columns[0])] == "text"
        return self.sample.has_repeats or (self.sample.has_header and is_text)

    @property
    def repeated(self) -> bytes:
        """An expression for lines that repeat the header."""
        return rb"\xef\xbb\xbf|" + re.escape(self.sample.header.encode())

    @property
    def why_whole(self) -> str | None:
        """Why the file can't be read in parts, and what helps; None: it can."""
        if self.marked:
            return "numbers with thousands marks or decimal commas are told by all of their cells; write plain ones"
        if self.kinds[str(self.layout.time_columns[0])] == "text":
            return "how its times are written is told by all of them; write ISO 8601 or whole numbers since 1970"
        return None

    @property
    def not_plain(self) -> tuple[int, str, str] | None:
        """Line, column and text of the first cell that makes numbers be read as text."""
        for line, cells in self.sample.rows:
            for key in sorted(self.marked, key=int):
                if len(cells) == len(self.sample.names) and not is_number(cells[int(key)]):
                    return line, self.layout.names[int(key)], cells[int(key)]
        return None


def _plan(opened: Opened, sample: Sample, options: ReadOptions) -> _Plan:
    source = opened.source
    refuse = _refuse(opened, sample)
    described, decisions = choose(sample, source.file_name, options, refuse)
    if described is not None and not sample.has_header:
        if len(described.positions) != len(sample.names):
            raise refuse(
                f"the rows have {len(sample.names)} fields, and the format {described.name} has "
                f"{len(described.positions)} without a header"
            )
        sample = with_names(sample, described.positions)
    layout = find_columns(sample.names, options, refuse, described)
    kinds, types = csv_types(opened, sample, layout, options)
    marked = marked_numbers(opened, sample, layout, options, kinds, types)
    symbol = source.partition or (None if described is None else described.symbol_of(source.stem))
    return _Plan(sample, layout, kinds, types, marked, decisions, symbol)


def _refuse(opened: Opened, sample: Sample) -> Callable[[str], BarsError]:
    return lambda message: BarsError(message, path=opened.source.name, line=max(1, sample.header_line))


def _needed_nbytes(opened: Opened, plan: _Plan) -> int:
    """About what it takes to decode the whole file."""
    n_unpacked = opened.unpacked_nbytes()
    n_lines = max(1, opened.head.count(b"\n"), opened.head.count(b"\r"))
    n_rows = n_unpacked * n_lines // max(1, len(opened.head))
    text = 3 * n_unpacked if plan.why_whole is not None or plan.has_lines_to_drop else 0
    # Parsed columns, those that take their place where values are missing, are scaled or checked, and sorted ones.
    return text + 3 * 8 * n_rows * (len(plan.types) + 1)


def _decoded(opened: Opened, plan: _Plan, options: ReadOptions, track: Track, n_threads: int) -> Decoded:
    """Parse the file, or the part of it that ``opened`` holds."""
    source, sample, layout = opened.source, plan.sample, plan.layout
    kinds, types, marked = plan.kinds, plan.types, plan.marked
    if sample.is_header_only:
        table = pa.table({name: pa.array([], kind) for name, kind in types.items()})
    else:
        table = _parse(
            opened, sample, layout, options, kinds, types, marked, track, n_threads, plan.is_part, plan.is_end
        )
    table = aligned(table, n_threads)
    line_of = partial(blame.line_of, opened, sample)

    def cell_error(message: str, row: int | None, column: int) -> BarsError:
        line = None if row is None else line_of(row)
        return BarsError(message, path=source.name, line=line, column=layout.names[column])

    decisions = list(plan.decisions)
    columns = _by_role(table, layout, options, kinds, marked, decisions, source.file_name, cell_error)
    if "symbol" in columns:
        columns["symbol"] = _trimmed(columns["symbol"], _refuse(opened, sample))
    decoded = Decoded(
        source.name,
        source.size_nbytes,
        source.stem,
        layout,
        columns,
        True,
        line_of,
        n_rows=table.num_rows,
        decisions=[*decisions, *layout.decisions, _delimiter_decision(sample, options)],
        warnings=layout.warnings,
        symbol=plan.symbol,
    )
    names = {i: role for role, i in layout.roles.items()} | {i: layout.names[i] for i in layout.further}
    for i, name in names.items():
        if kinds[str(i)] != "number" or str(i) in marked:
            continue
        cells = (cells[i].strip() for _, cells in sample.rows if len(cells) == len(sample.names))
        if all(cell.lstrip("+-").isdigit() for cell in cells if cell not in NULL_WORDS):
            warn_inexact(decoded, name)
    if opened.compression is None and table.num_rows:
        with opened.stream() as stream:
            stream.seek(opened.size_nbytes - 1)
            if stream.read(1) not in (b"\n", b"\r"):
                decoded.warnings.append(
                    "the last line has no line end; if the file was cut there, its last value is wrong"
                )
    return decoded


def _in_parts(
    opened: Opened, plan: _Plan, options: ReadOptions, track: Track, room: Room, needed: int
) -> Iterator[Decoded]:
    """Some rows after the other, each parsed as the first ones say."""
    n_unpacked = opened.unpacked_nbytes()
    part_nbytes = max(_LEAST_PART_NBYTES, (room.nbytes or 0) * n_unpacked // max(1, needed))
    lines_before, n_read, is_first = 0, 0, True
    for data, is_last in pieces_of_text(opened, part_nbytes):
        n_read += len(data)
        track(partial(int, min(opened.source.size_nbytes, opened.source.size_nbytes * n_read // max(1, n_unpacked))))
        part = Opened(opened.source, None, "text", b"", False)
        part.replace(data)
        sample = plan.sample if is_first else replace(plan.sample, header_line=0)
        mine = replace(plan, sample=sample, layout=_copied(plan.layout), kinds=dict(plan.kinds), types=dict(plan.types),
                       marked=set(plan.marked), is_part=True, is_end=is_last)  # fmt: skip
        if mine.has_lines_to_drop:
            _drop_lines(part, mine.repeated, sample)
        try:
            decoded = _decoded(part, mine, options, lambda tell: None, room.n_threads)
        except BarsError as error:
            line = None if error.line is None else error.line + lines_before
            raise BarsError(error.message, path=error.path, line=line, column=error.column) from None
        decoded.is_part = True
        decoded.line_of = partial(_line_in_part, part, sample, lines_before)
        if not is_last or opened.compression is not None:
            decoded.warnings[:] = [text for text in decoded.warnings if not text.startswith("the last line has no")]
        lines_before += count_lines(data)
        is_first = False
        yield decoded


def _line_in_part(part: Opened, sample: Sample, lines_before: int, row: int) -> int:
    return lines_before + blame.line_of(part, sample, row)


def _copied(layout: Layout) -> Layout:
    return replace(
        layout, further=list(layout.further), decisions=list(layout.decisions), warnings=list(layout.warnings)
    )


def _by_role(
    table: pa.Table,
    layout: Layout,
    options: ReadOptions,
    kinds: dict[str, Kind],
    marked: set[str],
    decisions: list[Decision],
    file_name: str,
    error: Callable[[str, int | None, int], BarsError],
) -> dict[str, Column]:
    """The parsed columns by role and name, text turned into times and numbers."""
    described = layout.format
    rule = NumberRule() if described is None else described.numbers
    columns: dict[str, Column] = {}
    numbers: dict[int, Column] = {}
    if marked:
        texts = {int(key): table[key] for key in sorted(marked, key=int)}
        roles = {i: role for role, i in layout.roles.items()}
        numbers, decision = read_marked(texts, rule, options, lambda i: number_hint(roles[i]), error)
        decisions.append(decision)
    for role, i in layout.roles.items():
        if role == "time":
            column = table[str(i)]
            if kinds[str(i)] == "text":
                texts_of_time = [table[str(each)] for each in layout.time_columns]
                column, decision = read_times_text(texts_of_time, layout, options, error)
                decisions.append(decision)
            elif described is not None and described.time.unit == "ms of day":
                column = time_of_day(column, described, file_name, error, i)
                decisions.append(Decision("time", "milliseconds of the day", "the format; the date is in the name"))
            columns[role] = column
        else:
            columns[role] = numbers[i] if i in numbers else table[str(i)]
        if role in PRICES:
            columns[role] = scaled(columns[role], rule.price_scale)
    if rule.price_scale > 1:
        decisions.append(Decision("price scale", f"divided by {rule.price_scale:,}", f"the format {described.name}"))  # type: ignore[union-attr]
    for i in layout.further:
        columns[layout.names[i]] = table[str(i)]
    return alike(columns)


def _drop_lines(opened: Opened, expression: bytes, sample: Sample) -> None:
    """Empty the lines below the header that match."""
    data = opened.read()
    line_ends = re.compile(rb"\r\n|\n|\r")
    start = 0
    for _ in range(sample.header_line):
        match = line_ends.search(data, start)
        start = len(data) if match is None else match.end()
    if re.search(rb"(?m)^(?:" + expression + rb")(?=\r?$)", data[start:]):
        opened.replace(data[:start] + re.sub(rb"(?m)^(?:" + expression + rb")(?=\r?$)", b"", data[start:]))


def _delimiter_decision(sample: Sample, options: ReadOptions) -> Decision:
    shown = "tab" if sample.delimiter == "\t" else sample.delimiter
    return Decision("delimiter", shown, "as told" if options.delimiter else "the header line")


def _parse(
    opened: Opened,
    sample: Sample,
    layout: Layout,
    options: ReadOptions,
    kinds: dict[str, Kind],
    types: dict[str, pa.DataType],
    marked: set[str],
    track: Track,
    n_threads: int,
    is_part: bool,
    is_end: bool,
) -> pa.Table:
    """The wanted columns, named by their positions."""

    def blank_rows(row: Any) -> Literal["skip", "error"]:
        return "error" if row.text.strip(" \t") else "skip"

    def read(types: dict[str, pa.DataType]) -> pa.Table:
        segments, is_cut = _segments(opened, track, n_threads)
        # A block is a piece for all that follows; one a segment spares the overhead of more.
        block = min(8 * _MiB, max(_MiB, opened.size_nbytes // (8 * n_threads)))
        if is_cut:
            block = max(segment.size() for segment in segments) + 1

        def parse(number: int) -> pa.Table:
            return pacsv.read_csv(
                cast(IO[Any], segments[number]),
                read_options=pacsv.ReadOptions(
                    column_names=[str(i) for i in range(len(sample.names))],
                    skip_rows=0 if number else sample.header_line,
                    block_size=block,
                    use_threads=not is_cut,
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
        return pa.concat_tables(parallel(parse, range(len(segments)), done=tell, threads=n_threads))

    # Lines that were emptied, each once: parsing must end.
    emptied: set[bytes] = set()
    while True:
        try:
            return read(types)
        except MemoryError:
            raise BarsError("there is not enough memory to read the file", path=opened.source.name) from None
        except (pa.ArrowException, OSError):
            error = opened.damage() or blame.find_ragged(opened, sample)
            if error is not None:
                footer = blame.footer(opened, sample) if is_end else None
                if footer is not None:
                    layout.warnings.append(f"the last line is no row and is left out: {footer.strip()[:80]!r}")
                no_row = rb"[ \t]*#[^\r\n]*" if footer is None else re.escape(footer.encode())
                if no_row in emptied:
                    raise error from None
                emptied.add(no_row)
                _drop_lines(opened, no_row, sample)
                continue
        texts: dict[str, pa.DataType] = {name: pa.binary() for name in types}
        looked = {name: kind for name, kind in kinds.items() if name not in marked}
        looked |= {name: "text" for name in marked}
        try:
            faults = blame.find_faults(opened, sample, partial(read, texts), looked, year_window(options.allow_years))
        except (pa.ArrowException, OSError):
            faults = {}
        roles = {str(i): role for role, i in layout.roles.items()}
        if not faults:
            raise BarsError("the file can't be read as CSV; it is damaged, or no CSV file", path=opened.source.name)
        wrong = min((name for name in faults if name in roles), key=lambda name: faults[name].row, default=None)
        again = re.escape(sample.header.encode())
        if wrong is not None and again not in emptied and faults[wrong].cell == layout.names[int(wrong)]:
            emptied.add(again)
            _drop_lines(opened, again, sample)
            continue
        if is_part and (wrong is None or roles[wrong] not in ("time", "symbol")):
            wrong = min(faults, key=lambda name: faults[name].row) if wrong is None else wrong
            raise BarsError(
                f"{faults[wrong].message}; in a file that is too large to be read at once a column must be written as "
                "in its first rows: correct it, remove the column, or give more --memory or fewer --workers",
                path=opened.source.name,
                line=blame.line_of(opened, sample, faults[wrong].row),
                column=layout.names[int(wrong)],
            )
        if wrong is not None and roles[wrong] not in ("time", "symbol") and wrong not in marked:
            marked.update(str(i) for role, i in layout.roles.items() if role not in ("time", "symbol"))
            types.update(dict.fromkeys(marked, pa.string()))
            continue
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
                text_column(layout.names[int(name)], fault.message.partition(" is no ")[0].strip("'\""))
            )
            del types[name], kinds[name]


def _segments(opened: Opened, track: Track, n_threads: int) -> tuple[list[pa.NativeFile], bool]:
    """Streams that together hold the file; each but the first begins at the start of a line.

    With them is whether there is one for each of several threads, or the only thread, to parse.
    """
    size = opened.size_nbytes
    stream = opened.stream()
    if opened.data is None and (opened.compression is not None or opened.source.filesystem is not None):
        track(opened.tell)
        return [stream], False
    n_segments = max(1, min(size // _SEGMENT_NBYTES, 8 * n_threads)) if n_threads > 1 else 1
    n_segments = max(n_segments, -(-size // _MOST_SEGMENT_NBYTES))
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
        return segments, len(segments) > 1 or n_threads == 1


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
