"""Rows that are put in order on the device, on a fake driver: every row, and nothing left after a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))

from staging_fakes import FakeDriver, Gate, at, lanes_end, refuse, without_collector

from stager.cuda import device_memory, scatter, upload
from stager.cuda.pages import PAGE_NBYTES
from stager.cuda.watch import Watch
from stager.errors import StagingError, StagingMemoryError, StagingStalled

RING = 4 * PAGE_NBYTES


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr(upload, "RING_NBYTES", RING)


def pieces_of(n_rows, n_pieces, seed):
    """Rows cut at random and the pieces in another order: rows as they lie, rows in order, sources, places."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, n_rows), min(n_pieces, n_rows) - 1, replace=False)) if n_rows > 1 else []
    sources = np.array([0, *cuts], np.int64)
    lengths = np.diff(sources, append=n_rows)
    order = rng.permutation(len(sources))
    places = np.empty_like(sources)
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    return sources, places, lengths


def load(driver, n_rows, n_columns, n_pieces, *, seed=0, n_lanes=4, timeout=30.0, progress=None):
    """Scatter; the rows wanted, the rows found, the memory, the path."""
    sources, places, lengths = pieces_of(n_rows, n_pieces, seed)
    rows = np.arange(n_rows * n_columns, dtype=np.uint32).reshape(n_rows, n_columns)
    wanted = np.empty_like(rows)
    for source, place, length in zip(sources, places, lengths, strict=True):
        wanted[place : place + length] = rows[source : source + length]
    flat = rows.reshape(-1).view(np.uint8)

    def fill(out, first):
        out[:] = flat[first : first + len(out)]

    scattered = scatter.Scattered(n_rows, 4 * n_columns, sources, places, n_lanes)
    watch = Watch(rows.nbytes + scattered.table.nbytes, timeout, progress)
    memory, path = device_memory.load(
        driver, scattered.nbytes, watch, "try the remedy",
        lambda memory: scatter.copy_scattered(scattered, fill, memory, driver, watch),
    )  # fmt: skip
    return wanted, memory.data[: rows.nbytes].view(np.uint32).reshape(rows.shape), memory, path


@settings(deadline=None, max_examples=60)
@given(
    n_rows=st.integers(1, 20_000), n_columns=st.integers(1, 9), n_pieces=st.integers(1, 3000),
    n_lanes=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_row_comes_to_its_place(n_rows, n_columns, n_pieces, n_lanes, seed):
    driver = FakeDriver()
    wanted, found, memory, path = load(driver, n_rows, n_columns, n_pieces, n_lanes=n_lanes, seed=seed)
    assert np.array_equal(found, wanted)
    assert path == "pinned ring"
    assert driver.calls["allocate"] == 1
    driver.check(1)
    assert memory.size < found.nbytes + (1 << 20)


def test_the_room_is_small_beside_the_rows():
    sources = places = np.zeros(1, np.int64)
    rooms = 2 * upload.N_LANES * RING
    assert scatter.Scattered(10**9, 20, sources, places, 16).nbytes <= 20 * 10**9 + rooms + 1024
    assert scatter.Scattered(10, 20, sources, places, 16).nbytes <= 4 * 256 + 1024


def test_where_nothing_can_be_pinned_the_rows_still_arrive():
    driver = FakeDriver()
    driver.before["register"] = refuse(0)
    wanted, found, _memory, path = load(driver, 5000, 5, 100)
    assert np.array_equal(found, wanted)
    assert path == "pageable ring"


@pytest.mark.parametrize(
    ("call", "k"),
    [("allocate", 0), ("register", 0), ("register", 1), ("lane", 0), ("lane", 1), ("lane", 4)]
    + [(call, k) for call in ("copy", "scatter", "wait") for k in (0, 1, 5)],
)
def test_a_call_that_fails_leaves_nothing(call, k):
    driver = FakeDriver()
    driver.before[call] = at(k, StagingError("the fake fails"))

    def run():
        with pytest.raises(StagingError, match="the fake fails"):
            load(driver, 20_000, 5, 500)
        lanes_end()
        driver.check()

    without_collector(run)


def test_too_little_memory_is_told_with_all_that_is_needed():
    driver = FakeDriver(free=5000 * 20)
    with pytest.raises(StagingMemoryError, match=r"are needed on the GPU, .* are free; try the remedy"):
        load(driver, 5000, 5, 100)
    assert driver.calls["allocate"] == 0


def test_a_scatter_that_blocks_stalls_and_keeps_the_memory_until_it_returns():
    driver, gate = FakeDriver(), Gate(1)
    driver.before["scatter"] = gate

    def run():
        with pytest.raises(StagingStalled):
            load(driver, 20_000, 5, 500, timeout=0.3)
        assert len(driver.memories) == 1
        gate.opened.set()
        lanes_end()
        driver.check()

    without_collector(run)


def test_progress_reaches_the_total():
    told = []
    load(FakeDriver(), 20_000, 5, 500, progress=lambda *step: told.append(step))
    assert told[-1][1] == told[-1][2] == 20_000 * 20 + 500 * 16
