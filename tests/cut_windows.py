"""Samples cut by plain NumPy, row by row: what every batch is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa


class Cut:
    """The samples of a table of bars made from `steps` (see ``bars_fixtures.bar_table``), in row order.

    Attributes
    ----------
    decisions : list of int
        The row of each sample's newest bar, in the sorted rows.
    x : (n, window, n_columns) float32
    y : (n,) float32 or None
    symbols : list of str
    steps : list of int
        The step of each decision's bar.
    """

    def __init__(
        self, table: pa.Table, steps: Mapping[str, Sequence[int]], window: int, reach: int | None = None, delay: int = 1
    ) -> None:
        names = [name for name in table.column_names if name not in ("symbol", "time")]
        rows = np.stack([table[name].to_numpy() for name in names], axis=1)
        first = dict(zip(steps, np.cumsum([0, *map(len, steps.values())]), strict=False))
        order = [first[symbol] + i for symbol in sorted(steps) for i in np.argsort(steps[symbol])]
        self.rows = rows[order]
        close = self.rows[:, names.index("close")]
        owners = [symbol for symbol in sorted(steps) for _ in steps[symbol]]
        times = [step for symbol in sorted(steps) for step in sorted(steps[symbol])]
        # The last row of the run that a row belongs to, and how many rows of it lie before.
        before, last = np.zeros(len(rows), int), np.arange(len(rows))
        for row in range(1, len(rows)):
            if owners[row] == owners[row - 1] and times[row] == times[row - 1] + 1:
                before[row] = before[row - 1] + 1
        for row in range(len(rows) - 2, -1, -1):
            if before[row + 1]:
                last[row] = last[row + 1]
        self.decisions = [
            row for row in range(len(rows)) if before[row] >= window - 1 and row + (reach or 0) <= last[row]
        ]
        windows = [self.rows[row - window + 1 : row + 1] for row in self.decisions]
        self.x = np.array(windows, np.float64).reshape(-1, window, len(names)).astype(np.float32)
        self.y = None
        if reach is not None:
            self.y = np.array([close[r + reach] / close[r + delay] - 1 for r in self.decisions]).astype(np.float32)
        self.symbols = [owners[row] for row in self.decisions]
        self.steps = [times[row] for row in self.decisions]

    def __len__(self) -> int:
        return len(self.decisions)
