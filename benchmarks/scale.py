"""Past one process: packing on a Dask cluster of one and two workers, and serving from two GPUs.

Without GPUs only the first part is measured, and of each worker one thread on a core of its own. Rows are those of
benchmarks/pack.py, a file a day. DDP is examples/ddp.py, where torch is installed.

python benchmarks/scale.py                         # 200 million rows; half an hour, 40 GB of disk
python benchmarks/scale.py --rows 2e7 --repeats 3  # some minutes, 5 GB
python benchmarks/scale.py --parts gpu             # on a machine of two GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from harness import row, save, show
from pack import MINUTES, N_SYMBOLS, make
from random_bars import random_bars
from service import service

import stager
from stager.batches.devices import count_devices
from stager.config import parse_nbytes

TESTS = Path(__file__).parents[1] / "tests"
DDP = Path(__file__).parents[1] / "examples" / "ddp.py"
WINDOW, BATCH, COLUMNS = 64, 4096, 8
# Blocks on all GPUs that a service holds, for all ranks.
SHARED = "spread by a service"
SECONDS = 5.0

# -------------------------------------------------------------------------------- packing


@contextmanager
def workers(folder: Path, n: int) -> Iterator[str]:
    """A cluster of so many workers, each of one thread on a core of its own; its address."""
    sys.path.insert(0, str(TESTS))
    from dask_fixtures import dask_cluster

    cores = sorted(os.sched_getaffinity(0))
    one_thread = {"OMP_NUM_THREADS": "1"}
    with dask_cluster(folder, 0) as cluster:
        for number in range(n):
            process = cluster.start_worker("4GiB", **one_thread)
            os.sched_setaffinity(process.pid, {cores[number % len(cores)]})
        from distributed import Client

        with Client(cluster.address) as client:
            client.wait_for_workers(n, timeout=60)
            # Importing is not packing.
            client.run(__import__, "stager.cluster.tasks")
        yield cluster.address


def packed_by_cluster(files: list[str], out: Path, memory: int, n: int) -> float:
    from stager.cluster.packing import pack_on

    with workers(out.with_name("dask"), n) as address:
        started = time.perf_counter()
        pack_on(address, files, out, memory_nbytes=memory)
        return time.perf_counter() - started


def packed_here(files: list[str], out: Path, memory: int, n_cores: int | None) -> float:
    """In a process of its own, on so many cores."""
    code = (
        "import os, sys, time\n"
        "n = int(sys.argv[3])\n"
        "if n: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n])\n"
        "import stager\n"
        "started = time.perf_counter()\n"
        "stager.pack(sys.argv[4:], sys.argv[1], memory_nbytes=int(sys.argv[2]))\n"
        "print(time.perf_counter() - started)\n"
    )
    command = [sys.executable, "-c", code, str(out), str(memory), str(n_cores or 0), *files]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def packing(folder: Path, n_rows: float, memory: int, repeats: int) -> tuple[str, list[dict[str, Any]]]:
    paths = make(folder, n_rows, "daily", ".csv")
    files, n = list(map(str, paths)), max(1, round(n_rows / (N_SYMBOLS * MINUTES))) * N_SYMBOLS * MINUTES
    nbytes = sum(path.stat().st_size for path in paths)
    contestants: dict[str, Callable[[Path], float]] = {
        "stager.pack, one core": lambda out: packed_here(files, out, memory, 1),
        "stager.pack, all cores": lambda out: packed_here(files, out, memory, None),
        "--cluster, 1 worker of one thread": lambda out: packed_by_cluster(files, out, memory, 1),
        "--cluster, 2 workers of one thread": lambda out: packed_by_cluster(files, out, memory, 2),
    }
    told: dict[str, list[float]] = {name: [] for name in contestants}
    fingerprints = set()
    for _ in range(repeats):
        for name, run in contestants.items():
            out = folder / "out.pack"
            told[name].append(run(out))
            fingerprints.add(stager.open_pack(out).fingerprint)
            shutil.rmtree(out)
            shutil.rmtree(folder / "dask", ignore_errors=True)
            print(f"{name}: {told[name][-1]:.1f} s", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    if len(fingerprints) != 1:
        raise SystemExit(f"the packs differ: {fingerprints}")
    rows = [row(name, _timing(seconds), nbytes=nbytes, mrows=n / statistics.median(seconds) / 1e6)
            for name, seconds in told.items()]  # fmt: skip
    one = next(each for each in rows if "1 worker" in each["name"])
    for each in rows:
        each["of_one_worker"] = one["seconds"] / each["seconds"]
    return f"{n / 1e6:.0f} million rows packed by workers, a file a day, csv", rows


def _timing(seconds: list[float]) -> dict[str, Any]:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "n": len(seconds)}


# -------------------------------------------------------------------------------- GPUs


def serve(rank: int, world_size: int, pack: str, placement: str, folder: str) -> None:
    """Runs in a process of its own: stages on the GPU of its rank and serves as long as the others do."""
    import cupy

    from stager import Ranks, Stager

    with cupy.cuda.Device(rank):
        _together(Path(folder), "stage", rank, world_size)
        started = time.perf_counter()
        device = f"cuda:{rank}"
        if placement == SHARED:
            opened = stager.attach("bench", device=device)
        else:
            opened = stager.stage(pack, device=device, placement=placement)  # type: ignore[arg-type]
        with opened as resident:
            staged = time.perf_counter() - started
            st = Stager(resident, window=WINDOW, batch_size=BATCH, ranks=Ranks(rank, world_size, rank), last="pad")
            for batch in st.batches(0):
                batch.x.data  # noqa: B018 - the first batches, untimed
                if batch.number == 100:
                    break
            cupy.cuda.Device().synchronize()
            _together(Path(folder), "serve", rank, world_size)
            n_batches, epoch, started = 0, 1, time.perf_counter()
            while time.perf_counter() - started < SECONDS:
                for _ in st.batches(epoch):
                    n_batches += 1
                    if not n_batches % 256 and time.perf_counter() - started > SECONDS:
                        break
                epoch += 1
            cupy.cuda.Device().synchronize()
            seconds = time.perf_counter() - started
    told = {"rate": n_batches * BATCH / seconds, "staged": staged, "nbytes": resident.pack.rows_nbytes}
    print(json.dumps(told))


def _together(folder: Path, what: str, rank: int, world_size: int) -> None:
    """Wait until all ranks are here."""
    (folder / f"{what}-{rank}").touch()
    while len(list(folder.glob(f"{what}-*"))) < world_size:
        time.sleep(0.001)


def served(pack: Path, n: int, placement: str) -> list[dict[str, Any]]:
    """What each of `n` ranks tells."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", str(pack), placement, folder]
        ranks = [
            subprocess.Popen([*command, str(rank), str(n)], stdout=subprocess.PIPE, text=True) for rank in range(n)
        ]
        told = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"placement {placement!r} on {n} ranks failed, see above")
    return [json.loads(one.splitlines()[-1]) for one in told]


def gpus(folder: Path, nbytes: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pack = folder / "bars.pack"
    stager.pack(random_bars(nbytes, COLUMNS), pack)
    staging, gathers = [], []
    for placement, numbers in {"device": (1, 2), "spread": (1,), SHARED: (1, 2), "host": (1, 2)}.items():
        base = 0.0
        for n in numbers:
            with service(pack, "cuda:0", "--placement", "spread") if placement == SHARED else nullcontext():
                runs = [served(pack, n, placement) for _ in range(repeats)]
            slowest = [max(rank["staged"] for rank in run) for run in runs]
            staging.append(row(f"stage, placement {placement!r}, {n} ranks", _timing(slowest),
                               nbytes=n * runs[0][0]["nbytes"]))  # fmt: skip
            rates = [sum(rank["rate"] for rank in run) for run in runs]
            base = base or statistics.median(rates)
            timing = _timing([n * BATCH / rate for rate in rates])
            gathers.append(row(f"serve, placement {placement!r}, {n} ranks", timing,
                               nbytes=n * BATCH * WINDOW * COLUMNS * 4, together=statistics.median(rates),
                               of_one_rank=statistics.median(rates) / base))  # fmt: skip
    tables = {"Two GPUs, staging": staging, "Two GPUs, batches": gathers}
    if trained := ddp(pack, repeats):
        tables["Two GPUs, DDP"] = trained
    shutil.rmtree(folder)
    return tables


def ddp(pack: Path, repeats: int) -> list[dict[str, Any]]:
    """Samples a second of examples/ddp.py on one rank and on two, of as many samples each."""
    rows: list[dict[str, Any]] = []
    for n in (1, 2):
        rates = []
        for _ in range(repeats):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
            command += [str(DDP), str(pack), "--batch", str(16384 * n), "--epochs", "3"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"examples/ddp.py: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return []
            # The first epoch warms up.
            found = re.findall(r"^ +[12] +[\d.]+ +[\d.]+% +([\d,]+)$", done.stdout, re.MULTILINE)
            rates.append(max(float(one.replace(",", "")) for one in found))
        timing = _timing([16384 * n / rate for rate in rates])
        rows.append(row(f"examples/ddp.py, {n} ranks", timing, together=statistics.median(rates)))
    for each in rows:
        each["of_one_rank"] = each["together"] / rows[0]["together"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="pack,gpu")
    parser.add_argument("--rows", type=float, default=2e8, help="to be packed [%(default)s]")
    parser.add_argument("--memory", default="2GiB", help="of each process that packs [%(default)s]")
    parser.add_argument("--resident", default="8GiB", help="of rows on a GPU [%(default)s]")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stager-bench-scale"))
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        pack, placement, folder, rank, world_size = options.serve
        serve(int(rank), int(world_size), pack, placement, folder)
        return
    tables: dict[str, list[dict[str, Any]]] = {}
    parts = options.parts.split(",")
    if "pack" in parts:
        title, rows = packing(options.folder, options.rows, parse_nbytes(options.memory), options.repeats)
        tables[title] = rows
    if "gpu" in parts and count_devices() < 2:
        print(f"{count_devices()} GPUs: what needs two is left out", file=sys.stderr)
    elif "gpu" in parts:
        tables |= gpus(options.folder, parse_nbytes(options.resident), options.repeats)
    for title, rows in tables.items():
        show(title, rows)
    if tables:
        print(f"\n{save('scale', tables)}")


if __name__ == "__main__":
    main()
