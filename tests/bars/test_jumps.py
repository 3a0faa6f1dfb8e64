"""Planted jumps are found, all of them and at their places; a market's moves are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.jumps import SCALE, SPIKE, SPLIT, Jumps, find_jumps

RATIOS = {
    "2": 2.0, "1/2": 0.5, "3": 3.0, "1/3": 1 / 3, "3/2": 1.5, "2/3": 2 / 3, "5/2": 2.5, "1/4": 0.25, "20": 20.0,
    "10": 10.0, "1/10": 0.1, "100": 100.0, "1/100": 0.01, "1000": 1e3, "1/1000": 1e-3, "1/1000000000": 1e-9,
}  # fmt: skip
TENS = {"10", "1/10", "100", "1/100", "1000", "1/1000", "1/1000000000"}


@st.composite
def quiet(draw: st.DrawFn) -> np.ndarray:
    """Closes that move by two per cent at most."""
    n = draw(st.integers(1, 60))
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).uniform(-0.01, 0.01, n)
    return draw(st.sampled_from([0.003, 1.0, 90.0, 4e4])) * (1 + noise)


def joined(series: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.array([len(one) for one in series])
    return np.concatenate(series), np.cumsum(counts) - counts, counts


def jumps_of(opens: np.ndarray, close: np.ndarray, first_rows: np.ndarray, counts: np.ndarray) -> Jumps:
    found = find_jumps(np.arange(len(close)) * 7, opens, close, first_rows, counts)
    assert found.times.tolist() == (found.rows * 7).tolist()
    return found


def opened(close: np.ndarray, first_rows: np.ndarray) -> np.ndarray:
    """Opens at the last close, as where bars follow each other closely."""
    opens = np.append(close[:1], close[:-1])
    opens[first_rows] = close[first_rows]
    return opens


@settings(deadline=None)
@given(st.lists(quiet(), min_size=1, max_size=4))
def test_no_jump_in_quiet_series(series: list[np.ndarray]) -> None:
    close, first_rows, counts = joined(series)
    assert len(jumps_of(close * 1.004, close, first_rows, counts)) == 0


@settings(deadline=None)
@given(st.data(), st.lists(quiet().filter(lambda close: len(close) > 13), min_size=1, max_size=4), st.booleans())
def test_planted_jumps_are_found_exactly(data: st.DataObject, series: list[np.ndarray], gapless: bool) -> None:
    planted: list[tuple[int, str]] = []
    start = 0
    for close in series:
        for at in data.draw(st.sets(st.sampled_from(range(6, len(close) - 5, 6)), max_size=3)):
            name = data.draw(st.sampled_from(sorted(RATIOS)))
            close[at:] *= RATIOS[name]
            planted.append((start + at, name))
        start += len(close)
    close, first_rows, counts = joined(series)
    opens = opened(close, first_rows) if gapless else close * 0.998
    jumps = jumps_of(opens, close, first_rows, counts)
    assert list(zip(jumps.rows, jumps.near, strict=True)) == sorted(planted)
    assert jumps.kinds.tolist() == [SCALE if name in TENS else SPLIT for _, name in sorted(planted)]
    assert jumps.ratios == pytest.approx([RATIOS[name] for _, name in sorted(planted)], rel=0.03)


@settings(deadline=None)
@given(quiet().filter(lambda close: len(close) > 13), st.data())
def test_a_wrong_bar_is_one_spike(close: np.ndarray, data: st.DataObject) -> None:
    at = data.draw(st.integers(6, len(close) - 7))
    length = data.draw(st.integers(1, 2))
    close[at : at + length] *= data.draw(st.sampled_from([0.01, 0.2, 2.2, 10.0, 7777.0]))
    jumps = jumps_of(close, close, np.array([0]), np.array([len(close)]))
    assert (jumps.rows.tolist(), jumps.kinds.tolist(), jumps.near) == ([at], [SPIKE], [""])


def test_a_split_overnight_is_told_by_the_open_where_the_day_goes_on() -> None:
    close = np.r_[np.full(30, 100.0) + np.arange(30) % 3, np.full(20, 44.0) + np.arange(20) % 3]
    opens = close.copy()
    opens[30] = 50.5  # the split; then the price fell by twelve per cent
    jumps = jumps_of(opens, close, np.array([0]), np.array([50]))
    assert (jumps.rows.tolist(), jumps.near) == ([30], ["1/2"])


def test_jumps_of_a_wild_symbol_are_its_usual_moves() -> None:
    """A price of one or two ticks halves and doubles all the time."""
    close = np.random.default_rng(1).choice([1.0, 2.0], 500)
    assert len(jumps_of(close, close, np.array([0]), np.array([500]))) == 0


def test_borders_of_symbols_and_prices_around_zero_are_no_jump() -> None:
    close = np.r_[np.full(20, 10.0), np.full(20, 1000.0), [0.5, 0.25, -0.25, -1.0, 0.5, 1.5, 0.0, 0.0, 3.0, 6.0]]
    assert len(jumps_of(close, close, np.array([0, 20, 40]), np.array([20, 20, 10]))) == 0


def test_many_rows_are_looked_at_in_pieces() -> None:
    n = (1 << 18) * 2 + 9
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 1e-4, n)))
    places = [1 << 18, (1 << 18) + 77, (1 << 19) + 1]
    for at in places:
        close[at:] /= 4
    jumps = jumps_of(close, close, np.array([0]), np.array([n]))
    assert (jumps.rows.tolist(), jumps.near) == (places, ["1/4"] * 3)
    assert math.isclose(jumps.ratios[0], 0.25, rel_tol=1e-3)
