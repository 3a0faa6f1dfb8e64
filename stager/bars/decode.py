"""Bytes to Arrow columns: one input at a time, text by :mod:`pyarrow.csv` and Parquet by :mod:`pyarrow.parquet`."""

from __future__ import annotations

from collections.abc import Callable

from stager.bars.columns import Decoded
from stager.bars.decode_arrow import decode_named, decode_parquet, decode_table, read_ipc
from stager.bars.decode_csv import decode_csv
from stager.bars.decode_json import read_json
from stager.bars.formats import named
from stager.bars.options import ReadOptions
from stager.bars.sources import BarFile, Opened, look
from stager.bars.wide import melt

__all__ = ["Decoded", "decode", "decode_table"]


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
    told = None if options.format is None else named(options.format)
    opened = look(source, options.encoding or (None if told is None else told.encoding))
    decoded = _decode(opened, options, track)
    if decoded.layout.wide is not None:
        melt(decoded, decoded.layout.wide)
    return decoded


def _decode(opened: Opened, options: ReadOptions, track: Callable[[Callable[[], int]], None]) -> Decoded:
    if opened.content == "parquet":
        return decode_parquet(opened, options)
    if opened.content == "arrow":
        return decode_named(read_ipc(opened), opened.source, options)
    if opened.content == "json":
        table = read_json(opened)
        if table is not None:
            return decode_named(table, opened.source, options)
    return decode_csv(opened, options, track)
