"""How batches are handed out on the host: framework, type, and what was served."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from bars_fixtures import bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import stager
from stager import Normalize, Select, Stager, Target, panel
from stager.errors import ConfigError, SampleError
from stager.samples.normalize import apply, cast

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}


def stager_of(**options):
    return Stager(bar_table(STEPS), **{"window": 16, "batch_size": 50, "device": "cpu"} | options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", [None, Target(horizon=1)])
def test_torch_gets_the_same_bits(dtype, target):
    torch = pytest.importorskip("torch")
    with stager_of(dtype=dtype, target=target) as served:
        for mine, theirs in zip(served.batches(1, to="numpy" if dtype != "bfloat16" else "torch"),
                                served.batches(1, to="torch"), strict=True):  # fmt: skip
            assert theirs.x.dtype == getattr(torch, dtype)
            x = mine.x if dtype == "bfloat16" else torch.from_numpy(mine.x)
            assert torch.equal(theirs.x, x)
            assert (theirs.y is None) == (target is None)


def test_bfloat16_is_the_nearest_in_torch_too():
    torch = pytest.importorskip("torch")
    options = {"normalize": Normalize("last", "none", "none")}
    with stager_of(**options) as whole, stager_of(dtype="bfloat16", **options) as half:
        for one, other in zip(whole.batches(0), half.batches(0, to="torch"), strict=True):
            assert torch.equal(torch.from_numpy(one.x).to(torch.bfloat16), other.x)


def test_float16_is_numpys_nearest():
    with stager_of() as whole, stager_of(dtype="float16") as half:
        for one, other in zip(whole.batches(0), half.batches(0), strict=True):
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(other.x, one.x.astype(np.float16))


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_framework_that_is_missing_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with stager_of() as served, pytest.raises(ConfigError, match=f"pip install {package}"):
        next(served.batches(0, to=package))


def test_bfloat16_on_numpy_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with stager_of(dtype="bfloat16") as served, pytest.raises(ConfigError, match="pip install ml_dtypes"):
        next(served.batches(0))


def test_frameworks_and_types_that_there_are_not():
    with stager_of() as served, pytest.raises(SampleError, match="'torch', 'jax', 'numpy'"):
        served.batches(0, to="tensorflow")
    with pytest.raises(SampleError, match="'float32', 'float16', 'bfloat16'"):
        stager_of(dtype="float64")


@settings(deadline=None)
@given(hnp.arrays(np.uint32, st.integers(1, 50)))
def test_bfloat16_is_the_nearest_with_ties_to_even(bits):
    values = bits.view(np.float32)
    found = cast(values, "bfloat16").astype(np.uint32) << 16
    for value, near in zip(values, found.view(np.float32), strict=True):
        if np.isnan(value):
            assert np.isnan(near)
            continue
        down = np.uint32(value.view(np.uint32) & 0xFFFF0000)
        # 65,536 bits are one step of bfloat16; the step after the largest is infinity.
        rest = int(value.view(np.uint32)) - int(down)
        up = rest > 0x8000 or (rest == 0x8000 and (int(down) >> 16) & 1)
        assert near.view(np.uint32) == int(down) + (0x10000 if up else 0)


def test_what_was_served_is_counted():
    with stager_of(target=Target(horizon=1)) as served:
        assert served.stats().n_batches == 0
        list(served.batches(0))
        batches = served.batches(1)
        for _ in range(3):
            next(batches)
        batches.close()
        stats = served.stats()
        assert stats.n_batches == len(served) + 3
        assert stats.n_samples == served.n_samples + 150
        assert stats.nbytes == stats.n_samples * (16 * 5 + 1) * 4
        assert stats.gather_seconds > 0
        assert stats.gather_gbps > 0
        assert stats.n_copied_batches == 0
        assert "batches" in str(stats)
    assert stager.ServingStats().gather_gbps == 0.0


@pytest.mark.parametrize("dilation", [1, 2, 3, 7])
@pytest.mark.parametrize("normalize", ["none", "last", "zscore"])
@pytest.mark.parametrize("columns", [None, ["volume", "close"]])
def test_rows_of_a_window_lie_so_far_apart(dilation, normalize, columns):
    length, reach = 6, 5 * dilation + 1
    select = Select(columns=columns)
    options = {"select": select, "target": Target(horizon=2), "shuffle": False}
    with stager_of(window=length, dilation=dilation, **options) as st, stager_of(window=reach, **options) as whole:
        assert st.plan.reasons == whole.plan.reasons
        for one, other in zip(st.batches(0), whole.batches(0), strict=True):
            np.testing.assert_array_equal(one.x, other.x[:, ::dilation])
            np.testing.assert_array_equal(one.y, other.y)
            np.testing.assert_array_equal(one.times, other.times)
        assert st.view(0, 1, 3).shape == (length, 5)
        np.testing.assert_array_equal(st.view(0, 1, 3), whole.view(0, 1, 3)[::dilation])
        assert np.shares_memory(st.view(0, 1, 3), st.resident.rows)
        assert ("after the other" in str(st.plan)) == (dilation > 1)
        state = st.state_dict(0, 1)
        if dilation > 1:
            with pytest.raises(SampleError, match="window"):
                whole.resume(state)
    with (
        stager_of(window=length, dilation=dilation, normalize=normalize, **options) as st,
        stager_of(window=length, dilation=dilation, **options) as raw,
    ):
        methods = st._index.methods
        for one, other in zip(st.batches(0), raw.batches(0), strict=True):
            wanted = other.x.copy()
            if methods is not None:
                apply(wanted, methods, st.resident.rows[st._index.rows(one.sample_ids)][:, [3]])
            np.testing.assert_array_equal(one.x, wanted)


def test_a_missing_value_that_a_window_steps_over_does_not_matter():
    extra = np.zeros(20)
    extra[10] = np.nan
    table = bar_table({"A": range(20)}, extra=extra)
    with Stager(table, window=3, dilation=3, batch_size=4, device="cpu", shuffle=False) as st:
        rows = st._index.rows(np.arange(st.n_samples))
        np.testing.assert_array_equal(rows, [row for row in range(6, 20) if row not in (10, 13, 16)])


def test_a_panel_of_rows_that_lie_apart():
    steps = {name: [k for k in range(60) if k % (7 + number)] for number, name in enumerate("ABC")}
    made = panel(memory_pack(steps))
    options = {"batch_size": 9, "device": "cpu", "shuffle": False, "select": Select(max_gap=99)}
    options["target"] = Target(horizon=1, across_gaps="allow")
    with Stager(made, window=4, dilation=3, **options) as st, Stager(made, window=10, **options) as whole:
        for one, other in zip(st.batches(0), whole.batches(0), strict=True):
            np.testing.assert_array_equal(one.x, other.x[:, ::3])
            np.testing.assert_array_equal(one.mask, other.mask[:, ::3])
            np.testing.assert_array_equal(one.y, other.y)
        np.testing.assert_array_equal(st.view(0, 0, 0), whole.view(0, 0, 0)[::3])


@pytest.mark.parametrize("dilation", [0, -1, 1.5, True, "2"])
def test_rows_lie_apart_by_an_integer(dilation):
    with pytest.raises(SampleError, match="dilation is"):
        stager_of(dilation=dilation)
    with pytest.raises(SampleError, match="the window needs 16,001"):
        stager_of(dilation=3200, window=6, target=None)


def test_the_leak_test_looks_at_rows_that_lie_apart():
    report = stager.leaktest(bar_table(STEPS), window=4, dilation=3, target=Target(horizon=1), decisions=2)
    assert not report.leaks
    assert report.n_windows > 0
