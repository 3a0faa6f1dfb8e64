"""Shards: parts of a pack that are served on their own, and together are the pack."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bars_fixtures import bar_table
from hypothesis import given
from hypothesis import strategies as st

import stager
from stager import Stager, Target, stage
from stager.batches.read_ahead import read_ahead
from stager.errors import ConfigError, SampleError
from stager.packs.layout import Pack, open_pack
from stager.packs.sharding import cut, shard_of

STEPS = {"A": range(300), "B": range(40, 90), "C": range(200), "D": range(7), "E": range(120), "F": range(333)}
OPTIONS: dict[str, Any] = {"window": 4, "target": Target(horizon=2), "batch_size": 16, "seed": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return stager.pack(bar_table(STEPS), tmp_path_factory.mktemp("shards") / "bars.pack")


def samples(resident: stager.Resident, epoch: int = 1) -> dict[tuple[str, int], tuple[bytes, float]]:
    """Windows and targets by symbol and decision."""
    found = {}
    with Stager(resident, **OPTIONS) as one:
        for batch in one.batches(epoch):
            for at, (symbol, time) in enumerate(zip(batch.symbols, batch.times.view(np.int64).tolist(), strict=True)):
                assert (symbol, time) not in found
                found[symbol, time] = (np.asarray(batch.x[at]).tobytes(), float(batch.y[at]))
    return found


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.data())
def test_a_cut_has_no_empty_part_and_parts_are_about_equal(counts: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(counts)))
    edges = cut(np.array(counts), n)
    assert edges[0] == 0
    assert edges[-1] == len(counts)
    assert len(edges) == n + 1
    sums = [sum(counts[a:b]) for a, b in pairwise(edges)]
    assert min(b - a for a, b in pairwise(edges)) >= 1
    # No part is larger than its share and a count at each end, unless others had to be left one each.
    if len(counts) >= 4 * n and max(counts) * n <= sum(counts):
        assert max(sums) <= sum(counts) / n + 2 * max(counts)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_groups_of_symbols_are_the_pack_together(whole: Pack, n: int) -> None:
    with stage(whole, device="cpu") as resident:
        everything = samples(resident)
    together: dict[Any, Any] = {}
    rows, fingerprints = [], set()
    for number in range(n):
        with stage(whole, device="cpu", shard=(number, n)) as resident:
            mine = samples(resident)
            assert not set(mine) & set(together)
            together |= mine
            rows.append(np.array(resident.rows))
            fingerprints.add(resident.pack.fingerprint)
            assert resident.path == "mapped"
            with Stager(resident, **OPTIONS) as one:
                assert one.plan.shard.startswith(f"{number} of {n}, by symbols: {resident.pack.symbols[0]} to ")
                assert re.search(rf"^shard +{number} of {n}, by", str(one.plan), re.MULTILINE)
                assert one.plan.as_dict()["shard"] == one.plan.shard
                assert one.plan.rows_nbytes == rows[-1].nbytes
                assert sum(one.plan.reasons.values()) + one.n_samples == one.plan.n_rows == len(rows[-1])
                symbol, time = next(iter(mine))
                assert 0 <= one.locate(symbol, np.datetime64(time, "ns")) < one.n_samples == len(mine)
    assert together == everything
    np.testing.assert_array_equal(np.concatenate(rows), whole.rows)
    assert len(fingerprints | {whole.fingerprint}) == n + 1


def test_a_shard_is_read_as_a_file_of_its_own(whole: Pack) -> None:
    for number in range(3):
        part = shard_of(whole, number, 3)
        assert part.bars["symbol"].unique().to_pylist() == list(part.symbols)
        np.testing.assert_array_equal(part.times, whole.times[part_rows(whole, part)])
        np.testing.assert_array_equal(part.column("close"), whole.column("close")[part_rows(whole, part)])
        out = np.empty(part.rows.nbytes - 20, np.uint8)
        part.parts[0].file.read(out, 20)
        assert out.tobytes() == part.rows.tobytes()[20:]
        ask = read_ahead(part)
        ask(0, part.rows.nbytes // 2)
        ask(part.rows.nbytes // 2, part.rows.nbytes)


def part_rows(whole: Pack, part: Pack) -> slice:
    first = int(whole.first_rows[whole.symbols.index(part.symbols[0])])
    return slice(first, first + part.n_rows)


def test_a_shard_outlives_the_pack_it_is_of(whole: Pack) -> None:
    assert whole.path is not None
    part = shard_of(open_pack(whole.path), 1, 2)
    out = np.empty(part.rows.nbytes, np.uint8)
    part.parts[0].file.read(out, 0)
    assert out.tobytes() == part.rows.tobytes()


@pytest.fixture
def by_time(tmp_path: Path) -> Pack:
    """Three segments of consecutive times, the last with a new symbol."""
    path = tmp_path / "bars.pack"
    stager.pack(bar_table({"A": range(100), "B": range(50)}), path)
    stager.append(path, bar_table({"A": range(100, 200), "B": range(50, 150)}))
    return stager.append(path, bar_table({"A": range(200, 260), "C": range(300)}))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_segments_lose_the_windows_across_their_borders(by_time: Pack, n: int) -> None:
    with stage(by_time, device="cpu") as resident:
        everything = samples(resident)
    together: dict[Any, Any] = {}
    named: list[str] = []
    for number in range(n):
        with stage(by_time, device="cpu", shard=(number, n)) as resident:
            together |= samples(resident)
            shard = resident.pack.shard
            assert shard is not None
            assert shard.by == "segments"
            named += shard.parts
            with Stager(resident, **OPTIONS) as one:
                assert ", ".join(shard.parts) in one.plan.shard
                on_disk = sum(sum(f.stat().st_size for f in part.folder.iterdir()) for part in resident.pack.parts)
                assert one.plan.disk_nbytes == on_disk
    assert named == ["segment-0", "segment-1", "segment-2"]
    assert set(together.items()) <= set(everything.items())
    # A window of 4 with its label, 3 bars after it, lies across a border in 6 places, for each symbol that goes on.
    assert len(everything) - len(together) == {1: 0, 2: 6, 3: 18}[n]


def test_a_training_goes_on_with_its_own_shard_alone(whole: Pack) -> None:
    with (
        stage(whole, device="cpu", shard=(0, 2)) as a,
        stage(whole, device="cpu", shard=(1, 2)) as b,
        Stager(a, **OPTIONS) as one,
        Stager(a, **OPTIONS) as same,
        Stager(b, **OPTIONS) as other,
        Stager(whole, device="cpu", **OPTIONS) as everything,
    ):
        state = one.state_dict(0, 2)
        assert same.resume(state) == (0, 2)
        for wrong in (other, everything):
            with pytest.raises(SampleError):
                wrong.resume(state)


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        ((2, 2), r"shard is \(2, 2\); the first is the shard's number, 0 to 1"),
        ((-1, 2), r"shard is \(-1, 2\)"),
        ((0, 0), r"shard is \(0, 0\)"),
        ((0, 7), r"has 6 symbols; a shard is at least one"),
        ((0, 2.0), r"give two integers"),
        ((True, 2), r"give two integers"),
        (3, r"shard is 3; give the shard's number and how many"),
        ((0, 1, 2), r"shard is \(0, 1, 2\); give"),
    ],
)
def test_refusals(whole: Pack, shard: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        stage(whole, device="cpu", shard=shard)


def test_more_shards_than_segments_and_what_is_no_pack(by_time: Pack) -> None:
    with pytest.raises(ConfigError, match=r"whole segments, of which .* has 3; use at most 3 shards, or .*compact"):
        stage(by_time, device="cpu", shard=(0, 4))
    with pytest.raises(ConfigError, match="pack the bars first"):
        stage(bar_table({"A": range(30)}), device="cpu", shard=(0, 1))
    with pytest.raises(ConfigError, match="is a shard already"):
        stage(shard_of(by_time, 0, 2), device="cpu", shard=(0, 2))
