"""Every kernel of serving under compute-sanitizer, which finds each access outside of what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

# Windows of one lane and of several blocks, rows where 16 bytes a load are legal and where not, the last row included.
SERVED = """
import itertools
import cupy
import numpy as np
from bars_fixtures import memory_pack
from stager import Normalize, Select, Stager, Target, panel
from stager.cuda import GraphBatch

# Beyond a small allocation lies what other arrays of the pool take; each has its own, so that nothing hides there.
cupy.cuda.set_allocator(None)
# The last window of the last symbol ends where its memory does.
steps = {"A": range(90), "B": range(3), "C": [*range(400), *range(403, 700)]}
n_rows = sum(map(len, steps.values()))
rng = np.random.default_rng(1)
packs = [
    memory_pack(steps, **{f"feature_{k}": rng.random(n_rows) for k in range(n_more)}) for n_more in (0, 3, 27)
]
scalings = "none", Normalize(), Normalize("zscore", "zscore", "zscore"), Normalize(other="zscore", fit="train")
n_batches = 0

def serve(pack, **options):
    global n_batches
    for place in ("device", "host"):
        with Stager(pack, device="cuda", placement=place, batch_size=97, seed=3, **options) as st:
            for batch in st.batches(1):
                n_batches += 1

targets = Target(horizon=3), [Target(horizon=3), Target(kind="direction", horizon=5)]
for pack in packs:
    for (window, dilation), scaling, dtype in itertools.product(
        ((2, 1), (7, 1), (64, 1), (64, 3)), scalings, ("float32", "float16", "bfloat16")
    ):
        serve(pack, window=window, dilation=dilation, normalize=scaling, dtype=dtype, target=targets[window == 7])
    for columns in (("close",), ("volume", "open", "close")):
        serve(pack, window=16, select=Select(columns=columns))
    serve(pack, window=300)
    for shuffle in ("block", "time", False):
        serve(pack, window=8, target=Target(horizon=2), shuffle=shuffle)
    n = sum(max(0, n - 7) for n in (90, 400, 297))
    serve(pack, window=8, sampling="weighted", weights=rng.random(n))
    for options in ({}, {"target": Target(horizon=3)}, {"select": Select(columns=("close",))}):
        serve(panel(pack), window=16, **options)
    with Stager(pack, device="cuda", window=16, target=Target(horizon=3), batch_size=97, seed=3, last="drop") as st:
        graph = GraphBatch(st)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            graph.advance()
            captured = stream.end_capture()
            for _ in range(2 * len(st) + 1):
                captured.launch(stream)
                n_batches += 1
        stream.synchronize()
cupy.cuda.Device().synchronize()
print("served", n_batches)
"""


def test_no_kernel_reads_or_writes_outside_its_arrays():
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not installed")
    done = subprocess.run(
        [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", SERVED],
        capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert int(done.stdout.split("served ")[1].split()[0]) > 1_000
