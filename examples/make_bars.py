"""Write made-up one-minute bars of 20 symbols, with what real files have: gaps, late listings, a delisting.

A signal is planted: every symbol drifts up or down for about an hour at a time, so that the direction of the next
minutes can be told from the last ones, but not for sure.

    python examples/make_bars.py bars.csv
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.csv

MINUTE = 60


def make_bars(n_symbols: int = 20, n_minutes: int = 8_000, seed: int = 7) -> pa.Table:
    """Bars in time order, all symbols interleaved, as a vendor's flat file has them."""
    rng = np.random.default_rng(seed)
    start = np.datetime64("2024-01-01T00:00").astype("datetime64[s]").astype(np.int64)
    parts = []
    for index in range(n_symbols):
        first = rng.integers(n_minutes // 4, n_minutes // 2) if index % 5 == 4 else 0  # listed late
        last = 2 * n_minutes // 3 if index == n_symbols - 2 else n_minutes  # delisted
        minutes = np.arange(first, last)
        n = len(minutes)
        # The drift keeps its sign for 60 minutes on average.
        drift = np.where(np.cumsum(rng.random(n) < 1 / 60) % 2, 1.0, -1.0) * rng.choice([-1, 1])
        sigma = 5e-4
        close = rng.uniform(20, 400) * np.exp(np.cumsum(sigma * (0.35 * drift + rng.standard_normal(n))))
        before = np.append(close[0], close[:-1])
        spread = close * sigma * rng.random((2, n))
        keep = rng.random(n) > 0.002  # single missing minutes
        for _ in range(3):  # outages
            outage = rng.integers(0, n - 60)
            keep[outage : outage + rng.integers(5, 60)] = False
        bars = {
            "symbol": np.full(n, f"SYM{index:02d}"),
            "minute": minutes,
            "open": before,
            "high": np.maximum(before, close) + spread[0],
            "low": np.minimum(before, close) - spread[1],
            "close": close,
            "volume": rng.integers(100, 10_000, n).astype(np.float64),
        }
        parts.append({name: values[keep] for name, values in bars.items()})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["minute"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    times = pa.array((start + columns.pop("minute") * MINUTE).astype("datetime64[s]")).cast(pa.timestamp("s", "UTC"))
    prices = {name: np.round(columns[name], 4) for name in ("open", "high", "low", "close")}
    return pa.table({"symbol": columns["symbol"], "time": times, **prices, "volume": columns["volume"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="the CSV file to write")
    parser.add_argument("--minutes", type=int, default=8_000, help="length of the longest history [%(default)s]")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    table = make_bars(n_minutes=options.minutes, seed=options.seed)
    pyarrow.csv.write_csv(table, options.out)
    print(f"{options.out}: {table.num_rows:,} bars of {len(table['symbol'].unique())} symbols")


if __name__ == "__main__":
    main()
