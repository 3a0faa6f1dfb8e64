"""Jumps of price from the bars of a pack to appended ones are told, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bars_fixtures import DAY, bar_table

from stager.bars.read import ReadOptions
from stager.packs.appending import append
from stager.packs.packing import pack

DAILY = ReadOptions(interval="1d")


def daily(steps: dict[str, range], factors: dict[str, float] | None = None) -> object:
    """Bars around 100, times a factor of each symbol."""
    closes = np.concatenate(
        [(100 + np.array(some) % 4) * (factors or {}).get(symbol, 1.0) for symbol, some in steps.items()]
    )
    prices = {name: closes for name in ("open", "high", "low", "close")}
    return bar_table(steps, unit=DAY, **prices)  # type: ignore[arg-type]


def told(warnings: list[str]) -> list[str]:
    return [text for text in warnings if "from the pack's bars to the appended ones" in text]


@pytest.mark.parametrize("n", [1, 3, 20])
def test_a_split_between_pack_and_appended_bars(tmp_path: Path, n: int) -> None:
    pack(daily({"A": range(20), "B": range(20), "C": range(20)}), tmp_path / "x.pack", read=DAILY)
    steps = {"A": range(20, 20 + n), "B": range(20, 20 + n), "C": range(20, 20 + n), "NEW": range(20, 20 + n)}
    later = daily(steps, {"B": 0.5, "NEW": 9.0})
    (text,) = told(append(tmp_path / "x.pack", later).manifest.warnings)
    assert text.startswith(
        "1 jump of price from the pack's bars to the appended ones, of B: 1 that looks like a split; first B at "
        "2024-01-21, new price over old 0.4"
    )
    assert ", near 1/2;" in text


def test_bars_appended_one_by_one_are_compared_with_all_before(tmp_path: Path) -> None:
    pack(daily({"A": range(9)}), tmp_path / "x.pack", read=DAILY)
    for day in range(9, 15):
        packed = append(tmp_path / "x.pack", daily({"A": range(day, day + 1)}, {"A": 100.0 if day > 12 else 1.0}))
        assert len(told(packed.manifest.warnings)) == (day > 12)
    assert "near 100" in told(packed.manifest.warnings)[0]


def test_bars_in_between_and_the_same_level_say_nothing(tmp_path: Path) -> None:
    pack(daily({"A": range(0, 40, 2), "B": range(20)}), tmp_path / "x.pack", read=DAILY)
    between = append(tmp_path / "x.pack", daily({"A": range(1, 5, 2), "B": range(20, 30)}, {"A": 3.0}))
    assert told(between.manifest.warnings) == []
