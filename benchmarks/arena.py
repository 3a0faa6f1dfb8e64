"""The arena beside other CuPy allocators: time of an allocation and of whole operations, and device bytes.

All allocators are measured in turn in every round of one run; each figure is the median of the rounds with least and
most. Stream and device checks are on. RMM's rows need its wheels.

    python benchmarks/arena.py
    python benchmarks/arena.py --rounds 3 --no-trainer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

sys.path.insert(0, str(Path(__file__).parent))

from harness import save

from stager import Arena
from stager.batches.devices import count_devices

MIB = 1 << 20
SIZES = {"1 kB": 1_000, "48 kB": 48_000, "1 MiB": MIB}
EXAMPLE = Path(__file__).parents[1] / "examples" / "crossasset.py"
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def allocators(capacity: int) -> tuple[dict[str, Scope], dict[str, str]]:
    """Scopes that install an allocator, by name; and what is missing, with the reason."""
    scopes: dict[str, Scope] = {}
    missing: dict[str, str] = {}
    pool = cupy.cuda.MemoryPool()
    scopes["CuPy MemoryPool"] = lambda: cupy.cuda.using_allocator(pool.malloc)
    arena, traced = Arena(capacity), Arena(capacity, trace=True)
    scopes["stager Arena"] = lambda: arena
    scopes["stager Arena, traced"] = lambda: traced
    asynchronous = cupy.cuda.MemoryAsyncPool()
    scopes["CuPy MemoryAsyncPool"] = lambda: cupy.cuda.using_allocator(asynchronous.malloc)
    scopes["cudaMallocAsync"] = lambda: cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    try:
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ImportError as error:
        missing["RMM pool"] = missing["RMM arena"] = f"not installed ({error})"
        return scopes, missing
    upstream = rmm.mr.CudaMemoryResource()
    resources = {
        "RMM pool": rmm.mr.PoolMemoryResource(upstream, initial_pool_size=capacity),
        "RMM arena": rmm.mr.ArenaMemoryResource(upstream, arena_size=capacity),
    }

    @contextlib.contextmanager
    def installed(resource: Any) -> Iterator[None]:
        before = rmm.mr.get_current_device_resource()
        rmm.mr.set_current_device_resource(resource)
        try:
            with cupy.cuda.using_allocator(rmm_cupy_allocator):
                yield
        finally:
            rmm.mr.set_current_device_resource(before)

    for name, resource in resources.items():
        scopes[name] = lambda resource=resource: installed(resource)  # type: ignore[misc]
    return scopes, missing


def fixed(size: int, number: int) -> float:
    """Nanoseconds of an allocation and its release."""
    malloc = cupy.cuda.get_allocator()
    malloc(size)
    return timeit.timeit("malloc(size)", globals={"malloc": malloc, "size": size}, number=number) / number * 1e9


def never_repeating(number: int, seed: int) -> float:
    """Nanoseconds of an allocation among 20 that live, 1 B to 2 MiB."""
    draw = np.random.default_rng(seed)
    sizes, victims = draw.integers(1, 2 * MIB, number).tolist(), draw.integers(0, 20, number).tolist()
    malloc, alive = cupy.cuda.get_allocator(), [None] * 20
    began = time.perf_counter()
    for size, victim in zip(sizes, victims, strict=True):
        alive[victim] = None
        alive[victim] = malloc(size)
    return (time.perf_counter() - began) / number * 1e9


def operation(function: Callable[[], Any], number: int) -> float:
    """Nanoseconds of an operation, the device's work included."""
    function()
    runtime.deviceSynchronize()
    began = time.perf_counter()
    for _ in range(number):
        function()
    runtime.deviceSynchronize()
    return (time.perf_counter() - began) / number * 1e9


def training_step(x: Any) -> Any:
    """2,000 allocations, most of them short-lived, some kept until the end."""
    kept = []
    for number in range(500):
        a = x * 1.5
        b = cupy.tanh(a)
        c = a + b
        kept.append(c.sum())
        if number % 50 == 0:
            kept.append(b)
    return kept


def measure(rounds: int, capacity: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of every allocator; nanoseconds unless named otherwise."""
    scopes, missing = allocators(capacity)
    x = cupy.ones(12_000, cupy.float32)
    figures: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, scope in scopes.items():
            with scope():
                measured = {f"allocation {label}": fixed(size, 20_000) for label, size in SIZES.items()}
                measured["allocation never repeating"] = never_repeating(10_000, number)
                measured["cupy.empty"] = operation(lambda: cupy.empty(12_000, cupy.float32), 5_000)
                measured["cupy.tanh"] = operation(lambda: cupy.tanh(x), 2_000)
                measured["step of 2,000 allocations"] = operation(lambda: training_step(x), 2)
            runtime.deviceSynchronize()
            if number:  # the first round warms up
                for what, value in measured.items():
                    figures.setdefault((what, name), []).append(value)
    rows = [
        {
            "name": what,
            "allocator": name,
            "nanoseconds": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "n": len(values),
            "of_cupys_pool": statistics.median(values) / statistics.median(figures[what, "CuPy MemoryPool"]),
        }
        for (what, name), values in figures.items()
    ]
    return sorted(rows, key=lambda row: list(dict.fromkeys(what for what, _ in figures)).index(row["name"])), missing


def device_bytes(names: list[str]) -> list[dict[str, Any]]:
    """What each allocator takes from the device for one and the same work, in a process of its own."""
    rows = []
    for name in names:
        command = [sys.executable, __file__, "--bytes-of", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, env=_environment())
        rows.append({"name": "work of 20 varying steps", "allocator": name} | json.loads(done.stdout.splitlines()[-1]))
    return rows


def varying_steps(x: Any) -> None:
    draw = np.random.default_rng(9)
    for size in draw.integers(10_000, 400_000, 20).tolist():
        parts = [cupy.tanh(cupy.ones(size, cupy.float32)) for _ in range(12)]
        del parts[::2]
        training_step(x)


def bytes_of(name: str) -> None:
    """Print the bytes that `name` takes for `varying_steps`."""
    x = cupy.ones(12_000, cupy.float32)
    varying_steps(x)  # kernels are loaded before anything is measured
    if name != "stager Arena":
        first = 96 * MIB if name == "RMM arena" else 32 * MIB  # RMM's arena doesn't grow
        print(json.dumps({"device_nbytes": taken(lambda: allocators_one(name, first), x)[0]}))
        return
    with Arena("1MiB") as probe, probe.measure() as need:
        varying_steps(x)
    capacity = -(-need.peak_nbytes // MIB) * MIB
    del probe, need
    while True:  # the smallest whole MiB that holds it all
        nbytes, arena = taken(lambda capacity=capacity: Arena(capacity), x)  # type: ignore[misc]
        if not (overflows := arena.stats().overflows):
            break
        del arena
        capacity += MIB
    print(json.dumps({"device_nbytes": nbytes, "overflows": overflows}))


def taken(allocator: Callable[[], Any], x: Any) -> tuple[int, Any]:
    """Most device bytes that the steps took, looked at all the time from another thread; and the allocator's scope."""
    cupy.get_default_memory_pool().free_all_blocks()
    runtime.deviceSynchronize()
    before = least = runtime.memGetInfo()[0]
    done = threading.Event()

    def look() -> None:
        nonlocal least
        while not done.wait(0.0005):
            least = min(least, runtime.memGetInfo()[0])

    watcher = threading.Thread(target=look)
    watcher.start()
    scope = allocator()
    with scope:
        varying_steps(x)
        runtime.deviceSynchronize()
    done.set()
    watcher.join()
    return int(before - least), scope


def allocators_one(name: str, capacity: int) -> Any:
    """The scope of one allocator without making the others."""
    if name == "CuPy MemoryPool":
        return cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc)
    if name == "CuPy MemoryAsyncPool":
        return cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    if name == "cudaMallocAsync":
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    return allocators(capacity)[0][name]()


def trainer(repeats: int) -> list[dict[str, Any]]:
    """The cross-asset trainer from start to end, with the arena just large enough and with CuPy's own pool."""
    arguments = ["--bars", "6000", "--folds", "3"]
    need = -(-(_train([*arguments, "--arena", "128MiB"])["arena"]["peak_nbytes"]) // MIB)
    variants = {"stager Arena": ["--arena", f"{need}MiB"], "CuPy MemoryPool": ["--pool", "cupy"]}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, options in variants.items():
            results[name].append(_train([*arguments, *options]))
    rows = []
    for name, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        row = {
            "name": "examples/crossasset.py",
            "allocator": name,
            "seconds": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
            "n": repeats,
            "device_nbytes": runs[0]["device_nbytes"],
        }
        if "arena" in runs[0]:
            row |= {"allocations": runs[0]["arena"]["allocations"], "overflows": runs[0]["arena"]["overflows"]}
        rows.append(row)
    return rows


def _train(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        subprocess.run(
            [sys.executable, EXAMPLE, *arguments, "--output", output],
            check=True,
            capture_output=True,
            timeout=500,
            env=_environment(),
        )
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as one table per figure."""
    for what in dict.fromkeys(row["name"] for row in rows):
        print(f"\n{what}")
        for row in (row for row in rows if row["name"] == what):
            text = f"  {row['allocator']:<22}"
            if "nanoseconds" in row:
                units = ((1e6, "ms"), (1e3, "us"), (1, "ns"))
                scale, unit = next(pair for pair in units if row["min"] > 10 * pair[0] or pair[0] == 1)
                low, middle, high = (row[key] / scale for key in ("min", "nanoseconds", "max"))
                text += f"{middle:9.1f} {unit}  ({low:.1f} to {high:.1f}, n {row['n']})"
                text += f"  {row['of_cupys_pool']:.2f} of CuPy's pool"
            if "seconds" in row:
                text += f"{row['seconds']:9.2f} s   ({row['min']:.2f} to {row['max']:.2f}, n {row['n']})"
            if "device_nbytes" in row:
                text += f"{row['device_nbytes'] / MIB:9.1f} MiB of device memory"
            for key in ("allocations", "overflows"):
                if key in row:
                    text += f"  {row[key]:,} {key}"
            print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trainer-rounds", type=int, default=3)
    parser.add_argument("--no-trainer", action="store_true")
    parser.add_argument("--bytes-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not count_devices():
        print("no GPU: the arena is measured on one")
        return
    if options.bytes_of:
        bytes_of(options.bytes_of)
        return
    rows, missing = measure(options.rounds, 256 * MIB)
    names = [name for name in dict.fromkeys(row["allocator"] for row in rows) if "traced" not in name]
    tables = {"allocation": rows, "device_bytes": device_bytes(names)}
    if not options.no_trainer:
        tables["trainer"] = trainer(options.trainer_rounds)
    for table in tables.values():
        show(table)
    for name, reason in missing.items():
        print(f"\n{name}: {reason}")
    print(f"\nwritten to {save('arena', tables)}")


if __name__ == "__main__":
    main()
