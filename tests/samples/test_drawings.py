"""The drawings of docs/samples.md show what is served."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from bars_fixtures import MINUTE, START, memory_pack

from stager import Derive, Panel, Select, Stager, Target, derive, panel
from stager.packs.layout import Pack
from stager.samples.building import build_index
from stager.samples.fill import FILLED

TEXT = (Path(__file__).parents[2] / "docs" / "samples.md").read_text(encoding="utf-8")


def drawing(words: str) -> list[str]:
    """The lines of the drawing that holds the words."""
    (found,) = [block for block in re.split(r"^```.*\n", TEXT, flags=re.MULTILINE)[1::2] if words in block]
    return found.splitlines()


def minutes(pack: Pack, rows: np.ndarray) -> list[int]:
    return ((pack.times[rows] - START) // MINUTE).tolist()


def clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


@pytest.mark.parametrize(("part", "fill", "max_gap"), [(0, False, 0), (1, False, 1), (2, True, 0)])
def test_gaps_and_fills(part: int, fill: bool, max_gap: int) -> None:
    lines = drawing("as they came")
    bars = lines[1]
    left = bars.index("#")
    steps = [place - left for place, character in enumerate(bars) if character == "#"]
    closes, opens = (match.start() - left for match in re.finditer(r"\|", bars))
    session = f"00:00-{clock(closes)},{clock(opens + 1)}-{clock(steps[-1] + 1)} UTC"
    pack = memory_pack({"A": steps})
    if fill:
        pack = derive(pack, Derive(fill="previous", cap=2, session=session))
        drawn = next(line for line in lines if line.startswith("fill"))[left:]
        real, filled = ([place for place, character in enumerate(drawn) if character == kind] for kind in "#f")
        is_filled = pack.column(FILLED) != 0
        assert minutes(pack, ~is_filled) == real
        assert minutes(pack, is_filled) == filled
    index = build_index(pack, 4, None, Select(session=session, max_gap=max_gap))
    decisions = [line for line in lines if line.startswith("decisions")][part][left:]
    assert minutes(pack, index.rows_between(0, index.n_samples)) == [
        place for place, character in enumerate(decisions) if character == "*"
    ]


def test_decision_and_label_time() -> None:
    lines = drawing("entry: close of")
    places = {int(match[0]): match.start() for match in re.finditer(r"\d", next(x for x in lines if x[:4] == "bars"))}
    marks = [match.start() for match in re.finditer("▲", next(line for line in lines if "▲" in line))]
    # A mark is at the close of a bar, half a bar behind the number of the bar.
    decision, entry, leave = (max(bar for bar, place in places.items() if place < mark) for mark in marks)
    with Stager(
        memory_pack({"A": range(8)}), window=4, batch_size=1, target=Target("close", delay=1, horizon=3), device="cpu"
    ) as one:
        (batch,) = one.batches()
        last = int(batch.x[0, -1, 3] - 1e6)
        assert (last, last + 1, last + 1 + 3) == (decision, entry, leave)
        text = " ".join(lines)
        assert f"at 10:0{(int(batch.times[0].astype(np.int64)) - START) // MINUTE}" in text
        assert f"at 10:0{(int(batch.label_times[0].astype(np.int64)) - START) // MINUTE}" in text


def test_panel_and_mask() -> None:
    lines = [line for line in drawing("not observed: NaN") if re.match(r"\s+[ABC] │", line)]
    seen = {line.split()[0]: [cell.strip() == "█" for cell in line.split("│")[1:7]] for line in lines}
    pack = panel(memory_pack({name: [*np.flatnonzero(row).tolist(), 6, 7] for name, row in seen.items()}), Panel())
    with Stager(pack, window=4, batch_size=1, target=Target(horizon=1), select=Select(max_gap=9), device="cpu") as one:
        batch = next(batch for batch in one.batches() if batch.times[0].astype(np.int64) == START + 6 * MINUTE)
        np.testing.assert_array_equal(batch.mask[0].T, [row[2:] for row in seen.values()])
        np.testing.assert_array_equal(np.isnan(batch.x[0, :, :, 3]).T, [np.invert(row[2:]) for row in seen.values()])
        assert [name for name, y in zip(batch.symbols, batch.y[0], strict=True) if not np.isnan(y)] == ["A", "C"]
