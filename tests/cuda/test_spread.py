"""Rows in blocks over several GPUs: where they lie, how they get there, and that any window is found."""

from __future__ import annotations

import gc
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bars_fixtures import bar_table
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))

from staging_fakes import FakeDriver, at, without_collector

import stager
from stager.batches.placements import choose_placement
from stager.cuda import spread
from stager.cuda.spread import Layout, SpreadRows, copy_blocks
from stager.cuda.watch import Watch
from stager.errors import ConfigError, StagingError, StagingMemoryError


@given(n_rows=st.integers(1, 5000), n_blocks=st.integers(1, 9), halo=st.integers(0, 300), data=st.data())
def test_every_window_lies_in_the_block_of_its_first_row(n_rows: int, n_blocks: int, halo: int, data: Any) -> None:
    layout = Layout.of(n_rows, n_blocks, halo)
    assert 1 <= len(layout.spans) <= n_blocks
    assert layout.spans[0][0] == 0
    assert layout.spans[-1][1] == n_rows
    reach = data.draw(st.integers(1, min(n_rows, halo + 1)))
    layout.check_reach(reach)
    start = data.draw(st.integers(0, n_rows - reach))
    first, stop = layout.spans[start // layout.base_rows]
    assert first <= start
    assert start + reach <= stop
    assert layout.block_of(start, start + reach) == start // layout.base_rows


def test_longer_windows_are_refused() -> None:
    layout = Layout.of(1000, 2, 10)
    layout.check_reach(11)
    with pytest.raises(StagingError, match=r"reach over 12 rows, .*at most 11; use a shorter window"):
        layout.check_reach(12)
    Layout.of(1000, 1, 10).check_reach(500)
    with pytest.raises(StagingError, match="rows 400 to 511 lie on several GPUs"):
        layout.block_of(400, 511)
    assert layout.block_of(400, 510) == 0


class OnFake:
    """A block's rows where the fake keeps them, as a device array."""

    def __init__(self, memory: Any, shape: tuple[int, int]) -> None:
        self.memory, self.array = memory, memory.data.view(np.float32).reshape(shape)
        self.shape, self.data = shape, SimpleNamespace(ptr=memory.ptr)

    def __getitem__(self, key: Any) -> Any:
        return self.array[key]


def spread_over(rows: np.ndarray, n_blocks: int, halo: int, **options: Any) -> tuple[SpreadRows, list[FakeDriver]]:
    layout = Layout.of(len(rows), n_blocks, halo)
    drivers = [FakeDriver() for _ in layout.spans]
    memories, path = copy_blocks(rows, layout, drivers, Watch(rows.nbytes, 30), n_cores=4, remedy="", **options)
    assert path == "pinned ring"
    blocks = [
        OnFake(memory, (stop - first, rows.shape[1]))
        for memory, (first, stop) in zip(memories, layout.spans, strict=True)
    ]
    return SpreadRows(layout, blocks, 0), drivers


@pytest.mark.parametrize("with_fill", [False, True])
@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_each_block_gets_its_rows_in_one_allocation(n_blocks: int, with_fill: bool) -> None:
    rows = np.arange(5 * 700_000, dtype=np.float32).reshape(-1, 5)
    flat, asked = rows.reshape(-1).view(np.uint8), []

    def fill(out: np.ndarray, first: int) -> None:
        out[:] = flat[first : first + len(out)]

    options: dict[str, Any] = {"fill": fill, "read_ahead": lambda *span: asked.append(span)} if with_fill else {}
    found, drivers = spread_over(rows, n_blocks, 1000, **options)
    for driver, block, (first, stop) in zip(drivers, found.blocks, found.layout.spans, strict=True):
        np.testing.assert_array_equal(block.array, rows[first:stop])
        assert driver.calls["allocate"] == 1
        driver.check(1)
    assert (found.shape, found.nbytes, len(found)) == (rows.shape, rows.nbytes, len(rows))
    if with_fill:
        assert min(first for first, _ in asked) == 0
        assert max(stop for _, stop in asked) == rows.nbytes
    for start in (0, 349_000, 349_999, 350_000, 699_000):
        np.testing.assert_array_equal(found[start : start + 64 : 3], rows[start : start + 64 : 3])
    np.testing.assert_array_equal(found[5], rows[5])
    if n_blocks > 1:
        with pytest.raises(StagingError, match="no view of all of them"):
            found[0 : len(rows)]
    for wrong in (-1, len(rows), slice(5, 2, -1)):
        with pytest.raises(IndexError):
            found[wrong]


def test_after_a_failure_on_the_second_gpu_nothing_stays() -> None:
    rows = np.zeros((100_000, 5), np.float32)
    layout = Layout.of(len(rows), 2, 10)

    def fail() -> None:
        drivers = [FakeDriver(), FakeDriver()]
        drivers[1].before["copy"] = at(0, StagingError("the bus fell off"))
        with pytest.raises(StagingError, match="fell off"):
            copy_blocks(rows, layout, drivers, Watch(rows.nbytes, 30), n_cores=4, remedy="")
        for driver in drivers:
            driver.check(0)
        drivers = [FakeDriver(), FakeDriver(free=1000)]
        with pytest.raises(StagingMemoryError, match=r"1000 B are free; host"):
            copy_blocks(rows, layout, drivers, Watch(rows.nbytes, 30), n_cores=4, remedy="host")
        for driver in drivers:
            driver.check(0)

    without_collector(fail)


def test_views_are_counted_when_the_rows_are_given_back() -> None:
    from stager.batches.resident import live_views

    blocks = [np.zeros((10, 2), np.float32) for _ in range(3)]
    found = SpreadRows(Layout.of(30, 3, 0), blocks, 0)
    del blocks
    views = [found[0:5], found[3:5], found[12:14]]
    assert found.let_go(live_views) == 3
    assert found.blocks == []
    del views
    gc.collect()


@pytest.mark.parametrize(
    ("free", "peers", "in_place", "shares", "expected"),
    [
        (100, [], True, False, ("device", "")),
        (99, [60], True, False, ("spread", "100 B do not fit the 99 B free on the GPU, but fit 2 GPUs")),
        (99, [40], True, False, ("host", "100 B do not fit the 99 B free on the GPU, nor 2 GPUs")),
        (99, [], True, False, ("host", "100 B do not fit the 99 B free on the GPU, which reads no other GPU")),
        (30, [90, 90], True, False, ("host", "100 B do not fit the 30 B free on the GPU, nor 3 GPUs")),
        (99, [60], False, False, ("device", "")),
        (100, [], True, True, ("host", "CPU and GPU share one memory")),
    ],
)
def test_where_rows_go_by_themselves(free: int, peers: list[int], in_place: bool, shares: bool, expected: Any) -> None:
    asked = []

    def ask() -> list[int]:
        asked.append(1)
        return peers

    found = choose_placement(100, free, ask, lambda n: 105 // n, shares_memory=shares, in_place=in_place)
    assert found == expected
    # Asking makes contexts on the other GPUs.
    assert len(asked) == (free < 100 and in_place and not shares)


def test_the_halo_is_small() -> None:
    assert spread.HALO_ROWS * 4 * 5 < 2 << 20


class FakeGpu(FakeDriver):
    """Whose kernels read the memory of some others; `of` makes those."""

    shares_memory = False

    def __init__(self, device: int, others: list[int], free: int = 1 << 40) -> None:
        super().__init__(free)
        self.device, self._others, self.read, self.n_allocations = device, others, [], 0

    def peers(self) -> list[int]:
        return self._others

    def read_peer(self, other: int) -> None:
        self.read.append(other)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpu]:
    """Three, of which the one in the middle is staged to."""
    pytest.importorskip("cupy")
    from stager.batches import resident
    from stager.batches.devices import Device
    from stager.cuda import staging

    made = [FakeGpu(0, [1, 2]), FakeGpu(1, [0, 2]), FakeGpu(2, [0, 1])]
    monkeypatch.setattr(resident, "choose_device", lambda device: Device(1, "asked for"))
    monkeypatch.setattr(resident, "thread_count", lambda: 4)
    monkeypatch.setattr(staging, "prepare", lambda index, watch: made[index])
    monkeypatch.setattr(staging, "CudaDriver", lambda index: made[index])
    monkeypatch.setattr(staging, "relax_capture", lambda: None)
    monkeypatch.setattr("stager.cuda.capture.relaxed", nullcontext)
    monkeypatch.setattr(staging, "array_at", lambda memory, offset, shape, dtype: OnFake(memory, shape))
    return made


def a_pack(folder: Path) -> Any:
    return stager.pack(bar_table({"A": range(70_000), "B": range(80_000), "C": range(9)}), folder / "bars.pack")


def test_a_pack_is_staged_over_all_gpus_that_are_read(gpus: list[FakeGpu], tmp_path: Path) -> None:
    pack = a_pack(tmp_path)
    resident = stager.stage(pack, device="cuda:1", placement="spread")
    assert (resident.placement, resident.path) == ("spread", "pinned ring, in blocks on cuda:1, cuda:0, cuda:2")
    assert resident.nbytes == pack.rows_nbytes
    assert gpus[1].read == [0, 2]
    assert [gpu.calls["allocate"] for gpu in gpus] == [1, 1, 1]
    for block, (first, stop) in zip(resident.rows.blocks, resident.rows.layout.spans, strict=True):
        np.testing.assert_array_equal(block.array, pack.rows[first:stop])
    del block
    resident.close()
    gc.collect()
    for gpu in gpus:
        gpu.check(0)


def test_by_itself_a_pack_that_does_not_fit_one_gpu_is_spread(gpus: list[FakeGpu], tmp_path: Path) -> None:
    pack = a_pack(tmp_path)
    for gpu in gpus:
        gpu.free = pack.rows_nbytes - 1
    with stager.stage(pack) as resident:
        assert resident.placement == "spread"
        assert re.search(
            r"cuda:2; [\d.]+ MiB do not fit the [\d.]+ MiB free on the GPU, but fit 3 GPUs$", resident.path
        )
    gpus[1]._others = []
    with pytest.raises(StagingError, match=r"cuda:1 reads no other GPU's memory .*use placement='host'"):
        stager.stage(pack, placement="spread")


def test_several_segments_are_merged_first(gpus: list[FakeGpu], tmp_path: Path) -> None:
    a_pack(tmp_path)
    pack = stager.append(tmp_path / "bars.pack", bar_table({"D": range(50)}))
    with pytest.raises(StagingError, match="2 segments; merge them with `stager compact"):
        stager.stage(pack, placement="spread")


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="placement='spread' needs a GPU"):
        stager.stage(bar_table({"A": range(50)}), device="cpu", placement="spread")
