"""Derived packs: fills and columns, against plain loops, and against the same bars with the future left out."""

from __future__ import annotations

import datetime as dt
import math
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import Derive, Feature, ReadOptions, Select, Stager, derive
from stager.errors import ConfigError, PackExistsError, SampleError
from stager.packs.layout import Pack, open_pack
from stager.packs.packing import pack_in_memory
from stager.samples.building import build_index
from stager.samples.targets import Target

NAN = float("nan")


def by_symbol(pack: Pack) -> dict[str, list[dict[str, float]]]:
    """The bars of each symbol, one dictionary a bar; ``step`` is the minute or day."""
    unit = DAY if pack.interval.is_session else MINUTE
    return {
        symbol: [
            {"step": (int(pack.times[row]) - START) // unit, **{name: pack.column(name)[row] for name in pack.columns}}
            for row in range(first, first + count)
        ]
        for symbol, first, count in zip(pack.symbols, pack.first_rows.tolist(), pack.counts.tolist(), strict=True)
    }


def filled_by_hand(pack: Pack, cap: int, calendar: list[int], last_of: Any) -> dict[str, list[dict[str, float]]]:
    """Walk along the calendar: the last real bar is repeated for at most `cap` entries."""
    out: dict[str, list[dict[str, float]]] = {}
    for symbol, bars in by_symbol(pack).items():
        real = {int(bar["step"]): bar for bar in bars}
        out[symbol], last, n = [], None, 0
        for step in calendar:
            if step in real:
                last, n = real[step], 0
                out[symbol].append({**last, "is_filled": 0.0})
            elif last is not None and n < cap and step < last_of(int(last["step"])):
                n += 1
                prices = dict.fromkeys(("open", "high", "low", "close"), last["close"])
                others = {name: NAN for name in pack.columns if name not in prices}
                out[symbol].append({**others, **prices, "volume": 0.0, "is_filled": 1.0, "step": step})
    return out


def assert_same(found: dict[str, list[dict[str, float]]], wanted: dict[str, list[dict[str, float]]]) -> None:
    assert list(found) == list(wanted)
    for symbol, bars in wanted.items():
        assert len(found[symbol]) == len(bars)
        for mine, other in zip(found[symbol], bars, strict=True):
            assert mine.keys() == other.keys()
            for name, value in other.items():
                assert mine[name] == value or (math.isnan(value) and math.isnan(mine[name])), (symbol, name, mine)


steps_of = st.dictionaries(
    st.sampled_from("ABC"), st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True), min_size=1
)


@settings(deadline=None, max_examples=120)
@given(steps=steps_of, cap=st.sampled_from([1, 2, 5, 100]), interval=st.sampled_from(["1min", "1d"]))
def test_fills_are_those_of_a_walk_along_the_clock(steps: dict[str, list[int]], cap: int, interval: str) -> None:
    n = sum(map(len, steps.values()))
    pack = memory_pack(
        {"A": [0, *[step + 1 for step in steps.pop("A", [])]], **steps},
        interval=interval,
        unit=DAY if interval == "1d" else MINUTE,
    )
    assert pack.n_rows >= n
    taken = {int(bar["step"]) for bars in by_symbol(pack).values() for bar in bars}
    calendar = sorted(taken) if interval == "1d" else list(range(max(taken) + 1))
    made = derive(pack, Derive(fill="previous", cap=cap))
    assert_same(by_symbol(made), filled_by_hand(pack, cap, calendar, lambda step: math.inf))
    assert made.manifest.columns[-1].name == "is_filled"
    np.testing.assert_array_equal(made.rows[:, 3], made.column("close").astype(np.float32))


def test_fills_stay_inside_the_session_and_its_half() -> None:
    pack = memory_pack({"A": [0, 8, 12, 14, 27, 45], "B": [2, 59]})
    hours = "00:00-00:10,00:12-00:20,00:25-00:30 UTC"
    made = by_symbol(derive(pack, Derive(fill="previous", cap=4, session=hours)))
    close_of = {0: 10, 8: 10, 12: 20, 14: 20, 27: 30, 45: 45, 2: 10, 59: 59}
    wanted = filled_by_hand(pack, 4, list(range(60)), close_of.__getitem__)
    assert_same(made, wanted)
    assert [bar["step"] for bar in made["B"]] == [2, 3, 4, 5, 6, 59]


def test_further_columns_are_missing_or_kept_in_filled_bars() -> None:
    pack = memory_pack({"A": [0, 2]}, vwap=[5.0, 6.0], trades=[1.0, 2.0])
    made = derive(pack, Derive(fill="previous", cap=1, keep=["vwap"]))
    assert made.column("vwap").tolist() == [5.0, 5.0, 6.0]
    assert np.isnan(made.column("trades")).tolist() == [False, True, False]


@settings(deadline=None, max_examples=60)
@given(steps=steps_of, cut=st.integers(1, 40), window=st.integers(1, 4))
def test_what_comes_later_changes_no_earlier_sample(steps: dict[str, list[int]], cut: int, window: int) -> None:
    """Bars from the cut on left out, altered or delayed, everything built anew: decisions before are bit-identical."""
    recipe = Derive(["log_return", "range", "time_of_day"], fill="previous", cap=2)
    select = Select(max_gap=1)

    table = bar_table(steps)
    stamps = table["time"].cast(pa.int64()).to_numpy()
    later = stamps >= START + cut * MINUTE

    def samples(table: pa.Table) -> dict[tuple[str, int], bytes]:
        if not table.num_rows:
            return {}
        pack = derive(pack_in_memory(table, ReadOptions(interval="1min")), recipe)
        try:
            index = build_index(pack, window, None, select)
        except SampleError:
            return {}
        found: dict[tuple[str, int], bytes] = {}
        for row in index.rows(np.arange(index.n_samples)).tolist():
            step = (int(pack.times[row]) - START) // MINUTE
            symbol = pack.symbols[int(np.searchsorted(pack.first_rows, row, side="right")) - 1]
            if step < cut:
                found[symbol, step] = pack.rows[row - window + 1 : row + 1].tobytes()
        return found

    def changed(name: str, values: Any) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, [values])

    whole = samples(table)
    for name in ("open", "high", "low", "close", "volume"):
        values = table[name].to_numpy()
        assert samples(changed(name, np.where(later, values * 3, values))) == whole
    delayed = pa.array(np.where(later, stamps + 7 * MINUTE, stamps)).cast(pa.timestamp("ns", "UTC"))
    assert samples(changed("time", delayed)) == whole
    assert samples(table.filter(pa.array(~later))) == whole


def test_decision_entry_and_exit_are_real_bars() -> None:
    pack = derive(memory_pack({"A": [0, 1, 3, 4, 5, 6]}), Derive(fill="previous", cap=1))
    target = Target(horizon=1, delay=1, kind="difference")

    def rows(**select: Any) -> list[int]:
        index = build_index(pack, 2, target, Select(**select))
        return index.rows(np.arange(index.n_samples)).tolist()

    # Row 2 is filled: no decision there, no entry for row 1, no exit for row 0 (which has no window anyway).
    assert rows() == [3, 4]
    assert rows(allow_filled=True) == [1, 2, 3, 4]
    reasons = build_index(pack, 2, target, Select()).reasons
    assert reasons["decision at a filled bar"] == 1
    assert reasons["entry or exit at a filled bar"] == 1


def test_history_counts_real_bars() -> None:
    pack = derive(memory_pack({"A": [0, 3, 4], "B": [4]}), Derive(fill="previous", cap=9))
    for least, expected in ((1, [0, 3, 4, 5]), (2, [3, 4]), (3, [4])):
        index = build_index(pack, 1, None, Select(min_history=least))
        assert index.rows(np.arange(index.n_samples)).tolist() == expected


def test_rolls_and_splits_begin_at_a_real_bar() -> None:
    """A bar filled after a split has the price from before it."""
    pack = derive(
        memory_pack({"A": [0, 1, 4, 5]}, contract=[1.0, 1.0, 2.0, 2.0]),
        Derive(["log_return"], fill="previous", cap=9, rolls="contract"),
    )
    splits = pa.table({"symbol": ["A"], "time": pa.array([START + 2 * MINUTE], pa.timestamp("ns")), "ratio": [2]})
    for select in ({"splits": splits}, {"rolls": "contract"}):
        index = build_index(pack, 2, None, Select(columns=["close"], allow_filled=True, **select))
        assert index.rows(np.arange(index.n_samples)).tolist() == [1, 2, 3, 5]
    assert np.isnan(pack.column("log_return")).tolist() == [True, False, False, False, True, False]


# -------------------------------------------------------------------------------- columns


def test_built_in_columns_are_computed_in_float64() -> None:
    rng = np.random.default_rng(2)
    close = 60_000 * np.exp(1e-9 * rng.normal(size=20).cumsum())
    table = bar_table(
        {"A": range(10), "B": [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]}, close=close, high=close + 2, low=close - 1
    )
    pack = pack_in_memory(table, ReadOptions(interval="1min", adjustment="raw"))
    made = derive(pack, Derive(["log_return", "range", "dollar_volume", "time_of_day"], zone="America/New_York"))
    assert made.columns == (
        "open", "high", "low", "close", "volume",
        "log_return", "range", "dollar_volume", "time_of_day_sin", "time_of_day_cos",
    )  # fmt: skip
    assert [column.role for column in made.manifest.columns][5:] == ["other", "other", "volume", "other", "other"]
    moves = made.column("log_return")
    for first in (0, 10):
        assert math.isnan(moves[first])
        wanted = [math.log(close[row] / close[row - 1]) for row in range(first + 1, first + 10)]
        np.testing.assert_allclose(moves[first + 1 : first + 10], wanted, rtol=1e-12)
    # The pack's float32 prices are all the same; its log returns are not.
    assert len(np.unique(made.rows[:, 3])) == 1
    assert len(np.unique(made.rows[1:10, 5])) == 9
    np.testing.assert_array_equal(made.column("range"), ((close + 2) - (close - 1)) / close)
    np.testing.assert_array_equal(made.column("dollar_volume"), close * np.arange(1.0, 21))
    zone = zoneinfo.ZoneInfo("America/New_York")
    for row in range(20):
        local = dt.datetime.fromtimestamp((int(made.times[row]) + MINUTE) / 1e9, zone)
        angle = 2 * math.pi * (local.hour * 60 + local.minute) / 1440
        assert made.column("time_of_day_sin")[row] == pytest.approx(math.sin(angle), abs=1e-12)
        assert made.column("time_of_day_cos")[row] == pytest.approx(math.cos(angle), abs=1e-12)
    assert made.manifest.adjustment == "raw"
    assert made.manifest.decisions[-1].what == "derived"


def test_the_time_of_day_follows_the_clock() -> None:
    """The hour is the same on both sides of a change of clocks."""
    noon = [
        int(dt.datetime(2024, 3, day, 12, tzinfo=zoneinfo.ZoneInfo("America/New_York")).timestamp()) for day in (8, 11)
    ]
    pack = memory_pack({"A": [second // 60 - START // MINUTE for second in noon]})
    for recipe in (
        Derive(["time_of_day"], zone="America/New_York"),
        Derive(["time_of_day"], session="09:30-16:00 America/New_York"),
    ):
        sines = derive(pack, recipe).column("time_of_day_sin")
        assert sines[0] == sines[1]
    utc = derive(pack, Derive(["time_of_day"])).column("time_of_day_sin")
    assert utc[0] != utc[1]


def test_values_that_are_no_numbers_are_missing() -> None:
    close = [1.0, 0.0, -1.0, 2.0, 4.0]
    pack = derive(memory_pack({"A": range(5)}, close=close), Derive(["log_return", "range"]))
    assert np.isnan(pack.column("log_return")).tolist() == [True, True, True, True, False]
    assert np.isnan(pack.column("range")).tolist() == [False, True, True, False, False]
    index = build_index(pack, 1, None, Select())
    assert index.rows(np.arange(index.n_samples)).tolist() == [4]


@pytest.mark.parametrize("adjustment", ["total", "unknown"])
def test_dollar_volume_needs_one_adjustment(adjustment: Any) -> None:
    pack = pack_in_memory(bar_table({"A": range(5)}), ReadOptions(interval="1min", adjustment=adjustment))
    with pytest.raises(SampleError, match=f"the pack's is '{adjustment}'"):
        derive(pack, Derive(["dollar_volume"]))


# -------------------------------------------------------------------------------- the user's functions


def trailing_mean(table: Any) -> np.ndarray:
    close = table["close"].to_numpy()
    return np.array([close[max(0, row - 2) : row + 1].mean() for row in range(len(close))])


def test_a_function_sees_one_symbol_and_has_a_lookback() -> None:
    seen: list[tuple[str, list[str]]] = []

    def function(table: Any) -> np.ndarray:
        seen.append((table["symbol"][0].as_py(), table.column_names))
        assert len(table["symbol"].unique()) == 1
        return trailing_mean(table)

    pack = memory_pack({"A": range(10), "B": range(2), "C": range(8)})
    made = derive(pack, Derive(["range", Feature("mean", function, lookback=2)]))
    assert {name for name, _ in seen} == {"A", "B", "C"}
    assert seen[0][1] == ["symbol", "time", "open", "high", "low", "close", "volume", "range"]
    mean, close = made.column("mean"), pack.column("close")
    for first, count in zip(pack.first_rows.tolist(), pack.counts.tolist(), strict=True):
        assert np.isnan(mean[first : first + min(2, count)]).all()
        for row in range(first + 2, first + count):
            assert mean[row] == close[row - 2 : row + 1].mean()
    assert build_index(made, 3, None, Select()).n_samples == (10 - 4) + (8 - 4)


def test_a_lookback_beyond_all_bars_leaves_no_value() -> None:
    feature = Feature("x", lambda table: table["close"].to_numpy(), lookback=2**70)
    assert np.isnan(derive(memory_pack({"A": range(5)}), Derive([feature])).column("x")).all()


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(SampleError, match=r"derive\(\) got \['range'\]"):
        derive(memory_pack({"A": range(5)}), ["range"])  # type: ignore[arg-type]


def test_a_lookback_does_not_reach_across_a_roll() -> None:
    pack = memory_pack({"A": range(10)}, contract=[1.0] * 5 + [2.0] * 5)
    made = derive(pack, Derive([Feature("mean", trailing_mean, lookback=2)], rolls="contract"))
    assert np.isnan(made.column("mean")).tolist() == [True, True, *[False] * 3, True, True, *[False] * 3]


@pytest.mark.parametrize(
    ("function", "lookback", "words"),
    [
        (lambda table: np.append(table["close"].to_numpy()[1:], 0), 0, "'x' looks ahead"),
        (lambda table: table["close"].to_numpy() / table["close"].to_numpy()[-1], 0, "'x' looks ahead"),
        (lambda table: table["close"].to_numpy() - table["close"].to_numpy().mean(), 3, "'x' looks ahead"),
        (lambda table: np.arange(table.num_rows) / table.num_rows, 0, "'x' looks ahead"),
        (trailing_mean, 1, "needs more than its lookback of 1 rows"),
        (lambda table: table["close"].to_numpy().cumsum(), 5, "needs more than its lookback of 5 rows"),
        (lambda table: table["close"].to_numpy()[1:], 0, r"shape \(29,\) for 30 bars"),
        (lambda table: 1.0, 0, r"shape \(\) for 30 bars"),
        (lambda table: ["a"] * table.num_rows, 0, "no numbers"),
        (lambda table: None, 0, "shape|no numbers"),
        (
            lambda table: table["clos"],
            0,
            "'x' raised KeyError: .*clos.*; it was given 30 bars of A with columns symbol",
        ),
    ],
)
def test_functions_that_are_refused(function: Any, lookback: int, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        derive(memory_pack({"A": range(30)}), Derive([Feature("x", function, lookback=lookback)]))


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (lambda: Derive(), SampleError, "nothing is derived"),
        (lambda: Derive("range"), SampleError, "columns is 'range'"),
        (lambda: Derive(["rnage"]), SampleError, "no derived column 'rnage'; there are log_return"),
        (lambda: Derive(["range", "range"]), SampleError, "'range' is asked for twice"),
        (lambda: Derive(fill="linear"), SampleError, "fill is 'linear'"),  # type: ignore[arg-type]
        (lambda: Derive(fill="previous"), SampleError, "cap is None"),
        (lambda: Derive(fill="previous", cap=0), SampleError, "cap is 0"),
        (lambda: Derive(fill="previous", cap=True), SampleError, "cap is True"),
        (lambda: Derive(["range"], cap=3), SampleError, "belong to fill='previous'"),
        (lambda: Derive(["range"], zone="Mars/Olympus"), ConfigError, "Mars/Olympus"),
        (lambda: Derive(["range"], session="9-16"), SampleError, "session is '9-16'"),
        (lambda: Feature("range", len, lookback=0), SampleError, "not that of another column"),
        (lambda: Feature("x", 5, lookback=0), SampleError, "5 is no function"),  # type: ignore[arg-type]
        (lambda: Feature("x", len, lookback=-1), SampleError, "lookback is -1"),
    ],
)
def test_recipes_that_are_refused(recipe: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        recipe()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Derive([Feature("close", trailing_mean, lookback=2)]), "already has a column 'close'"),
        (Derive(fill="previous", cap=1, keep=["vwap"]), "no column 'vwap' to keep"),
    ],
)
def test_recipes_that_do_not_fit_the_pack(recipe: Derive, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        derive(memory_pack({"A": range(30)}), recipe)


def test_the_time_of_day_is_for_bars_shorter_than_a_day() -> None:
    with pytest.raises(SampleError, match="nothing about bars of 1d"):
        derive(memory_pack({"A": range(5)}, interval="1d", unit=DAY), Derive(["time_of_day"]))


def test_a_pack_without_volume_has_no_dollar_volume() -> None:
    table = bar_table({"A": range(5)}).drop(["volume"])
    pack = pack_in_memory(table, ReadOptions(interval="1min", adjustment="raw"))
    with pytest.raises(SampleError, match="needs a column 'volume'"):
        derive(pack, Derive(["dollar_volume"]))
    assert derive(pack, Derive(fill="previous", cap=1)).columns == ("open", "high", "low", "close", "is_filled")


# -------------------------------------------------------------------------------- on disk


def packs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_derived_pack_is_kept_beside_the_pack(tmp_path: Path) -> None:
    pack = stager.pack(bar_table({"A": [0, 1, 4], "B": range(6)}), tmp_path / "bars.pack")
    recipe = Derive(["range"], fill="previous", cap=2)
    made = derive(pack, recipe)
    assert made.path is not None
    assert made.path.parent == tmp_path
    assert packs_in(tmp_path) == sorted(["bars.pack", made.path.name])
    stager.verify(made.path)
    before = (made.path / "manifest.json").stat().st_mtime_ns
    again = derive(str(tmp_path / "bars.pack"), Derive(["range"], fill="previous", cap=2))
    assert again.path == made.path
    assert (made.path / "manifest.json").stat().st_mtime_ns == before
    held = derive(pack_in_memory(bar_table({"A": [0, 1, 4], "B": range(6)})), recipe)
    assert held.path is None
    np.testing.assert_array_equal(held.rows, made.rows)
    assert held.fingerprint == made.fingerprint
    # Another recipe, and other bars, are another pack.
    other = derive(pack, Derive(["range"], fill="previous", cap=1))
    stager.pack(bar_table({"A": range(6)}), tmp_path / "bars.pack", overwrite=True)
    third = derive(tmp_path / "bars.pack", recipe)
    assert len({made.path, other.path, third.path}) == 3


def test_a_damaged_derived_pack_is_built_anew(tmp_path: Path) -> None:
    pack = stager.pack(bar_table({"A": range(6)}), tmp_path / "bars.pack")
    made = derive(pack, Derive(["range"]))
    assert made.path is not None
    rows = made.path / "segment-0" / "rows.npy"
    rows.write_bytes(rows.read_bytes()[:-4])
    again = derive(pack, Derive(["range"]))
    assert again.path == made.path
    stager.verify(made.path)


def test_a_function_is_never_taken_from_what_was_kept(tmp_path: Path) -> None:
    pack = stager.pack(bar_table({"A": range(6)}), tmp_path / "bars.pack")
    for factor in (2.0, 3.0):
        feature = Feature("x", lambda table, factor=factor: table["close"].to_numpy() * factor, lookback=0)
        made = derive(pack, Derive([feature]))
        assert made.path is None
        np.testing.assert_array_equal(made.column("x"), pack.column("close") * factor)
    kept = derive(pack, Derive([feature]), tmp_path / "mine.pack")
    np.testing.assert_array_equal(open_pack(tmp_path / "mine.pack").rows, kept.rows)
    with pytest.raises(PackExistsError):
        derive(pack, Derive([feature]), tmp_path / "mine.pack")
    derive(pack, Derive(["range"]), tmp_path / "mine.pack", overwrite=True)


def test_a_stager_serves_a_derived_pack(tmp_path: Path) -> None:
    pack = stager.pack(bar_table({"A": [0, 1, 2, 4, 5, 6], "B": range(6)}), tmp_path / "bars.pack")
    made = derive(pack, Derive(["log_return"], fill="previous", cap=1))
    select = Select(columns=["log_return", "is_filled"])
    with Stager(made, window=3, batch_size=99, select=select, shuffle=False, device="cpu") as one:
        (batch,) = one.batches()
        assert batch.x.shape == (6, 3, 2)
        assert one.resident.path == "mapped"
        assert batch.x[:, -1, 1].tolist() == [0.0] * 6
        assert batch.x[:2, :, 1].tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
