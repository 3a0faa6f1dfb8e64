"""Sessions, contract rolls, splits, universes: what bounds runs, and which decisions are served."""

from __future__ import annotations

import datetime as dt
import re
import sys
import zoneinfo
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack

from stager import Stager, panel
from stager.bars.read import ReadOptions
from stager.errors import ConfigError, SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples.building import build_index
from stager.samples.plan import make_plan
from stager.samples.select import Select
from stager.samples.sessions import make_sessions
from stager.samples.targets import Target

NEW_YORK = zoneinfo.ZoneInfo("America/New_York")


def instant(text: str, zone: dt.tzinfo = NEW_YORK) -> int:
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()) * 10**9


def in_minutes(*stretches: tuple[str, str]) -> Pack:
    """A bar of symbol A for every minute of half-open stretches of New York time."""
    steps = [
        step
        for start, end in stretches
        for step in range((instant(start) - START) // MINUTE, (instant(end) - START) // MINUTE)
    ]
    return memory_pack({"A": steps})


def served(pack: Pack, window: int, target: Target | None = None, **select: Any) -> list[int]:
    index = build_index(pack, window, target, Select(**select))
    return index.rows(np.arange(index.n_samples)).tolist()


HOURS = "09:30-16:00 America/New_York"


@pytest.mark.parametrize(
    "day",
    [
        "2024-03-08",  # the Friday before clocks go forward
        "2024-03-11",
        "2024-11-01",
        "2024-11-04",
        "2024-11-29",  # a half day: it has fewer bars, and no gap
    ],
)
def test_hours_follow_the_clock_of_the_zone(day: str) -> None:
    pack = in_minutes((f"{day}T09:00", f"{day}T17:00"))
    assert served(pack, 10, session=HOURS) == list(range(30 + 9, 30 + 390))
    assert served(pack, 10, session=HOURS, close_inclusive=True) == list(range(30 + 9, 30 + 391))


def test_windows_and_labels_stay_inside_their_session() -> None:
    """Bars around the clock: only the session's hours bound anything."""
    pack = in_minutes(("2024-03-07T00:00", "2024-03-13T00:00"))
    index = build_index(pack, 60, Target(horizon=5), Select(session=HOURS))
    rows = index.rows(np.arange(index.n_samples))
    assert len(rows) == 6 * (390 - 59 - 6)
    days = make_sessions(HOURS, int(pack.times[0]), int(pack.times[-1]))
    for edge in (rows, rows - 59, rows + 6):
        numbers = days.of(pack.times[edge])
        assert (numbers >= 0).all()
        np.testing.assert_array_equal(numbers, days.of(pack.times[rows]))
    assert index.reasons["outside the session"] == pack.n_rows - 6 * 390
    assert index.reasons["session boundary in the window"] == 6 * 59
    assert index.reasons["label beyond the end of the run"] == 6 * 6
    assert (index.n_runs, index.longest_run) == (6, 390)


def test_a_label_allowed_across_gaps_reaches_the_next_session() -> None:
    pack = in_minutes(("2024-03-08T09:30", "2024-03-08T16:00"), ("2024-03-11T09:30", "2024-03-11T16:00"))
    across = Target(horizon=5, across_gaps="allow")
    assert served(pack, 60, across, session=HOURS) == [*range(59, 390), *range(390 + 59, 780 - 6)]


def test_max_gap_does_not_join_sessions() -> None:
    pack = in_minutes(("2024-03-08T15:50", "2024-03-08T16:00"), ("2024-03-11T09:30", "2024-03-11T09:40"))
    assert served(pack, 10, max_gap=10**6) == list(range(9, 20))
    assert served(pack, 10, max_gap=10**6, session=HOURS) == [9, 19]
    index = build_index(pack, 5, None, Select(session=HOURS))
    plan = make_plan(pack, index, None, batch_size=4, n_batches=3, device="cpu", placement="host", path="mapped")
    assert set(plan.samples_at_gap.values()) == {12}


@pytest.mark.parametrize("hours", ["18:00-17:00 America/New_York", "18:00-24:00,00:00-17:00 America/New_York"])
def test_a_session_over_midnight(hours: str) -> None:
    pack = in_minutes(("2024-03-09T12:00", "2024-03-12T12:00"))
    if "," in hours:
        with pytest.raises(SampleError, match="follow each other within 24 hours"):
            build_index(pack, 2, None, Select(session=hours))
        return
    numbers = make_sessions(hours, int(pack.times[0]), int(pack.times[-1])).of(pack.times)
    local = [dt.datetime.fromtimestamp(time / 1e9, NEW_YORK) for time in pack.times.tolist()]
    assert [number < 0 for number in numbers] == [moment.hour == 17 for moment in local]
    days = [(moment + dt.timedelta(hours=6)).replace(tzinfo=None).date() for moment in local]
    inside = numbers >= 0
    assert len({(n, d) for n, d, i in zip(numbers.tolist(), days, inside, strict=True) if i}) == len(
        set(numbers[inside])
    )


def test_a_session_of_a_whole_day_ends_where_it_begins() -> None:
    pack = in_minutes(("2024-03-09T12:00", "2024-03-12T12:00"))
    numbers = make_sessions("17:00-17:00 America/New_York", int(pack.times[0]), int(pack.times[-1]), True).of(
        pack.times
    )
    assert (numbers >= 0).all()
    changes = np.flatnonzero(np.diff(numbers)) + 1
    at = [dt.datetime.fromtimestamp(time / 1e9, NEW_YORK) for time in pack.times[changes].tolist()]
    assert [(moment.hour, moment.minute) for moment in at] == [(17, 0)] * 3


def test_a_break_is_a_gap() -> None:
    tokyo = "09:00-11:30,12:30-15:00 Asia/Tokyo"
    minutes = [*range(150), *range(210, 360)]
    pack = memory_pack({"A": [*minutes, *(minute + 1440 for minute in minutes)]})
    assert served(pack, 100, session=tokyo) == [*range(99, 150), *range(249, 300), *range(399, 450), *range(549, 600)]
    assert served(pack, 200, session=tokyo, max_gap=60) == [*range(199, 300), *range(499, 600)]
    lunch = memory_pack({"A": range(360)})
    assert served(lunch, 150, session=tokyo) == [149, 359]
    assert served(lunch, 150, session=tokyo, close_inclusive=True) == [149, 150, 359]


# The calendars' own use of pandas.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calendars_know_half_days_and_holidays() -> None:
    pytest.importorskip("exchange_calendars")
    pack = in_minutes(*((f"2024-11-{day}T09:00", f"2024-11-{day}T16:30") for day in (27, 28, 29)))
    # Thanksgiving is closed, the day after ends at 13:00.
    assert served(pack, 10, session="XNYS") == [*range(39, 420), *range(900 + 39, 900 + 240)]
    assert served(pack, 10, session="XNYS", close_inclusive=True)[380:382] == [419, 420]
    # 09:30 to 12:00 and 13:00 to 16:00 in Hong Kong are 01:30 to 04:00 and 05:00 to 08:00 UTC; the first is a holiday.
    hong_kong = memory_pack({"A": [*range(60, 540), *range(1440 + 60, 1440 + 540)]})
    assert served(hong_kong, 100, session="XHKG") == [*range(480 + 30 + 99, 480 + 180), *range(480 + 339, 480 + 420)]
    with pytest.raises(SampleError, match="no such sessions"):
        served(pack, 10, session="XXXX")


def test_without_the_calendars_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exchange_calendars", None)
    with pytest.raises(SampleError, match=r"pip install 'stager\[calendars\]'"):
        make_sessions("XNYS", START, START)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"session": "9:30-16:00 America/New_York"}, SampleError, "session is '9:30-16:00"),
        ({"session": "09:30-16:00"}, SampleError, "session is"),
        ({"session": ""}, SampleError, "session is ''"),
        ({"session": 5}, SampleError, "session is 5"),
        ({"session": "09:30-25:00 UTC"}, SampleError, "25:00 is no time"),
        ({"session": "09:75-16:00 UTC"}, SampleError, "09:75 is no time"),
        ({"session": "24:00-16:00 UTC"}, SampleError, "within 24 hours"),
        ({"session": "09:00-12:00,11:00-15:00 UTC"}, SampleError, "follow each other"),
        ({"session": "09:00-12:00,13:00-10:00 UTC"}, SampleError, "follow each other"),
        ({"session": "09:30-16:00 America/Gotham"}, ConfigError, "America/Gotham"),
        ({"close_inclusive": True}, SampleError, "name the session too"),
        ({"close_inclusive": 1, "session": HOURS}, SampleError, "close_inclusive is 1"),
        ({"allow_filled": "yes"}, SampleError, "allow_filled is 'yes'"),
        ({"stride": 0}, SampleError, "stride is 0"),
        ({"stride": 1.0}, SampleError, "stride is 1.0"),
        ({"stride": 2**70}, SampleError, "the largest is"),
        ({"min_history": -1}, SampleError, "min_history is -1"),
        ({"columns": "close"}, SampleError, "columns is the text 'close'"),
        ({"columns": ()}, SampleError, "at least one"),
        ({"columns": ("close", "close")}, SampleError, "each once"),
        ({"columns": 5}, SampleError, "columns is 5"),
    ],
)
def test_selections_that_are_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Select(**arguments)


def test_a_session_without_a_bar_is_named() -> None:
    with pytest.raises(SampleError, match="no bar opens inside the session '10:00-11:00 UTC'; look at its hours"):
        build_index(memory_pack({"A": range(10)}), 2, None, Select(session="10:00-11:00 UTC"))


def test_sessions_are_for_bars_shorter_than_a_day() -> None:
    pack = memory_pack({"A": range(10)}, interval="1d", unit=DAY)
    with pytest.raises(SampleError, match="the bars are of 1d; sessions bound shorter ones"):
        build_index(pack, 2, None, Select(session=HOURS))


# -------------------------------------------------------------------------------- rolls and splits


def at(steps: list[int], unit: int = MINUTE) -> pa.Array:
    return pa.array([START + step * unit for step in steps], pa.timestamp("ns", "UTC"))


def test_a_column_tells_contracts() -> None:
    pack = memory_pack({"A": range(10), "B": range(5)}, contract=[1.0] * 4 + [2.0] * 6 + [2.0] * 5)
    assert served(pack, 3, rolls="contract") == [2, 3, 6, 7, 8, 9, 12, 13, 14]
    assert served(pack, 3, Target(horizon=1, delay=0, across_gaps="allow"), rolls="contract") == [2, 6, 7, 8, 12, 13]
    index = build_index(pack, 3, None, Select(rolls="contract"))
    assert index.reasons["roll or split in the window"] == 2
    nan = float("nan")
    gaps = memory_pack({"A": range(6)}, contract=[nan, nan, 1.0, 1.0, nan, nan])
    assert served(gaps, 2, rolls="contract", columns=["close"]) == [1, 3, 5]


@pytest.mark.parametrize(
    ("adjustment", "expected"),
    [("raw", [1, 2, 4, 5]), ("unknown", [1, 2, 4, 5]), ("split", [1, 2, 3, 4, 5]), ("total", [1, 2, 3, 4, 5])],
)
def test_splits_end_runs_of_prices_that_are_not_adjusted(adjustment: Any, expected: list[int]) -> None:
    pack = pack_in_memory(bar_table({"A": range(6)}), ReadOptions(interval="1min", adjustment=adjustment))
    # Between two bars, it takes effect with the later one; before the first and after the last it changes nothing.
    seconds = [2.5, -10, 0, 5.5, 99]
    times = pa.array([START + int(step * MINUTE) for step in seconds], pa.timestamp("ns", "UTC"))
    splits = pa.table({"symbol": ["A"] * 5, "time": times, "ratio": [4, 2, 2, 2, 2]})
    assert served(pack, 2, splits=splits) == expected
    index = build_index(pack, 2, None, Select())
    plan = make_plan(pack, index, None, batch_size=4, n_batches=3, device="cpu", placement="host", path="mapped")
    assert plan.adjustment == adjustment
    assert adjustment in str(plan)


@pytest.mark.parametrize(
    ("adjustment", "closes", "ratios", "words"),
    [
        ("raw", [100, 101, 50, 51, 25, 25], [2, 2], None),
        ("unknown", [100, 101, 50, 51, 25, 25], [2, 2], None),
        ("raw", [100, 101, 102, 103, 51, 52], [2, 2], None),  # one of two
        ("raw", [100, 101, 102, 103, 104, 105], [2, 2], "do not jump by the ratio at 2 of 2"),
        ("unknown", [100, 101, 200, 201, 400, 401], [2, 2], "do not jump by the ratio at 2 of 2"),
        ("raw", [100, 101, 1000, 1010, 2000, 2020], [0.1, 0.5], None),
        ("raw", [100, 101, 102, 103, 104, 105], [1.05, 1], None),  # no clear ones
        ("split", [100, 101, 102, 103, 104, 105], [2, 2], None),
        ("split", [100, 101, 50, 51, 25, 25], [2, 2], "closes jump by the ratio at 2 of 2"),
        ("total", [100, 101, 50, 51, 25, 25], [2, 2], "adjusted \\(total\\)"),
        ("raw", [100, 101, 0, 103, -104, 105], [2, 2], None),
    ],
)
def test_bars_that_contradict_a_splits_ratio_are_told(
    adjustment: Any, closes: list[float], ratios: list[float], words: str | None
) -> None:
    table = bar_table({"A": range(6), "B": range(6)}, close=[*map(float, closes), *[7.0] * 6])
    pack = pack_in_memory(table, ReadOptions(interval="1min", adjustment=adjustment))
    # Those before the first bar and behind the last tell nothing.
    splits = pa.table({"symbol": ["A"] * 4 + ["B"], "time": at([2, 4, -1, 9, 0]), "ratio": [*ratios, 9, 9, 9]})
    for source in (pack, panel(pack)):
        with Stager(source, window=1, batch_size=2, select=Select(splits=splits), device="cpu") as one:
            told = [text for text in one.plan.warnings if "declared splits" in text]
            assert one.plan.as_dict()["warnings"] == list(one.plan.warnings)
            assert len(told) == (words is not None)
            for text in told:
                assert re.search(str(words), text)
                assert "A at 2024-01-01 00:0" in text
                assert text in str(one.plan)


def test_a_split_of_daily_bars_takes_effect_with_its_date() -> None:
    pack = memory_pack({"A": range(6)}, interval="1d", unit=DAY)
    for time in (pa.array([START // DAY + 3], pa.int32()).cast(pa.date32()), at([3 * 24 + 14], 60 * MINUTE)):
        splits = pa.table({"symbol": ["A"], "time": time, "ratio": [2]})
        assert served(pack, 2, splits=splits) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ({"rolls": "contract"}, "rolls: contract can't be read"),
        ({"rolls": 5}, "rolls is 5"),
        ({"rolls": pa.table({"symbol": ["A"]})}, "rolls: there is no column 'time'"),
        ({"rolls": pa.table({"symbol": ["X"], "time": at([1])})}, "none of the 1 effective times .* is of X"),
        ({"splits": pa.table({"symbol": ["A"], "time": at([1])})}, "splits: there is no column 'ratio'"),
        ({"splits": pa.table({"symbol": ["A"], "time": at([1]), "ratio": [0.0]})}, "ratio must be above 0"),
        ({"splits": pa.table({"symbol": ["A"], "time": at([1]), "ratio": [None]})}, "ratio|numbers"),
        ({"universe": pa.table({"symbol": ["A"], "start": at([1])})}, "universe: there is no column 'end'"),
        ({"universe": pa.table({"symbol": ["A"], "start": at([1]), "end": at([1])})}, "an end must lie after"),
        ({"universe": pa.table({"symbol": ["A"], "start": at([70]), "end": at([90])})}, "rows: not in the universe"),
        ({"columns": ["bid"]}, "the pack has no column 'bid'; it has: open"),
        ({"min_history": 11}, "10 rows: history too short"),
    ],
)
def test_tables_that_are_refused(select: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words):
        build_index(memory_pack({"A": range(10)}), 2, None, Select(**select))


# -------------------------------------------------------------------------------- universe, stride, columns


def test_instants_of_a_table_are_told_to_the_nanosecond() -> None:
    time = pa.array([START + 1], pa.timestamp("ns", "UTC"))
    splits = pa.table({"symbol": ["A"], "time": time, "ratio": [0.0]})
    with pytest.raises(SampleError, match=r"first otherwise A 2024-01-01 00:00:00.000000001Z, 0.0"):
        served(memory_pack({"A": range(6)}), 2, splits=splits)


def test_a_symbol_is_served_while_it_belongs_to_the_universe() -> None:
    """Decisions (the closes) are what counts; symbols that the pack does not have are no matter."""
    pack = memory_pack({"A": range(10), "B": range(10)})
    universe = pa.table(
        {
            "symbol": ["A", "Z", "B", "A"],
            "start": at([3, 0, -5, 8]),
            "end": pa.array([START + 5 * MINUTE, None, None, START + 9 * MINUTE], pa.timestamp("ns", "UTC")),
        }
    )
    assert served(pack, 2, universe=universe) == [2, 3, 7, *range(11, 20)]
    index = build_index(pack, 2, None, Select(universe=universe))
    assert index.reasons["not in the universe"] == 6


def test_all_symbols_share_the_instants_of_a_stride() -> None:
    pack = memory_pack({"A": range(40), "B": range(3, 40), "C": [*range(11), *range(13, 40)]})
    index = build_index(pack, 4, None, Select(stride=5))
    rows = index.rows(np.arange(index.n_samples))
    assert set((pack.times[rows] + MINUTE) // MINUTE % 5) == {0}
    for symbol, n in zip("ABC", (8, 7, 7), strict=True):
        first = pack.first_rows[pack.symbols.index(symbol)]
        assert ((rows >= first) & (rows < first + pack.counts[pack.symbols.index(symbol)])).sum() == n


def test_a_stride_of_daily_bars_counts_sessions() -> None:
    week = [day for day in range(28) if day % 7 < 5]
    pack = memory_pack({"A": week, "B": week[2:]}, interval="1d", unit=DAY)
    index = build_index(pack, 1, None, Select(stride=5))
    days = (pack.times[index.rows(np.arange(index.n_samples))] - START) // DAY
    assert days.tolist() == [0, 7, 14, 21, 7, 14, 21]


def test_a_missing_value_in_a_column_that_is_not_served_removes_nothing() -> None:
    pack = memory_pack({"A": range(6)}, vwap=[1.0, float("nan"), 1.0, 1.0, 1.0, 1.0])
    assert served(pack, 2) == [3, 4, 5]
    assert served(pack, 2, columns=["close", "open"]) == [1, 2, 3, 4, 5]


def test_what_comes_later_changes_no_earlier_sample() -> None:
    """Bars after the cut are left out: earlier decisions are the same, whatever bounds them."""
    pack = in_minutes(("2024-03-07T09:00", "2024-03-07T17:00"), ("2024-03-08T09:00", "2024-03-08T17:00"))
    steps = ((pack.times - START) // MINUTE).tolist()
    rolls = pa.table({"symbol": ["A", "A"], "time": pack.times[[100, 700]].astype("datetime64[ns]")})
    select = Select(session=HOURS, rolls=rolls, stride=3, min_history=50)
    whole = build_index(pack, 10, None, select)
    rows = whole.rows(np.arange(whole.n_samples))
    for cut in (101, 421, 500, 701, 900):
        part = build_index(memory_pack({"A": steps[:cut]}), 10, None, select)
        assert part.rows(np.arange(part.n_samples)).tolist() == rows[rows < cut].tolist()
