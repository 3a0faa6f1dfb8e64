"""Wide files: one row for each time, with columns for every symbol, brought to one row for each bar."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from stager.bars.columns import SYMBOLS, Decoded, aligned
from stager.bars.detect import Decision
from stager.bars.options import PRICES
from stager.bars.wide_names import FIELDS, Wide


def melt(decoded: Decoded, wide: Wide) -> None:
    """Put the columns of all symbols below each other, in place: symbol by symbol, in the order of the columns."""
    n_rows, names = decoded.n_rows, decoded.layout.names
    time = decoded.columns["time"]
    roles = [role for role in FIELDS if role in PRICES or any(role in each for each in wide.symbols.values())]
    columns: dict[str, Any] = {"time": pa.chunked_array([c for _ in wide.symbols for c in time.chunks], type=time.type)}
    for role in roles:
        missing = pa.chunked_array([pa.nulls(n_rows, pa.float64())])
        parts = [
            decoded.columns.get(names[each[role]], missing) if role in each else missing
            for each in wide.symbols.values()
        ]
        chunks = [chunk.cast(pa.float64()) for part in parts for chunk in part.chunks]
        columns[role] = pa.chunked_array(chunks, type=pa.float64())
    numbers: Any = np.repeat(np.arange(len(wide.symbols), dtype=np.int32), n_rows)
    symbol = pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(list(wide.symbols), pa.string()))
    columns["symbol"] = pa.chunked_array([symbol], type=SYMBOLS)
    table = aligned(pa.table(columns))
    decoded.columns = {name: table[name] for name in table.column_names}
    line_of = decoded.line_of
    decoded.line_of = lambda row: line_of(row % n_rows)
    decoded.n_rows = table.num_rows
    decoded.decisions.append(Decision("symbol", "one set of columns each", f"the names of {len(wide.symbols)} symbols"))
