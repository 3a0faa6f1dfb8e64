"""Tables of bars whose values tell where they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stager.bars.read import ReadOptions
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory

MINUTE = 60 * 10**9
DAY = 86_400 * 10**9
START = 1_704_067_200 * 10**9  # 2024-01-01T00:00Z, a Monday


def bar_table(
    steps: Mapping[str, Sequence[int]], *, unit: int = MINUTE, start: int = START, **columns: Sequence[Any]
) -> pa.Table:
    """Bars of symbol k at ``start + step * unit``, with ``close = 1e6 * k + row of the symbol``.

    A shift, straddle or swap shows in the values by arithmetic: closes of one symbol differ by 1 from bar to bar,
    closes of two symbols by a million. `columns` (rows in the given order) replace or add columns.
    """
    symbols = [symbol for symbol, times in steps.items() for _ in times]
    times = [start + step * unit for some in steps.values() for step in some]
    closes = np.array([1e6 * k + row for k, some in enumerate(steps.values(), 1) for row in range(len(some))])
    values: dict[str, Any] = {
        "open": closes - 0.25,
        "high": closes + 0.5,
        "low": closes - 0.5,
        "close": closes,
        "volume": np.arange(1.0, len(closes) + 1),
    }
    values.update(columns)
    return pa.table(
        {
            "symbol": pa.array(symbols, pa.string()),
            "time": pa.array(times, pa.timestamp("ns", "UTC")),
            **{name: pa.array(column, pa.float64()) for name, column in values.items()},
        }
    )


def memory_pack(
    steps: Mapping[str, Sequence[int]], *, interval: str = "1min", unit: int = MINUTE, **columns: Sequence[Any]
) -> Pack:
    """The bars of :func:`bar_table`, packed in memory."""
    return pack_in_memory(bar_table(steps, unit=unit, **columns), ReadOptions(interval=interval))


def csv_text(table: pa.Table) -> str:
    """The table as CSV, floats in their shortest exact form."""
    lines = [",".join(table.column_names)]
    stamps = np.datetime_as_string(table["time"].to_numpy().astype("datetime64[ns]"))
    for stamp, row in zip(stamps, table.drop(["time"]).to_pylist(), strict=True):
        symbol, *values = row.values()
        lines.append(",".join([symbol, f"{stamp}Z", *("" if v is None else repr(v) for v in values)]))
    return "\n".join(lines) + "\n"
