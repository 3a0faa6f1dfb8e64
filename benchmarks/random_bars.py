"""Random minute bars of any size."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

MINUTE = 60 * 10**9
START = 1_704_067_200 * 10**9


def random_bars(nbytes: int, n_columns: int) -> pa.Table:
    """So many bytes of them as float32 rows; one minute in 1,000 is missing, and ends a run."""
    n_symbols = 512 if nbytes > 128 << 20 else 64
    per_symbol = nbytes // (4 * n_columns * n_symbols)
    rng = np.random.default_rng(7)
    minutes = np.arange(per_symbol) + np.cumsum(rng.random(per_symbol) < 0.001)
    n = per_symbol * n_symbols
    close = 100 + 10 * rng.random(n)
    columns = {
        "open": close + rng.random(n) - 0.5,
        "high": close + 0.5 + rng.random(n),
        "low": close - 0.5 - rng.random(n),
        "close": close,
        "volume": 1 + 1e5 * rng.random(n),
        **{f"feature_{index}": rng.random(n) for index in range(n_columns - 5)},
    }
    codes = np.repeat(np.arange(n_symbols, dtype=np.int32), per_symbol)
    symbols = pa.DictionaryArray.from_arrays(codes, [f"SYM{index:04d}" for index in range(n_symbols)])
    times = pa.array(np.tile(START + minutes * MINUTE, n_symbols), pa.timestamp("ns", "UTC"))
    return pa.table({"symbol": symbols, "time": times, **columns})
