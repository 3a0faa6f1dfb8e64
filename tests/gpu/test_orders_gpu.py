"""Ranks, padding, blocks and draws on a GPU: the same bits as on NumPy."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from bars_fixtures import bar_table

from stager import PurgedKFold, Ranks, Stager, Target

with contextlib.suppress(ImportError):  # the marker skips, or fails under --require-gpu
    import cupy

    from stager.cuda import GraphBatch, groups

pytestmark = pytest.mark.gpu

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
OPTIONS = (
    {"last": "pad"},
    {"last": "pad", "batch_size": 4000},
    {"last": "pad", "shuffle": False, "ranks": Ranks(1, 3)},
    {"last": "drop", "ranks": Ranks(2, 3)},
    {"last": "pad", "shuffle": "block", "block": 100, "ranks": Ranks(0, 2)},
    {"shuffle": "block"},
    {"last": "pad", "shuffle": "time", "ranks": Ranks(1, 3)},
    {"sampling": "weighted", "weights": "uniqueness"},
    {"sampling": "weighted", "weights": "uniqueness", "last": "pad", "ranks": Ranks(3, 4)},
)


def bits(array):
    host = array if isinstance(array, np.ndarray) else array.get()
    return host.view(np.uint32)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group_nbytes", [1, 50_000, 64 << 20])
def test_batches_come_as_the_same_bits(monkeypatch, place, options, group_nbytes):
    for bound in ("_FIRST_NBYTES", "_LEAST_NBYTES", "_MOST_NBYTES"):
        monkeypatch.setattr(groups, bound, group_nbytes)
    table = bar_table(STEPS)
    options = {"window": 16, "target": Target(horizon=3), "batch_size": 7, "seed": 4, **options}
    with (
        Stager(table, device="cpu", **options) as cpu,
        Stager(table, device="cuda", placement=place, **options) as gpu,
    ):
        assert len(cpu) == len(gpu)
        parts = [(cpu, gpu)]
        if len(cpu) > 1:
            for one, other in zip(cpu.split(PurgedKFold(2)), gpu.split(PurgedKFold(2)), strict=True):
                parts += [(one.train, other.train), (one.test, other.test)]
        for left, right in parts:
            for start in (0, len(left) - 1):
                for batch, same in zip(left.batches(1, start=start), right.batches(1, start=start), strict=True):
                    assert isinstance(same.x, cupy.ndarray)
                    np.testing.assert_array_equal(bits(batch.x), bits(same.x))
                    np.testing.assert_array_equal(bits(batch.y), bits(same.y))
                    np.testing.assert_array_equal(batch.sample_ids, same.sample_ids)
                    np.testing.assert_array_equal(batch.valid, same.valid)
                del same
        del parts, left, right


@pytest.mark.parametrize("options", [one for one in OPTIONS if one.get("last") and one.get("shuffle") != "time"])
def test_a_graph_serves_the_same(options):
    options = {"window": 16, "target": Target(horizon=3), "batch_size": 7, "seed": 4, **options}
    with Stager(bar_table(STEPS), device="cuda", **options) as st:
        batch, stream = GraphBatch(st, epochs=4), cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            batch.advance()
            graph = stream.end_capture()
        for start in ((0, 0), (1, len(st) - 1)):
            batch.seek(*start)
            for epoch in range(start[0], start[0] + 2):
                for right in st.batches(epoch, start=start[1] if epoch == start[0] else 0):
                    graph.launch(stream)
                    stream.synchronize()
                    np.testing.assert_array_equal(bits(batch.x), bits(right.x))
                    np.testing.assert_array_equal(bits(batch.y), bits(right.y))
                    np.testing.assert_array_equal(batch.valid.get(), right.valid)
        del right, batch, graph
