"""Finding the samples: seconds, and bytes a row, of what a Stager needs beyond the rows themselves.

python benchmarks/samples.py               # 50 million rows of 5,000 symbols; about two minutes and 12 GB on two cores
python benchmarks/samples.py --rows 5e6
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pyarrow as pa
from harness import measure, row, save, show

from stager import Normalize, ReadOptions, Select, Target
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples.index import build_index

WINDOW = 60
MINUTE = 60 * 10**9
START = 1_704_067_200 * 10**9
HOURS = "09:30-16:00 America/New_York"


def minute_bars(n_rows: int, n_symbols: int) -> Pack:
    """Minute bars around the clock, one in 500 missing."""
    rng = np.random.default_rng(7)
    per_symbol = n_rows // n_symbols
    minutes = np.arange(per_symbol) + np.cumsum(rng.random(per_symbol) < 0.002)
    codes = np.repeat(np.arange(n_symbols, dtype=np.int32), per_symbol)
    close = 100 + rng.random(len(codes))
    table = pa.table(
        {
            "symbol": pa.DictionaryArray.from_arrays(codes, [f"SYM{index:05d}" for index in range(n_symbols)]),
            "time": pa.array(np.tile(START + minutes * MINUTE, n_symbols), pa.timestamp("ns", "UTC")),
            **dict.fromkeys(("open", "high", "low", "close", "volume"), close),
        }
    )
    pack = pack_in_memory(table, ReadOptions(interval="1min"))
    for name in pack.columns:
        pack.column(name)  # brought into order when first asked for
    return pack


def universe_of(pack: Pack) -> pa.Table:
    """Every symbol belongs to it from some minute on."""
    starts = START + np.random.default_rng(8).integers(0, 5_000, len(pack.symbols)) * MINUTE
    still = pa.nulls(len(pack.symbols), pa.timestamp("ns", "UTC"))
    return pa.table({"symbol": pack.symbols, "start": pa.array(starts, pa.timestamp("ns", "UTC")), "end": still})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=50e6)
    parser.add_argument("--symbols", type=int, default=5_000)
    arguments = parser.parse_args()
    pack = minute_bars(int(arguments.rows), arguments.symbols)
    near, far = Target(horizon=5), Target(horizon=60)
    cases: dict[str, dict[str, Any]] = {
        "windows alone": {},
        "one target": {"target": near},
        "four targets": {"target": [near, far, Target(horizon=5, kind="direction"), Target(horizon=15)]},
        "one target by trailing volatility": {"target": Target(horizon=5, scale="volatility")},
        "one target ranked across symbols": {"target": Target(horizon=5, scale="rank")},
        "inside a session": {"select": Select(session=HOURS)},
        "a stride of 5": {"select": Select(stride=5)},
        "a universe": {"select": Select(universe=universe_of(pack))},
        "a normalisation that is fitted": {"normalize": Normalize("zscore", "zscore", fit="train")},
    }
    rows = []
    for name, options in cases.items():
        asked = {"target": None, "select": Select(), **options}
        index = build_index(pack, WINDOW, **asked)
        timing = measure(lambda asked=asked: build_index(pack, WINDOW, **asked), repeats=3)
        rows.append(row(name, timing, samples=index.n_samples, bytes_a_row=index.nbytes / pack.n_rows))
        del index
    title = f"Samples of {pack.n_rows:,} rows, {len(pack.symbols):,} symbols"
    show(title, rows)
    save("samples", {title: rows})


if __name__ == "__main__":
    main()
