"""Serving shuffled windows with targets, side by side with what people use instead, in one run.

Each peer hands out batches in a Python loop that does nothing else; at its end the device is waited for, and only then
is the time taken, the same for all. Every peer's first windows are compared with the rows that they must hold. A peer
that is not installed, does not fit or fails is a row that says so.

    python benchmarks/serve.py                     # about five minutes on an H200; writes benchmarks/results/serve.json
    python benchmarks/serve.py --only main
    python benchmarks/serve.py --device cpu        # writes serve_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from device import MIB, Machine
from first_batch import first_batches
from harness import RESULTS, machine, row, save, show
from peers import LeftOutError, Loader, Peer, Windows
from random_bars import random_bars
from rivals import everybody, fused, strongest

from stager import ReadOptions
from stager.batches.devices import check_cuda, count_devices
from stager.errors import DeviceError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory

BATCHES = (32, 256, 4_096)
WINDOWS = (32, 64, 256)
COLUMNS = (5, 8, 32)
MAIN = (64, 8)
PARTS = ("main", "fused", "grid", "first")
COLD = "From a cold start to the first batch"
LEAST_REPEATS, REPEATS = 3, 5
# Windows of a first batch that are compared with the rows.
CHECKED = 4

Row = dict[str, Any]


def bars(nbytes: int, n_columns: int) -> Pack:
    return pack_in_memory(random_bars(nbytes, n_columns), ReadOptions(interval="1min"))


def check(w: Windows, x: Any, y: Any) -> None:
    """Raise unless the first windows of a batch are those of samples with its first targets."""
    if tuple(x.shape) != (w.batch_size, w.window, w.rows.shape[1]) or tuple(y.shape) != (w.batch_size,):
        raise ValueError(f"a batch is x {tuple(x.shape)} and y {tuple(y.shape)}")
    for window, target in zip(_on_host(x[:CHECKED]), _on_host(y[:CHECKED]), strict=True):
        samples = np.flatnonzero(w.y == target)
        if not any(np.array_equal(window, w.rows[first : first + w.window]) for first in w.starts[samples]):
            raise ValueError("a batch holds a window that is not the one of its target")


def _on_host(array: Any) -> Any:
    if hasattr(array, "get"):
        return array.get()
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def rate(loader: Loader, where: Machine, seconds: float) -> dict[str, Any]:
    """Seconds a batch, over back-to-back runs of the loop, each until the device is idle."""

    def timed(n: int) -> float:
        started = time.perf_counter()
        loader.run(n)
        where.wait()
        return time.perf_counter() - started

    n, elapsed = 1, timed(1)
    while elapsed < seconds / 10 and n < 1 << 24:
        n = max(n + 1, min(10 * n, int(1.2 * n * seconds / 10 / elapsed)))
        elapsed = timed(n)
    # What workers had made ahead would otherwise be a good part of it.
    n = max(1, round(n * seconds / REPEATS / elapsed), 4 * loader.ahead)
    n = -(-n // loader.whole) * loader.whole
    gc.collect()
    runs = [timed(n)]
    while len(runs) < REPEATS and (len(runs) < LEAST_REPEATS or sum(runs) + runs[-1] < 2 * seconds):
        runs.append(timed(n))
    found = [one / n for one in runs]
    return {"seconds": statistics.median(found), "min": min(found), "max": max(found), "n": len(found)}


def measured(peer: Peer, w: Windows, where: Machine, seconds: float) -> Row:
    """One peer's row: its figures, or why there are none."""
    facts: Row = {
        "batch": w.batch_size,
        "window": w.window,
        "columns": w.rows.shape[1],
        "rows_nbytes": w.rows.nbytes,
        "samples": len(w.y),
    }
    try:
        peer.check_installed()
        where.empty_pools()
        found = row(peer.name, **_figures(peer, w, where, seconds), **facts)
    except LeftOutError as reason:
        found = {"name": peer.name, **facts, "left_out": str(reason)}
    except Exception as error:
        # One line, whatever CUDA writes; the run goes on, and fails at its end.
        found = {"name": peer.name, **facts, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    where.empty_pools()
    tell(found)
    return found


def _figures(peer: Peer, w: Windows, where: Machine, seconds: float) -> Row:
    if w.n_batches < 1:
        raise LeftOutError(f"{len(w.y):,} samples fill no batch")
    before, started = where.taken(), time.perf_counter()
    loader = peer.open(w)
    try:
        where.wait()
        opened = time.perf_counter()
        x, y = loader.run(1)
        where.wait()
        first = time.perf_counter()
        if peer.same_windows:
            check(w, x, y)
        # Read as float32, written in the type that is handed out; the target is 4 bytes each way.
        nbytes = w.batch_size * (w.window_nbytes * (4 + x.dtype.itemsize) // 4 + 8)
        del x, y
        timing = rate(loader, where, seconds)
        taken = where.taken() - before
    finally:
        loader.close()
    found: Row = {"timing": timing, "nbytes": nbytes, "samples_per_second": w.batch_size / timing["seconds"]}
    found |= {"open_seconds": opened - started, "first_seconds": first - opened}
    if where.device == "cuda":
        found |= {"of_copy": nbytes / timing["seconds"] / where.copy_rate, "device_nbytes": taken}
        if peer.over_bus:
            found["of_bus"] = w.batch_size * w.window_nbytes / timing["seconds"] / where.bus_rate
    return found


def tell(found: Row) -> None:
    """Print a row as soon as it is measured."""
    what = f"{found['window']:>4} x {found['columns']:<3} batch {found['batch']:>5,}  {found['name']:<52}"
    if "seconds" not in found:
        print(f"{what} {found.get('left_out') or found['error']}", flush=True)
        return
    low, middle, high = (found["batch"] / found[key] for key in ("max", "seconds", "min"))
    ratios = "  ".join(f"{key} {found[key]:.2f}" for key in ("of_copy", "of_bus") if key in found)
    taken = f"  {found['device_nbytes'] / MIB:,.0f} MiB" if "device_nbytes" in found else ""
    first = f"  first batch {found['open_seconds']:.3f} + {found['first_seconds']:.4f} s"
    print(f"{what} {middle:.3g}/s ({low:.3g} to {high:.3g}, n {found['n']})  {ratios}{taken}{first}", flush=True)


def beside_copy(rows: list[Row]) -> list[Row]:
    """On the CPU: how fast each is, of the plain copy at the same batch."""
    plain = {r["batch"]: r["seconds"] for r in rows if r["name"].startswith("plain copy") and "seconds" in r}
    for r in rows:
        if "seconds" in r and r["batch"] in plain:
            r["of_copy"] = plain[r["batch"]] / r["seconds"]
    return rows


class Run:
    """The tables of a run, kept as soon as each is whole, so that a run that is ended leaves what it has measured."""

    def __init__(self, where: Machine, seconds: float, file: str | None) -> None:
        self.where, self._seconds, self._file = where, seconds, file
        self.failed: list[str] = []

    def keep(self, name: str, rows: list[Row]) -> None:
        self.failed += [f"{r['name']}: {r['error']}" for r in rows if "error" in r]
        if self._file:
            save(self._file, {name: rows})

    def measure(self, peers: list[Peer], found: Windows, batches: tuple[int, ...] = BATCHES) -> list[Row]:
        return [
            measured(peer, replace(found, batch_size=batch), self.where, self._seconds)
            for batch in batches
            for peer in peers
        ]


def machine_parts(run: Run, only: list[str]) -> None:
    """What all ratios are of, and what a process meets once."""
    ceilings = run.where.measure_ceilings()
    show("Ceilings", ceilings)
    run.keep("Ceilings", ceilings)
    if "first" in only:
        try:
            steps = first_batches()
        except RuntimeError as error:
            run.failed.append(f"{COLD}: {error}")
        else:
            show(COLD, steps)
            run.keep(COLD, steps)


def shapes(run: Run, only: list[str], sizes: list[int]) -> None:
    """All peers in the main shape, and some in the others; bars are made once for all windows."""
    device, others = run.where.device, [n for n in COLUMNS if n != MAIN[1]]
    grids: dict[int, list[Row]] = {nbytes: [] for nbytes in sizes}
    for n_columns, nbytes in itertools.product((MAIN[1], *others), sizes):
        is_main, is_large = n_columns == MAIN[1], nbytes == sizes[-1]
        if not ("grid" in only or (is_main and {"main", "fused"} & set(only))):
            continue
        pack = bars(nbytes, n_columns)
        for window in sorted(WINDOWS, key=lambda one: one != MAIN[0]):
            found = Windows.find(pack, window, device)
            if (window, n_columns) == MAIN:
                if "main" in only:
                    rows = run.measure(everybody(device, is_large), found)
                    run.keep(title(f"{window} x {n_columns}", nbytes), beside_copy(rows) if device == "cpu" else rows)
                if "fused" in only and is_large:
                    run.keep("Fused", run.measure(fused(device), found, BATCHES[-1:]))
            elif "grid" in only:
                grids[nbytes] += run.measure(strongest(device), found)
    for nbytes, rows in grids.items():
        if rows:
            run.keep(title("Other shapes", nbytes), rows)


def title(shape: str, nbytes: int) -> str:
    return f"{shape}, {nbytes // MIB} MiB of rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="a part; may be given again [all; on the CPU main]"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement [%(default)s]")
    parser.add_argument("--small", type=int, help="MiB of the rows in the cache [32, on the CPU 8]")
    parser.add_argument("--large", type=int, default=512, help="MiB of the rows beyond the cache [%(default)s]")
    parser.add_argument("--no-save", action="store_true", help="leave the result file as it is")
    options = parser.parse_args()
    started = time.perf_counter()
    device = ("cuda" if count_devices() else "cpu") if options.device == "auto" else options.device
    if device == "cuda":
        try:
            check_cuda(0)
        except DeviceError as error:
            sys.exit(str(error))
    only = options.only or (list(PARTS) if device == "cuda" else ["main"])
    file = "serve" if device == "cuda" else "serve_cpu"
    run = Run(Machine(device), options.seconds, None if options.no_save else file)
    print(machine(), flush=True)
    if device == "cuda":
        machine_parts(run, only)
    shapes(run, only, [(options.small or (32 if device == "cuda" else 8)) * MIB, options.large * MIB])
    print(f"\n{time.perf_counter() - started:.0f} s" + ("" if options.no_save else f", written: {RESULTS / file}.json"))
    if run.failed:
        sys.exit("\n  ".join([f"{len(run.failed)} failed:", *run.failed]))


if __name__ == "__main__":
    main()
