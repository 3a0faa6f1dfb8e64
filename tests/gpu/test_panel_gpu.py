"""Panels on a GPU: the same bits as on NumPy, mask and targets too."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from bars_fixtures import bar_table, memory_pack

from stager import Normalize, Panel, PurgedKFold, Select, Stager, Target, panel

with contextlib.suppress(ImportError):  # the marker skips, or fails under --require-gpu
    import cupy
    import torch

    from stager.cuda import groups

pytestmark = pytest.mark.gpu

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
OPTIONS = (
    {"target": Target(horizon=3)},
    {"target": [Target(horizon=2), Target(horizon=9)], "select": Select(stride=3)},
    {"select": Select(columns=("close", "volume")), "shuffle": "time"},
    {"target": Target(horizon=3), "select": Select(columns=("volume",)), "shuffle": False},
)


def bits(array):
    host = array if isinstance(array, np.ndarray) else array.get()
    return host if host.dtype == bool else host.view(np.uint32)


def assert_same(one, other):
    for batch, same in zip(one.batches(1), other.batches(1), strict=True):
        for name in ("x", "y", "mask"):
            left, right = getattr(batch, name), getattr(same, name)
            if left is None:
                assert right is None
                continue
            assert isinstance(right, cupy.ndarray)
            assert left.shape == right.shape
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(bits(left), bits(right))
        np.testing.assert_array_equal(batch.sample_ids, same.sample_ids)
        np.testing.assert_array_equal(batch.times, same.times)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("extra", OPTIONS)
@pytest.mark.parametrize("group_nbytes", [1, 100_000, 64 << 20])
def test_panels_and_their_folds_are_the_same_bits(monkeypatch, place, extra, group_nbytes):
    for name in ("_FIRST_NBYTES", "_LEAST_NBYTES", "_MOST_NBYTES"):
        monkeypatch.setattr(groups, name, group_nbytes)
    pack = panel(memory_pack(STEPS))
    options = {"window": 16, "batch_size": 50, "seed": 4, **extra}
    with (
        Stager(pack, device="cpu", **options) as cpu,
        Stager(pack, device="cuda", placement=place, **options) as gpu,
    ):
        assert_same(cpu, gpu)
        for one, other in zip(cpu.split(PurgedKFold(3)), gpu.split(PurgedKFold(3)), strict=True):
            assert_same(one.train, other.train)
            assert_same(one.test, other.test)
            assert other.train._gather._tables[0] is gpu._gather._tables[0]
        del other


@pytest.mark.parametrize("n_symbols", [1, 2, 3, 4, 5, 37, 300])
def test_every_number_of_symbols(n_symbols):
    rng = np.random.default_rng(n_symbols)
    steps = {f"S{k:03}": np.flatnonzero(rng.random(90) < 0.8).tolist() or [0] for k in range(n_symbols)}
    pack = panel(memory_pack(steps))
    targets = [Target(horizon=1, across_gaps="allow"), Target(horizon=4, scale="rank", across_gaps="allow")]
    for target in (None, targets[0], targets):
        # Of 300 symbols and 60 instants, several blocks copy a sample.
        for window in (1, 2, 9, 60):
            options = {"window": window, "batch_size": 7, "target": target, "select": Select(max_gap=20)}
            with Stager(pack, device="cpu", **options) as cpu, Stager(pack, device="cuda", **options) as gpu:
                assert_same(cpu, gpu)


def test_views_and_the_newest_window():
    pack = panel(memory_pack(STEPS), Panel(["C", "B"]))
    with Stager(pack, window=16, batch_size=50, device="cuda") as st:
        batch = next(st.batches(2))
        for place in (0, 49):
            view = st.view(2, 0, place)
            assert view.shape == (16, 2, 5)
            assert st.resident.rows.data.ptr <= view.data.ptr < st.resident.rows.data.ptr + st.resident.nbytes
            np.testing.assert_array_equal(bits(view), bits(batch.x[place]))
        newest = st.latest()
        assert newest.x.shape == (1, 16, 2, 5)
        assert newest.mask.get()[0, -1].tolist() == [False, True]
        del view, batch, newest


def test_batches_stay_right_after_closing():
    st = Stager(panel(memory_pack(STEPS)), window=16, batch_size=50, target=Target(horizon=3), device="cuda")
    kept = [(batch.x, batch.y, batch.mask) for batch in st.batches()]
    before = [tuple(part.get() for part in parts) for parts in kept]
    st.close()
    cupy.zeros(1 << 24)
    for parts, was in zip(kept, before, strict=True):
        for part, values in zip(parts, was, strict=True):
            np.testing.assert_array_equal(part.get(), values)


def test_a_table_is_staged_as_a_panel_of_its_pack():
    with Stager(panel(memory_pack({"A": range(20)})), window=3, batch_size=4, device="cuda") as st:
        assert next(st.batches()).x.shape == (4, 3, 1, 5)
    with Stager(bar_table({"A": range(20)}), window=3, batch_size=4, device="cuda") as st:
        assert next(st.batches()).mask is None


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_extra", [0, 3])
@pytest.mark.parametrize("columns", [None, ["volume", "close", "low"]])
@pytest.mark.parametrize(
    "normalize", [Normalize("last", "none"), Normalize("zscore", "zscore"), Normalize("last", "zscore")]
)
def test_every_symbol_is_normalised_alike(normalize, columns, n_extra, dtype, place):
    """Of 5 and 8 columns a symbol, of which one thread scales several, of one symbol or two."""
    rng = np.random.default_rng(n_extra)
    steps = {name: np.flatnonzero(rng.random(150) < 0.7).tolist() for name in "ABC"}
    n = sum(map(len, steps.values()))
    extra = {f"e{k}": rng.normal(size=n) for k in range(n_extra)}
    pack = panel(memory_pack(steps, close=50 + rng.normal(size=n), volume=rng.integers(0, 9, n) * 1.0, **extra))
    options = {"batch_size": 32, "normalize": normalize, "dtype": dtype, "select": Select(columns=columns, max_gap=999)}
    for window in (1, 7, 8):
        with (
            Stager(pack, device="cpu", window=window, **options) as cpu,
            Stager(pack, device="cuda", placement=place, window=window, **options) as gpu,
        ):
            for one, other in zip(cpu.batches(0, to="torch"), gpu.batches(0, to="torch"), strict=True):
                same = other.x.cpu()
                # NaN of what is missing may be any NaN.
                left, right = (torch.nan_to_num(x.float(), nan=-7.0) for x in (one.x, same))
                assert torch.equal(left, right)
                assert torch.equal(torch.isnan(one.x), torch.isnan(same))
                assert torch.equal(one.mask, other.mask.cpu())
            del other
