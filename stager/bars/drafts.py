"""A draft of the format of an unknown file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from stager.bars.detect import SYMBOL_NAMES, TIME_NAMES, VOLUME_NAMES, is_number, normalise, time_form
from stager.bars.options import PRICES, ReadOptions
from stager.bars.patterns import possible
from stager.bars.sample import sample_csv
from stager.bars.sources import find, look
from stager.errors import BarsError

_UNKNOWN = "FILL IN"


def draft(file: str, options: ReadOptions) -> str:
    """TOML text that describes a text file as far as its first rows tell; the rest is marked to be filled in.

    Parameters
    ----------
    file : str
        Path or URI.
    options : ReadOptions
        Of it only ``encoding`` and ``delimiter`` are used.

    Raises
    ------
    BarsError
        If it is no text with columns.
    """
    source = find(file)[0]
    opened = look(source, options.encoding)
    if opened.content != "text":
        raise BarsError(f"is {opened.content}, not text; its columns have names, give them with --column", path=file)
    sample = sample_csv(opened, options)
    widths = {len(cells) for _, cells in sample.rows}
    skipped = None
    if sample.has_header and len(widths) == 1 and max(widths) > len(sample.names):
        # The header does not name all columns, so that nothing is known of any.
        skipped = sample.header
        numbers = tuple(str(number) for number in range(1, max(widths) + 1))
        sample = replace(sample, names=numbers, has_header=False)
    names = [name.strip() for name in sample.names]
    rows = [cells for _, cells in sample.rows if len(cells) == len(names)]
    plain = [normalise(name) for name in names]
    columns = {role: _first(names, plain, {role}) for role in PRICES}
    columns["volume"] = _first(names, plain, VOLUME_NAMES)
    columns["symbol"] = _first(names, plain, SYMBOL_NAMES)
    time = _first(names, plain, TIME_NAMES)
    if not sample.has_header:
        names = [f"column {number}" for number in range(1, len(names) + 1)]
        time = names[0]
    lines = [
        'title = "FILL IN: whose files these are"',
        f"{'header' if sample.has_header else 'positions'} = {json.dumps(names, ensure_ascii=False)}",
        f"delimiter = {json.dumps(sample.delimiter)}",
        *([] if skipped is None else [f"skip = [{json.dumps(re.escape(skipped), ensure_ascii=False)}]"]),
        *([f"encoding = {json.dumps(options.encoding)}"] if options.encoding else []),
        '# label = "close"          # if a time marks the end of its bar',
        '# adjustment = "raw"       # or split, total',
        "",
        "[columns]",
        f"time = {json.dumps(time or _UNKNOWN, ensure_ascii=False)}",
    ]
    for role, name in columns.items():
        if name is not None or role in PRICES:
            lines.append(f"{role} = {json.dumps(name or _UNKNOWN, ensure_ascii=False)}")
    lines += ["", "[time]", *_time_lines(rows, sample.names.index(time) if time in sample.names else 0)]
    marked = [cell for cells in rows for cell in cells if not is_number(cell)]
    if any("," in cell and cell.replace(",", "").replace(".", "").strip().isdigit() for cell in marked):
        lines += ["", "[numbers]", '# decimal = ","             # or thousands = ","']
    if columns["symbol"] is None:
        lines += ["", "[symbol]", "from_file = '^(.+)$'      # the part of the file's name that is the symbol"]
    return "\n".join(lines)


def _first(names: Sequence[str], plain: Sequence[str], wanted: set[str] | frozenset[str]) -> str | None:
    return next((name for name, each in zip(names, plain, strict=True) if each in wanted), None)


def _time_lines(rows: Sequence[Sequence[str]], column: int) -> list[str]:
    cells = [cells[column].strip() for cells in rows]
    forms = {time_form(cell) for cell in cells}
    if forms == {"integer"}:
        return ['# unit = "ms"              # s, ms, us, ns; without it the size of the numbers tells']
    if forms == {"aware"}:
        return ["# the times carry their zone"]
    lines = ['# zone = "America/New_York" # if the times are local times of one zone']
    patterns = possible(cells, None) if cells else []
    if None in forms and patterns:
        shown = "" if len(patterns) == 1 else "      # or " + ", ".join(patterns[1:])
        lines.insert(0, f"pattern = {json.dumps(patterns[0])}{shown}")
    return lines
