"""Bars off the grid, prices that are not positive, and stretches without volume, beside models in plain Python."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from bars_fixtures import DAY, MINUTE, START
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.interval import Interval
from stager.bars.series import count, not_positive, off_grid, zero_volume

HOUR = 60 * MINUTE


def borders(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.cumsum([0, *counts])[:-1], np.array(counts)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(3, 40), min_size=1, max_size=4))
def test_planted_times_are_off_the_grid(data: st.DataObject, counts: list[int]) -> None:
    """Every symbol has a grid of its own, and fewer than half of its bars are moved."""
    first_rows, numbers = borders(counts)
    times, planted = [], []
    for n in counts:
        own = START + data.draw(st.integers(0, MINUTE - 1)) + np.arange(n) * MINUTE
        odd = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=(n - 1) // 2)))
        own[odd] += data.draw(st.integers(1, MINUTE - 1))
        planted += [row + sum(map(len, times)) for row in odd]
        times.append(own)
    off = off_grid(np.concatenate(times), first_rows, numbers, Interval.parse("1min"))
    assert ([] if off is None else np.flatnonzero(off).tolist()) == planted
    assert (off is None) == (not planted)
    assert count(off, first_rows, np.concatenate(times)).n == len(planted)


def test_summer_time_moves_no_bar_off_the_grid() -> None:
    winter = START + np.arange(20) * DAY + 14 * HOUR + 30 * MINUTE
    times = np.r_[winter, winter[-1] + DAY - HOUR + np.arange(20) * DAY]
    assert off_grid(times, np.array([0]), np.array([40]), Interval.parse("4h")) is None
    times[7] += 5 * MINUTE
    off = off_grid(times, np.array([0]), np.array([40]), Interval.parse("1d"))
    assert off is not None
    assert np.flatnonzero(off).tolist() == [7]


def test_months_have_no_grid() -> None:
    assert (
        off_grid(np.array([START, START + 31 * DAY + 1]), np.array([0]), np.array([2]), Interval.parse("1mo")) is None
    )


def test_many_rows_are_looked_at_in_pieces() -> None:
    n = (1 << 18) + 1000
    times = START + np.arange(n) * MINUTE
    first_rows, counts = borders([(1 << 18) - 10, 500, 510])
    times[[5, 1 << 18, n - 1]] += 1
    off = off_grid(times, first_rows, counts, Interval.parse("1min"))
    assert off is not None
    assert np.flatnonzero(off).tolist() == [5, 1 << 18, n - 1]
    assert count(off, first_rows, times).of_symbols.tolist() == [1, 1, 1]


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, np.nan]), min_size=1, max_size=30), min_size=1, max_size=4))
def test_stretches_without_volume(symbols: list[list[float]]) -> None:
    first_rows, _ = borders([len(one) for one in symbols])
    volume = np.concatenate([np.array(one) for one in symbols])
    expected, row = [], 0
    for one in symbols:
        for is_zero, group in groupby(one, key=lambda value: value == 0):
            length = len(list(group))
            if is_zero:
                expected.append((row, length))
            row += length
    prices = [np.arange(len(volume)) * 1.0 for _ in range(4)]
    prices[1][volume == 0] += np.arange(np.count_nonzero(volume == 0)) % 2
    found = zero_volume(volume, prices, first_rows, np.arange(len(volume)) * 3)
    assert list(zip(found.rows, found.lengths, strict=True)) == expected
    assert found.times.tolist() == (found.rows * 3).tolist()
    assert found.zero.of_symbols.tolist() == [one.count(0.0) for one in symbols]
    assert found.flat == (found.zero.n + 1) // 2


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_prices_that_are_not_positive(low: list[float]) -> None:
    prices = [np.array(low) + 1, np.array(low) + 2, np.array(low), np.array(low) + 1]
    found = not_positive(prices)
    assert (found is None) == all(price > 0 for price in low)
    if found is not None:
        assert found.tolist() == [price <= 0 for price in low]
        first = next(i for i, price in enumerate(low) if price <= 0)
        assert count(found, np.array([0]), np.arange(len(low)) + 9).first == (first, first + 9)
