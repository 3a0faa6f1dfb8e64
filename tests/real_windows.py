"""The two real files whose windows are served, parsed without stager."""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import os
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

FOLDER = os.environ.get("STAGER_REAL_DATA")
COLUMNS = ("open", "high", "low", "close", "volume")
# Name: options of reading, zone of the stamps, minutes from the stamp back to the bar's open.
FILES: dict[str, tuple[dict[str, Any], str, int]] = {
    "mplfinance_sp500_nov2019_1min_ochl.csv": (
        {"symbol": "SP500", "zone": "America/New_York"}, "America/New_York", 0,
    ),
    "nautilus_6EH4_1min.csv.gz": ({"symbol": "6EH4", "label": "close"}, "UTC", 1),
}  # fmt: skip


class Windows:
    """All windows of a file that span no missing minute, and the next minute's relative close, where there is one.

    Attributes
    ----------
    path : Path
    options : dict
        Of ``ReadOptions``.
    x : (n, window, 5) float32, of COLUMNS
    y : (n,) float32
    times : (n,) datetime64[ns]
        When the newest bar closed.
    """

    def __init__(self, name: str, window: int) -> None:
        self.options, zone, shift = FILES[name]
        self.path = Path(str(FOLDER)) / name
        opener = gzip.open if name.endswith(".gz") else open
        with opener(self.path, "rt", encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        stamp_name = next(iter(lines[0]))
        stamps = [dt.datetime.fromisoformat(line[stamp_name]).replace(tzinfo=ZoneInfo(zone)) for line in lines]
        opened = np.array([int(stamp.timestamp()) - 60 * shift for stamp in stamps])
        assert (np.diff(opened) > 0).all()
        names = {column.lower(): column for column in lines[0]}
        values = np.array([[float(line[names[column]]) for column in COLUMNS] for line in lines])
        rows, close = values.astype(np.float32), values[:, 3]
        decisions = [
            row
            for row in range(window - 1, len(lines) - 1)
            if opened[row + 1] - opened[row - window + 1] == 60 * window
        ]
        self.x = np.array([rows[row - window + 1 : row + 1] for row in decisions])
        self.y = np.array([close[row + 1] / close[row] - 1 for row in decisions]).astype(np.float32)
        self.times = np.array(opened[decisions] + 60, "datetime64[s]").astype("datetime64[ns]")
