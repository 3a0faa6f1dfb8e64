"""Longer intervals as columns: what is visible at a decision, against a walk over the bars."""

from __future__ import annotations

import datetime as dt
import math
import zoneinfo
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager import Derive, Normalize, ReadOptions, TimeFrame, derive
from stager.errors import ConfigError, SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory
from stager.samples.building import build_index
from stager.samples.select import Select

NEW_YORK = zoneinfo.ZoneInfo("America/New_York")
NAN = float("nan")


def visible(pack: Pack, length: int, row: int, bounds: Any) -> list[int]:
    """Rows of the last frame of so many minutes that has closed at the decision of a row, bar by bar."""
    symbol = int(np.searchsorted(pack.first_rows, row, side="right")) - 1
    step = pack.interval.nanoseconds
    frames: dict[tuple[int, int], list[int]] = {}
    for other in range(int(pack.first_rows[symbol]), row + 1):
        time = int(pack.times[other])
        edges = bounds(time)
        if edges is None:
            continue
        start = edges[0] + (time + step - 1 - edges[0]) // (length * MINUTE) * length * MINUTE
        frames.setdefault((start, min(start + length * MINUTE, edges[1])), []).append(other)
    decision = int(pack.times[row]) + step
    closed = [rows for (_, end), rows in sorted(frames.items()) if end <= decision]
    return closed[-1] if closed else []


def assert_equals_the_walk(pack: Pack, made: Pack, length: int, name: str, bounds: Any) -> None:
    columns = {column: pack.column(column) for column in pack.columns}
    for row in range(pack.n_rows):
        rows = visible(pack, length, row, bounds)
        found = {column: made.column(f"{column}_{name}")[row] for column in ("open", "high", "low", "close", "volume")}
        if not rows:
            assert all(math.isnan(value) for value in found.values())
            continue
        assert found == {
            "open": columns["open"][rows[0]],
            "high": columns["high"][rows].max(),
            "low": columns["low"][rows].min(),
            "close": columns["close"][rows[-1]],
            "volume": columns["volume"][rows].sum(),
        }


steps_of = st.dictionaries(
    st.sampled_from("ABC"), st.lists(st.integers(0, 70), min_size=1, max_size=40, unique=True), min_size=1
)


@settings(deadline=None, max_examples=100)
@given(steps=steps_of, length=st.sampled_from([2, 5, 15, 60]), session=st.sampled_from([None, (5, 32), (0, 61)]))
def test_the_last_closed_frame_is_seen(steps: dict[str, list[int]], length: int, session: Any) -> None:
    pack = memory_pack(steps)
    frame = TimeFrame(f"{length}min")
    if session is None:
        made = derive(pack, Derive([frame]))
        assert_equals_the_walk(pack, made, length, frame.length.text, lambda time: (0, 2**62))
        return
    first, last = (START + minute * MINUTE for minute in session)
    hours = "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in session)
    made = derive(pack, Derive([frame], session=f"{hours} UTC"))
    assert_equals_the_walk(
        pack, made, length, frame.length.text, lambda time: (first, last) if first <= time < last else None
    )


def test_an_hour_is_seen_with_the_bar_that_closes_with_it() -> None:
    """Bars of 5 minutes: the hour from 11:00 is first seen at the bar stamped 11:55, not at 11:50 and not at 12:00."""
    pack = memory_pack({"A": range(0, 24 * 60, 5)}, interval="5min")
    close, hours = pack.column("close"), derive(pack, Derive([TimeFrame("1h", ["close"])])).column("close_1h")

    def row(clock: str) -> int:
        return (int(clock[:2]) * 60 + int(clock[3:])) // 5

    assert hours[row("11:50")] == close[row("10:55")]
    assert hours[row("11:55")] == close[row("11:55")]
    assert hours[row("12:00")] == close[row("11:55")]
    assert hours[row("12:50")] == close[row("11:55")]
    assert np.isnan(hours[: row("00:55")]).all()


@pytest.mark.parametrize("day", [dt.date(2024, 3, 8), dt.date(2024, 3, 11)])
def test_frames_begin_with_the_session_on_both_sides_of_a_change_of_clocks(day: dt.date) -> None:
    """From 09:30: the last hour is half an hour, and the whole session is a frame of a day."""
    opened = int(dt.datetime.combine(day, dt.time(9, 30), NEW_YORK).timestamp()) // 60 - START // MINUTE
    pack = memory_pack({"A": range(opened - 30, opened + 420)})
    recipe = Derive(
        [TimeFrame("1h", ["close"]), TimeFrame("1d", ["open", "volume"])], session="09:30-16:00 America/New_York"
    )
    made, close = derive(pack, recipe), pack.column("close")
    hours = made.column("close_1h")
    for minute in range(450):
        ends = [end for end in (*range(60, 390, 60), 390) if 30 + end <= minute + 1]
        assert hours[minute] == close[30 + ends[-1] - 1] if ends else math.isnan(hours[minute])
    assert np.isnan(made.column("open_1d")[: 30 + 389]).all()
    assert set(made.column("open_1d")[30 + 389 :]) == {pack.column("open")[30]}
    assert set(made.column("volume_1d")[30 + 389 :]) == {pack.column("volume")[30 : 30 + 390].sum()}


def test_a_closing_auction_belongs_to_the_last_frame() -> None:
    pack = memory_pack({"A": range(12)})
    recipe = Derive([TimeFrame("5min", ["close"])], session="00:00-00:10 UTC", close_inclusive=True)
    found = derive(pack, recipe).column("close_5min")
    close = pack.column("close")
    # The auction's bar is stamped 00:10 and closes at 00:11, so the frame is known then.
    assert found[9] == close[4]
    assert found[10] == close[10]
    assert found[11] == close[10]


def test_frames_do_not_reach_across_a_roll() -> None:
    pack = memory_pack({"A": range(20)}, contract=[1.0] * 7 + [2.0] * 13)
    found = derive(pack, Derive([TimeFrame("5min", ["open"])], rolls="contract")).column("open_5min")
    opens = pack.column("open")
    assert np.isnan(found).tolist() == [True] * 4 + [False] * 3 + [True] * 2 + [False] * 11
    assert found[9] == opens[7]


@settings(deadline=None, max_examples=60)
@given(
    steps=steps_of,
    cut=st.integers(1, 70),
    length=st.sampled_from([2, 5, 15]),
    inclusive=st.booleans(),
    unit=st.sampled_from([MINUTE, MINUTE * 2 // 3, MINUTE // 2 + 1]),
)
def test_what_comes_later_changes_no_earlier_value(
    steps: dict[str, list[int]], cut: int, length: int, inclusive: bool, unit: int
) -> None:
    """Also of bars that are off the grid, or stamped with the close."""
    table = bar_table(steps, unit=unit)
    stamps = table["time"].cast(pa.int64()).to_numpy()
    later = stamps >= START + cut * MINUTE
    recipe = Derive([TimeFrame(f"{length}min")], session="00:03-00:50 UTC", close_inclusive=inclusive)

    def rows_before(table: pa.Table) -> dict[tuple[str, int], bytes]:
        if not table.num_rows:
            return {}
        made = derive(pack_in_memory(table, ReadOptions(interval="1min")), recipe)
        owners = np.searchsorted(made.first_rows, np.arange(made.n_rows), side="right") - 1
        keep = np.flatnonzero(made.times < START + cut * MINUTE)
        return {(made.symbols[owners[row]], int(made.times[row])): made.rows[row].tobytes() for row in keep}

    whole = rows_before(table)
    values = np.where(later, 7.0, table["high"].to_numpy())
    assert (
        rows_before(table.set_column(table.column_names.index("high"), "high", [np.maximum(values, table["high"])]))
        == whole
    )
    assert rows_before(table.filter(pa.array(~later))) == whole
    delayed = pa.array(np.where(later, stamps + 100 * MINUTE, stamps)).cast(pa.timestamp("ns", "UTC"))
    assert rows_before(table.set_column(1, "time", [delayed])) == whole


def test_prices_of_a_frame_are_normalised_as_prices() -> None:
    made = derive(memory_pack({"A": range(30)}), Derive([TimeFrame("5min", ["close", "volume"]), "range"]))
    roles = {column.name: column.role for column in made.manifest.columns}
    assert (roles["close_5min"], roles["volume_5min"], roles["range"]) == ("price", "volume", "other")
    index = build_index(made, 3, None, Select(columns=["close_5min", "volume_5min", "range"]), Normalize())
    assert index.methods is not None
    assert index.methods.tolist() == [1, 2, 0]
    # Windows that begin before the first frame has closed are left out.
    assert index.rows(np.arange(1)).tolist() == [6]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("soon",), ConfigError, "interval is 'soon'"),
        (("1mo",), SampleError, "'1mo'; write days or less"),
        (("2w",), SampleError, "'2w'"),
        ((5,), SampleError, "is of 5"),
        (("1h", "close"), SampleError, "columns of a time frame are 'close'"),
        (("1h", ()), SampleError, "at least one"),
        (("1h", ("close", "close")), SampleError, "each once"),
    ],
)
def test_frames_that_are_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TimeFrame(*arguments)


@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        (TimeFrame("90s"), {}, "must be a multiple"),
        (TimeFrame("1min"), {}, "must be a multiple"),
        (TimeFrame("2d"), {"interval": "1d", "unit": DAY}, "of bars below a day"),
        (TimeFrame("1h", ["vwap"]), {}, "needs column 'vwap'"),
    ],
)
def test_frames_that_do_not_fit_the_bars(frame: TimeFrame, options: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        derive(memory_pack({"A": range(9)}, **options), Derive([frame]))
