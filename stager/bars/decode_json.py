"""JSON to a table, or to lines of text: rows as arrays, as objects, by symbol, or column by column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa

from stager.bars.sources import Opened
from stager.errors import BarsError

# Keys under which services put their rows, and the symbol beside them.
_ROWS = ("bars", "results", "candles", "values", "data", "historical")
_SYMBOL = ("symbol", "ticker")
# A row is no longer.
_FIRST_NBYTES = 1 << 16
# What they set where an answer is not all of it.
_NEXT_PAGES = ("next_page_token", "next_url")


def read_json(opened: Opened) -> pa.Table | None:
    """The table in a JSON file; None: rows are arrays without names, and ``opened`` now holds them as lines of text.

    Raises
    ------
    BarsError
        If the file is damaged, or holds no table.
    """

    def refuse(message: str) -> BarsError:
        return BarsError(message, path=opened.source.name)

    data = opened.read()
    content: Any
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        try:
            content = msgspec.json.Decoder().decode_lines(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise refuse(f"the JSON is truncated or damaged ({error}); get it again") from None
    _refuse_twice(data, refuse)
    try:
        table = _table(content, opened, data)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, BarsError):
            raise
        reason = str(error).splitlines()[0]
        raise refuse(f"the JSON holds rows that are not alike ({reason[:120]}); write one form of row") from None
    return table


def _refuse_twice(data: bytes, refuse: Callable[[str], BarsError]) -> None:
    """Refuse a key that stands twice in the first row, as in all that the same program wrote: one would be lost."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise refuse(f"the key {twice!r} stands twice in one row; rename or remove one")

    start = re.search(rb"\[\s*\{|^\s*\{(?!\s*\"[^\"]*\"\s*:\s*[\[{])", data[:_FIRST_NBYTES])
    if start is not None:
        first = data[start.end() - 1 : start.end() + _FIRST_NBYTES].decode("utf-8", "ignore")
        try:
            json.JSONDecoder(object_pairs_hook=check).raw_decode(first)
        except (json.JSONDecodeError, RecursionError):
            return


def _table(content: Any, opened: Opened, data: bytes) -> pa.Table | None:
    if isinstance(content, dict):
        return _of_object(content, opened)
    if content and all(isinstance(row, list) for row in content):
        # The text of the numbers is kept, and is parsed as all text is.
        if any(isinstance(cell, list | dict) for row in content for cell in row):
            raise BarsError("the rows of the JSON hold further arrays or objects", path=opened.source.name)
        data = re.sub(rb'("(?:[^"\\]|\\.)*")|\s+', rb"\1", data)
        start, end = data.index(b"[", data.index(b"[") + 1) + 1, data.rindex(b"]", 0, data.rindex(b"]"))
        opened.replace(data[start:end].replace(b"],[", b"\n") + b"\n")
        return None
    if content and all(isinstance(row, dict) for row in content):
        return _records(content)
    raise BarsError("the JSON holds no rows of bars", path=opened.source.name)


def _records(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array(rows))])


def _of_object(content: dict[str, Any], opened: Opened) -> pa.Table | None:
    page = next((key for key in _NEXT_PAGES if content.get(key)), None)
    if page is not None:
        opened.warnings.append(f"the file is one page of several ({page!r} is set); the bars of the next are missing")
    rows = next((content[key] for key in _ROWS if isinstance(content.get(key), list | dict)), None)
    symbol = next((content[key] for key in _SYMBOL if isinstance(content.get(key), str)), None)
    names = content.get("columns")
    if isinstance(names, list) and isinstance(rows, list) and rows:
        table = pa.table(dict(zip(names, map(pa.array, zip(*rows, strict=True)), strict=True)))
        index = content.get("index")
        return table if index is None or "time" in names else table.append_column("__index_level_0__", pa.array(index))
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        table = _records(rows)
        return table if symbol is None else table.append_column("symbol", pa.array([symbol] * len(table)))
    if isinstance(rows, dict) and rows and all(isinstance(each, list) for each in rows.values()):
        tables = [
            _records(each).append_column("symbol", pa.array([name] * len(each))) for name, each in rows.items() if each
        ]
        if tables:
            return pa.concat_tables(tables, promote_options="permissive")
    others = [each for each in content.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
    if len(others) == 1 and all(isinstance(row, dict) for row in others[0]):
        return _of_object({"bars": others[0], **({} if symbol is None else {"symbol": symbol})}, opened)
    lists = {name: each for name, each in content.items() if isinstance(each, list)}
    if len(lists) >= 5 and len(set(map(len, lists.values()))) == 1:
        return pa.table({name: pa.array(each) for name, each in lists.items()})
    nested = {name: each for name, each in content.items() if isinstance(each, dict)}
    if len(nested) == len(content) and len(nested) >= 4:
        keys = [tuple(each) for each in nested.values()]
        if all(key == keys[0] for key in keys):
            columns = {name: pa.array(list(each.values())) for name, each in nested.items()}
            return pa.table(columns | {"__index_level_0__": pa.array(list(keys[0]))})
    raise BarsError(
        f"the JSON holds no rows of bars, only {', '.join(map(repr, list(content)[:8]))}; if it is an error message, "
        "get the data again",
        path=opened.source.name,
    )
