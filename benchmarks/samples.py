"""Finding the samples: seconds, and bytes a row, of what a Stager needs beyond the rows themselves.

Qlib's and neuralforecast's datasets are measured beside it, at fewer rows, where they are installed.

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
from stager.samples.building import build_index

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


def peers(n_rows: int, n_symbols: int) -> list[dict[str, Any]]:
    """What Qlib's TSDataSampler and neuralforecast's dataset take for windows of the same bars, and what a Stager does.

    From a DataFrame in the order that each wants; values are not copied by any step that is not theirs.
    """
    pack = minute_bars(n_rows, n_symbols)
    index = build_index(pack, WINDOW, None, Select())
    timing = measure(lambda: build_index(pack, WINDOW, None, Select()), repeats=3)
    rows = [row("stager", timing, samples=index.n_samples, bytes_a_row=index.nbytes / pack.n_rows)]
    owners = np.repeat(np.array(pack.symbols), pack.counts)
    times = pack.times.view("datetime64[ns]")
    try:
        import pandas as pd
        from qlib.data.dataset import TSDataSampler
    except ImportError as error:
        print(f"Qlib is left out: {error}")
    else:
        frame = pd.DataFrame(
            {name: pack.column(name).astype(np.float32) for name in pack.columns},
            index=pd.MultiIndex.from_arrays([times, owners], names=["datetime", "instrument"]),
        ).sort_index()

        def qlib() -> Any:
            return TSDataSampler(frame, times.min(), times.max(), step_len=WINDOW)

        made = qlib()
        # Without the values themselves, of which it keeps a copy.
        tables = (
            made.idx_df.memory_usage(deep=True).sum() + made.idx_arr.nbytes + made.data_index.memory_usage(deep=True)
        )
        timing = measure(qlib, repeats=1, warm_up=0)
        rows.append(row("Qlib TSDataSampler", timing, samples=len(made), bytes_a_row=tables / pack.n_rows))
        del made, frame
    try:
        import pandas as pd
        from neuralforecast.tsdataset import TimeSeriesDataset
    except ImportError as error:
        print(f"neuralforecast is left out: {error}")
    else:
        long = pd.DataFrame({"unique_id": owners, "ds": times, "y": pack.column("close").astype(np.float32)})
        timing = measure(lambda: TimeSeriesDataset.from_df(long), repeats=1, warm_up=0)
        made = TimeSeriesDataset.from_df(long)[0]
        tables = made.indptr.nbytes + made.temporal.element_size() * made.temporal.nelement()
        rows.append(row("neuralforecast TimeSeriesDataset, one column", timing, bytes_a_row=tables / pack.n_rows))
    for one in rows:
        one["times_ours"] = one["seconds"] / rows[0]["seconds"]
    return rows


def finding(n_rows: int, n_symbols: int) -> tuple[str, list[dict[str, Any]]]:
    """Title and table of what finding the samples takes."""
    pack = minute_bars(n_rows, n_symbols)
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
    return f"Samples of {pack.n_rows:,} rows, {len(pack.symbols):,} symbols", rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=50e6)
    parser.add_argument("--symbols", type=int, default=5_000)
    parser.add_argument("--peer-rows", type=float, default=2e6)
    parser.add_argument("--only-peers", action="store_true", help="the result file keeps the other table")
    options = parser.parse_args()
    tables = {} if options.only_peers else dict([finding(int(options.rows), options.symbols)])
    tables[f"Windows of {int(options.peer_rows):,} rows, 200 symbols, beside other datasets"] = peers(
        int(options.peer_rows), 200
    )
    for title, rows in tables.items():
        show(title, rows)
    save("samples", tables)


if __name__ == "__main__":
    main()
