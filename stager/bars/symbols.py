"""Symbols of all inputs to numbers, in the order of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stager.bars.arrange import code_type
from stager.bars.threads import parallel

# The stubs of pyarrow don't know that the chunks of a dictionary column are dictionary arrays.
SymbolColumn: TypeAlias = Any
Codes = npt.NDArray[np.unsignedinteger[Any]]


def encode(columns: Sequence[SymbolColumn]) -> tuple[tuple[str, ...], list[list[Codes]]]:
    """All symbols sorted as text, and each row's place among them.

    Parameters
    ----------
    columns : sequence of ChunkedArray of dictionary<int32, string>
        One for each input; the dictionaries may differ from chunk to chunk.

    Returns
    -------
    symbols : tuple of str
        Also those that stand in a dictionary without a row.
    codes : list of list of ndarray
        For each input and chunk, of the smallest unsigned type.
    """
    chunks = [chunk for column in columns for chunk in column.chunks]
    if not chunks:
        return (), [[] for _ in columns]
    lengths = [len(chunk.dictionary) for chunk in chunks]
    together = pa.concat_arrays([chunk.dictionary for chunk in chunks]).dictionary_encode()
    order = pc.sort_indices(together.dictionary).to_numpy()
    place = np.empty(len(order), dtype=code_type(len(order)))
    place[order] = np.arange(len(order), dtype=place.dtype)
    tables = np.split(place[together.indices.to_numpy()], np.cumsum(lengths)[:-1])

    def translate(item: tuple[Any, Codes]) -> Codes:
        chunk, table = item
        codes: Codes = table[chunk.indices.to_numpy()]
        return codes

    flat = iter(parallel(translate, list(zip(chunks, tables, strict=True))))
    codes = [[next(flat) for _ in column.chunks] for column in columns]
    return tuple(together.dictionary.take(pa.array(order)).to_pylist()), codes


def constant(symbol: str, n_rows: Sequence[int]) -> SymbolColumn:
    """A column of one symbol, in chunks of so many rows."""
    dictionary = pa.array([symbol], pa.string())
    chunks: list[Any] = [pa.DictionaryArray.from_arrays(np.zeros(n, dtype=np.int32), dictionary) for n in n_rows]
    return pa.chunked_array(chunks, type=cast(Any, pa.dictionary(pa.int32(), pa.string())))
