"""Time-grouped batches on a GPU: the same bits as on NumPy."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from bars_fixtures import bar_table

from stager import Select, Stager, Target, WalkForward

with contextlib.suppress(ImportError):  # the marker skips, or fails under --require-gpu
    import cupy

    from stager.cuda import groups

pytestmark = pytest.mark.gpu

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
OPTIONS = (
    {},
    {"target": [Target(horizon=2), Target(horizon=9)], "select": Select(stride=3)},
    {"select": Select(columns=("close", "volume")), "normalize": "zscore"},
)


def bits(array):
    host = array if isinstance(array, np.ndarray) else array.get()
    return host.view(np.uint32)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("extra", OPTIONS)
@pytest.mark.parametrize("group_nbytes", [1, 50_000, 64 << 20])
def test_whole_instants_come_as_the_same_bits(monkeypatch, place, extra, group_nbytes):
    for name in ("_FIRST_NBYTES", "_LEAST_NBYTES", "_MOST_NBYTES"):
        monkeypatch.setattr(groups, name, group_nbytes)
    table = bar_table(STEPS)
    options = {"window": 16, "target": Target(horizon=3), "batch_size": 7, "seed": 4, "shuffle": "time", **extra}
    with (
        Stager(table, device="cpu", **options) as cpu,
        Stager(table, device="cuda", placement=place, **options) as gpu,
    ):
        parts = [(cpu, gpu)]
        for one, other in zip(cpu.split(WalkForward(2)), gpu.split(WalkForward(2)), strict=True):
            parts += [(one.train, other.train), (one.test, other.test)]
        for left, right in parts:
            for start in (0, len(left) - 1):
                for batch, same in zip(left.batches(1, start=start), right.batches(1, start=start), strict=True):
                    assert isinstance(same.x, cupy.ndarray)
                    np.testing.assert_array_equal(bits(batch.x), bits(same.x))
                    np.testing.assert_array_equal(bits(batch.y), bits(same.y))
                    np.testing.assert_array_equal(batch.sample_ids, same.sample_ids)
                    assert batch.symbols == same.symbols
                del same
        del parts, other, right
