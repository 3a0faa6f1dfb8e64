"""Folds on a GPU: the same bits as on NumPy, over the same rows and targets."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from bars_fixtures import bar_table

from stager import Combinatorial, Normalize, PurgedKFold, Select, Stager, Target, WalkForward
from stager.errors import ClosedError

with contextlib.suppress(ImportError):  # the marker skips, or fails under --require-gpu
    import cupy

pytestmark = pytest.mark.gpu

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
SCHEMES = (WalkForward(3), PurgedKFold(4), Combinatorial(5, 2, embargo="6min"))


def bits(array):
    host = array if isinstance(array, np.ndarray) else array.get()
    return host.view(np.uint32)


OPTIONS = (
    {},
    {"target": [Target(horizon=2), Target(horizon=9)], "select": Select(stride=3)},
    {"select": Select(columns=("close", "volume"))},
)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("extra", OPTIONS)
def test_folds_serve_the_same_bits_on_every_device(scheme, place, extra):
    table = bar_table(STEPS)
    options = {"window": 16, "target": Target(horizon=3), "batch_size": 50, "seed": 4, **extra}
    with (
        Stager(table, device="cpu", **options) as cpu,
        Stager(table, device="cuda", placement=place, **options) as gpu,
    ):
        for one, other in zip(cpu.split(scheme), gpu.split(scheme), strict=True):
            assert one.describe() == other.describe()
            for part in ("train", "test"):
                left, right = getattr(one, part), getattr(other, part)
                for batch, same in zip(left.batches(1), right.batches(1), strict=True):
                    assert isinstance(same.x, cupy.ndarray)
                    np.testing.assert_array_equal(bits(batch.x), bits(same.x))
                    np.testing.assert_array_equal(bits(batch.y), bits(same.y))
                    np.testing.assert_array_equal(batch.weight, same.weight)
                    np.testing.assert_array_equal(batch.times, same.times)
                    assert batch.symbols == same.symbols
                del same
        del other, right


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_fitted_on_a_fold_is_applied_alike(place):
    normalize = Normalize("zscore", "zscore", fit="train")
    options = {"window": 16, "target": Target(horizon=3), "batch_size": 50, "normalize": normalize}
    with (
        Stager(bar_table(STEPS), device="cpu", **options) as cpu,
        Stager(bar_table(STEPS), device="cuda", placement=place, **options) as gpu,
    ):
        for one, other in zip(cpu.split(PurgedKFold(4)), gpu.split(PurgedKFold(4)), strict=True):
            for part in ("train", "test"):
                for batch, same in zip(getattr(one, part).batches(1), getattr(other, part).batches(1), strict=True):
                    np.testing.assert_array_equal(bits(batch.x), bits(same.x))
                del same
        del other


def test_all_folds_use_the_rows_and_targets_of_the_whole_set():
    st = Stager(bar_table(STEPS), window=16, target=Target(horizon=3), batch_size=50, device="cuda")
    rows, y = st.resident.rows.data.ptr, st._gather._gathers[0]._y.data.ptr
    folds = st.split(PurgedKFold(3))
    for fold in folds:
        for part in (fold.train, fold.test):
            assert part.resident.rows.data.ptr == rows
            assert part._gather._gathers[0]._y.data.ptr == y
            list(part.batches())
            assert part._gather._groups._slots is st._gather._groups._slots
    # The targets live for as long as one of their users.
    kept = list(folds[0].test.batches())
    st.close()
    with pytest.raises(ClosedError):
        folds[0].train.batches()
    assert sum(len(batch) for batch in kept) == folds[0].test.n_samples


def test_a_closed_fold_leaves_the_others_their_targets():
    with Stager(bar_table(STEPS), window=16, target=Target(horizon=3), batch_size=50, device="cuda") as st:
        first, second = st.split(PurgedKFold(2))
        wanted = [batch.y.get() for batch in second.test.batches()]
        first.train.close()
        for batch, y in zip(second.test.batches(), wanted, strict=True):
            np.testing.assert_array_equal(batch.y.get(), y)
        del batch


def test_the_newest_windows_and_predictions_come_from_the_device():
    table = bar_table(STEPS)
    with (
        Stager(table, window=16, batch_size=50, device="cpu") as cpu,
        Stager(table, window=16, batch_size=50, device="cuda") as gpu,
    ):
        one, other = cpu.latest(), gpu.latest()
        assert one.symbols == other.symbols == ["A", "B", "C"]
        np.testing.assert_array_equal(bits(one.x), bits(other.x))
        del other
        predictions = cupy.arange(gpu.n_samples, dtype=cupy.float32)
        assert gpu.to_table(predictions).equals(cpu.to_table(predictions.get()))
