"""Bar files in the dialects that people have: what decoding gives, literally, or the question that is left.

``expected.csv`` of a folder is the right reading before anything is sorted, dropped, or shifted.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stager.bars.decode import decode
from stager.bars.intake import rows_of
from stager.bars.read import ReadOptions
from stager.bars.sources import find
from stager.errors import BarsError

FOLDER = Path(__file__).parent.parent / "data" / "barfiles"


@dataclass(frozen=True)
class Case:
    """What must be told about a folder's files, and what is asked for when it isn't."""

    told: dict[str, Any] = field(default_factory=dict)
    asks: str | None = None
    refused: str | None = None
    expected: str = "expected.csv"


NUMBERS = ("open", "high", "low", "close", "volume")
NEW_YORK = "America/New_York"
ZZV = {"symbol": "ZZV"}
VOLUME = "--column volume=NAME"

CASES: dict[str, Case] = {
    "akshare_hist_gbk": Case(),
    "alpaca_bars_flat_csv": Case({"symbol": "ZZAP"}),
    "alpaca_bars_json": Case(),
    "alphavantage_intraday": Case({"format": "alphavantage-intraday"}, asks="--format alphavantage-intraday"),
    "backtrader_generic": Case(
        {
            "columns": {
                "time": "Tag+Zeit",
                "open": "Auf",
                "high": "Hoch",
                "low": "Tief",
                "close": "Zu",
                "volume": "Menge",
            },
            "time_pattern": "%d-%m-%Y %H.%M.%S",
            "zone": "UTC",
            "symbol": "FEED",
        },
        asks="--column time=NAME",
    ),
    "binance_spot_ms": Case(),
    "binance_spot_us": Case(),
    "binance_um_header": Case(),
    "coinbase_candles_header": Case({"symbol": "BTC-USD"}),
    "coinbase_candles_json": Case({"symbol": "BTC-USD"}),
    "cryptodatadownload_s": Case({"columns": {"volume": "Volume BTC"}}, asks=VOLUME),
    "databento_ohlcv_pretty": Case(),
    "databento_ohlcv_raw": Case({"format": "databento-raw"}, asks="--format databento-raw"),
    "dukascopy_gmt": Case(),
    "dukascopy_jforex_eet": Case(),
    "firstratedata_1min": Case(),
    "freqtrade_feather": Case({"symbol": "ETH/USDT"}),
    "freqtrade_json": Case({"symbol": "ETH/USDT"}),
    "histdata_ascii_m1": Case(),
    "ibkr_daily_yyyymmdd_int": Case({"symbol": "ZZT"}),
    "ibkr_midpoint_minus1": Case(),
    "investing_com": Case({"symbol": "ZZ INDEX", "date_order": "mdy"}, asks="--date-order"),
    "kibot_intraday": Case({"format": "kibot"}, asks="--format kibot"),
    "kraken_ohlcvt": Case(),
    "lean_equity_minute": Case({"format": "lean-equity-minute"}, asks="--format lean-equity-minute"),
    "metatrader4_csv": Case({"zone": "UTC"}, asks="--zone"),
    "metatrader5_m15": Case({"zone": "UTC", "columns": {"volume": "<TICKVOL>"}}, asks=VOLUME),
    "nse_bhavcopy_udiff": Case(),
    "parquet_all_strings": Case(),
    "parquet_float32_prices": Case(),
    "parquet_hive_symbol_in_path": Case(),
    "parquet_long_dictionary": Case(),
    "parquet_pandas_named_index": Case({"symbol": "ETHUSDT"}),
    "parquet_pandas_tz_new_york": Case({"symbol": "NYX"}),
    "parquet_yfinance_multiindex": Case(),
    "polygon_minute_aggs_gz": Case(),
    "qlib_csv": Case(),
    "stooq_5min_ascii": Case({"zone": "UTC"}, asks="--zone"),
    "stooq_daily_ascii": Case(),
    "tiingo_eod_csv": Case({"symbol": "ZZT"}),
    "tradingview_iso": Case({"symbol": "ZZAP"}),
    "tushare_daily": Case(),
    "yahoo_download": Case(),
    "yfinance_intraday_header3": Case(),
    "yfinance_single_header3": Case(),
    "v_ampm": Case(ZZV | {"zone": "UTC"}, asks="--zone"),
    "v_bar_end_labels": Case(ZZV | {"label": "close"}, asks="--label"),
    "v_date_order_ambiguous": Case(ZZV | {"date_order": "mdy"}, asks="--date-order"),
    "v_dst_overlap_local": Case(ZZV | {"zone": NEW_YORK}, asks="--zone"),
    "v_empty_file": Case(refused="empty"),
    "v_epoch_damaged_scientific": Case(ZZV, refused="digits"),
    "v_html_error_page": Case(refused="HTML"),
    "v_lfs_pointer": Case(refused="git lfs pull"),
    "v_long_interleaved_symbols": Case(),
    "v_mixed_naive_and_aware": Case(ZZV, refused="with and without a zone"),
    "v_pre_1970_and_far_dates": Case(ZZV | {"allow_years": (1900, 2261)}, refused="int64 nanoseconds"),
    "v_symbol_all_na": Case(),
    "v_symbols_look_like_other_types": Case(),
    "v_truncated_last_row": Case(ZZV, refused="3 fields"),
    "v_wide_close_only": Case({"field": "close"}, asks="--field"),
}
CASES |= {path.name: Case(ZZV) for path in sorted(FOLDER.iterdir()) if path.is_dir() and path.name not in CASES}

# What is not built yet, and why; an entry that begins to pass fails the test and must be removed.
NOT_BUILT: dict[tuple[str, str], str] = {}


def params(test: str, names: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=NOT_BUILT[test, name], strict=True))
        if (test, name) in NOT_BUILT
        else name
        for name in names
    ]


def inputs_of(folder: Path) -> list[Path] | Path:
    """The folder's files, or the folder where their paths carry the symbol."""
    if any(path.is_dir() for path in folder.iterdir()):
        return folder
    beside = ("expected", "about.txt", "recipe.json")
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(beside)]


def literal(folder: Path, told: dict[str, Any]) -> dict[str, list[Any]]:
    """Rows as the files have them: symbol, nanoseconds, and numbers with None for a missing one."""
    options = ReadOptions(**({"allow_years": (1900, 2261)} | told))
    files = find(inputs_of(folder))
    inputs = [one for file in files for one in decode(file, options, lambda tell: None)]
    dates = all(rows_of(one, options, is_only=len(files) == 1).is_dates for one in inputs)
    read = [rows_of(one, options, is_only=len(files) == 1, dates=dates) for one in inputs]
    found: dict[str, list[Any]] = {key: [] for key in ("symbol", "timestamp", *NUMBERS)}
    present: list[bool] = []
    for one, rows in zip(inputs, read, strict=True):
        for part in rows.codes:
            found["symbol"] += [rows.symbols[code] for code in part]
        for part, mask in zip(rows.times.parts, rows.times.present, strict=True):
            found["timestamp"] += part.tolist()
            present += [True] * len(part) if mask is None else mask.tolist()
        for key in NUMBERS:
            values = one.columns[key].to_pylist() if key in one.columns else [None] * one.n_rows
            found[key] += [None if value is None or value != value else value for value in values]
    # A line of delimiters alone is no row.
    kept = [i for i in range(len(found["symbol"])) if present[i] or any(found[key][i] is not None for key in NUMBERS)]
    return {key: [values[i] for i in kept] for key, values in found.items()}


def wanted(path: Path) -> dict[str, list[Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [int(np.datetime64(row["timestamp"].removesuffix("Z"), "ns").astype(np.int64)) for row in rows]
    numbers = {key: [float(row[key]) if row[key] else None for row in rows] for key in NUMBERS}
    return {"symbol": [row["symbol"] for row in rows], "timestamp": times, **numbers}


def test_every_folder_is_named() -> None:
    assert len(CASES) == sum(path.is_dir() for path in FOLDER.iterdir()) == 92
    assert set(CASES) == {path.name for path in FOLDER.iterdir() if path.is_dir()}
    assert {name for _, name in NOT_BUILT} <= set(CASES)


@pytest.mark.parametrize("name", params("decode", sorted(name for name, case in CASES.items() if case.refused is None)))
def test_decoding_is_literal(name: str) -> None:
    case = CASES[name]
    found, right = literal(FOLDER / name, case.told), wanted(FOLDER / name / case.expected)
    for key in right:
        assert found[key] == right[key], key


@pytest.mark.parametrize(
    "name", params("refuse", sorted(name for name, case in CASES.items() if case.refused is not None))
)
def test_refusal(name: str) -> None:
    case = CASES[name]
    with pytest.raises(BarsError, match=case.refused) as caught:
        literal(FOLDER / name, case.told)
    assert str(FOLDER / name) in str(caught.value)


@pytest.mark.parametrize("name", params("ask", sorted(name for name, case in CASES.items() if case.asks is not None)))
def test_question(name: str) -> None:
    """Without what can't be known the files are refused, and the option that tells it is named."""
    case = CASES[name]
    with pytest.raises(BarsError) as caught:
        literal(FOLDER / name, {"symbol": "ZZ"} if "symbol" in case.told else {})
    assert str(case.asks) in str(caught.value)
