"""``stager bench`` on a real GPU: the ceilings, cached views, and a step whose work is on the device."""

from __future__ import annotations

import pytest

from stager.batches.bench import bench
from stager.batches.smoke import made_up_bars

try:
    import cupy

    from stager.cuda.measuring import copy_nbytes, device_copy_gbps
except ImportError:  # the marker skips, or fails under --require-gpu
    pass

pytestmark = pytest.mark.gpu

# Of a step: about a millisecond of the device's clock.
WORK = 'extern "C" __global__ void work() { long long t = clock64(); while (clock64() - t < 2000000) {} }'


def test_the_ceiling_on_the_device_is_that_of_its_memory():
    free = cupy.cuda.runtime.memGetInfo()[0]
    assert 100 < device_copy_gbps(0, copy_nbytes(0)) < 20_000
    assert free - cupy.cuda.runtime.memGetInfo()[0] <= 4 << 20


@pytest.mark.parametrize("to", [None, "torch", "jax", "numpy"])
def test_loader_and_ceilings_are_measured(to):
    if to in ("torch", "jax"):
        pytest.importorskip(to)
    report = bench(made_up_bars(300_000), seconds=1.0, device="cuda", to=to)
    assert report.device.startswith("cuda:0 ")
    assert report.placement == "device"
    assert report.transfer_seconds > 0
    assert report.copy_gbps > report.bus_gbps > 1
    assert report.sample_nbytes == 64 * 5 * 4
    # At this size no step of the way is near a millisecond a batch.
    assert report.loader.median > 256_000
    assert (report.loader_reusing is not None) == (to is None)
    assert report.stats.gather_nbytes > 0
    lines = dict(report.lines())
    assert "of the pinned copy" in lines["staged"]
    assert "pinned copy" in lines


def test_work_on_the_device_bounds_the_training():
    kernel = cupy.RawKernel(WORK, "work")
    report = bench(made_up_bars(300_000), seconds=1.0, device="cuda", step=lambda batch: kernel((1,), (1,), ()))
    assert report.bound == "step"
    # The step only queues; its time is that of the device.
    assert report.step.median < 256 / 0.0004
    assert report.loader_share < 0.2
