"""The counting sort against NumPy's lexsort, for orders, range sizes and code widths."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stager.bars.arrange import Arranged, Conflict, arrange, code_type
from stager.bars.checks import Piece


def pieces_of(codes: np.ndarray, times: np.ndarray, n_symbols: int, cuts: list[int]) -> list[Piece]:
    rows = np.arange(len(times), dtype=np.float64)
    codes = codes.astype(code_type(n_symbols))
    edges = [0, *sorted(cut % (len(times) + 1) for cut in cuts), len(times)]
    return [Piece(codes[a:b], times[a:b], (times[a:b].astype(np.float64), rows[a:b])) for a, b in pairwise(edges)]


def check(arranged: Arranged, codes: np.ndarray, times: np.ndarray, n_symbols: int) -> None:
    order = np.lexsort((times, codes))
    assert np.array_equal(arranged.times, times[order])
    assert np.array_equal(arranged.columns[1], order.astype(np.float64))
    assert np.array_equal(arranged.counts, np.bincount(codes, minlength=n_symbols))
    assert np.array_equal(arranged.first_rows, np.cumsum(arranged.counts) - arranged.counts)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), n_rows=st.integers(0, 400), n_symbols=st.sampled_from([1, 2, 7, 300, 70_000]))
@pytest.mark.parametrize("rows_in_range", [3, 50, 1 << 17])
def test_it_is_the_order_of_symbol_and_time(
    monkeypatch: pytest.MonkeyPatch, rows_in_range: int, data: st.DataObject, n_rows: int, n_symbols: int
) -> None:
    monkeypatch.setattr("stager.bars.arrange._RANGE_ROWS", rows_in_range)
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, n_symbols, n_rows)
    times = generator.permutation(n_rows).astype(np.int64) * 60
    order = data.draw(st.sampled_from(["any", "time", "symbol", "both", "newest first"]))
    if order in ("time", "newest first"):
        times = np.sort(times)[:: -1 if order == "newest first" else 1].copy()
    if order in ("symbol", "both"):
        codes = np.sort(codes)
    if order == "both":
        times = np.sort(times)
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=6))
    arranged = arrange(pieces_of(codes, times, n_symbols, cuts), n_symbols, 2)
    check(arranged, codes, times, n_symbols)


def test_many_ranges_on_all_cores() -> None:
    n_symbols, n_times = 1500, 400
    codes = np.tile(np.random.default_rng(0).permutation(n_symbols), n_times)
    times = np.repeat(np.arange(n_times, dtype=np.int64), n_symbols)
    calls: list[tuple[int, int]] = []
    arranged = arrange(
        pieces_of(codes, times, n_symbols, [100_000, 100_001, 333_333]),
        n_symbols,
        2,
        done=lambda done, total: calls.append((done, total)),
    )
    check(arranged, codes, times, n_symbols)
    assert calls[-1] == (len(times) * 24, len(times) * 24)
    assert calls == sorted(calls)


def test_identical_rows_go_and_others_conflict() -> None:
    codes = np.array([1, 0, 1, 1, 0, 2], dtype=np.uint8)
    times = np.array([5, 5, 5, 6, 5, 5], dtype=np.int64)
    values = np.array([1.0, np.nan, 1.0, 1.0, np.nan, 9.0])
    arranged = arrange([Piece(codes, times, (values,))], 4, 1)
    assert arranged.n_duplicates == 2
    assert arranged.counts.tolist() == [1, 2, 1, 0]
    assert arranged.first_rows.tolist() == [0, 1, 3, 4]
    assert arranged.times.tolist() == [5, 5, 6, 5]
    assert np.array_equal(arranged.columns[0], [np.nan, 1.0, 1.0, 9.0], equal_nan=True)
    values[4] = 3.0
    with pytest.raises(Conflict) as caught:
        arrange([Piece(codes, times, (values,))], 4, 1)
    assert (caught.value.symbol, caught.value.time, caught.value.n_conflicts) == (0, 5, 1)


def test_codes_are_as_small_as_they_can_be() -> None:
    assert [code_type(n).itemsize for n in (0, 1, 256, 257, 65_536, 65_537)] == [1, 1, 1, 2, 2, 4]


def test_threads_that_ask_for_the_columns_at_once_get_the_same_right_ones() -> None:
    n_rows, n_symbols = 300_000, 7
    codes = np.tile(np.arange(n_symbols, dtype=np.uint8), n_rows // n_symbols + 1)[:n_rows]
    values = np.arange(n_rows, dtype=np.float64)
    piece = Piece(codes, np.repeat(np.arange(n_rows // n_symbols + 1), n_symbols)[:n_rows], (values, -values))
    expected = values[np.argsort(codes, kind="stable")]
    for _ in range(5):
        arranged = arrange([piece], n_symbols, 2)
        with ThreadPoolExecutor(4) as pool:
            found = [future.result() for future in [pool.submit(lambda one=arranged: one.columns) for _ in range(4)]]
        for columns in found:
            assert columns is found[0]
            assert np.array_equal(columns[0], expected)
            assert np.array_equal(columns[1], -expected)
        assert np.array_equal(arranged.rows(lambda number, part: part.astype(np.float32))[:, 0], expected)
