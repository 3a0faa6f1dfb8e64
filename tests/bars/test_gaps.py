"""Missing bars are those of a model that counts one by one, and of the samples' own count."""

from __future__ import annotations

import itertools

import numpy as np
from bars_fixtures import DAY, MINUTE, START, bar_table
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.gaps import find_gaps
from stager.bars.interval import Interval
from stager.bars.read import ReadOptions
from stager.packs.packing import pack_in_memory
from stager.samples.summary import summarise

PLACES = st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=30).map(sorted), min_size=1, max_size=4)


def laid_out(symbols: list[list[int]], unit: int) -> tuple[np.ndarray, np.ndarray]:
    times = np.concatenate([START + np.array(places, np.int64) * unit for places in symbols])
    return times, np.cumsum([0, *map(len, symbols)])[:-1]


@settings(deadline=None)
@given(PLACES)
def test_bars_within_a_day(symbols: list[list[int]]) -> None:
    times, first_rows = laid_out(symbols, MINUTE)
    seen = {place for places in symbols for place in places}
    expected = [
        (int(first) + i, b - a - 1, len([place for place in seen if a < place < b]))
        for first, places in zip(first_rows, symbols, strict=True)
        for i, (a, b) in enumerate(itertools.pairwise(places))
        if b - a > 1
    ]
    gaps = find_gaps(times, first_rows, Interval.parse("1min"))
    assert list(zip(gaps.rows, gaps.n_missing, gaps.n_elsewhere, strict=True)) == expected


@settings(deadline=None)
@given(PLACES)
def test_sessions_are_those_of_any_symbol(symbols: list[list[int]]) -> None:
    times, first_rows = laid_out(symbols, DAY)
    seen = sorted({place for places in symbols for place in places})
    expected = [
        (int(first) + i, seen.index(b) - seen.index(a) - 1)
        for first, places in zip(first_rows, symbols, strict=True)
        for i, (a, b) in enumerate(itertools.pairwise(places))
        if seen.index(b) - seen.index(a) > 1
    ]
    gaps = find_gaps(times, first_rows, Interval.parse("1d"))
    assert list(zip(gaps.rows, gaps.n_missing, strict=True)) == expected
    assert (gaps.n_missing == gaps.n_elsewhere).all()


@settings(deadline=None)
@given(PLACES, st.sampled_from([("1min", MINUTE), ("1d", DAY), ("1w", 7 * DAY)]))
def test_as_many_as_a_pack_tells(symbols: list[list[int]], kind: tuple[str, int]) -> None:
    interval, unit = kind
    times, first_rows = laid_out(symbols, unit)
    gaps = find_gaps(times, first_rows, Interval.parse(interval))
    table = bar_table({f"S{i}": places for i, places in enumerate(symbols)}, unit=unit)
    summary = summarise(pack_in_memory(table, ReadOptions(interval=interval)))
    found = (len(gaps), int(gaps.n_missing.sum()), int(gaps.n_missing.max(initial=0)))
    assert found == (summary.n_gaps, summary.n_missing, summary.largest_gap)


def test_months_have_no_gap_for_their_length() -> None:
    months = np.arange("2023-01", "2024-03", dtype="datetime64[M]").astype("datetime64[ns]").astype(np.int64)
    assert len(find_gaps(months, np.array([0]), Interval.parse("1mo"))) == 0
    without = np.delete(months, 5)
    both = np.concatenate([months, without])
    gaps = find_gaps(both, np.array([0, len(months)]), Interval.parse("1mo"))
    assert (gaps.rows.tolist(), gaps.n_missing.tolist()) == ([len(months) + 4], [1])


def test_a_wide_range_of_a_short_interval_is_counted_without_a_place_for_each() -> None:
    """Twenty years of nanoseconds."""
    far = 20 * 365 * DAY
    gaps = find_gaps(np.array([START, START + far, START + 5]), np.array([0, 2]), Interval.parse("1ns"))
    assert (gaps.n_missing.tolist(), gaps.n_elsewhere.tolist()) == ([far - 1], [1])
