"""From a cold start to the first batch on the GPU: in new processes, which have compiled no kernel yet."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from random_bars import random_bars

import stager
from stager import ReadOptions, Stager, Target

ROWS_NBYTES = 128 << 20
PROCESSES = 3
STEPS = (
    "staging, kernels compiled meanwhile",
    "the Stager made: samples found, tables on the GPU",
    "the first batch",
    "the first batch of another epoch",
)


def first_batches() -> list[dict[str, Any]]:
    """What passes in a new process, step by step, until the GPU has done each.

    Raises
    ------
    RuntimeError
        If such a process fails, with what it wrote.
    """
    runs = []
    with tempfile.TemporaryDirectory() as name:
        pack = Path(name) / "bars.pack"
        stager.pack(random_bars(ROWS_NBYTES, 8), pack, read=ReadOptions(interval="1min"))
        for index in range(PROCESSES):
            environment = os.environ | {"CUPY_CACHE_DIR": str(Path(name) / f"kernels-{index}")}
            command = [sys.executable, __file__, str(pack)]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(run.stderr.strip())
            runs.append(json.loads(run.stdout))
    return [
        {"name": step, "seconds": statistics.median(found), "min": min(found), "max": max(found), "n": PROCESSES}
        for step, found in zip(STEPS, zip(*runs, strict=True), strict=True)
    ]


def steps(pack: str) -> list[float]:
    """Seconds of each step."""
    import cupy

    at = [time.perf_counter()]

    def done() -> None:
        cupy.cuda.Device().synchronize()
        at.append(time.perf_counter())

    # Opening the device is nobody's time.
    cupy.cuda.Device().synchronize()
    at[0] = time.perf_counter()
    with stager.stage(pack, device="cuda") as resident:
        done()
        with Stager(resident, window=64, target=Target("close", horizon=5), batch_size=256, seed=7) as st:
            done()
            for epoch in (0, 1):
                batch = next(st.batches(epoch))
                done()
                del batch
    return [after - before for before, after in itertools.pairwise(at)]


if __name__ == "__main__":
    print(json.dumps(steps(sys.argv[1])))
