"""What a time stamp means: forms, units, zones, daylight saving time, labels, session dates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from bars.conftest import ReadText, decided, instants, lines, one_symbol
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.read import ReadOptions, read
from stager.bars.zones import Zone, to_utc
from stager.errors import BarsError

UTC_MINUTES = ["2024-05-06T13:30:00", "2024-05-06T13:31:00"]


@pytest.mark.parametrize(
    "cells",
    [
        ("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"),
        ("2024-05-06 13:30:00Z", "2024-05-06 13:31Z"),
        ("2024-05-06T13:30:00+00:00", "2024-05-06T15:31:00+0200"),
        ("2024-05-06T09:30:00-04", "2024-05-06T09:31:00.000-04:00"),
        ("2024-05-06T13:30:00.000000000Z", "2024-05-06T13:31:00.0Z"),
        ("1715002200", "1715002260"),
        ("1715002200000", "1715002260000"),
        ("1715002200000000", "1715002260000000"),
        ("1715002200000000000", "1715002260000000000"),
    ],
)
def test_instants(read_text: ReadText, cells: tuple[str, str]) -> None:
    bars = read_text(one_symbol(*cells))
    assert instants(bars) == UTC_MINUTES
    assert bars.timestamps == "utc"
    assert decided(bars)["zone"][0] == "UTC"


def test_nine_digits_of_a_second_are_kept(read_text: ReadText) -> None:
    bars = read_text(one_symbol("2024-05-06T13:30:00.123456789Z", "2024-05-06T13:30:01.123456789Z"))
    assert bars.table["time"].cast(pa.int64()).to_pylist() == [1715002200123456789, 1715002201123456789]
    assert bars.interval.text == "1s"


@pytest.mark.parametrize(
    ("cells", "zone"),
    [
        (("2024-05-06 09:30:00", "2024-05-06 09:31:00"), "America/New_York"),
        (("2024-05-06T08:30", "2024-05-06T08:31"), "-05:00"),
        (("2024-05-06T19:00", "2024-05-06T19:01"), "+0530"),
        (("2024-05-06T13:30", "2024-05-06T13:31"), "UTC"),
        (("2024-05-06T13:30", "2024-05-06T13:31"), "+00:00"),
    ],
)
def test_wall_clocks_need_a_zone(read_text: ReadText, cells: tuple[str, str], zone: str) -> None:
    bars = read_text(one_symbol(*cells), zone=zone)
    assert instants(bars) == UTC_MINUTES
    assert decided(bars)["zone"][1] == "as told"
    with pytest.raises(BarsError, match=r"has no zone.*--zone America/New_York") as caught:
        read_text(one_symbol(*cells))
    assert (caught.value.line, caught.value.column) == (2, "time")


def test_a_name_may_say_utc(read_text: ReadText) -> None:
    text = one_symbol("2024-05-06 13:30", "2024-05-06 13:31", header="timestamp_utc,open,high,low,close,volume")
    assert instants(read_text(text)) == UTC_MINUTES
    assert instants(read_text(text, zone="UTC")) == UTC_MINUTES
    with pytest.raises(BarsError, match="says UTC"):
        read_text(text, zone="Europe/Berlin")


def test_a_zone_that_contradicts_the_stamps(read_text: ReadText) -> None:
    for cells in (("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"), ("1715002200", "1715002260")):
        assert instants(read_text(one_symbol(*cells), zone="UTC")) == UTC_MINUTES
        with pytest.raises(BarsError, match="leave out --zone"):
            read_text(one_symbol(*cells), zone="America/New_York")


def test_a_zone_in_a_table_is_not_applied_twice(read_text: ReadText) -> None:
    table = read_text(one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z")).table
    local = table["time"].cast(pa.timestamp("ms", "America/New_York"))
    assert instants(read(table.set_column(1, "time", local))) == UTC_MINUTES
    naive = pa.array([np.datetime64(text, "us") for text in ("2024-05-06T09:30", "2024-05-06T09:31")])
    assert instants(read(table.set_column(1, "time", naive), ReadOptions(zone="America/New_York"))) == UTC_MINUTES


@pytest.mark.parametrize(
    "cells", [("2024-05-06", "2024-05-07"), ("20240506", "20240507"), ("2024-05-06 00:00", "2024-05-07 00:00:00")]
)
def test_dates_stay_dates(read_text: ReadText, cells: tuple[str, str]) -> None:
    bars = read_text(one_symbol(*cells))
    assert (bars.timestamps, bars.interval.text) == ("session", "1d")
    assert instants(bars) == ["2024-05-06T00:00:00", "2024-05-07T00:00:00"]
    with_zone = read_text(one_symbol(*cells), zone="America/New_York")
    assert instants(with_zone) == instants(bars)
    assert any("America/New_York" in text for text in with_zone.warnings)
    with pytest.raises(BarsError, match="--label close"):
        read_text(one_symbol(*cells), label="close")
    with pytest.raises(BarsError, match="--interval"):
        read_text(one_symbol(cells[0]))
    assert read_text(one_symbol(cells[0]), interval="1d").timestamps == "session"


def test_dates_of_tables_stay_dates(read_text: ReadText) -> None:
    table = read_text(one_symbol("2024-05-06", "2024-05-07")).table
    for kind in (pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ns")):
        other = read(table.set_column(1, "time", table["time"].cast(pa.timestamp("ns")).cast(kind)))
        assert other.timestamps == "session"
        assert other.table.equals(table)


def test_midnights_that_are_bars_of_an_hour_need_a_zone(read_text: ReadText) -> None:
    text = one_symbol("2024-05-06", "2024-05-07")
    with pytest.raises(BarsError, match="--zone"):
        read_text(text, interval="1h")
    assert read_text(text, interval="1h", zone="UTC").timestamps == "utc"


def test_daily_instants_at_midnight_are_dates_unless_they_are_closes(read_text: ReadText) -> None:
    text = one_symbol("2024-05-06T00:00:00Z", "2024-05-07T00:00:00Z")
    assert read_text(text).timestamps == "session"
    closes = read_text(text, label="close")
    assert closes.timestamps == "utc"
    assert instants(closes) == ["2024-05-05T00:00:00", "2024-05-06T00:00:00"]
    assert read_text(one_symbol("2024-05-06T04:00:00Z", "2024-05-07T04:00:00Z")).timestamps == "utc"


def test_closes_are_shifted_by_the_interval(read_text: ReadText) -> None:
    cells = ("2024-05-06T13:31:00Z", "2024-05-06T13:32:00Z", "2024-05-06T13:35:00Z")
    bars = read_text(one_symbol(*cells), label="close")
    assert instants(bars) == [*UTC_MINUTES, "2024-05-06T13:34:00"]
    assert instants(read_text(one_symbol(*cells), label="close", interval="1h"))[0] == "2024-05-06T12:31:00"
    monthly = read_text(
        one_symbol("2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z", "2024-04-01T00:00:00Z"), label="close"
    )
    assert instants(monthly) == ["2024-01-01T00:00:00", "2024-02-01T00:00:00", "2024-03-01T00:00:00"]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("03/08/2024 15:59", "03/08/2024 16:00"), "'03/08/2024 15:59'"),
        (("1.71500E+12", "1.71500E+12"), "can't tell|lost its last digits"),
        (("34200000", "34260000"), "34200000 is neither"),
        (("1715002200", "1715002260000"), "two units are mixed: 1715002200 would be seconds"),
        (("20240230", "20240301"), "20240230 is neither"),
        (("12:30", "12:31"), "can't tell|lost its last digits"),
        (("2024-05-06T13:30:00", "2024-05-06T13:31:00Z"), "mixed"),
        (("2024-05-06", "2024-05-06T13:31:00Z"), "mixed"),
        (("2099-01-01T00:00:00Z", "2099-01-01T00:01:00Z"), "1980 to"),
        (("-5", "-4"), "-5 is neither"),
        (("99999999999999999999", "1"), "can't tell|lost its last digits"),
    ],
)
def test_times_that_cannot_be_told(read_text: ReadText, cells: tuple[str, str], words: str) -> None:
    with pytest.raises(BarsError, match=words) as caught:
        read_text(one_symbol(*cells))
    assert caught.value.line in (2, 3)
    assert caught.value.column == "time"


def test_other_years_can_be_allowed(read_text: ReadText) -> None:
    text = one_symbol("1928-01-03", "1928-01-04", "1950-06-30")
    with pytest.raises(BarsError, match="1928-01-03") as caught:
        read_text(text)
    assert caught.value.line == 2
    assert instants(read_text(text, allow_years=(1900, 2030)))[0] == "1928-01-03T00:00:00"
    epochs = one_symbol("-631047600000", "-631047540000")
    assert instants(read_text(epochs, allow_years=(1940, 2030)))[0] == "1950-01-02T05:00:00"
    with pytest.raises(BarsError, match="int64"):
        read_text(one_symbol("2262-04-11", "2262-04-12"), allow_years=(1980, 2261))


def test_inputs_of_two_kinds_are_not_mixed(tmp_path: object, read_text: ReadText) -> None:
    read_text(one_symbol("2024-05-06T13:30:00Z", "2024-05-06T13:31:00Z"), name="a.csv")
    read_text(one_symbol("2024-05-06 13:32", "2024-05-06 13:33"), name="b.csv", zone="UTC")
    with pytest.raises(BarsError, match=r"b\.csv.*no zone.*a\.csv"):
        read([f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"], ReadOptions(symbol="A", zone="UTC"))


# The clocks of New York went back on 2024-11-03 at 02:00 EDT, and ahead on 2024-03-10 at 02:00 EST.
FALL = ["00:30", "01:00", "01:30", "01:00", "01:30", "02:00"]
FALL_UTC = ["04:30", "05:00", "05:30", "06:00", "06:30", "07:00"]


def test_repeated_times_are_told_apart_by_the_order_of_rows(read_text: ReadText) -> None:
    cells = [f"2024-11-03 {clock}" for clock in FALL]
    for order in (cells, cells[::-1]):
        bars = read_text(one_symbol(*order), zone="America/New_York")
        assert instants(bars) == [f"2024-11-03T{clock}:00" for clock in FALL_UTC]
    newest_first = read_text(one_symbol(*cells[::-1]), zone="America/New_York")
    assert newest_first.table["volume"].to_pylist() == [6, 5, 4, 3, 2, 1]


def test_repeated_times_of_two_symbols(read_text: ReadText) -> None:
    rows = [f"2024-11-03 {clock},{symbol},1,2,1,2,3" for clock in FALL for symbol in "BA"]
    for order in (rows, sorted(rows, key=lambda row: row.split(",")[1])):
        bars = read_text(lines(*order), zone="America/New_York")
        assert instants(bars) == [f"2024-11-03T{clock}:00" for clock in FALL_UTC] * 2


def test_hourly_bars_repeat_one_time(read_text: ReadText) -> None:
    cells = [f"2024-11-03 {hour:02}:00" for hour in (0, 1, 1, 2, 3)]
    assert instants(read_text(one_symbol(*cells), zone="America/New_York")) == [
        f"2024-11-03T{hour:02}:00:00" for hour in (4, 5, 6, 7, 8)
    ]


@pytest.mark.parametrize(
    "clocks", [["00:30", "01:00", "01:30", "02:00"], ["01:30", "01:00", "01:30", "01:00", "02:00"]]
)
def test_repeated_times_that_cannot_be_told_apart(read_text: ReadText, clocks: list[str]) -> None:
    with pytest.raises(BarsError, match="occurred twice in America/New_York") as caught:
        read_text(one_symbol(*(f"2024-11-03 {clock}" for clock in clocks)), zone="America/New_York")
    assert caught.value.line in (2, 3)


def test_skipped_times_prove_a_wrong_zone(read_text: ReadText) -> None:
    cells = [f"2024-03-10 {clock}" for clock in ("01:30", "02:00", "02:30", "03:00")]
    with pytest.raises(BarsError, match=r"2024-03-10 02:00:00 never occurred.*wrong zone") as caught:
        read_text(one_symbol(*cells), zone="America/New_York")
    assert caught.value.line == 3
    assert instants(read_text(one_symbol(*cells), zone="-05:00"))[0] == "2024-03-10T06:30:00"


ZONES = [
    "America/New_York",
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "America/St_Johns",
    "Africa/Casablanca",
    "Asia/Kolkata",
]


@settings(deadline=None, max_examples=60)
@given(
    zone=st.sampled_from(ZONES),
    start=st.datetimes(datetime(1981, 1, 1), datetime(2025, 1, 1)),
    step=st.sampled_from([5, 30, 60, 24 * 60, 7 * 24 * 60]),
    n_rows=st.integers(1, 300),
    backwards=st.booleans(),
)
def test_wall_clocks_agree_with_zoneinfo(zone: str, start: datetime, step: int, n_rows: int, backwards: bool) -> None:
    info = ZoneInfo(zone)
    first = start.replace(second=0, microsecond=0, tzinfo=UTC)
    steps = [first + timedelta(minutes=step * i) for i in range(n_rows)]
    local = [instant.astimezone(info) for instant in steps][:: -1 if backwards else 1]
    wall = np.array([moment.replace(tzinfo=None) for moment in local], dtype="datetime64[ns]").astype(np.int64)
    expected = np.array([m.astimezone(UTC).replace(tzinfo=None) for m in local], dtype="datetime64[ns]").astype(
        np.int64
    )
    cut = n_rows // 3
    try:
        parts = to_utc(
            [wall[:cut], wall[cut:]],
            lambda: np.zeros(n_rows, dtype=np.int32),
            Zone.parse(zone),
            lambda text, row: BarsError(text, line=row),
        )
    except BarsError as error:
        # Only a time that really occurred twice may be refused: where the rows show one pass of it.
        moment = local[error.line]
        assert moment.replace(fold=0).utcoffset() != moment.replace(fold=1).utcoffset()
    else:
        assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize(
    ("clocks", "told", "opens"),
    [
        (("900", "1030"), None, ["09:00:00", "10:30:00"]),
        (("0", "30000"), None, ["00:00:00", "03:00:00"]),
        (("9", "10"), "%Y%m%d %H", ["09:00:00", "10:00:00"]),
        (("9", "10"), "%Y%m%d %H%M", ["00:09:00", "00:10:00"]),
        (("9", "10"), "%Y%m%d %H%M%S", ["00:00:09", "00:00:10"]),
        (("900", "1030"), "%Y%m%d %H%M%S", ["00:09:00", "00:10:30"]),
    ],
)
def test_a_clock_without_its_leading_zeros(
    read_text: ReadText, clocks: tuple[str, str], told: str | None, opens: list[str]
) -> None:
    text = "date,time,open,high,low,close\n" + "".join(f"20240506,{clock},1,2,1,2\n" for clock in clocks)
    bars = read_text(text, zone="UTC", **({} if told is None else {"time_pattern": told}))
    assert instants(bars) == [f"2024-05-06T{clock}" for clock in opens]


def test_a_clock_of_one_or_two_digits_is_asked_about(read_text: ReadText) -> None:
    text = "date,time,open,high,low,close\n20240506,9,1,2,1,2\n20240506,10,1,2,1,2\n"
    with pytest.raises(BarsError, match=r"bars\.csv:2, column 'time': the clock '9' may be hours.*--time-pattern"):
        read_text(text, zone="UTC")
    text = text.replace(",9,", ",0,").replace("20240506,10,", "20240507,0,")
    assert read_text(text).timestamps == "session"


PRICES = {role: [1.0, 1.0, 1.0] for role in ("open", "high", "low", "close")}


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ([1715002200.0, 1715002260.0, 1715002320.0], "2024-05-06T13:30:00"),
        ([1715002200000.0, 1715002260000.0, 1715002320000.0], "2024-05-06T13:30:00"),
        ([20240506.0, 20240507.0, 20240508.0], "2024-05-06T00:00:00"),
        ([1715002200.5, 1715002260.5, 1715002320.5], None),
        ([1715002200.0, float("nan"), 1715002320.0], None),
        ([1.715e12, 1.715e12, 1.71501e12], None),
        ([1e300, 2e300, 3e300], None),
    ],
)
def test_whole_numbers_stored_as_float64_are_times(times: list[float], first: str | None) -> None:
    table, options = pa.table({"time": times, **PRICES}), ReadOptions(symbol="A", duplicates="first")
    if first is None:
        with pytest.raises(BarsError, match="double, which is no time"):
            read(table, options)
    else:
        assert instants(read(table, options))[0] == first


def test_times_of_float32_are_refused() -> None:
    times = pa.array([1715002200.0, 1715002260.0, 1715002320.0], pa.float32())
    with pytest.raises(BarsError, match="float, which is no time"):
        read(pa.table({"time": times, **PRICES}), ReadOptions(symbol="A"))


def test_clocks_in_several_columns(read_text: ReadText, tmp_path: Path) -> None:
    described = """
    title = "Hours and minutes apart"
    header = ["day", "hour", "minute"]
    [columns]
    time = ["day", "hour", "minute"]
    open = "open"
    high = "high"
    low = "low"
    close = "close"
    [time]
    pattern = "%Y%m%d %H %M"
    """
    (tmp_path / "mine.toml").write_text(described)
    text = "day,hour,minute,open,high,low,close\n20240506,9,5,1,2,1,2\n20240506,10,30,1,2,1,2\n"
    bars = read_text(text, format=str(tmp_path / "mine.toml"), zone="UTC")
    assert instants(bars) == ["2024-05-06T09:05:00", "2024-05-06T10:30:00"]
