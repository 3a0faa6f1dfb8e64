"""Panels: all symbols side by side, against plain dictionaries of bars."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import (
    Combinatorial,
    Derive,
    Labels,
    Normalize,
    Panel,
    PurgedKFold,
    ReadOptions,
    Select,
    Stager,
    Target,
    WalkForward,
    derive,
    open_pack,
    panel,
    panel_plan,
)
from stager.cli import main
from stager.errors import ClosedError, SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory

NAN = float("nan")
STEPS = {"B": [*range(80), *range(83, 150)], "A": range(90), "C": [*range(5), *range(7, 160)]}
COLUMNS = ("open", "high", "low", "close", "volume")


class ByHand:
    """The panel of a ragged pack, cell by cell."""

    def __init__(
        self, pack: Pack, window: int, targets: Sequence[Target] | None, *, symbols: Sequence[str] | None = None,
        columns: Sequence[str] | None = None, max_gap: int = 0, stride: int = 1,
    ) -> None:  # fmt: skip
        unit = DAY if pack.interval.is_session else MINUTE
        self.symbols = list(symbols or pack.symbols)
        columns = list(columns or pack.columns)
        bars: dict[str, dict[int, list[float]]] = {}
        closes: dict[str, list[float]] = {}
        for symbol, first, count in zip(pack.symbols, pack.first_rows.tolist(), pack.counts.tolist(), strict=True):
            rows = range(first, first + count)
            steps = [(int(pack.times[row]) - START) // unit for row in rows]
            bars[symbol] = {
                step: [float(pack.column(name)[row]) for name in columns] for step, row in zip(steps, rows, strict=True)
            }
            closes[symbol] = [float(pack.column("close")[row]) for row in rows]
        axis = sorted({step for symbol in self.symbols for step in bars[symbol]})
        self.empty = {"before the first bar": 0, "between bars": 0, "after the last bar": 0}
        for symbol in self.symbols:
            for step in axis:
                before, after = min(bars[symbol]) > step, max(bars[symbol]) < step
                if step not in bars[symbol]:
                    place = "before the first bar" if before else "after the last bar" if after else "between bars"
                    self.empty[place] += 1
        # The calendar of daily bars is that of all symbols of the panel.
        clock = {step: place for place, step in enumerate(axis)} if pack.interval.is_session else {s: s for s in axis}
        self.axis, self.x, self.y, self.mask, self.times = axis, [], [], [], []
        for place, step in enumerate(axis):
            chosen = axis[place - window + 1 : place + 1] if place >= window - 1 else []
            whole = bool(chosen) and all(clock[b] - clock[a] - 1 <= max_gap for a, b in itertools.pairwise(chosen))
            if not whole or (step + 1) % stride:
                continue
            y = [[self._label(bars, closes, clock, s, step, t, max_gap) for t in targets or ()] for s in self.symbols]
            if targets and all(math.isnan(value) for values in y for value in values):
                continue
            empty = [NAN] * len(columns)
            self.x.append([[bars[symbol].get(at, empty) for symbol in self.symbols] for at in chosen])
            self.mask.append([[at in bars[symbol] for symbol in self.symbols] for at in chosen])
            self.y.append(y)
            self.times.append(START + (step + 1) * unit)

    def _label(
        self, bars: Mapping[str, Mapping[int, Any]], closes: Mapping[str, list[float]], clock: Mapping[int, int],
        symbol: str, step: int, target: Target, max_gap: int,
    ) -> float:  # fmt: skip
        steps = list(bars[symbol])
        if step not in bars[symbol]:
            return NAN
        at = steps.index(step)
        span = steps[at : at + target.reach + 1]
        if len(span) <= target.reach:
            return NAN
        if any(clock[b] - clock[a] - 1 > max_gap for a, b in itertools.pairwise(span)):
            return NAN
        return float(np.float32(closes[symbol][at + target.reach] / closes[symbol][at + target.delay] - 1))


def served(one: Stager, epoch: int = 0, start: int = 0) -> dict[str, np.ndarray]:
    batches = list(one.batches(epoch, start=start))
    names = ["x", "mask", "sample_ids", "times", *(("y", "label_times", "y_valid") if batches[0].y is not None else ())]
    return {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}


def assert_by_hand(one: Stager, hand: ByHand, several: bool, epoch: int = 0) -> None:
    found = served(one, epoch)
    assert one.n_samples == len(hand.times)
    order = np.argsort(found["sample_ids"])
    assert found["sample_ids"][order].tolist() == list(range(len(hand.times)))
    assert found["times"][order].astype(np.int64).tolist() == hand.times
    np.testing.assert_array_equal(found["x"][order], np.array(hand.x).astype(np.float32))
    np.testing.assert_array_equal(found["mask"][order], np.array(hand.mask))
    assert found["mask"].dtype == bool
    assert found["x"].dtype == np.float32
    if "y" in found:
        y = np.array(hand.y, np.float32)
        np.testing.assert_array_equal(found["y"][order], y if several else y[:, :, 0])
        np.testing.assert_array_equal(found["y_valid"], ~np.isnan(found["y"]))
        np.testing.assert_array_equal(np.isnat(found["label_times"]), np.isnan(found["y"]))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_panel_is_that_made_by_hand(data):
    steps = {
        f"S{k}": sorted(data.draw(st.sets(st.integers(0, 25), min_size=1))) for k in range(data.draw(st.integers(1, 6)))
    }
    interval = data.draw(st.sampled_from(["1min", "1d"]))
    pack = memory_pack(steps, interval=interval, unit=DAY if interval == "1d" else MINUTE)
    symbols = data.draw(
        st.one_of(st.none(), st.permutations(list(steps)).map(lambda names: names[: len(names) // 2 + 1]))
    )
    targets = data.draw(st.sampled_from([None, [Target(horizon=1, delay=0)], [Target(horizon=2), Target(horizon=1)]]))
    window, max_gap = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 1, 4]))
    columns = data.draw(st.sampled_from([None, ("close",), ("volume", "open")]))
    stride = 1 if interval == "1d" else data.draw(st.sampled_from([1, 2]))
    hand = ByHand(pack, window, targets, symbols=symbols, columns=columns, max_gap=max_gap, stride=stride)
    made = panel(pack, Panel(symbols))
    assert made.rows.shape == (len(hand.axis), len(hand.symbols) * 5)
    told = panel_plan(pack, Panel(symbols))
    assert (told.n_times, told.n_symbols) == (len(hand.axis), len(hand.symbols))
    assert told.n_bars == sum(len(steps[symbol]) for symbol in hand.symbols)
    assert told.rows_nbytes == made.rows.nbytes
    several = targets is not None and len(targets) > 1
    options = {
        "window": window, "target": targets if several or targets is None else targets[0], "device": "cpu",
        "select": Select(columns=columns, max_gap=max_gap, stride=stride), "seed": data.draw(st.integers(0, 9)),
        "batch_size": data.draw(st.integers(1, 30)), "shuffle": data.draw(st.sampled_from(["full", "time", False])),
    }  # fmt: skip
    if not hand.times:
        with pytest.raises(SampleError, match="no sample"):
            Stager(made, **options)
        return
    with Stager(made, **options) as one:
        assert_by_hand(one, hand, several, data.draw(st.integers(0, 4)))
        plan = one.plan
        assert plan.n_samples + sum(plan.reasons.values()) == plan.n_rows == len(hand.axis)
        assert plan.panel.n_cells + sum(plan.panel.reasons.values()) == plan.panel.n_bars == told.n_bars
        assert plan.panel.fill == pytest.approx(told.fill)
        assert plan.panel.empty == told.empty == hand.empty
        assert told.n_bars + sum(told.empty.values()) == told.n_times * told.n_symbols


@pytest.fixture
def pack():
    return memory_pack(STEPS)


@pytest.fixture
def one(pack):
    with Stager(panel(pack), window=7, target=Target(horizon=3), batch_size=16, seed=3, device="cpu") as made:
        yield made


def test_shapes_and_symbols(one):
    batch = next(one.batches())
    assert batch.x.shape == (16, 7, 3, 5)
    assert batch.mask.shape == (16, 7, 3)
    assert batch.y.shape == (16, 3)
    assert batch.symbols == ["A", "B", "C"]
    assert batch.label_times.shape == (16, 3)
    assert batch.weight.shape == (16,)
    with Stager(one.resident, window=7, target=[Target(horizon=3), Target(horizon=5)], batch_size=9) as two:
        assert next(two.batches()).y.shape == (9, 3, 2)
    with Stager(one.resident, window=2, batch_size=9, select=Select(columns=["close"])) as two:
        batch = next(two.batches())
        assert batch.x.shape == (9, 2, 3, 1)
        assert batch.y is None
        assert batch.label_times is None


def test_a_view_is_the_rows_themselves(one):
    for number, batch in enumerate(one.batches(2)):
        for place in (0, len(batch) - 1):
            view = one.view(2, number, place)
            assert np.shares_memory(view, one.resident.rows)
            np.testing.assert_array_equal(view, batch.x[place])


def test_batches_may_begin_anywhere_and_be_written_to(one):
    whole = served(one, 1)
    for start in (1, 5, len(one) - 1):
        rest = served(one, 1, start)
        for name, values in rest.items():
            np.testing.assert_array_equal(values, whole[name][16 * start :])
    for batch in one.batches(1):
        batch.x[:], batch.y[:], batch.mask[:] = 0, 0, False
    for name, values in served(one, 1).items():
        np.testing.assert_array_equal(values, whole[name])


def test_labels_are_those_of_the_symbols_own_bars(one, pack):
    """What the ragged pack serves for a symbol and decision, the panel serves in its place."""
    for target in (
        [Target(horizon=2, across_gaps="allow"), Target("open", horizon=1, exit="close", kind="log_return")],
        [Target(horizon=4, scale="rank"), Target(horizon=4, scale="demean")],
        [Target(horizon=1, scale="volatility", scale_window=5), Target(horizon=1, kind="direction", classes=2)],
    ):
        with (
            Stager(one.resident, window=1, target=target, batch_size=50) as wide,
            Stager(pack, window=1, target=target, batch_size=50, device="cpu") as long,
        ):
            cells = {}
            for batch in wide.batches():
                for i, k in np.argwhere(batch.y_valid.any(axis=2)):
                    cells[batch.symbols[k], int(batch.times[i])] = (
                        batch.y[i, k].tolist(),
                        batch.label_times[i, k].tolist(),
                    )
            samples = {
                (symbol, int(time)): (y.tolist(), ends.tolist())
                for batch in long.batches()
                for symbol, time, y, ends in zip(batch.symbols, batch.times, batch.y, batch.label_times, strict=True)
            }
            assert repr(sorted(cells.items())) == repr(sorted(samples.items()))


def test_given_labels_have_their_own_ends(one):
    rows = [("A", 20), ("C", 20), ("B", 40)]
    table = pa.table(
        {
            "symbol": [symbol for symbol, _ in rows],
            "time": pa.array([START + step * MINUTE for _, step in rows], pa.timestamp("ns", "UTC")),
            "label": [1.0, 2.0, 3.0],
            "label_end": pa.array([START + (step + 9) * MINUTE for _, step in rows], pa.timestamp("ns", "UTC")),
        }
    )
    with Stager(one.resident, window=3, target=Labels(table), batch_size=5, shuffle=False) as two:
        (batch,) = two.batches()
        np.testing.assert_array_equal(batch.y, np.array([[1, NAN, 2], [NAN, 3, NAN]], np.float32))
        assert batch.label_times[1, 1] == np.datetime64(START + 49 * MINUTE, "ns")


@pytest.mark.parametrize("scheme", [WalkForward(3), PurgedKFold(4), Combinatorial(5, 2, embargo="6min")])
def test_folds_serve_samples_of_the_whole_panel(one, scheme):
    whole = served(one)
    by_time = {time: place for place, time in enumerate(whole["times"].tolist())}
    for fold in one.split(scheme):
        ends = {}
        for name in ("train", "test"):
            part = getattr(fold, name)
            found = served(part, 1)
            places = [by_time[time] for time in found["times"].tolist()]
            assert len(set(places)) == part.n_samples == fold.counts[name]
            for fact in ("x", "y", "mask", "label_times"):
                np.testing.assert_array_equal(found[fact], whole[fact][places])
            ends[name] = found["times"], np.nanmax(found["label_times"].view(np.int64), axis=1).view("datetime64[ns]")
            assert part.plan.n_samples + sum(part.plan.reasons.values()) == part.plan.n_rows
        starts, known = ends["train"]
        for decision, end in zip(*ends["test"], strict=True):
            assert not np.any((starts < end) & (known > decision))
        assert np.shares_memory(fold.train.resident.rows, one.resident.rows)
        assert fold.train._gather._tables[1] is one._gather._tables[1]


def test_samples_are_found_and_told(one):
    table = one.to_table(np.arange(one.n_samples * 3, dtype=np.float32).reshape(-1, 3))
    for batch in one.batches():
        assert one.locate("B", batch.times[0]) == batch.sample_ids[0]
    y = np.empty((one.n_samples, 3), np.float32)
    for batch in one.batches():
        y[batch.sample_ids] = batch.y
    rows = np.argwhere(~np.isnan(y))
    assert table["prediction"].to_pylist() == (rows[:, 0] * 3 + rows[:, 1]).tolist()
    np.testing.assert_array_equal(table["target"].to_numpy(), y[~np.isnan(y)])
    assert table["symbol"].to_pylist() == ["ABC"[k] for k in rows[:, 1]]
    assert not table["label_end"].null_count
    assert one.to_table(np.zeros((one.n_samples, 3, 2)))["prediction_1"].null_count == 0
    with pytest.raises(SampleError, match=r"one for each sample and symbol"):
        one.to_table(np.zeros(one.n_samples))
    with pytest.raises(SampleError, match="the pack has no symbol 'X'; it has 3: A, B, C"):
        one.locate("X", "2024-01-01T01:00Z")
    with Stager(one.resident, window=3, batch_size=4) as two:
        batch = two.latest()
        assert batch.x.shape == (1, 3, 3, 5)
        assert batch.times[0] == np.datetime64(START + 160 * MINUTE, "ns")
        assert batch.mask[0].tolist() == [[False, False, True]] * 3
        assert two.to_table()["symbol"].to_pylist().count("A") == 88


def test_selection_and_universe_decide_which_symbols_have_labels(one):
    def table(**columns):
        stamps = {
            name: pa.array([START + step * MINUTE for step in values], pa.timestamp("ns", "UTC"))
            for name, values in columns.items()
        }
        return pa.table({"symbol": ["A", "C"], **stamps})

    universe = table(start=[10, 30], end=[20, 35])
    with Stager(
        one.resident, window=7, target=Target(horizon=3), batch_size=99, select=Select(universe=universe)
    ) as two:
        batches = list(two.batches())
        cells = {(batch.symbols[k], (int(batch.times[i]) - START) // MINUTE)
                 for batch in batches for i, k in np.argwhere(batch.y_valid)}  # fmt: skip
        assert cells == {("A", step) for step in range(10, 20)} | {("C", step) for step in range(30, 35)}
        # The others are there to be seen.
        assert all(batch.mask[:, -1].all() for batch in batches)
        assert two.plan.panel.reasons["not in the universe"] == 395 - 15
    with Stager(one.resident, window=7, target=Target(horizon=3), batch_size=99, select=Select(symbols=["B"])) as two:
        assert {int(k) for batch in two.batches() for k in np.argwhere(batch.y_valid)[:, 1]} == {1}
        assert two.plan.panel.reasons["symbol not selected"] == 90 + 158


def test_no_symbol_has_a_label_while_its_window_spans_a_roll():
    """As without a panel; the other symbols of the instant keep theirs."""
    steps = {"A": range(30), "B": [*range(12), *range(14, 30)]}
    contract = [*[1.0] * 10, *[2.0] * 20, *[1.0] * 20, *[2.0] * 8]
    pack = memory_pack(steps, contract=contract)
    select, target = Select(rolls="contract", max_gap=2), Target(horizon=2, delay=0)
    with Stager(panel(pack), window=4, target=target, batch_size=99, select=select, device="cpu") as one:
        cells = {(batch.symbols[k], (int(batch.times[i]) - START) // MINUTE - 1)
                 for batch in one.batches() for i, k in np.argwhere(batch.y_valid)}  # fmt: skip
        # A rolls at 10, B at 22: labels end before, windows of 4 begin at or after.
        assert cells == {("A", step) for step in [*range(3, 8), *range(13, 28)]} | {
            ("B", step) for step in [*range(3, 12), *range(14, 20), *range(25, 28)]
        }
        told = one.plan.panel
        assert told.reasons["roll or split in the window"] == 3 + 3
        assert told.n_cells + sum(told.reasons.values()) == told.n_bars == 58


def test_what_is_filled_or_misses_a_column_is_not_observed():
    steps = {"A": range(12), "B": [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]}
    vwap = [float(k) for k in range(22)]
    vwap[15] = NAN
    pack = memory_pack(steps, vwap=vwap)
    filled = derive(pack, Derive(["log_return"], fill="previous", cap=1, keep=["vwap"]))
    with Stager(panel(filled), window=12, batch_size=1, device="cpu") as one:
        (batch,) = one.batches()
        observed = np.ones((12, 2), bool)
        # The first bars have no return; 3 is filled, 4 is not there, 5 lacks its vwap.
        observed[0] = False
        observed[[3, 4, 5], 1] = False
        np.testing.assert_array_equal(batch.mask[0], observed)
        assert batch.x[0, 3, 1, 3] == batch.x[0, 2, 1, 3]
        assert np.isnan(batch.x[0, 4, 1]).all()
    with Stager(panel(filled), window=12, batch_size=1, device="cpu", select=Select(columns=["close"])) as one:
        (batch,) = one.batches()
        assert batch.mask[0, :, 1].tolist() == [step not in (3, 4) for step in range(12)]
    target = Target(horizon=1, delay=0)
    with Stager(panel(filled), window=1, target=target, batch_size=99, device="cpu", shuffle=False) as one:
        (batch,) = one.batches()
        labelled = {int(t - np.datetime64(START, "ns")) // MINUTE - 1 for t in batch.times[batch.y_valid[:, 1]]}
        # 2 would leave at a filled bar, 3 enter there; 0 and 5 miss a served column.
        assert labelled == {1, 6, 7, 8, 9, 10}


def test_only_bars_of_the_session_make_the_axis():
    steps = {"A": range(30), "B": range(5, 40), "C": range(31, 33)}
    pack = memory_pack(steps)
    made = panel(pack, Panel(session="00:10-00:20,00:25-00:35 UTC", columns=("close", "volume")))
    assert ((made.times - START) // MINUTE).tolist() == [*range(10, 20), *range(25, 35)]
    assert made.columns == ("A.close", "A.volume", "B.close", "B.volume", "C.close", "C.volume")
    inside = panel(pack, Panel(session="00:10-00:20 UTC"))
    assert inside.manifest.panel.symbols == ["A", "B"]
    assert inside.manifest.warnings == ["C has no bar in the session and is not in the panel"]
    assert panel_plan(pack, Panel(session="00:10-00:20 UTC")).left_out == ("C",)
    assert "1 symbols without a bar: C" in str(panel_plan(pack, Panel(session="00:10-00:20 UTC")))
    with pytest.raises(SampleError, match="C has no bar in the session"):
        panel(pack, Panel(["A", "C"], session="00:10-00:20 UTC"))
    with pytest.raises(SampleError, match="no bar of the symbols"):
        panel(pack, Panel(["C"], session="00:10-00:20 UTC"))


def test_bars_of_one_session_share_a_place_however_they_are_stamped():
    """Weekly bars of which one is stamped on a Tuesday: known when the last of them is."""
    weeks = {"A": [0, 7, 14, 21], "B": [0, 8, 14]}
    pack = pack_in_memory(bar_table(weeks, unit=DAY), ReadOptions(interval="1w"))
    made = panel(pack)
    assert ((made.times - START) // DAY).tolist() == [0, 8, 14, 21]
    with Stager(made, window=4, batch_size=1, device="cpu") as one:
        (batch,) = one.batches()
        assert batch.mask[0].tolist() == [[True, True]] * 3 + [[True, False]]
    twice = pack_in_memory(bar_table({"A": [0, 7, 9, 14]}, unit=DAY), ReadOptions(interval="1w"))
    with pytest.raises(SampleError, match="A has two bars of the 1w session of 2024-01-10"):
        panel(twice)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_comes_later_changes_no_earlier_sample(data):
    """Bars after a decision altered, deleted or delayed: windows and masks up to it are bit-identical."""
    steps = {
        f"S{k}": sorted(data.draw(st.sets(st.integers(0, 25), min_size=3))) for k in range(data.draw(st.integers(1, 4)))
    }
    cut, window = data.draw(st.integers(2, 25)), data.draw(st.integers(1, 4))
    early = {symbol: [step for step in some if step < cut] for symbol, some in steps.items()}
    early = {symbol: some for symbol, some in early.items() if some}
    if not early:
        return
    symbols = list(early)
    how = data.draw(st.sampled_from(["deleted", "delayed", "altered"]))
    later = {"deleted": early, "altered": steps,
             "delayed": {s: [step if step < cut else step + 3 for step in steps[s]] for s in steps}}[how]  # fmt: skip

    def samples(some: Mapping[str, Sequence[int]], shift: float) -> dict[int, tuple[bytes, bytes]]:
        closes = [
            1000.0 * ord(symbol[-1]) + step + (shift if step >= cut else 0)
            for symbol, all_ in some.items()
            for step in all_
        ]
        pack = memory_pack(some, **dict.fromkeys(COLUMNS, closes))
        try:
            one = Stager(panel(pack, Panel(symbols)), window=window, batch_size=7, device="cpu")
        except SampleError:
            return {}
        with one:
            return {
                int(time): (x.tobytes(), mask.tobytes())
                for batch in one.batches()
                for time, x, mask in zip(batch.times, batch.x, batch.mask, strict=True)
                if time <= np.datetime64(START + cut * MINUTE, "ns")
            }

    columns = samples(steps, 0.0)
    assert samples(later, 500.0 if how == "altered" else 0.0) == columns


def test_a_panel_is_kept_beside_its_pack(tmp_path: Path):
    made = stager.pack(bar_table(STEPS), tmp_path / "bars.pack")
    first = panel(made)
    assert first.path.name.startswith("bars-")
    stamp = first.path.stat().st_ctime_ns
    assert panel(tmp_path / "bars.pack").path.stat().st_ctime_ns == stamp
    assert panel(made, Panel(["C", "A"])).path != first.path
    assert stager.verify(first.path) == []
    again = open_pack(first.path)
    assert repr(again).endswith("panel of 3 symbols, 160 rows of open, high, low, close, volume, 1min>")
    told = CliRunner().invoke(main, ["info", str(first.path)])
    assert "3 side by side in each row, a panel" in told.output
    assert "missing" not in told.output
    hand = ByHand(made, 7, [Target(horizon=3)])
    with Stager(first.path, window=7, target=Target(horizon=3), batch_size=16, device="cpu") as one:
        assert_by_hand(one, hand, several=False)
        assert one.plan.disk_nbytes > one.plan.rows_nbytes
    out = panel(made, Panel(["C", "A"]), tmp_path / "two.pack")
    assert out.path == tmp_path / "two.pack"
    assert out.manifest.panel.symbols == ["C", "A"]
    (first.path / "segment-0" / "rows.npy").write_bytes(b"")
    assert panel(made).rows.shape == (160, 15)


def test_the_plan_tells_the_panel(one):
    text = str(one.plan)
    assert "150 of 160 rows, 3 symbols" in text
    assert "82.3% filled: 395 bars, 375 served at their decision" in text
    assert one.plan.batch_nbytes == 16 * (7 * 3 * 5 * 4 + 3 * 4 + 7 * 3)
    assert one.plan.as_dict()["panel"]["n_cells"] == 375
    told = panel_plan(memory_pack(STEPS))
    assert told.fill == pytest.approx(395 / 480)
    assert (told.rows_nbytes, told.mask_nbytes) == (160 * 3 * 5 * 4, 160 * 4)
    assert one.plan.rows_nbytes == told.rows_nbytes
    assert "82.3%: 395 bars" in str(told)
    assert told.empty == {"before the first bar": 0, "between bars": 5, "after the last bar": 80}
    assert re.search(r"after the last bar +80 places", text)


def test_what_does_not_fit_is_refused(one, pack, monkeypatch):
    with pytest.raises(SampleError, match="has no symbol 'X'"):
        panel(pack, Panel(["X"]))
    with pytest.raises(SampleError, match="has no column 'vwap'"):
        panel(pack, Panel(columns=["close", "vwap"]))
    with pytest.raises(SampleError, match="name at least one, and each once"):
        Panel(["A", "A"])
    with pytest.raises(SampleError, match="name at least one, and each once"):
        Panel([])
    with pytest.raises(SampleError, match="a panel needs 'close'"):
        Panel(columns=["open"])
    with pytest.raises(SampleError, match="the text 'A'"):
        Panel("A")
    with pytest.raises(SampleError, match="a panel already"):
        panel(one.resident.pack)
    with pytest.raises(SampleError, match="the longest run has 160 rows, the window needs 161"):
        Stager(one.resident, window=161, batch_size=2)
    with pytest.raises(SampleError, match="150 samples fill no batch of 151"):
        Stager(one.resident, window=7, target=Target(horizon=3), batch_size=151, last="drop")
    with pytest.raises(SampleError, match="no column 'x'"):
        Stager(one.resident, window=2, batch_size=2, select=Select(columns=["x"]))
    late = {"A": [*range(20), 40, 41, 42]}
    with pytest.raises(SampleError, match="none of these has a symbol with a sample"):
        Stager(panel(memory_pack(late)), window=20, target=Target(horizon=1, delay=0), batch_size=2, device="cpu")
    with pytest.raises(SampleError, match="same name"):
        panel(memory_pack({"A": [0, 1], "A.x": [0]}, **{"x.close": [1.0, 2.0, 3.0]}))
    monkeypatch.setattr("stager.samples.panel.available_nbytes", lambda: 100)
    with pytest.raises(
        SampleError, match=r"of host memory, 100 B are available: 160 instants of 3 symbols, 82\.3% filled"
    ):
        panel(pack)


def test_closing_refuses_further_use(pack):
    with stager.stage(panel(pack), device="cpu") as rows:
        one = Stager(rows, window=7, target=Target(horizon=3), batch_size=16)
        batches = one.batches()
        kept = next(batches)
        fold = one.split(WalkForward(2))[0].train
        one.close()
        for use in (lambda: next(batches), one.batches, one.latest, one.to_table, lambda: one.split(WalkForward(2))):
            with pytest.raises(ClosedError):
                use()
        assert kept.x.shape == (16, 7, 3, 5)
        assert len(list(fold.batches())) == len(fold)


def scaled(x, method, close):
    """A window of one symbol's column as a sentence of the documentation tells."""
    there = ~np.isnan(x)
    values, closes = x[there].astype(np.float64), close[~np.isnan(close)].astype(np.float64)
    if not there.any():
        return x
    if method == "last":
        values = values / closes[-1] - 1
    elif method == "log1p":
        values = np.sign(values) * np.log1p(np.abs(values))
    elif method == "zscore":
        deviation = values.std()
        values = (values - values.mean()) / (deviation if len(set(values.tolist())) > 1 else 1.0)
    made = x.copy()
    made[there] = values
    return made


@pytest.mark.parametrize("columns", [None, ["close", "volume"], ["volume", "low", "close"]])
@pytest.mark.parametrize(
    "normalize", [Normalize("last", "log1p"), Normalize("zscore", "none"), Normalize("none", "zscore")]
)
def test_every_symbol_is_normalised_by_what_is_there_of_it(normalize, columns):
    rng = np.random.default_rng(1)
    steps = {name: np.flatnonzero(rng.random(120) < 0.7).tolist() for name in "ABC"}
    n = sum(map(len, steps.values()))
    made = panel(
        memory_pack(steps, close=50 + rng.normal(size=n), low=rng.normal(size=n), volume=rng.integers(0, 99, n) * 1.0)
    )
    select = Select(columns=columns, max_gap=10_000)
    options = {"window": 6, "batch_size": 10, "device": "cpu", "select": select, "shuffle": False}
    names = columns or ["open", "high", "low", "close", "volume"]
    with Stager(made, **options) as raw, Stager(made, normalize=normalize, **options) as st:
        assert raw.n_samples == st.n_samples
        n_missing_last = 0
        for one, other in zip(raw.batches(0), st.batches(0), strict=True):
            np.testing.assert_array_equal(one.mask, other.mask)
            for sample in range(len(one)):
                for symbol in range(3):
                    close = one.x[sample, :, symbol, names.index("close")]
                    n_missing_last += bool(np.isnan(close[-1]) and not np.isnan(close).all())
                    for column, name in enumerate(names):
                        method = normalize.volume if name == "volume" else normalize.price
                        wanted = scaled(one.x[sample, :, symbol, column], method, close)
                        found = other.x[sample, :, symbol, column]
                        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert n_missing_last > 10, "the last bar of a window is missing often enough to matter"


def test_a_panel_is_fitted_on_the_cells_that_train():
    rng = np.random.default_rng(2)
    steps = {name: np.flatnonzero(rng.random(200) < 0.8).tolist() for name in "ABC"}
    n = sum(map(len, steps.values()))
    made = panel(memory_pack(steps, close=50 + rng.normal(size=n)))
    normalize = Normalize("zscore", "none", fit="train")
    options = {"window": 4, "batch_size": 10, "device": "cpu", "select": Select(max_gap=10_000)}
    options |= {"target": Target(horizon=1, across_gaps="allow")}
    with Stager(made, normalize=normalize, **options) as st, Stager(made, **options) as raw:
        fold, plain = st.split(WalkForward(2))[0], raw.split(WalkForward(2))[0]
        batches = plain.train.batches(0)
        cells = [batch.x[:, -1, :, 3][batch.mask[:, -1] & ~np.isnan(batch.y)] for batch in batches]
        values = np.concatenate(cells).astype(np.float64)
        for part, same in ((fold.train, plain.train), (fold.test, plain.test)):
            for one, other in zip(part.batches(0), same.batches(0), strict=True):
                wanted = (other.x[:, :, :, 3] - values.mean()) / values.std()
                np.testing.assert_allclose(one.x[:, :, :, 3], wanted, rtol=1e-4, atol=1e-5)


def test_a_panel_with_a_close_that_is_not_positive_is_not_divided_by_it():
    made = panel(memory_pack({"A": range(9), "B": range(9)}, close=np.arange(18) - 12.0))
    with pytest.raises(SampleError, match=r"that of A at 20.* is -12; use Normalize\(price='zscore'\)"):
        Stager(made, window=2, batch_size=2, device="cpu", normalize="last")
    Stager(made, window=2, batch_size=2, device="cpu", normalize="zscore").close()
