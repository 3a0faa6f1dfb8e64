"""Bytes to Arrow columns: one input at a time, text by :mod:`pyarrow.csv` and Parquet by :mod:`pyarrow.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from stager.bars.columns import Decoded
from stager.bars.decode_arrow import decode_named, decode_parquet, decode_table, read_ipc
from stager.bars.decode_csv import decode_csv
from stager.bars.decode_json import read_json
from stager.bars.formats import named
from stager.bars.options import ReadOptions
from stager.bars.room import Room
from stager.bars.sources import BarFile, Opened, look
from stager.bars.wide import melt
from stager.errors import BarsError

__all__ = ["Decoded", "Track", "decode", "decode_table"]

# Takes a callable that tells how many bytes of the file were read.
Track: TypeAlias = Callable[[Callable[[], int]], None]
# JSON text as columns, and what it takes to parse it.
_JSON_GROWTH = 4
# What Hive, Spark and pyarrow name the folder of rows without a value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def decode(source: BarFile, options: ReadOptions, track: Track, room: Room | None = None) -> Iterator[Decoded]:
    """The columns of a file: all of its rows, or some of them after the other where it is large.

    Parameters
    ----------
    source : BarFile
    options : ReadOptions
    track : callable
        Takes a callable that tells how many bytes of the file were read.
    room : Room, optional
        Memory and threads that decoding may take.

    Raises
    ------
    BarsError
        If the file can't be read as bars, naming file, line and column; or needs more memory, and can't be read in
        parts.
    """
    if source.partition == _NO_VALUE:
        raise BarsError("the folder says that there is no symbol; take it out, or name the folder", path=source.name)
    told = None if options.format is None else named(options.format)
    room = Room(source.name) if room is None else room
    opened = look(source, options.encoding or (None if told is None else told.encoding), room)
    for decoded in _decode(opened, options, track, room):
        decoded.folder = source.partition
        decoded.warnings += [*([] if source.warning is None else [source.warning]), *opened.warnings]
        if decoded.layout.wide is not None:
            melt(decoded, decoded.layout.wide)
        yield decoded


def _decode(opened: Opened, options: ReadOptions, track: Track, room: Room) -> Iterator[Decoded]:
    if opened.content == "parquet":
        yield from decode_parquet(opened, options, room)
        return
    if opened.content == "arrow":
        room.check(2 * opened.unpacked_nbytes(), "Feather is not read in parts; save it as Parquet")
        yield decode_named(read_ipc(opened), opened.source, options)
        return
    if opened.content == "json":
        room.check(_JSON_GROWTH * opened.unpacked_nbytes(), "JSON is not read in parts; save it as CSV or Parquet")
        table = read_json(opened)
        if table is not None:
            yield decode_named(table, opened.source, options)
            return
    yield from decode_csv(opened, options, track, room)
