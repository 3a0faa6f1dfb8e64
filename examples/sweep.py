"""Sweep hyper-parameters: eight processes train on one copy of the bars, which a service holds.

Each process attaches to the pack, trains the classifier of train.py with rates and sizes of its own, and judges it on
the last quarter of the history. Without --name a service is started for the sweep and ended after it.

    python examples/sweep.py bars.pack
    stager serve bars.pack &  python examples/sweep.py --name bars
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from train import BATCH, HORIZON, WINDOW, Classifier, accuracy, array_module, features_of

from stager import PurgedKFold, Stager, Target, attach

RATES, SIZES = (3e-4, 1e-3, 2e-3, 5e-3), (8, 32)


def train(job: tuple[str, int, float, int]) -> dict[str, Any]:
    """Runs in a process of its own."""
    name, n_epochs, rate, n_hidden = job
    started = time.perf_counter()
    with attach(name) as resident:
        attached = time.perf_counter() - started
        target = Target("close", horizon=HORIZON, kind="direction", classes=2)
        st = Stager(resident, window=WINDOW, target=target, batch_size=BATCH, seed=7)
        fold = st.split(PurgedKFold(4))[-1]
        xp = array_module(resident)
        model = Classifier(xp, WINDOW - 1, n_hidden)
        n_samples, started = 0, time.perf_counter()
        for epoch in range(n_epochs):
            for batch in fold.train.batches(epoch):
                model.step(features_of(batch.x), (batch.y > 0).astype(xp.float32), rate)
                n_samples += len(batch)
        seconds = time.perf_counter() - started
        return {
            "rate": rate, "hidden": n_hidden, "accuracy": accuracy(model, fold.test), "attached": attached,
            "samples_per_second": n_samples / seconds, "process": os.getpid(),
        }  # fmt: skip


@contextmanager
def service(pack: str, device: str) -> Iterator[str]:
    """A service for this sweep alone; the name of the pack in it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STAGER_SERVICE_SOCKET"] = f"{folder}/s.sock"
        command = [sys.executable, "-m", "stager.cli", "serve", f"sweep={pack}", "--device", device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for line in process.stdout or ():
                if line.startswith("serving on"):
                    break
            else:
                raise SystemExit("the service did not start")
            yield "sweep"
        finally:
            process.terminate()
            process.communicate()


def sweep(name: str, n_processes: int, n_epochs: int) -> list[dict[str, Any]]:
    """The results, best first."""
    jobs = [(name, n_epochs, rate, n_hidden) for rate, n_hidden in product(RATES, SIZES)]
    # Spawned, not forked: CUDA and gRPC don't survive a fork.
    with multiprocessing.get_context("spawn").Pool(n_processes) as pool:
        return sorted(pool.imap_unordered(train, jobs), key=lambda result: -result["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", nargs="?", help="a pack, for which a service is started")
    parser.add_argument("--name", help="instead: the name of a pack in a service that runs")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="auto", help="of the service: auto, cpu or cuda:N [%(default)s]")
    options = parser.parse_args()
    if (options.pack is None) == (options.name is None):
        parser.error("give a pack, or the --name of one that a service holds")
    if options.name is not None:
        results = sweep(options.name, options.processes, options.epochs)
    else:
        with service(str(Path(options.pack).absolute()), options.device) as name:
            results = sweep(name, options.processes, options.epochs)
    print(f"{'rate':>7}  {'hidden':>6}  {'accuracy':>8}  {'attached in':>11}  samples/s")
    for one in results:
        print(
            f"{one['rate']:>7.4f}  {one['hidden']:>6}  {one['accuracy']:>8.1%}  {one['attached'] * 1e3:>8.1f} ms  "
            f"{one['samples_per_second']:,.0f}"
        )
    print(f"{len(results)} trainings in {len({one['process'] for one in results})} processes, one copy of the bars")


if __name__ == "__main__":
    main()
