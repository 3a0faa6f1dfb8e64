"""All checks together: each fault that is planted is told, nothing else is, and a pack keeps what a user must know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, csv_text
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.bars.check_page import render
from stager.bars.clock import instant_text
from stager.bars.findings import Gap, Jump, Place, Report, spoken, stamps
from stager.bars.inspection import Inspection, check, inspect
from stager.bars.read import ReadOptions, read
from stager.errors import BarsError
from stager.packs.appending import append
from stager.packs.packing import pack

CHECKS = ["bars", "duplicates", "order", "relation", "grid", "signs", "volume", "jumps", "gaps", "unfinished"]


def market(n: int = 60, symbols: str = "AB") -> pa.Table:
    """Bars of quiet symbols, without any fault."""
    closes = np.tile(100.0 + np.arange(n) % 5, len(symbols))
    steps = {symbol: range(n) for symbol in symbols}
    return bar_table(steps, open=closes - 0.25, high=closes + 0.5, low=closes - 0.5, close=closes)


def changed(table: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        kind = table.schema.field(name).type
        table = table.set_column(table.column_names.index(name), name, pa.array(values, kind))
    return table


def severities(found: Inspection) -> dict[str, str]:
    """What is not fine."""
    return {one.check: one.severity for one in found.findings if one.severity != "fine"}


def one(found: Inspection, name: str) -> Any:
    (result,) = (each for each in found.findings if each.check == name)
    return result


def array(table: pa.Table, name: str) -> np.ndarray:
    values = table[name].combine_chunks()
    return np.array(values.cast(pa.int64()) if name == "time" else values)


def test_good_bars_are_fine() -> None:
    found = check(market())
    assert [each.check for each in found.findings] == CHECKS
    assert severities(found) == {}
    report = found.report()
    assert (report.n_bars, report.n_symbols, report.interval) == (120, 2, "1min")
    assert report.span == ("2024-01-01T00:00:00Z", "2024-01-01T00:59:00Z")
    assert (report.worst_gaps, report.jumps, report.gap_lengths, report.is_refused) == ([], [], [], False)
    assert [each.n_bars for each in report.symbols] == [60, 60]


def test_gaps_are_told_with_symbol_and_place() -> None:
    table = bar_table({"A": [*range(5), *range(8, 20)], "B": [*range(12), *range(18, 20)]})
    found = check(table)
    finding = one(found, "gaps")
    assert (finding.severity, finding.n) == ("note", 2)
    assert finding.text == (
        "2 gaps in A, B, 9 bars missing by 1min, the longest 6 after B at 2024-01-01 00:11Z; for 9 of them another "
        "symbol has a bar; most frequent lengths: 3 (1 times), 6 (1 times)"
    )
    report = found.report()
    assert report.worst_gaps == [
        Gap("B", "2024-01-01T00:11:00Z", "2024-01-01T00:18:00Z", 6, 6),
        Gap("A", "2024-01-01T00:04:00Z", "2024-01-01T00:08:00Z", 3, 3),
    ]
    facts = report.symbols[0]
    assert (facts.n_gaps, facts.n_missing, facts.n_elsewhere, facts.longest_gap) == (1, 3, 3, 3)
    assert facts.gap_after == "2024-01-01T00:04:00Z"
    assert report.symbols[1].gap_after == "2024-01-01T00:11:00Z"


def test_gaps_of_other_symbols_come_before_nights() -> None:
    days = [*range(30), *range(1440, 1470)]
    found = check(bar_table({"A": [place for place in days if not 10 <= place < 14], "B": days}))
    assert [(gap.symbol, gap.n_missing, gap.n_elsewhere) for gap in found.report().worst_gaps] == [
        ("A", 4, 4),
        ("A", 1410, 0),
        ("B", 1410, 0),
    ]


def test_sessions() -> None:
    closes = np.full(19, 5.0)
    prices = {name: closes for name in ("open", "high", "low", "close")}
    found = check(bar_table({"A": range(10), "B": [0, 1, 2, 5, 6, 7, 8, 9, 20]}, unit=DAY, **prices))
    assert found.bars.timestamps == "session"
    assert one(found, "gaps").n == 1
    assert found.report().worst_gaps == [Gap("B", "2024-01-03", "2024-01-06", 2, 2)]
    finding = one(found, "gaps")
    assert finding.severity == "note"
    assert finding.text.endswith(
        "; 1 time no symbol has a bar for more than 5 days, the longest for 11 after B at 2024-01-10"
    )


def test_a_long_time_without_sessions_is_a_warning() -> None:
    """With one symbol, no other tells that there were sessions."""
    found = check(bar_table({"A": [0, 1, 2, 3, 4, 7, 8, 40, 41, 48]}, unit=DAY))
    finding = one(found, "gaps")
    assert (finding.severity, finding.n, finding.places) == ("warning", 0, [Place("A", "2024-01-09")])
    assert "2 times no symbol has a bar for more than 5 days, the longest for 32 after A at 2024-01-09" in finding.text


def test_a_split_and_a_change_of_unit() -> None:
    table = market()
    factor = np.ones(120)
    factor[20:60], factor[100:] = 0.5, 1000
    prices = {name: array(table, name) * factor for name in ("open", "high", "low", "close")}
    found = check(changed(table, **prices))
    assert severities(found) == {"jumps": "warning"}
    assert [(jump.symbol, jump.time, jump.near, jump.kind) for jump in found.report().jumps] == [
        ("A", "2024-01-01T00:20:00Z", "1/2", "split"),
        ("B", "2024-01-01T00:40:00Z", "1000", "scale"),
    ]
    assert [each.n_jumps for each in found.report().symbols] == [1, 1]
    assert one(found, "jumps").places == [Place("A", "2024-01-01T00:20:00Z")]


def test_prices_of_zero_and_below() -> None:
    table = market()
    low = array(table, "low")
    low[[7, 70]] = 0.0, -3.5
    found = check(changed(table, low=low))
    assert severities(found) == {"signs": "warning"}
    finding = one(found, "signs")
    assert (finding.n, finding.places) == (2, [Place("A", "2024-01-01T00:07:00Z")])
    assert "down to -3.5" in finding.text
    assert "log returns are refused" in finding.remedy
    assert [each.n_not_positive for each in found.report().symbols] == [1, 1]


def test_stretches_without_volume() -> None:
    volume = np.ones(180)
    volume[30:45], volume[100], volume[120:] = 0, 0, 0
    found = check(changed(market(symbols="ABC"), volume=volume))
    assert severities(found) == {"volume": "warning"}
    assert one(found, "volume").text == (
        "76 of 180 bars (42.2 %) have a volume of 0; every bar of C; 1 stretch of 10 or more in a row, the longest of "
        "15 from A at 2024-01-01 00:30Z"
    )
    facts = found.report().symbols
    assert [(each.n_zero_volume, each.longest_zero_volume) for each in facts] == [(15, 15), (1, 1), (60, 60)]


def test_a_volume_that_is_not_known() -> None:
    found = check(changed(market(), volume=np.r_[np.ones(119), -1]))
    assert severities(found) == {"volume": "warning"}
    assert "volume below 0, first B at 2024-01-01 00:59Z" in one(found, "volume").text


def test_times_off_the_grid() -> None:
    times = array(market(), "time")
    times[10:14] += 7 * 10**9
    found = check(changed(market(), time=times))
    assert severities(found) == {"grid": "warning"}
    assert one(found, "grid").text.startswith(
        "4 of 120 bars (3.33 %) of A lie off the grid of 1min, first A at 2024-01-01 00:10:07Z"
    )


def test_a_last_bar_off_the_grid_is_the_running_one() -> None:
    times = array(market(), "time")
    times[59] += 7 * 10**9
    found = check(changed(market(), time=times))
    assert severities(found) == {"grid": "warning", "unfinished": "warning"}
    assert one(found, "unfinished").places == [Place("A", "2024-01-01T00:59:07Z")]


def test_conflicting_rows_are_a_finding_that_pack_refuses(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    path.write_text(csv_text(pa.concat_tables([market(), changed(market().slice(0, 1), volume=[77.0])])))
    found = check(path)
    assert found.report().is_refused
    finding = one(found, "duplicates")
    assert (finding.severity, finding.n, finding.places) == ("error", 1, [Place("A", "2024-01-01T00:00:00Z")])
    assert "kept" not in finding.text
    assert "--duplicates first" in finding.remedy
    assert found.report().warnings == []
    with pytest.raises(BarsError, match="--duplicates"):
        pack(path)
    told = check(path, ReadOptions(duplicates="last"))
    assert one(told, "duplicates").severity == "warning"
    assert not told.report().is_refused


def test_no_bars_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    path.write_text("time,open,high,low,close\n")
    found = check(path, ReadOptions(symbol="A"))
    assert found.report().is_refused
    assert one(found, "bars").text == "there is no bar in the input (it has no rows)"
    with pytest.raises(BarsError, match=r"there is no bar in the input \(it has no rows\)"):
        pack(path, read=ReadOptions(symbol="A"))


def test_the_report_is_json_and_back() -> None:
    table = market()
    close = array(table, "close")
    close[30:60] *= 3
    report = check(changed(table, close=close, open=close, high=close, low=close)).report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert report.jumps == [Jump("A", "2024-01-01T00:30:00Z", pytest.approx(2.88, rel=0.1), "3", "split")]


def test_a_pack_keeps_the_warnings_that_check_shows(tmp_path: Path) -> None:
    table = market()
    low = array(table, "low")
    low[5] = -1
    times = array(table, "time")
    times[70] += 1
    path = tmp_path / "bars.csv"
    path.write_text(csv_text(changed(table, low=low, time=times)))
    shown = [each.sentence for each in check(path).findings if each.severity == "warning"]
    assert len(shown) == 2
    packed = pack(path)
    assert packed.manifest.warnings == shown
    before = list(tmp_path.iterdir())
    check(path)
    assert list(tmp_path.iterdir()) == before


def test_appended_bars_are_checked_too(tmp_path: Path) -> None:
    pack(market(), tmp_path / "bars.pack")
    later = changed(market(), time=array(market(), "time") + 60 * MINUTE, volume=np.r_[-1.0, np.ones(119)])
    packed = append(tmp_path / "bars.pack", later)
    assert [text for text in packed.manifest.warnings if "a volume below 0" in text]


def test_checks_of_read_bars_are_those_of_files(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    path.write_text(csv_text(bar_table({"A": [0, 1, 2, 9], "B": range(30)})))
    assert inspect(read(path)).findings == check(path).findings


@given(st.integers(-(10**18), 4 * 10**18), st.sampled_from([1, 10**6, 10**9, MINUTE, DAY]))
def test_instants_are_spoken_as_everywhere(time: int, unit: int) -> None:
    time -= time % unit
    assert spoken(stamps(np.array([time]), "utc")[0]) == instant_text(time)
    assert spoken(stamps(np.array([time]), "session")[0]) == instant_text(time)[:10]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, 1e308, -1e308, 5e-324])


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(1, 40), st.sampled_from(["1ns", "1s", "1min", "90min", "4h", "1d", "3d", "1w", "1mo"]))
def test_any_numbers_and_times_are_checked_and_drawn(data: st.DataObject, n: int, interval: str) -> None:
    """Without a warning of NumPy, which would be an error here."""

    def numbers() -> list[float]:
        return data.draw(st.lists(NUMBERS, min_size=n, max_size=n))

    far = 200 * 365 * DAY
    starts = data.draw(st.sampled_from([-far // 2, 0, START]))
    reach = data.draw(st.sampled_from([1, 100, DAY, 400 * DAY, far]))
    places = data.draw(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, reach)), min_size=n, max_size=n))
    table = pa.table(
        {
            "symbol": [symbol for symbol, _ in places],
            "time": pa.array([starts + place for _, place in places], pa.timestamp("ns", "UTC")),
            **{name: pa.array(numbers(), pa.float64()) for name in ("open", "high", "low", "close", "volume")},
        }
    )
    found = check(table, ReadOptions(interval=interval, allow_years=(1678, 2261), duplicates="last", label="open"))
    report = found.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert "NaN" not in render(found, "any")


def test_every_symbol_may_have_one_bar() -> None:
    table = bar_table({f"S{i}": [i] for i in range(50)})
    found = check(table, ReadOptions(interval="1min"))
    assert severities(found) == {}
    assert len(found.report().symbols) == 50
    assert array(table, "time")[0] == START
