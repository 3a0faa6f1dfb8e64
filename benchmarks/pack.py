"""Packing more data than memory: time, memory and scratch, beside readers and sorters of the same files.

Every contestant runs in a process of its own, several times; what it wrote is removed before the next one. polars and
duckdb are measured where they are installed (``pip install polars duckdb``).

python benchmarks/pack.py                              # 20 million rows; a few minutes and 6 GB of disk on two cores
python benchmarks/pack.py --rows 2e8 --repeats 1       # a quarter of an hour, 60 GB of disk
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from harness import row, save, show

from stager.bars.memory import anonymous_nbytes
from stager.config import parse_nbytes

N_SYMBOLS, MINUTES = 1972, 390
MINUTE, DAY = 60 * 10**9, 86_400 * 10**9
START = 1_672_669_800 * 10**9
GiB = 1 << 30


def a_day(day: int) -> pa.Table:
    """The minutes of a session, all symbols at each."""
    rng = np.random.default_rng(day)
    n_rows = N_SYMBOLS * MINUTES
    price = np.tile(100 * np.exp(np.random.default_rng(7).normal(0, 0.3, N_SYMBOLS)), MINUTES)
    close = np.round(price * (1 + rng.normal(0, 0.001, n_rows)), 2)
    open_ = np.round(close * (1 + rng.normal(0, 0.0005, n_rows)), 2)
    names = pa.array([f"S{number:04d}" for number in range(N_SYMBOLS)])
    return pa.table(
        {
            "time": pa.array(np.repeat(START + day * DAY + np.arange(MINUTES) * MINUTE, N_SYMBOLS)),
            "symbol": names.take(pa.array(np.tile(np.arange(N_SYMBOLS), MINUTES))),
            "open": open_,
            "high": np.round(np.maximum(open_, close) + 0.01, 2),
            "low": np.round(np.minimum(open_, close) - 0.01, 2),
            "close": close,
            "volume": rng.integers(100, 100_000, n_rows),
        }
    )


def a_symbol(number: int, n_days: int) -> pa.Table:
    """All minutes of one symbol."""
    rng = np.random.default_rng(number)
    n_rows = n_days * MINUTES
    close = np.round(100 * np.exp(np.cumsum(rng.normal(0, 0.0005, n_rows))), 2)
    times = START + np.repeat(np.arange(n_days) * DAY, MINUTES) + np.tile(np.arange(MINUTES) * MINUTE, n_days)
    return pa.table(
        {
            "time": pa.array(times),
            "symbol": pa.array([f"S{number:04d}"]).take(pa.array(np.zeros(n_rows, np.int64))),
            "open": close,
            "high": np.round(close + 0.01, 2),
            "low": np.round(close - 0.01, 2),
            "close": close,
            "volume": rng.integers(100, 100_000, n_rows),
        }
    )


def write(table: pa.Table, file: Path) -> None:
    """Write bars as CSV or Parquet, by the file's ending."""
    time = table["time"].cast(pa.timestamp("ns"))
    if file.suffix == ".parquet":
        pq.write_table(table.set_column(0, "time", time.cast(pa.timestamp("ns", "UTC"))), file)
        return
    text = pc.binary_join_element_wise(time.cast(pa.timestamp("s")).cast(pa.string()), "Z", "")
    pacsv.write_csv(table.set_column(0, "time", text), file, pacsv.WriteOptions(quoting_style="none"))


def make(folder: Path, n_rows: float, layout: str, ending: str) -> list[Path]:
    """Files of about so many rows: one a day of all symbols, or one a symbol."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    n_days = max(1, round(n_rows / (N_SYMBOLS * MINUTES)))
    if layout == "daily":
        files = [folder / f"{day:04d}{ending}" for day in range(n_days)]
        for day, file in enumerate(files):
            write(a_day(day), file)
        return files
    files = [folder / f"S{number:04d}{ending}" for number in range(N_SYMBOLS)]
    for number, file in enumerate(files):
        write(a_symbol(number, n_days), file)
    return files


def read_csv(files: list[str], out: Path, memory: int) -> dict[str, Any]:
    for file in files:
        pacsv.read_csv(file)
    return {}


def read_parquet(files: list[str], out: Path, memory: int) -> dict[str, Any]:
    for file in files:
        pq.read_table(file)
    return {}


def stager(files: list[str], out: Path, memory: int) -> dict[str, Any]:
    from stager.packs.packing import Usage, pack

    usage = Usage()
    pack(files, out, memory_nbytes=memory, usage=usage)
    return {"scratch_gib": usage.scratch_nbytes / GiB}


def polars(files: list[str], out: Path, memory: int) -> dict[str, Any]:
    import polars as pl

    scan = pl.scan_csv if files[0].endswith(".csv") else pl.scan_parquet
    scan(files).sort("symbol", "time").sink_ipc(out)
    return {}


def duckdb(files: list[str], out: Path, memory: int) -> dict[str, Any]:
    import duckdb

    connection = duckdb.connect(config={"memory_limit": f"{memory}B", "temp_directory": str(out) + ".tmp"})
    reader = "read_csv" if files[0].endswith(".csv") else "read_parquet"
    connection.execute(f"COPY (SELECT * FROM {reader}({files!r}) ORDER BY symbol, time) TO '{out}' (FORMAT parquet)")
    return {}


CONTESTANTS: dict[str, Callable[[list[str], Path, int], dict[str, Any]]] = {
    "pyarrow.csv.read_csv alone, a file at a time": read_csv,
    "pyarrow.parquet.read_table alone, a file at a time": read_parquet,
    "stager.pack": stager,
    "polars scan().sort().sink_ipc()": polars,
    "DuckDB COPY (... ORDER BY ...)": duckdb,
}


def run_one(name: str, folder: Path, ending: str, memory: int) -> None:
    """Run a contestant in this process and print what it took."""
    files = sorted(map(str, folder.glob(f"*{ending}")))
    out = folder / "out"
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, anonymous_nbytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    facts = CONTESTANTS[name](files, out, memory)
    seconds = time.perf_counter() - started
    stop.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "memory_gib": peak / GiB, **facts}))


def contest(
    folder: Path, files: list[Path], n_rows: int, memory: int, repeats: int, names: list[str]
) -> list[dict[str, Any]]:
    """Run contestants on the same files, in turn, and tell what they took."""
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            command = [sys.executable, __file__, "--one", name, "--folder", str(folder), "--memory", str(memory)]
            done = subprocess.run([*command, "--ending", files[0].suffix], capture_output=True, text=True, check=False)
            for left in (folder / "out", folder / "out.tmp"):
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            told[name].append(json.loads(done.stdout.splitlines()[-1]))
    nbytes = sum(file.stat().st_size for file in files)
    rows = []
    for name, runs in told.items():
        if not runs:
            continue
        seconds = [run["seconds"] for run in runs]
        timing = {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": len(seconds)}
        facts = {key: max(run[key] for run in runs) for key in runs[0] if key != "seconds"}
        facts["mrows"] = n_rows / timing["seconds"] / 1e6
        rows.append(row(name, timing, nbytes=nbytes, **facts))
    for each in rows:
        each["of_reading"] = each["seconds"] / rows[0]["seconds"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=2e7)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stager-bench-pack"))
    parser.add_argument("--cases", default="daily.csv,daily.parquet,symbol.csv")
    parser.add_argument("--peers", default="polars,DuckDB", help="those to be measured too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--ending", help=argparse.SUPPRESS)
    options = parser.parse_args()
    memory = parse_nbytes(options.memory)
    if options.one:
        run_one(options.one, options.folder, options.ending, memory)
        return
    tables = {}
    for case in options.cases.split(","):
        layout, _, kind = case.partition(".")
        files = make(options.folder, options.rows, layout, f".{kind}")
        n_rows = max(1, round(options.rows / (N_SYMBOLS * MINUTES))) * N_SYMBOLS * MINUTES
        wanted = tuple(filter(None, options.peers.split(",")))
        peers = [name for name in CONTESTANTS if wanted and name.startswith(wanted)]
        names = [next(name for name in CONTESTANTS if kind in name), "stager.pack", *peers]
        rows = contest(options.folder, files, n_rows, memory, options.repeats, names)
        size = sum(file.stat().st_size for file in files) / 1e9
        what = "a file a day" if layout == "daily" else "a file a symbol"
        title = f"{n_rows / 1e6:.0f} million rows, {what}, {kind} of {size:.1f} GB"
        show(title, rows)
        tables[f"{n_rows / 1e6:.0f} million rows, {what}, {kind}"] = rows
        shutil.rmtree(options.folder)
    print(f"\n{save('pack', tables)}")


if __name__ == "__main__":
    main()
