"""The declared close of sessions: its text, its instants through the jumps of clocks, and the bars that it dates."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from bars.conftest import ReadText, decided, lines
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.interval import DAY, Interval
from stager.bars.options import ReadOptions
from stager.bars.session_close import SessionClose
from stager.errors import BarsError, ConfigError

ZONES = ("America/New_York", "Asia/Tokyo", "Pacific/Auckland", "Pacific/Kiritimati", "UTC", "-05:00", "Europe/London")


def closes(text: str, *dates: str) -> list[str]:
    stamps = np.array(dates, "datetime64[ns]").astype(np.int64)
    return np.datetime_as_string(SessionClose.parse(text).of(stamps).view("datetime64[ns]"), "m").tolist()


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("16:00 America/New_York", "16:00 America/New_York"),
        (" 9:05  UTC ", "09:05 UTC"),
        ("24:00 Asia/Tokyo", "24:00 Asia/Tokyo"),
        ("17:00 -05:00", "17:00 -05:00"),
    ],
)
def test_text(text: str, canonical: str) -> None:
    assert SessionClose.parse(text).text == canonical
    assert ReadOptions(session_close=text).session_close == text


@pytest.mark.parametrize("text", ["", "16:00", "America/New_York", "25:00 UTC", "24:01 UTC", "10:60 UTC", "4pm UTC"])
def test_no_close(text: str) -> None:
    with pytest.raises(ConfigError, match="such as '16:00 America/New_York'"):
        SessionClose.parse(text)
    with pytest.raises(ConfigError, match="session_close"):
        ReadOptions(session_close=text)


def test_no_zone() -> None:
    with pytest.raises(ConfigError, match=r"zone is 'America/New_Yorc'"):
        SessionClose.parse("16:00 America/New_Yorc")


def test_summer_and_winter() -> None:
    found = closes("16:00 America/New_York", "2024-01-02", "2024-07-02", "2024-03-08", "2024-03-11")
    assert found == ["2024-01-02T21:00", "2024-07-02T20:00", "2024-03-08T21:00", "2024-03-11T20:00"]
    assert closes("15:00 Asia/Tokyo", "2024-07-02") == ["2024-07-02T06:00"]
    assert closes("24:00 America/New_York", "2024-12-31") == ["2025-01-01T05:00"]


def test_times_that_come_twice_or_never_are_the_later_ones() -> None:
    # 01:30 came at 05:30 and at 06:30 UTC; 02:30 was skipped, an hour and a half after 06:00 UTC it would have been.
    assert closes("01:30 America/New_York", "2024-11-03") == ["2024-11-03T06:30"]
    assert closes("02:30 America/New_York", "2024-03-10") == ["2024-03-10T07:30"]


some_dates = st.lists(st.dates(date(1690, 1, 1), date(2250, 1, 1)), min_size=1, max_size=5)


@settings(deadline=None)
@given(dates=some_dates, minute=st.integers(0, 24 * 60), zone=st.sampled_from(ZONES))
def test_equals_the_zone_and_comes_back(dates: list[date], minute: int, zone: str) -> None:
    close = SessionClose.parse(f"{minute // 60}:{minute % 60:02d} {zone}")
    days = np.array(dates, "datetime64[ns]").astype(np.int64)
    found = close.of(days)
    for day, instant in zip(dates, found.tolist(), strict=True):
        local = datetime(day.year, day.month, day.day) + timedelta(minutes=minute)
        if zone != "-05:00":
            local = local.replace(tzinfo=ZoneInfo(zone))
            seconds = max(local.replace(fold=fold).timestamp() for fold in (0, 1))
        else:
            seconds = local.replace(tzinfo=ZoneInfo("UTC")).timestamp() + 5 * 3600
        # Old offsets have parts of seconds in no zone of the list.
        assert instant == round(seconds) * 10**9
    # Closes follow each other, but where a country gave up a whole day.
    alone = [close.dates(found[i : i + 1])[0] for i in range(len(days))]
    assert alone == close.dates(found).tolist()
    assert all(close.of(np.array([there])) == instant for there, instant in zip(alone, found, strict=True))
    assert close.of(np.array([], np.int64)).tolist() == close.dates(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("text", ["1d", "1w", "1mo", "3mo"])
def test_the_last_date_of_a_bar_closes_it(text: str) -> None:
    interval = Interval.parse(text).closing("16:00 America/New_York")
    opens = np.array(["2024-01-01", "2024-06-01"], "datetime64[ns]").astype(np.int64)
    found = interval.available(opens)
    last = Interval.parse(text).available(opens) - DAY
    # At 21:00 UTC in winter and 20:00 in summer.
    hours = {"3mo": [20, 20]}.get(text, [21, 20])
    assert ((found - last) // (3600 * 10**9)).tolist() == hours
    assert np.array_equal(interval.opened(found), opens)
    # A moment later only the next bar is.
    assert (interval.opened(found + 1) > opens).all()
    assert Interval.parse(text).closing(None) == Interval.parse(text)


DAILY = lines("2024-01-02,A,1,1,1,1,1", "2024-01-03,A,1,1,1,1,1", "2024-01-04,A,1,1,1,1,1")


def test_reading_says_when_sessions_close(read_text: ReadText) -> None:
    bars = read_text(DAILY)
    assert decided(bars)["session close"] == ("the next 00:00 UTC", "not told; --session-close tells it")
    bars = read_text(DAILY, session_close="9:30 Europe/London")
    assert decided(bars)["session close"] == ("09:30 Europe/London", "as told")
    assert bars.interval is not None
    assert bars.interval.close_text == "09:30 Europe/London"


def test_instants_have_no_session_close(read_text: ReadText) -> None:
    text = lines("2024-01-02T10:00Z,A,1,1,1,1,1", "2024-01-02T10:01Z,A,1,1,1,1,1")
    assert "session close" not in decided(read_text(text))
    with pytest.raises(BarsError, match=r"bars of 1min, which close where they end.* leave --session-close out"):
        read_text(text, session_close="16:00 America/New_York")
