"""How batches are handed out on the host: framework, type, and what was served."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from bars_fixtures import bar_table
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import stager
from stager import Normalize, Stager, Target
from stager.errors import ConfigError, SampleError
from stager.samples.normalize import cast

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
