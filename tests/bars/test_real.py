"""Real files, against facts that were computed independently of stager."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stager.bars.read import ReadOptions, read

FOLDER = os.environ.get("STAGER_REAL_DATA")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="STAGER_REAL_DATA is not set")

MINUTE = np.timedelta64(60, "s")
CASES: dict[str, tuple[dict[str, Any], str, str, np.timedelta64]] = {
    "mplfinance_sp500_nov2019_1min_ochl.csv": (
        {"symbol": "SP500", "zone": "America/New_York"},
        "1min",
        "utc",
        0 * MINUTE,
    ),
    "nautilus_6EH4_1min.csv.gz": ({"symbol": "6EH4", "label": "close"}, "1min", "utc", MINUTE),
    "backtestingpy_eurusd_1h.csv": ({"symbol": "EURUSD", "zone": "UTC"}, "1h", "utc", 0 * MINUTE),
    "backtrader_orcl_2003_2005_daily.txt": ({"symbol": "ORCL"}, "1d", "session", 0 * MINUTE),
    "pyalgotrade_bitstamp_btcusd_30min.csv": ({"symbol": "BTCUSD", "zone": "UTC"}, "30min", "utc", 0 * MINUTE),
}


@pytest.mark.parametrize("name", CASES)
def test_real_file(name: str) -> None:
    options, interval, timestamps, shift = CASES[name]
    folder = Path(str(FOLDER))
    facts = next(entry for entry in json.loads((folder / "index.json").read_text()) if entry["file"] == name)
    bars = read(folder / name, ReadOptions(**options))
    times = bars.table["time"].to_numpy().astype("datetime64[s]")
    assert bars.table.num_rows == facts["rows"]
    assert bars.symbols == tuple(facts["symbols"])
    assert times[0] == np.datetime64(facts["first_utc"].rstrip("Z")) - shift
    assert times[-1] == np.datetime64(facts["last_utc"].rstrip("Z")) - shift
    for column, total in facts["sums"].items():
        np.testing.assert_allclose(bars.table[column].to_numpy().sum(), total, rtol=1e-9)
    assert (bars.interval.text, bars.timestamps) == (interval, timestamps)
    assert bars.dropped == {"null price": 0, "duplicate": facts["duplicates"]}
    assert not any("high below" in text for text in bars.warnings)
