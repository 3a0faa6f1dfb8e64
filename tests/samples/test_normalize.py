"""Normalisation of windows, against sums of Python's own."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from bars_fixtures import memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import SampleError
from stager.samples.building import build_index
from stager.samples.normalize import FITTED, LAST, LOG1P, NONE, ZSCORE, Normalize, apply, as_normalize, fit
from stager.samples.select import Select

floats = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(deadline=None, max_examples=200)
@given(
    windows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=4),
    close=st.floats(2.0**-20, 2.0**20, width=32),
)
def test_each_column_by_its_method(windows: list[list[float]], close: float) -> None:
    """Four columns of the same values, one for each method."""
    raw = np.array(windows, np.float32)
    x = np.repeat(raw[:, :, None], 4, axis=2)
    apply(x, np.array([NONE, LAST, LOG1P, ZSCORE], np.int32), np.full((len(raw), 1), close, np.float32))
    np.testing.assert_array_equal(x[:, :, 0], raw)
    for window, found in zip(raw.tolist(), x, strict=True):
        np.testing.assert_array_equal(found[:, 1], np.array([value / close - 1 for value in window], np.float32))
        logs = [math.copysign(math.log1p(abs(value)), value) for value in window]
        np.testing.assert_array_max_ulp(found[:, 2], np.array(logs, np.float32), maxulp=1)
        if len(set(window)) == 1:
            assert found[:, 3].tolist() == [0.0] * 3
            continue
        mean, deviation = statistics.fmean(window), statistics.pstdev(window)
        scores = [(value - mean) / deviation for value in window]
        np.testing.assert_allclose(found[:, 3], scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e-40, 3.4e38, 16_777_217.0])
@pytest.mark.parametrize("length", [1, 2, 3, 1000])
def test_a_constant_window_is_zero(value: float, length: int) -> None:
    x = np.full((2, length, 1), value, np.float32)
    apply(x, np.array([ZSCORE], np.int32), np.ones((2, 1), np.float32))
    assert not x.any()


def test_a_column_of_large_values_keeps_its_small_moves() -> None:
    """In float32 sums, the variance of such a window is lost."""
    x = (60_000 + np.tile([0.0, 0.00390625], 50)).astype(np.float32).reshape(1, 100, 1)
    apply(x, np.array([ZSCORE], np.int32), np.ones((1, 1), np.float32))
    assert x[0, :, 0].tolist() == [-1.0, 1.0] * 50


def test_a_value_beyond_float32_becomes_infinite() -> None:
    x = np.array([[[3e38], [1.0]]], np.float32)
    apply(x, np.array([LAST], np.int32), np.array([[1e-30]], np.float32))
    assert x[0, 0, 0] == np.inf


def test_windows_without_a_positive_last_close_are_left_out() -> None:
    pack = memory_pack({"A": range(6)}, close=[1.0, 0.0, 2.0, -1.0, 1e-60, 3.0])
    for columns, lost in ((None, 3), (["open"], 3), (["volume"], 0)):
        index = build_index(pack, 1, None, Select(columns=columns), Normalize())
        rows = index.rows(np.arange(index.n_samples)).tolist()
        assert rows == ([0, 2, 5] if lost else list(range(6)))
        assert index.reasons["last close of the window not positive"] == lost
    assert build_index(pack, 1, None, Select(), as_normalize("zscore")).n_samples == 6


def test_a_fit_is_of_the_chosen_rows_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(60_000, 1e-2, (1000, 3)).astype(np.float32)
    rows[:, 2] = 0.1
    chosen = np.flatnonzero(rng.random(1000) < 0.4)
    for size in (7, 1 << 18):
        monkeypatch.setattr("stager.samples.normalize._CHUNK_ROWS", size)
        mean, deviation = fit(rows, chosen, np.array([2, 0]))
        values = rows[chosen].astype(np.float64).T.tolist()
        assert mean == pytest.approx([statistics.fmean(values[2]), statistics.fmean(values[0])], rel=1e-14)
        assert deviation == pytest.approx([1.0, statistics.pstdev(values[0])], rel=1e-9)


def test_a_fitted_column_is_scaled_by_what_was_fitted() -> None:
    x = np.array([[[1.0, 5.0], [3.0, 6.0]]], np.float32)
    apply(x, np.array([FITTED, NONE], np.int32), np.ones((1, 1), np.float32), np.array([[2.0, 9.0], [4.0, 9.0]]))
    assert x.tolist() == [[[-0.25, 5.0], [0.25, 6.0]]]


def test_without_folds_all_samples_are_fitted_on() -> None:
    pack = memory_pack({"A": range(10), "B": range(6)})
    index = build_index(pack, 4, None, Select(columns=["volume", "close"]), Normalize("zscore", "none", fit="train"))
    assert index.methods is not None
    assert index.methods.tolist() == [NONE, FITTED]
    assert index.fitted is not None
    closes = pack.rows[index.rows(np.arange(index.n_samples)), 3].astype(np.float64)
    assert index.fitted[:, 1] == pytest.approx([closes.mean(), closes.std()])


@pytest.mark.parametrize("arguments", [{"fit": "test"}, {"fit": "train"}, {"price": "none", "fit": "train"}])
def test_fits_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match="fit"):
        Normalize(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"price": "first"}, {"volume": "last"}, {"other": "last"}, {"other": None}, {"price": ["last"]}]
)
def test_methods_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"normalisation of .* there are: "):
        Normalize(**arguments)
