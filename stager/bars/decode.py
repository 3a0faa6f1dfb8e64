"""Bytes to Arrow columns: one input at a time, text by :mod:`pyarrow.csv` and Parquet by :mod:`pyarrow.parquet`."""

from __future__ import annotations

from collections.abc import Callable

from stager.bars.columns import Decoded
from stager.bars.decode_arrow import decode_parquet, decode_table
from stager.bars.decode_csv import decode_csv
from stager.bars.options import ReadOptions
from stager.bars.sources import BarFile, look

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
    opened = look(source)
    if opened.content == "parquet":
        return decode_parquet(opened, options)
    return decode_csv(opened, options, track)
