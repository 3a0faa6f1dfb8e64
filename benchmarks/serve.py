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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from first_batch import first_batches
from harness import machine, measure, row, save, show
from peers import LeftOutError, Loader, Peer, Windows
from random_bars import random_bars
from rivals import everybody, fused, strongest

from stager import ReadOptions
from stager.batches.devices import count_devices
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory

MIB = 1 << 20
BATCHES = (32, 256, 4_096)
WINDOWS = (32, 64, 256)
COLUMNS = (5, 8, 32)
MAIN = (64, 8)
COLD = "From a cold start to the first batch"
LEAST_REPEATS, REPEATS = 3, 5
# Windows of a first batch that are compared with the rows.
CHECKED = 4

Row = dict[str, Any]


def bars(nbytes: int, n_columns: int) -> Pack:
    return pack_in_memory(random_bars(nbytes, n_columns), ReadOptions(interval="1min"))


class Machine:
    """The device that serves: when it is idle, how much of its memory is taken, and how fast it copies."""

    def __init__(self, device: str) -> None:
        self.device = device
        #: Bytes read and written a second by a copy on the device, and bytes a second that come over the bus.
        self.copy_rate = self.bus_rate = 0.0

    def wait(self) -> None:
        if self.device == "cuda":
            import cupy

            cupy.cuda.Device().synchronize()

    def empty_pools(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import cupy

            self.wait()
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()

    def taken(self) -> int:
        """Bytes of device memory that are in use or kept in pools, by anybody."""
        if self.device == "cpu":
            return 0
        from cupy.cuda import runtime

        free, total = runtime.memGetInfo()
        return int(total - free)

    def measure_ceilings(self) -> list[Row]:
        """A copy on the device and one over the bus, of random bits."""
        import cupy
        from cupy.cuda import runtime

        n, n_pinned, stream = 2 << 30, 256 * MIB, cupy.cuda.Stream(non_blocking=True)
        source = cupy.arange(n // 4, dtype=cupy.uint32) * cupy.uint32(2_654_435_761)
        target, pinned = cupy.empty_like(source), cupy.cuda.alloc_pinned_memory(n_pinned)
        np.frombuffer(pinned, np.uint8, n_pinned)[:] = np.random.default_rng(1).integers(1, 256, n_pinned, np.uint8)
        self.wait()

        def on_device() -> None:
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, n, runtime.memcpyDeviceToDevice, stream.ptr)
            stream.synchronize()

        def over_bus() -> None:
            runtime.memcpyAsync(target.data.ptr, pinned.ptr, n_pinned, runtime.memcpyHostToDevice, stream.ptr)
            stream.synchronize()

        copy, bus = measure(on_device, repeats=10), measure(over_bus, repeats=10)
        self.copy_rate, self.bus_rate = 2 * n / copy["seconds"], n_pinned / bus["seconds"]
        return [
            row("copy on the device, 2 GiB, bytes read and written", copy, nbytes=2 * n),
            row("pinned copy to the device, 256 MiB", bus, nbytes=n_pinned),
        ]


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


def cells(pack: Pack, windows: tuple[int, ...], device: str) -> Iterator[Windows]:
    for window in windows:
        found = Windows.find(pack, window, device)
        for batch_size in BATCHES:
            yield replace(found, batch_size=batch_size)


def beside_copy(rows: list[Row]) -> list[Row]:
    """On the CPU: how fast each is, of the plain copy at the same batch."""
    plain = {r["batch"]: r["seconds"] for r in rows if r["name"].startswith("plain copy") and "seconds" in r}
    for r in rows:
        if "seconds" in r and r["batch"] in plain:
            r["of_copy"] = plain[r["batch"]] / r["seconds"]
    return rows


def title(shape: str, nbytes: int) -> str:
    return f"{shape}, {nbytes // MIB} MiB of rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--only", choices=("main", "grid", "fused", "first"), action="append", help="some parts")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement [%(default)s]")
    parser.add_argument("--small", type=int, help="MiB of the rows in the cache [32, on the CPU 8]")
    parser.add_argument("--large", type=int, default=512, help="MiB of the rows beyond the cache [%(default)s]")
    parser.add_argument("--no-save", action="store_true", help="leave the result file as it is")
    options = parser.parse_args()
    device = ("cuda" if count_devices() else "cpu") if options.device == "auto" else options.device
    where, failed = Machine(device), []
    tables: dict[str, list[Row]] = {}
    only = options.only or (["main", "grid", "fused", "first"] if device == "cuda" else ["main"])
    sizes = [(options.small or (32 if device == "cuda" else 8)) * MIB, options.large * MIB]
    print(machine())
    if device == "cuda":
        tables["Ceilings"] = where.measure_ceilings()
        show("Ceilings", tables["Ceilings"])
    if "first" in only and device == "cuda":
        try:
            tables[COLD] = first_batches()
        except RuntimeError as error:
            failed.append(f"{COLD}: {error}")
        else:
            show(COLD, tables[COLD])
    window, main_columns = MAIN
    for n_columns, nbytes in itertools.product(COLUMNS, sizes):
        is_main = n_columns == main_columns
        if not ("grid" in only or (is_main and {"main", "fused"} & set(only))):
            continue
        pack, what = bars(nbytes, n_columns), (device, nbytes == sizes[1])
        if is_main and "main" in only:
            rows = [measured(peer, w, where, options.seconds) for w in cells(pack, (window,), device)
                    for peer in everybody(*what)]  # fmt: skip
            tables[title(f"{window} x {n_columns}", nbytes)] = rows if device == "cuda" else beside_copy(rows)
        if is_main and "fused" in only and nbytes == sizes[1]:
            w = replace(Windows.find(pack, window, device), batch_size=BATCHES[-1])
            tables["Fused"] = [measured(peer, w, where, options.seconds) for peer in fused(device)]
        if "grid" in only:
            others = tuple(one for one in WINDOWS if not (is_main and one == window))
            rows = [measured(peer, w, where, options.seconds) for w in cells(pack, others, device)
                    for peer in strongest(device)]  # fmt: skip
            tables.setdefault(title("Other shapes", nbytes), []).extend(rows)
        del pack
    if not options.no_save:
        print("\nwritten:", save("serve" if device == "cuda" else "serve_cpu", tables))
    failed += [f"{r['name']}: {r['error']}" for rows in tables.values() for r in rows if "error" in r]
    if failed:
        sys.exit("\n  ".join([f"{len(failed)} failed:", *failed]))


if __name__ == "__main__":
    main()
