"""Bars of session dates, from the declared close of the sessions to what decisions, labels and selections are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, bar_table

from stager import Derive, Select, Stager, Target, WalkForward, append, derive, leaktest, pack, panel
from stager.bars.read import ReadOptions
from stager.errors import BarsError, PackDamagedError, PackError
from stager.packs.layout import open_pack
from stager.packs.manifest import seal

NEW_YORK = ReadOptions(session_close="16:00 America/New_York")
# From Friday 1 March 2024 on; the clocks of New York were put ahead on the 10th.
FRIDAY = int(np.datetime64("2024-03-01", "ns").astype(np.int64))
DATES = [day for day in range(30) if day % 7 not in (1, 2)]


def daily(**options: Any) -> pa.Table:
    return bar_table({"A": DATES, "B": DATES}, unit=DAY, start=FRIDAY, **options)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    pack(daily(), tmp_path / "d.pack", read=NEW_YORK)
    return tmp_path / "d.pack"


def closes(days: list[int]) -> np.ndarray:
    hours = [21 if day < 9 else 20 for day in days]
    return FRIDAY + np.array(days) * DAY + np.array(hours) * 3600 * 10**9


def test_the_pack_keeps_the_close(target: Path) -> None:
    found = open_pack(target)
    assert found.manifest.session_close == "16:00 America/New_York"
    assert found.available_at(np.arange(found.n_rows)).tolist() == closes(DATES + DATES).tolist()
    assert pack(daily(), target, overwrite=True).manifest.session_close is None
    assert (open_pack(target).available_at(np.arange(3)) - open_pack(target).times[:3]).tolist() == [DAY] * 3


def test_decisions_and_label_times_are_closes(target: Path) -> None:
    with Stager(target, window=4, target=Target(horizon=2), batch_size=8, shuffle=False, device="cpu") as one:
        batches = list(one.batches())
        times = np.concatenate([batch.times.astype(np.int64) for batch in batches])
        labels = np.concatenate([batch.label_times.astype(np.int64) for batch in batches])
        n = len(DATES) - 6
        assert times.tolist() == closes(DATES)[3:-3].tolist() * 2
        assert labels.tolist() == closes(DATES)[6:].tolist() * 2
        for sample in range(n):
            assert one.locate("A", np.datetime64(int(times[sample]), "ns")) == sample
        table = one.to_table()
        assert table["decision"].cast(pa.int64()).to_numpy().tolist() == times.tolist()
        assert table["label_end"].cast(pa.int64()).to_numpy().tolist() == labels.tolist()
        # The same windows, whenever sessions close.
        with Stager(daily(), window=4, target=Target(horizon=2), batch_size=8, shuffle=False, device="cpu") as other:
            for mine, theirs in zip(batches, other.batches(), strict=True):
                assert np.array_equal(mine.x, theirs.x)
                assert np.array_equal(mine.y, theirs.y)


@pytest.mark.parametrize(("first", "n_served"), [("20:59", 2), ("21:00", 2), ("21:01", 1)])
def test_members_are_told_at_the_close(target: Path, first: str, n_served: int) -> None:
    start, end = (
        np.array([f"2024-03-{day}T{hour}"], "datetime64[ns]") for day, hour in (("07", first), ("11", "20:00"))
    )
    universe = pa.table({"symbol": ["A"], "start": start, "end": end})
    options: dict[str, Any] = {"window": 2, "batch_size": 8, "shuffle": False, "device": "cpu"}
    with Stager(target, select=Select(universe=universe, symbols=["A"]), **options) as one:
        assert [batch.times.astype(np.int64).tolist() for batch in one.batches()] == [
            closes([6, 7])[-n_served:].tolist()
        ]


def test_what_is_derived_has_the_same_close(target: Path) -> None:
    kept = derive(target, Derive(("log_return",), fill="previous", cap=1))
    whole = panel(target)
    for found in (kept, whole):
        assert found.manifest.session_close == "16:00 America/New_York"
        assert found.available_at(np.arange(len(DATES))).tolist() == closes(DATES).tolist()
    with Stager(whole, window=3, batch_size=4, shuffle=False, device="cpu") as one:
        times = np.concatenate([batch.times.astype(np.int64) for batch in one.batches()])
        assert times.tolist() == closes(DATES)[2:].tolist()
    # Packed anew with another close, nothing kept beside the pack is taken for it.
    pack(daily(), target, read=ReadOptions(session_close="15:00 America/Chicago"), overwrite=True)
    for found in (derive(target, Derive(("log_return",), fill="previous", cap=1)), panel(target)):
        assert found.manifest.session_close == "15:00 America/Chicago"


def test_folds_and_leaks(target: Path) -> None:
    with Stager(target, window=3, target=Target(horizon=2), batch_size=8, device="cpu") as one:
        for fold in one.split(WalkForward(2)):
            ends = max(int(batch.label_times.astype(np.int64).max()) for batch in fold.train.batches())
            assert ends <= min(int(batch.times.astype(np.int64).min()) for batch in fold.test.batches())
    found = leaktest(target, window=3, target=Target(horizon=2), split=WalkForward(2), decisions=20)
    assert found.leaks == ()


class TestAppending:
    def test_the_close_is_that_of_the_pack(self, target: Path) -> None:
        later = bar_table({"A": [31, 32]}, unit=DAY, start=FRIDAY)
        found = append(target, later)
        assert found.manifest.session_close == "16:00 America/New_York"
        assert found.available_at(np.arange(len(DATES), len(DATES) + 2)).tolist() == closes([31, 32]).tolist()
        assert append(target, later, read=NEW_YORK).n_rows == found.n_rows

    def test_another_close_is_refused(self, target: Path) -> None:
        before = open_pack(target).fingerprint
        with pytest.raises(PackError, match=r"close at 16:30 America/New_York, and those of the pack at 16:00 Amer"):
            append(target, daily(), read=ReadOptions(session_close="16:30 America/New_York"))
        pack(daily(), target, overwrite=True)
        with pytest.raises(PackError, match=r"and those of the pack at the next 00:00 UTC; leave --session-close out"):
            append(target, daily(), read=NEW_YORK)
        assert open_pack(target).fingerprint == before

    def test_instants_are_refused(self, target: Path) -> None:
        hours = bar_table({"A": [31, 32]}, unit=DAY, start=FRIDAY + 3600 * 10**9)
        with pytest.raises(BarsError, match="the times are instants"):
            append(target, hours)


@pytest.mark.parametrize("change", [{"session_close": "16:00"}, {"timestamps": "utc"}, {"interval": "1h"}])
def test_a_manifest_that_contradicts_itself_is_damaged(target: Path, change: dict[str, str]) -> None:
    file = target / "manifest.json"
    told = json.loads(file.read_bytes()) | change | {"checksum": "0" * 32}
    raw = json.dumps(told).encode()
    file.write_bytes(raw.replace(b'"checksum": "' + b"0" * 32, f'"checksum": "{seal(raw, "0" * 32)}'.encode()))
    with pytest.raises(PackDamagedError, match=r"no valid manifest|its sessions have a close"):
        open_pack(target)
