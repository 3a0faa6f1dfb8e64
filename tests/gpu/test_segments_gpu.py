"""Packs of several segments on a real GPU: one allocation, rows in order, batches bit-identical with NumPy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import stager
from stager import Stager, Target
from stager.batches.smoke import made_up_bars
from stager.errors import StagingError

pytestmark = pytest.mark.gpu

N_ROWS = 3_000_000


def cut(table: pa.Table, n_parts: int, seed: int) -> list[pa.Table]:
    """Bars that follow one another, and for one in a hundred rows bars in between."""
    rng = np.random.default_rng(seed)
    order = np.argsort(np.argsort(table["time"].cast(pa.int64()).to_numpy(), kind="stable"))
    part = order * n_parts // len(table)
    late = rng.random(len(table)) < 0.01
    part[late] = n_parts - 1
    return [table.take(np.flatnonzero(part == number)) for number in range(n_parts)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """The same bars in one segment and in four."""
    folder = tmp_path_factory.mktemp("segments")
    table = made_up_bars(N_ROWS)
    first, *others = cut(table, 4, 1)
    one = stager.pack(table, folder / "one.pack")
    stager.pack(first, folder / "four.pack", read=stager.ReadOptions(interval=one.manifest.interval))
    for other in others:
        stager.append(folder / "four.pack", other)
    four = stager.open_pack(folder / "four.pack")
    assert len(four.parts) == 4
    assert four.fingerprint == one.fingerprint
    return one, four


def test_every_row_is_in_its_place_after_one_allocation(packs):
    one, four = packs
    told = []
    with stager.stage(four, device="cuda", progress=lambda *step: told.append(step)) as resident:
        assert resident.n_allocations == 1
        assert resident.placement == "device"
        assert resident.path in ("pinned ring", "pageable ring")
        assert resident.rows.shape == one.rows.shape
        np.testing.assert_array_equal(resident.rows.get().view(np.uint32), np.asarray(one.rows).view(np.uint32))
        assert told[-1][1] == told[-1][2]
    assert "rows" not in vars(four.held), "the rows were brought together in host memory"


@pytest.mark.parametrize("normalize", ["none", "zscore"])
def test_batches_are_those_of_numpy(packs, normalize):
    one, four = packs
    options = {"window": 32, "target": Target(horizon=5), "batch_size": 4096, "seed": 5, "normalize": normalize}
    with Stager(four, device="cuda", **options) as gpu, Stager(one, device="cpu", **options) as cpu:
        assert len(gpu) == len(cpu)
        for number, (found, wanted) in enumerate(zip(gpu.batches(2), cpu.batches(2), strict=True)):
            np.testing.assert_array_equal(found.x.get().view(np.uint32), wanted.x.view(np.uint32))
            np.testing.assert_array_equal(found.y.get().view(np.uint32), wanted.y.view(np.uint32))
            if number == 20:
                break


def test_host_placement_asks_for_compacting_and_serves_after_it(packs, tmp_path):
    one, _ = packs
    first, second = cut(made_up_bars(20_000), 2, 3)
    path = tmp_path / "x.pack"
    stager.pack(first, path, read=stager.ReadOptions(interval=one.manifest.interval))
    stager.append(path, second)
    with pytest.raises(StagingError, match=r"2 segments; merge them with `stager compact .*x\.pack`"):
        stager.stage(path, device="cuda", placement="host")
    stager.compact(path)
    with stager.stage(path, device="cuda", placement="host") as resident:
        wanted = np.asarray(stager.open_pack(path).rows).view(np.uint32)
        np.testing.assert_array_equal(resident.rows.get().view(np.uint32), wanted)
