"""One resident copy for many trainers against as many that load for themselves, in one run.

1, 2, 4 and 8 processes attach to a service; as many stage the pack for themselves; as many read it through torch's
DataLoader, and through TensorSocket, where these are installed. Measured are seconds from a warm process (imports and
CUDA context done) to the first batch, bytes in use, and samples a second, each and together.

python benchmarks/service.py                        # a pack of 15 GiB: 50 GB of disk
python benchmarks/service.py --pack bars.pack       # this pack
python benchmarks/service.py --gib 0.25 --device cpu
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from harness import measure, row, save
from peers import LeftOutError
from stage import N_COLUMNS, bars_table

import stager
from stager import Stager, Target, attach
from stager.batches.devices import count_devices
from stager.errors import StagingMemoryError
from stager.service import asking

WINDOW, BATCH, EPOCH_BATCHES = 64, 256, 512
BLOCK_NBYTES, N_SYMBOLS = 1 << 30, 500
ANSWER_SECONDS = 90
MODES = {"service": "attached to a service", "own": "each for itself", "torch": "torch DataLoader each",
         "socket": "TensorSocket"}  # fmt: skip
NEEDS = {"torch": "torch", "socket": "tensorsocket"}


# ------------------------------------------------------------------------------- a trainer


def windows_loader(pack: str, pin_memory: bool = False) -> Any:
    """torch's loader of shuffled windows of the mapped rows."""
    import torch

    rows = np.load(Path(pack) / "segment-0" / "rows.npy", mmap_mode="r")

    class Windows(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return len(rows) - WINDOW

        def __getitem__(self, index: int) -> Any:
            return (torch.from_numpy(np.array(rows[index : index + WINDOW])),)

    # Drawing is not what is measured: torch's own sampler would permute all of the rows first. Epochs are short: a
    # consumer of TensorSocket that comes late waits for the next one.
    sampler = torch.utils.data.RandomSampler(Windows(), replacement=True, num_samples=EPOCH_BATCHES * BATCH)
    return torch.utils.data.DataLoader(Windows(), BATCH, sampler=sampler, num_workers=2, pin_memory=pin_memory)


class Trainer:
    """What a process does; it is told line by line by the parent, and answers with JSON."""

    def __init__(self, mode: str, pack: str, device: str) -> None:
        self.mode, self.pack, self.device = mode, pack, device
        self.xp: Any = np
        if device != "cpu":
            import cupy

            self.xp = cupy
            cupy.zeros(1).sum().item()  # the context, and its first kernel
        pa.array([0.0]).to_numpy()  # imports pandas where it is installed
        if mode in NEEDS:
            importlib.import_module(NEEDS[mode])

    def load(self) -> dict[str, Any]:
        """To the first batch; the building of the trainer's own tables is told apart."""
        begun = time.perf_counter()
        told: dict[str, Any] = {}
        if self.mode in ("service", "own"):
            resident = attach("bench") if self.mode == "service" else stager.stage(self.pack, device=self.device)
            rows = time.perf_counter()
            self.st = Stager(resident, window=WINDOW, target=Target(horizon=5), batch_size=BATCH, seed=os.getpid())
            tables = time.perf_counter()
            self.batches = self.endless()
            told |= {"rows": rows - begun, "tables": tables - rows}
        else:
            self.batches = self.loader() if self.mode == "torch" else self.consumer()
        self.wait(next(self.batches))
        return told | {"first": time.perf_counter() - begun}

    def endless(self) -> Iterator[Any]:
        epoch = 0
        while True:
            for batch in self.st.batches(epoch):
                yield batch.x
            epoch += 1

    def loader(self) -> Iterator[Any]:
        loader = windows_loader(self.pack, pin_memory=self.device != "cpu")
        while True:
            for (batch,) in loader:
                yield batch.to("cpu" if self.device == "cpu" else "cuda", non_blocking=True)

    def consumer(self) -> Iterator[Any]:
        from tensorsocket import TensorConsumer

        consumer = TensorConsumer(batch_size=BATCH)
        while True:
            for (batch,) in consumer:
                yield batch

    def wait(self, x: Any) -> None:
        if self.xp is not np:
            self.xp.cuda.runtime.deviceSynchronize()
        del x

    def run(self, seconds: float) -> dict[str, Any]:
        """Samples a second, over so many seconds."""
        n, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            for _ in range(16):
                x = next(self.batches)
                n += len(x)
            if self.mode in NEEDS:
                self.wait(x)
        self.wait(x)
        elapsed = time.perf_counter() - begun
        return {"samples_per_second": n / elapsed}


def trainer_main(mode: str, pack: str, device: str) -> None:
    trainer = Trainer(mode, pack, device)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        try:
            answer = trainer.load() if word == "load" else trainer.run(float(argument))
        except StagingMemoryError as error:
            answer = {"error": f"does not fit: {error}"}
        print(json.dumps(answer), flush=True)


# -------------------------------------------------------------------------------- the parent


class Process:
    """A trainer's process; its first answer is its pid, once it is warm."""

    def __init__(self, mode: str, pack: Path, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--trainer", mode, "--pack", str(pack), "--device", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        if not line and not timer.is_alive():
            raise LeftOutError(f"a trainer had no batch in {ANSWER_SECONDS} s")
        timer.cancel()
        if not line:
            raise RuntimeError(f"a trainer ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LeftOutError(answer["error"])
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def used_nbytes(device: str, pids: list[int]) -> int:
    """Bytes in use: of the GPU; on the CPU of the processes, shared pages divided by those that share them."""
    if device == "cpu":
        found = 0
        for pid in pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    found += int(line.split()[1]) * 1024
        return found
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20


@contextmanager
def service(pack: Path, device: str, *options: str) -> Iterator[int]:
    """A service that holds the pack as "bench"; its process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STAGER_SERVICE_SOCKET"] = f"{folder}/s.sock"
        command = [sys.executable, "-m", "stager.cli", "serve", f"bench={pack}", "--device", device, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            if not any(line.startswith("serving on") for line in process.stdout):
                raise RuntimeError("the service did not start")
            yield process.pid
        finally:
            process.terminate()
            process.communicate()


def trial(
    mode: str, n: int, pack: Path, device: str, seconds: float, baseline: int, others: list[int]
) -> dict[str, Any]:
    """`n` trainers of one kind, loaded at once, then serving at once."""
    name = f"{MODES[mode]}, {n}"
    trainers = [Process(mode, pack, device) for _ in range(n)]
    try:
        pids = [one.answer()["pid"] for one in trainers]
        for one in trainers:
            one.say("load")
        loads = [one.answer() for one in trainers]
        for one in trainers:
            one.say(f"run {seconds / 3}")  # warm
        for one in trainers:
            one.answer()
        used = used_nbytes(device, pids + others) - baseline
        for one in trainers:
            one.say(f"run {seconds}")
        rates = [one.answer()["samples_per_second"] for one in trainers]
    except LeftOutError as reason:
        return {"name": name, "left_out": str(reason)}
    finally:
        for one in trainers:
            one.end()
    firsts = [one["first"] for one in loads]
    timing = {"seconds": statistics.median(firsts), "min": min(firsts), "max": max(firsts), "n": n}
    facts: dict[str, Any] = {"used_gib": used / 2**30, "each": statistics.median(rates), "together": sum(rates)}
    if "tables" in loads[0]:
        # Of these, what the client has to itself.
        facts["tables_seconds"] = statistics.median(one["tables"] for one in loads)
        facts["besides_seconds"] = statistics.median(one["first"] - one["tables"] for one in loads)
    return row(name, timing, **facts)


def made_bars(nbytes: int) -> pa.Table:
    """Bars whose rows take so many bytes: blocks of 500 symbols that hold the same values, under other names."""
    n_blocks = -(-nbytes // BLOCK_NBYTES)
    block = bars_table(nbytes // n_blocks // (4 * N_COLUMNS), N_SYMBOLS, N_COLUMNS).combine_chunks()
    names = [f"SYM{index:05d}" for index in range(n_blocks * N_SYMBOLS)]
    indices = block["symbol"].chunk(0).indices.to_numpy()
    symbols = [
        pa.DictionaryArray.from_arrays(pa.array(indices + np.int32(k * N_SYMBOLS)), names) for k in range(n_blocks)
    ]
    others = {name: pa.chunked_array(block[name].chunks * n_blocks) for name in block.column_names[1:]}
    return pa.table({"symbol": pa.chunked_array(symbols), **others})


def attaching(n: int = 200) -> dict[str, Any]:
    """To attach and let go again, in one process, which has what it needs imported."""
    return row(
        "attach", measure(lambda: attach("bench"), repeats=n, warm_up=5, after=lambda resident: resident.close())
    )


def asking_for_stats(n: int = 500) -> dict[str, Any]:
    return row("connect, ask for statistics, close", measure(asking.stats, repeats=n, warm_up=5))


def ceiling(device: str) -> float:
    """Bytes a second that a plain copy writes."""
    nbytes = 1 << 30
    if device == "cpu":
        source, target = (np.ones(nbytes // 4, np.float32) for _ in range(2))
        return nbytes / measure(lambda: np.copyto(target, source), repeats=3)["seconds"]
    code = (
        "import cupy; s=cupy.ones(1<<30,'u1'); t=cupy.empty_like(s); e=[cupy.cuda.Event() for _ in '12']\n"
        "for _ in range(3):\n e[0].record(); cupy.copyto(t,s); e[1].record(); e[1].synchronize()\n"
        "print(cupy.cuda.get_elapsed_time(*e)/1e3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return nbytes / float(done.stdout)


@contextmanager
def producer(pack: Path) -> Iterator[int]:
    """TensorSocket's side that loads, whose consumers get what it sends; its process."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import service\nfrom tensorsocket import TensorProducer\n"
        # It keeps the last batches for those that join a little later: of 10 KiB a window 0.5 GB.
        "producer = TensorProducer(service.windows_loader(sys.argv[2]), rubber_band_pct=0.4)\n"
        "while True:\n    for _ in producer: pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(pack)])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", type=Path, help="this pack, of one segment; default: one is made")
    parser.add_argument("--gib", type=float, default=15.0, help="rows of the pack that is made [%(default)s]")
    parser.add_argument("--device", default="cuda:0" if count_devices() else "cpu")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", choices=list(MODES), nargs="+", help="only these; default: all that are installed")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement [%(default)s]")
    parser.add_argument("--folder", type=Path, help="where the pack is made; default: a temporary directory")
    parser.add_argument("--trainer", choices=list(MODES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        trainer_main(options.trainer, str(options.pack), options.device)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        pack = options.pack
        if pack is None:
            pack = Path(folder) / "bars.pack"
            stager.pack(made_bars(int(options.gib * 2**30)), pack)
        opened = stager.open_pack(pack)
        gib, one_sample = opened.rows_nbytes / 2**30, 4 * WINDOW * len(opened.columns)
        where = "on a GPU" if options.device != "cpu" else "on a CPU"
        copied = ceiling(options.device)
        print(f"copy ceiling: {copied / 1e9:.1f} GB/s written, {copied / one_sample:,.0f} samples/s")
        rows: list[dict[str, Any]] = []

        def note(made: dict[str, Any]) -> None:
            """Keep each as it is measured, so that a run that is ended leaves what it has."""
            if "together" in made:
                made["of_copy"] = made["together"] * one_sample / copied
            rows.append(made)
            save("service", {f"Trainers, {gib:.3g} GiB {where}": rows})
            print({key: round(value, 4) if isinstance(value, float) else value for key, value in made.items()})

        baseline = used_nbytes(options.device, [])
        modes = options.modes or [one for one in MODES if one not in NEEDS or importlib.util.find_spec(NEEDS[one])]

        def run(mode: str, n: int, *others: int) -> None:
            note(trial(mode, n, pack, options.device, options.seconds, baseline, list(others)))

        for mode in modes:
            if mode == "service":
                with service(pack, options.device) as server:
                    small = [attaching(), asking_for_stats()]
                    save("service", {f"Requests {where}": small})
                    print(*small, sep="\n")
                    for n in options.trainers:
                        run(mode, n, server)
            elif mode == "socket":
                for n in options.trainers:
                    with producer(pack) as sending:
                        run(mode, n, sending)
            else:
                for n in options.trainers:
                    run(mode, n)


if __name__ == "__main__":
    main()
