"""Staging against what people do today, in one run: pack to GPU, many arrays, CSV to GPU, and batches on NumPy.

python benchmarks/stage.py            # about five minutes on an H200; without a GPU only the NumPy part
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from harness import measure, row, save, show

import stager
from stager import Stager
from stager.batches.devices import count_devices
from stager.batches.smoke import ARRAY_SHAPE, N_ARRAYS
from stager.cuda.upload import N_LANES, RING_CORES

N_COLUMNS = 40


def bars_table(n_rows: int, n_symbols: int, n_columns: int) -> pa.Table:
    """Minute bars in time order, symbols interleaved; five columns and further ones."""
    rng = np.random.default_rng(7)
    n_minutes = n_rows // n_symbols
    minute = np.repeat(np.arange(n_minutes), n_symbols)
    symbol = np.tile(np.arange(n_symbols, dtype=np.int32), n_minutes)
    close = np.round(100 + rng.random(len(minute)) * 10, 4)
    columns = {
        "open": close - 0.25,
        "high": close + 0.5,
        "low": close - 0.5,
        "close": close,
        "volume": rng.integers(1, 100_000, len(minute)).astype(np.float64),
    }
    for index in range(n_columns - 5):
        columns[f"feature_{index}"] = close * (index + 1)
    times = (minute * 60 + 1_704_067_200).astype("datetime64[s]")
    names = [f"SYM{index:04d}" for index in range(n_symbols)]
    return pa.table(
        {
            "symbol": pa.DictionaryArray.from_arrays(pa.array(symbol), names),
            "time": pa.array(times).cast(pa.timestamp("s", "UTC")),
            **columns,
        }
    )


def _pack(table: pa.Table, out: Path) -> dict[str, Any]:
    return measure(lambda: stager.pack(table, out, overwrite=True), repeats=1, warm_up=0)


def pack_to_gpu(folder: Path, n_gib: float) -> list[dict[str, Any]]:
    import cupy
    import torch
    from cupy.cuda import runtime

    from stager.cuda import staging, upload
    from stager.cuda.driver import CudaDriver
    from stager.cuda.pages import cut
    from stager.cuda.watch import Watch

    n_rows = int(n_gib * 2**30 / (4 * N_COLUMNS))
    packing = _pack(bars_table(n_rows, 500, N_COLUMNS), folder / "bars.pack")
    path = folder / "bars.pack"
    file = path / "segment-0" / "rows.npy"
    nbytes = stager.open_pack(path).rows.nbytes
    pinned, target = cupy.cuda.PinnedMemory(1 << 30), cupy.cuda.Memory(1 << 30)

    def pinned_copy() -> None:
        runtime.memcpyAsync(target.ptr, pinned.ptr, 1 << 30, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()

    stream = cupy.cuda.Stream(non_blocking=True)
    raw = measure(pinned_copy, repeats=10)
    ceiling = (1 << 30) / raw["seconds"] / 1e9

    def timed(name: str, function: Any, after: Any = None, repeats: int = 5) -> dict[str, Any]:
        timing = measure(function, after=after, repeats=repeats)
        return row(name, timing, nbytes=nbytes, of_ceiling=nbytes / timing["seconds"] / 1e9 / ceiling)

    def sync() -> None:
        cupy.cuda.Device(0).synchronize()

    def asarray() -> Any:
        array = cupy.asarray(np.load(file))
        sync()
        return array

    def from_numpy() -> Any:
        tensor = torch.from_numpy(np.load(file)).cuda()
        torch.cuda.synchronize()
        return tensor

    def free(_: Any) -> None:
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()

    def forced(n_cores: int) -> Any:
        watch = Watch(nbytes, 60)
        return staging.to_device(rows, CudaDriver(0), watch, read_only=True, n_cores=n_cores)

    def ours(**how: Any) -> Any:
        return stager.stage(path, device="cuda", **how)

    def close(staged: Any) -> None:
        staged.close()

    def drop_cache() -> None:
        # Only pages that no mapping holds are dropped, so this comes before any is opened for good.
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    cold = []
    for _ in range(2):
        drop_cache()
        cold.append(measure(ours, after=close, repeats=1, warm_up=0)["seconds"])
    rows = np.asarray(stager.open_pack(path).rows)
    float(rows[::16].sum())  # into the page cache
    memory_of = [cupy.cuda.Memory(nbytes)]
    driver = CudaDriver(0)
    registration = upload.Registration(rows, driver)
    registration.register(Watch(nbytes, 60), read_only=True)

    def transfer() -> None:
        for piece in cut(rows.ctypes.data, nbytes):
            n = piece.stop - piece.first
            runtime.memcpyAsync(memory_of[0].ptr + piece.first, rows.ctypes.data + piece.first, n, 1, stream.ptr)
        stream.synchronize()

    results = [row("raw pinned copy (the ceiling)", raw, nbytes=1 << 30, of_ceiling=1.0)]
    transfer_row = timed("the transfer alone, from a registered mapping", transfer)
    registration.release()
    memory_of.clear()
    slowest = {"seconds": float(np.median(cold)), "min": min(cold), "max": max(cold), "n": len(cold)}
    results += [
        transfer_row,
        timed("stager.stage", ours, close),
        timed("stager.stage, placement='host'", lambda: ours(placement="host"), close),
        row(
            "stager.stage, file not in the page cache",
            slowest,
            nbytes=nbytes,
            of_ceiling=nbytes / slowest["seconds"] / 1e9 / ceiling,
        ),
        timed(f"the copy alone, pinned ring of {N_LANES} lanes", lambda: forced(N_LANES)),
        timed("the copy alone, registered piece by piece", lambda: forced(RING_CORES - 1)),
        timed("np.load + cupy.asarray", asarray, free),
        timed("torch.from_numpy(np.load).cuda()", from_numpy, free),
        row("stager.pack of the same bars, for scale", packing, nbytes=nbytes),
    ]
    return results


def many_arrays() -> list[dict[str, Any]]:
    import cupy
    import torch
    from cupy.cuda import runtime

    rng = np.random.default_rng(7)
    arrays = [rng.random(ARRAY_SHAPE, np.float32) for _ in range(N_ARRAYS)]
    nbytes = sum(array.nbytes for array in arrays)

    def malloc_each() -> list[int]:
        pointers = []
        for array in arrays:
            pointer = runtime.malloc(array.nbytes)
            runtime.memcpy(pointer, array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice)
            pointers.append(pointer)
        return pointers

    def asarray_each() -> list[Any]:
        staged = [cupy.asarray(array) for array in arrays]
        cupy.cuda.Device(0).synchronize()
        return staged

    def cuda_each() -> list[Any]:
        staged = [torch.from_numpy(array).cuda() for array in arrays]
        torch.cuda.synchronize()
        return staged

    def release(staged: Any) -> None:
        staged.release()

    def free_each(pointers: list[int]) -> None:
        for pointer in pointers:
            runtime.free(pointer)

    ours = measure(lambda: stager.stage_arrays(arrays, device="cuda"), after=release)
    rows = [
        row(f"stager.stage_arrays, {N_ARRAYS:,} arrays", ours, nbytes=nbytes),
        row("cudaMalloc + cudaMemcpy each", measure(malloc_each, after=free_each, repeats=3), nbytes=nbytes),
        row("cupy.asarray each", measure(asarray_each, repeats=3), nbytes=nbytes),
        row("torch .cuda() each", measure(cuda_each, repeats=3), nbytes=nbytes),
    ]
    for r in rows:
        r["times_ours"] = r["seconds"] / ours["seconds"]
    return rows


def csv_to_gpu(folder: Path, n_rows: int) -> list[dict[str, Any]]:
    import pandas
    import torch

    file = folder / "bars.csv"
    pa.csv.write_csv(bars_table(n_rows, 500, 5), file)
    nbytes = file.stat().st_size
    names = ["open", "high", "low", "close", "volume"]

    def pandas_torch() -> list[Any]:
        frame = pandas.read_csv(file)
        parts = [
            torch.from_numpy(part[names].to_numpy(np.float32)).cuda() for _, part in frame.groupby("symbol", sort=True)
        ]
        torch.cuda.synchronize()
        return parts

    alone = measure(lambda: pa.csv.read_csv(file))
    rows = [
        row("pyarrow.csv.read_csv alone", alone, nbytes=nbytes),
        row("stager.stage(bars.csv), sorted and checked", measure(
            lambda: stager.stage(file, device="cuda"), after=lambda staged: staged.close()), nbytes=nbytes),
        row("stager.read alone", measure(lambda: stager.read(file), repeats=3), nbytes=nbytes),
        row("pandas.read_csv + groupby + torch", measure(pandas_torch, repeats=2, warm_up=0), nbytes=nbytes),
    ]  # fmt: skip
    for r in rows:
        r["of_read_csv"] = r["seconds"] / alone["seconds"]
    return rows


def numpy_batches() -> list[dict[str, Any]]:
    """Batches of 256 windows of 64x8, as a training loop takes them, against copies of as many bytes."""
    rows = []
    for n_rows, where in ((250_000, "rows in the cache, 8 MB"), (16_000_000, "rows beyond the cache, 512 MB")):
        table = bars_table(n_rows, 20, 8)
        with Stager(table, window=64, batch_size=256, seed=7, device="cpu") as st:
            n_batches = min(len(st), 4_000)
            nbytes = 256 * 64 * 8 * 4

            def loop(st: Stager = st, n: int = n_batches) -> None:
                for batch in st.batches(0):
                    if batch.number + 1 == n:
                        break

            flat = np.asarray(st.resident.rows).reshape(-1)
            rng = np.random.default_rng(1)
            starts = rng.integers(0, n_rows - 64, (n_batches, 256)) * 8
            target = np.empty((256, 512), np.float32)

            def copy(flat: Any = flat, n: int = n_batches) -> None:
                step = 256 * 512
                places = len(flat) // step
                for i in range(n):
                    first = (i % places) * step
                    flat[first : first + step].copy()

            def each(flat: Any = flat, starts: Any = starts, target: Any = target) -> None:
                for batch in starts[:400]:
                    for i, first in enumerate(batch.tolist()):
                        target[i] = flat[first : first + 512]

            ours, plain, single = measure(loop), measure(copy), measure(each, repeats=3)
            plain_rate = nbytes * n_batches / plain["seconds"]
            for name, timing, n in (
                (f"Stager.batches, {where}", ours, n_batches),
                (f"plain copy of as many bytes in a row, {where}", plain, n_batches),
                (f"a Python loop over samples, {where}", single, 400),
            ):
                scaled = {k: v / n if k != "n" else v for k, v in timing.items()}
                rate = nbytes * n / timing["seconds"]
                rows.append(row(name, scaled, nbytes=nbytes, of_copy=rate / plain_rate))
    return rows


PARTS: dict[str, tuple[str, Callable[[Path, argparse.Namespace], list[dict[str, Any]]]]] = {
    "numpy": ("Batches on NumPy", lambda folder, options: numpy_batches()),
    "arrays": ("Many arrays to the GPU", lambda folder, options: many_arrays()),
    "csv": ("CSV to the GPU", lambda folder, options: csv_to_gpu(folder, options.csv_rows)),
    "pack": ("Pack to the GPU", lambda folder, options: pack_to_gpu(folder, options.gib)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.25, help="size of the pack's rows [%(default)s]")
    parser.add_argument("--csv-rows", type=int, default=10_000_000, help="[%(default)s]")
    parser.add_argument("--only", choices=PARTS, help="one part; the result file keeps the others")
    options = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    has_gpu = count_devices() > 0
    with tempfile.TemporaryDirectory() as name:
        for part, (title, run) in PARTS.items():
            if options.only in (None, part) and (has_gpu or part == "numpy"):
                tables[title] = run(Path(name), options)
                show(title, tables[title])
    if has_gpu:
        print("\nwritten:", save("stage", tables))
    else:
        print("\nno GPU: the other parts, and the result file, need one")


if __name__ == "__main__":
    main()
