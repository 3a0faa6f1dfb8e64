"""The interval: its text, inference, and the instant a bar becomes available."""

from __future__ import annotations

import numpy as np
import pytest
from bars.conftest import ReadText, lines, one_symbol

from stager.bars.interval import DAY, Interval
from stager.errors import BarsError, ConfigError

MINUTE = 60 * 10**9


def infer(*symbols: list[int], unit: int = MINUTE) -> tuple[str, list[tuple[int, int]]]:
    counts = np.array([len(times) for times in symbols], dtype=np.int64)
    times = np.array([time * unit for symbol in symbols for time in symbol], dtype=np.int64)
    interval, deviants = Interval.infer(times, np.cumsum(counts) - counts, counts)
    return interval.text, deviants


@pytest.mark.parametrize(
    ("text", "canonical", "nanoseconds", "months", "is_session"),
    [
        ("1min", "1min", MINUTE, 0, False),
        (" 60 S ", "1min", MINUTE, 0, False),
        ("30s", "30s", 30 * 10**9, 0, False),
        ("90min", "90min", 90 * MINUTE, 0, False),
        ("4h", "4h", 240 * MINUTE, 0, False),
        ("24h", "1d", DAY, 0, True),
        ("7d", "1w", 7 * DAY, 0, True),
        ("1mo", "1mo", 0, 1, True),
        ("250ms", "250ms", 250 * 10**6, 0, False),
    ],
)
def test_text(text: str, canonical: str, nanoseconds: int, months: int, is_session: bool) -> None:
    interval = Interval.parse(text)
    assert (interval.text, interval.nanoseconds, interval.months) == (canonical, nanoseconds, months)
    assert interval.is_session is is_session
    assert Interval.parse(interval.text) == interval


@pytest.mark.parametrize("text", ["", "min", "0min", "-1min", "1.5h", "1m", "1 year", "9" * 19 + "s", "2000mo"])
def test_no_interval(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 1min"):
        Interval.parse(text)


@pytest.mark.parametrize("text", ["1min", "1d", "1w", "1mo", "3mo"])
def test_available_undoes_opened(text: str) -> None:
    interval = Interval.parse(text)
    opens = np.array(["1999-12-01", "2024-01-01", "2024-02-01"], dtype="datetime64[ns]").astype(np.int64)
    assert np.array_equal(interval.opened(interval.available(opens)), opens)


def test_a_month_ends_with_its_calendar() -> None:
    times = np.array(["2024-01-31", "2024-02-29T12:00", "2023-12-01"], dtype="datetime64[ns]").astype(np.int64)
    ends = Interval.parse("1mo").available(times).astype("datetime64[ns]").astype("datetime64[D]")
    assert ends.astype(str).tolist() == ["2024-02-01", "2024-03-01", "2024-01-01"]


def test_the_most_frequent_step_over_all_symbols() -> None:
    assert infer([0, 1, 2, 3, 7, 8], [0, 5, 10]) == ("1min", [(1, 5 * MINUTE)])
    assert infer([0, 5, 10, 15], [3], [0, 5]) == ("5min", [])
    assert infer([0], [1], [2, 4]) == ("2min", [])
    # Thin symbols: the step is seldom, but all steps are multiples of it.
    assert infer([0, 1, 2, 5, 9, 14, 20, 27, 35, 44]) == ("1min", [])
    assert infer([0, 3, 6, 9], [0, 1, 2, 3, 4, 5, 6])[1] == [(0, 3 * MINUTE)]


def test_the_first_rows_need_not_show_it() -> None:
    n_few = 1 << 16
    sparse = list(range(0, 10 * n_few, 10))
    dense = list(range(4 * n_few))
    assert infer(sparse, dense) == ("1min", [(0, 10 * MINUTE)])


def test_days_weeks_and_months() -> None:
    assert infer([0, 1, 2, 3, 4, 7, 8, 9], unit=DAY)[0] == "1d"
    assert infer([0, 7, 14, 21, 35], unit=DAY)[0] == "1w"
    assert infer([0, 28, 56, 84], unit=DAY)[0] == "4w"
    starts = np.arange("2020-01", "2024-05", dtype="datetime64[M]").astype("datetime64[D]").astype(int).tolist()
    assert infer(starts, unit=DAY) == ("1mo", [])
    assert infer(starts[:2], unit=DAY) == ("1mo", [])
    assert infer((np.array(starts[1:]) - 1).tolist(), unit=DAY)[0] == "1mo"


@pytest.mark.parametrize("symbols", [([0],), ([0], [5], [9]), ([0, 286, 391, 903, 1022],)])
def test_no_interval_to_infer(symbols: tuple[list[int], ...]) -> None:
    with pytest.raises(BarsError, match="--interval"):
        infer(*symbols, unit=10**9)


def test_reading_infers_and_reports(read_text: ReadText) -> None:
    rows = [f"2024-05-06T13:{m:02}:00Z,A,1,2,1,2,3" for m in range(20)]
    rows += [f"2024-05-06T13:{m:02}:00Z,B,1,2,1,2,3" for m in range(0, 20, 5)]
    bars = read_text(lines(*rows))
    assert bars.interval.text == "1min"
    assert any("B (5min)" in text for text in bars.warnings)
    assert read_text(lines(*rows), interval="5min").interval.text == "5min"
    with pytest.raises(BarsError, match="--interval"):
        read_text(one_symbol("2024-05-06T13:30:00Z"))
