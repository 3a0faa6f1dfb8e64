"""Where runs end: symbols, missing bars, sessions that others have."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise

import numpy as np
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples import runs as runs_module
from stager.samples.runs import find_breaks
from stager.samples.summary import summarise


def run_list(pack: Pack, max_gap: int = 0) -> list[tuple[int, int]]:
    """(first row, rows) of every run."""
    runs = find_breaks(pack).runs(max_gap)
    return list(zip(runs.first_rows.tolist(), runs.counts.tolist(), strict=True))


def test_missing_minutes_end_a_run() -> None:
    pack = memory_pack({"A": [0, 1, 3, 4, 10, 11], "B": [0, 1, 8]})
    assert run_list(pack) == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 1)]
    assert run_list(pack, 1) == [(0, 4), (4, 2), (6, 2), (8, 1)]
    assert run_list(pack, 4) == [(0, 4), (4, 2), (6, 2), (8, 1)]
    assert run_list(pack, 5) == [(0, 6), (6, 2), (8, 1)]
    assert run_list(pack, 6) == [(0, 6), (6, 3)]


def test_symbols_never_share_a_run() -> None:
    """The next symbol may begin exactly one bar after the last, or long before it."""
    pack = memory_pack({"A": [0, 1], "B": [2, 3], "C": [0, 1]})
    for max_gap in (0, 10**12, 2**63 - 1, 2**70):
        assert run_list(pack, max_gap) == [(0, 2), (2, 2), (4, 2)]


def test_times_off_the_grid() -> None:
    second = MINUTE // 60
    steps = [0, 60, 121, 180, 239, 240, 359, 479]
    pack = memory_pack({"A": steps}, unit=second)
    # 119 seconds are one whole bar and some, so none is missing; 120 seconds miss one.
    assert run_list(pack) == [(0, 7), (7, 1)]
    assert run_list(pack, 1) == [(0, 8)]


@pytest.fixture
def week() -> list[int]:
    """Weekdays of four weeks from Monday 2024-01-01 on, without the holiday on the 15th."""
    return [day for day in range(28) if day % 7 < 5 and day != 14]


def test_weekends_and_holidays_are_no_gap(week: list[int]) -> None:
    pack = memory_pack({"A": week, "B": week[3:]}, interval="1d", unit=DAY)
    assert run_list(pack) == [(0, len(week)), (len(week), len(week) - 3)]


def test_a_day_that_others_have_is_a_gap(week: list[int]) -> None:
    halted = [day for day in week if day not in (8, 9)]
    pack = memory_pack({"A": week, "B": halted}, interval="1d", unit=DAY)
    place = halted.index(10)
    assert run_list(pack) == [(0, 19), (19, place), (19 + place, len(halted) - place)]
    assert run_list(pack, 1) == run_list(pack)
    assert run_list(pack, 2) == [(0, 19), (19, len(halted))]
    # Alone, nobody tells that the days were sessions.
    assert run_list(memory_pack({"B": halted}, interval="1d", unit=DAY)) == [(0, len(halted))]


def test_daily_bars_of_any_hour() -> None:
    """Session opens move with daylight saving; a day is a day."""
    hour = DAY // 24
    steps = [day * 24 + (14 if day < 10 else 13) for day in range(20)]
    assert run_list(memory_pack({"A": steps}, interval="1d", unit=hour)) == [(0, 20)]


def test_weekly_bars() -> None:
    """One symbol stamps Mondays, another Fridays; the week counts."""
    mondays = [7 * week for week in range(6)]
    fridays = [7 * week + 4 for week in range(6) if week != 3]
    pack = memory_pack({"A": mondays, "B": fridays}, interval="1w", unit=DAY)
    assert run_list(pack) == [(0, 6), (6, 3), (9, 2)]
    assert run_list(pack, 1) == [(0, 6), (6, 5)]


def test_a_week_begins_on_monday() -> None:
    """A Sunday and the next day lie in two weeks, and the week between two Mondays is missed by both sides."""
    pack = memory_pack({"A": [6, 7], "B": [0, 14], "C": [6, 14]}, interval="1w", unit=DAY)
    assert run_list(pack) == [(0, 2), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_monthly_bars() -> None:
    first = dt.date(2024, 1, 1)
    months = [(dt.date(2024 + m // 12, m % 12 + 1, 1) - first).days for m in range(14)]
    ends = [day - 1 for day in months[1:]]
    pack = memory_pack({"A": months, "B": [*ends[:5], *ends[6:]]}, interval="1mo", unit=DAY)
    assert run_list(pack) == [(0, 14), (14, 5), (19, 7)]
    assert run_list(pack, 1) == [(0, 14), (14, 12)]


def test_chunks_of_rows_have_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = memory_pack({"A": [0, 1, 3, 4, 5, 9], "B": [0, 1, 2, 5]})
    expected = run_list(pack)
    for size in (1, 2, 3, 4):
        monkeypatch.setattr(runs_module, "_CHUNK_ROWS", size)
        assert run_list(pack) == expected


steps_of_symbols = st.dictionaries(
    st.sampled_from("ABCDE"), st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True), min_size=1
)


def missing_bars(stamps: list[int], calendar: list[int] | None, interval: int) -> list[int]:
    """How many bars are missing before each bar but the first, counted one by one."""
    if calendar is not None:
        return [sum(a < day < b for day in calendar) for a, b in pairwise(stamps)]
    return [
        sum(1 for n in range(1, (b - a) // interval + 1) if a + n * interval + interval <= b)
        for a, b in pairwise(stamps)
    ]


@settings(deadline=None, max_examples=150)
@given(steps=steps_of_symbols, max_gap=st.sampled_from([0, 1, 2, 5]), interval=st.sampled_from(["1min", "4min", "1d"]))
def test_equals_the_model(steps: dict[str, list[int]], max_gap: int, interval: str) -> None:
    unit = DAY if interval == "1d" else MINUTE
    pack = memory_pack(steps, interval=interval, unit=unit)
    calendar = sorted({step for some in steps.values() for step in some}) if interval == "1d" else None
    expected: list[tuple[int, int]] = []
    row = 0
    for symbol in sorted(steps):
        stamps = sorted(steps[symbol])
        first = row
        for offset, missing in enumerate(missing_bars(stamps, calendar, 4 if interval == "4min" else 1), 1):
            if missing > max_gap:
                expected.append((first, row + offset - first))
                first = row + offset
        row += len(stamps)
        expected.append((first, row - first))
    assert run_list(pack, max_gap) == expected
    runs = find_breaks(pack).runs(max_gap)
    firsts, ends = np.repeat(runs.first_rows, runs.counts), np.repeat(runs.ends, runs.counts)
    for start in range(0, pack.n_rows, 7):
        stop = min(start + 9, pack.n_rows)
        assert np.array_equal(runs.firsts_of(start, stop), firsts[start:stop])
        for count in (0, 1, 3, 1 << 60):
            last = [row for row in range(start, stop) if ends[row] - row <= count]
            assert runs.last_rows(start, stop, count).tolist() == last


def test_the_summary_counts_gaps() -> None:
    pack = memory_pack({"A": [0, 1, 3, 10], "B": [0, 5]})
    summary = summarise(pack)
    assert (summary.n_gaps, summary.n_missing, summary.largest_gap) == (3, 1 + 6 + 4, 6)
    assert summary.rows_nbytes == 6 * 5 * 4
    assert summary.disk_nbytes == 0
    one = summarise(pack_in_memory(bar_table({"A": [0, 1]}, start=START), ReadOptions()))
    assert (one.n_gaps, one.n_missing, one.largest_gap) == (0, 0, 0)
