"""Faults that users of other tools for windows met, each as a test; the names tell the tool and its report."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager import (
    Combinatorial,
    Derive,
    Feature,
    Labels,
    Panel,
    PurgedKFold,
    ReadOptions,
    Select,
    Stager,
    Target,
    TimeFrame,
    WalkForward,
    derive,
    panel,
)
from stager.errors import SampleError
from stager.packs.layout import Pack
from stager.packs.packing import pack_in_memory

NAN = float("nan")


def served(source: Any, **options: Any) -> dict[tuple[str, int], tuple[bytes, Any]]:
    """Inputs and targets of all samples, by symbol and minute of the decision's bar."""
    options = {"window": 5, "batch_size": 7, "device": "cpu", **options}
    found: dict[tuple[str, int], tuple[bytes, Any]] = {}
    with Stager(source, **options) as one:
        for batch in one.batches():
            minutes = (batch.times.astype(np.int64) - START) // MINUTE - 1
            for k, (symbol, minute) in enumerate(zip(batch.symbols, minutes.tolist(), strict=True)):
                assert batch.x[k].shape[0] == options["window"]
                assert (symbol, minute) not in found
                found[symbol, minute] = batch.x[k].tobytes(), None if batch.y is None else batch.y[k].tolist()
    return found


@pytest.mark.parametrize("normalize", ["last", "zscore"])
def test_kronos_227_statistics_of_a_window_do_not_hold_the_horizon(normalize: str) -> None:
    close = 100 + np.random.default_rng(1).normal(size=40).cumsum()
    wild = np.where(np.arange(40) > 20, close * 50, close)
    one, other = (
        served(memory_pack({"A": range(40)}, close=values), normalize=normalize, target=Target(horizon=5))
        for values in (close, wild)
    )
    for minute in range(4, 21):
        assert one["A", minute][0] == other["A", minute][0]
    assert one["A", 20][1] == pytest.approx(close[26] / close[21] - 1, rel=1e-6)


@pytest.mark.parametrize("window", [1, 2, 9, 10])
def test_qlib_1716_the_first_bars_of_the_first_symbol_have_their_window(window: int) -> None:
    found = served(memory_pack({"A": range(10), "B": range(10)}), window=window)
    assert set(found) == {(symbol, minute) for symbol in "AB" for minute in range(window - 1, 10)}


@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_keras_17392_the_only_window_is_served(window: int) -> None:
    for n in (window - 1, window, window + 1):
        if n >= window:
            pack = memory_pack({"A": range(n)})
            assert len(served(pack, window=window)) == n - window + 1
            for stride in (1, 2, 3):
                wanted = [row for row in range(window - 1, n) if (START // MINUTE + row + 1) % stride == 0]
                if wanted:
                    found = served(pack, window=window, select=Select(stride=stride))
                    assert sorted(minute for _, minute in found) == wanted
        elif n:
            with pytest.raises(SampleError, match=f"longest run has {n} rows, the window needs {window}"):
                served(memory_pack({"A": range(n)}), window=window)


def test_tensorflow_40343_a_target_belongs_to_the_end_of_its_window() -> None:
    """Closes are 1e6 and the row: each value of a window, and its target, tells where it is from."""
    found = served(memory_pack({"A": range(20)}), target=Target(horizon=3, delay=2, kind="value"))
    assert set(found) == {("A", minute) for minute in range(4, 15)}
    for (_, minute), (x, y) in found.items():
        window = np.frombuffer(x, np.float32).reshape(5, 5)
        assert window[:, 3].tolist() == [1e6 + row for row in range(minute - 4, minute + 1)]
        assert y == 1e6 + minute + 5


def test_freqtrade_4073_12507_a_longer_bar_is_seen_when_it_has_closed_and_not_a_bar_later() -> None:
    pack = derive(memory_pack({"A": range(0, 180, 5)}, interval="5min"), Derive([TimeFrame("1h", ["close"])]))
    seen = pack.column("close_1h")
    first = [int(np.flatnonzero(seen == pack.column("close")[last])[0]) for last in (11, 23)]
    assert [(int(pack.times[row]) - START) // MINUTE for row in first] == [55, 115]


def test_machine_learning_for_trading_463_one_labels_gap_keeps_the_sample_of_another() -> None:
    pack = memory_pack({"A": range(30)}, volume=[NAN if row == 15 else 1.0 for row in range(30)])
    targets = [Target(horizon=1), Target("volume", horizon=1, kind="difference")]
    select = Select(columns=["close"])
    alone, both = (served(pack, target=one, select=select) for one in (targets[0], targets))
    assert set(alone) == set(both)
    assert {key: value[1] for key, value in alone.items()} == {key: value[1][0] for key, value in both.items()}
    assert [minute for (_, minute), (_, y) in sorted(both.items()) if np.isnan(y[1])] == [13, 14]


def test_dft_4_a_label_that_is_left_out_removes_no_bar_from_windows() -> None:
    close = np.array([100.0, 101, 101, 102, 103, 103, 104, 105, 105, 106])
    target = Target(horizon=1, delay=0, kind="direction", classes=2)
    found = served(memory_pack({"A": range(10)}, close=close), window=3, target=target)
    assert sorted(minute for _, minute in found) == [2, 3, 5, 6, 8]
    for (_, minute), (x, _) in found.items():
        assert np.frombuffer(x, np.float32).reshape(3, 5)[:, 3].tolist() == close[minute - 2 : minute + 1].tolist()


def test_finrl_and_trademaster_fills_take_no_other_symbols_value_and_none_from_later() -> None:
    pack = derive(memory_pack({"A": [3, 5], "B": range(8)}), Derive(fill="previous", cap=99))
    first = int(pack.first_rows[0])
    assert ((pack.times[first : first + 5] - START) // MINUTE).tolist() == [3, 4, 5, 6, 7]
    assert pack.column("close")[first : first + 5].tolist() == [1e6, 1e6, 1e6 + 1, 1e6 + 1, 1e6 + 1]
    assert pack.column("volume")[first : first + 5].tolist() == [1.0, 0.0, 2.0, 0.0, 0.0]


def minutes(part: Stager) -> list[int]:
    """The minutes of the decisions' bars, in the order of an epoch."""
    times = np.concatenate([batch.times for batch in part.batches()]).astype(np.int64)
    return ((times - START) // MINUTE - 1).tolist()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), folds=st.integers(2, 5), embargo=st.sampled_from([None, "0min", "3min"]))
def test_mlfinlab_295_openquant_65_no_training_label_meets_a_test_label(
    seed: int, folds: int, embargo: str | None
) -> None:
    """Labels of any length, at both edges of the test; each from its decision to its own end."""
    random = np.random.default_rng(seed)
    n = 60
    ends = START + (np.arange(n) + 1 + random.integers(0, 9, n)) * MINUTE
    table = pa.table(
        {
            "symbol": ["A"] * n,
            "time": pa.array(START + np.arange(n) * MINUTE, pa.timestamp("ns", "UTC")),
            "label": random.normal(size=n),
            "label_end": pa.array(ends, pa.timestamp("ns", "UTC")),
        }
    )
    with Stager(memory_pack({"A": range(n)}), window=1, batch_size=8, target=Labels(table), device="cpu") as one:
        for fold in one.split(PurgedKFold(folds, embargo=embargo)):
            train, test = (
                [
                    (time, end)
                    for batch in part.batches()
                    for time, end in zip(batch.times, batch.label_times, strict=True)
                ]
                for part in (fold.train, fold.test)
            )
            assert len(test) in (n // folds, n // folds + 1)
            # Half-open: a label that is known at the decision of another one tells nothing of it.
            assert not any(a < end and start < b for a, b in train for start, end in test)


def test_timeseriescv_8_vibe_trading_1204_training_between_two_test_blocks_stays() -> None:
    """Blocks of 4 decisions, the second and the fifth test; each purges what lies next to it."""
    with Stager(memory_pack({"A": range(26)}), window=1, batch_size=8, target=Target(horizon=2, delay=0),
                device="cpu") as one:  # fmt: skip
        (fold,) = [
            fold for fold in one.split(Combinatorial(6, 2, embargo="0min"))
            if minutes(fold.test) == [4, 5, 6, 7, 16, 17, 18, 19]
        ]  # fmt: skip
        assert sorted(minutes(fold.train)) == [0, 1, 2, *range(9, 15), 21, 22, 23]
        assert fold.counts["purge"] == 4


def test_skfolio_269_the_purge_shortens_the_training_and_not_the_test() -> None:
    with Stager(memory_pack({"A": range(61)}), window=1, batch_size=8, target=Target(horizon=2, delay=0),
                device="cpu") as one:  # fmt: skip
        (fold,) = one.split(WalkForward(1, test="28min"))
        assert sorted(minutes(fold.train)) == list(range(30))
        assert minutes(fold.test) == list(range(31, 59))


@pytest.mark.parametrize("batch_size", [1, 32, 128, 157, 1000])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_autoformer_104_every_window_of_a_test_is_served_at_any_batch_size(batch_size: int, last: Any) -> None:
    with Stager(memory_pack({"A": range(2000)}), window=5, batch_size=batch_size, last=last, device="cpu") as one:
        (fold,) = one.split(WalkForward(1, test="158min"))
        assert minutes(fold.test) == list(range(2000 - 158, 2000))


def test_machine_learning_for_trading_771_the_purge_reaches_to_the_exit_not_only_over_the_horizon() -> None:
    with Stager(memory_pack({"A": range(100)}), window=3, batch_size=8, target=Target(horizon=15, delay=1),
                device="cpu") as one:  # fmt: skip
        (fold,) = one.split(WalkForward(1, test="20min"))
        assert max(minutes(fold.train)) == minutes(fold.test)[0] - 16
        known = max(batch.label_times.max() for batch in fold.train.batches() if batch.label_times is not None)
        assert known == min(batch.times.min() for batch in fold.test.batches())


def test_neuralforecast_783_memory_does_not_grow_with_the_windows() -> None:
    """A series of 1.09 million rows, of which windows of 512 would take 11 GB."""
    n = 1_090_000
    pack = memory_pack({"A": range(n)})
    tables = set()
    for window in (2, 512):
        tracemalloc.start()
        with Stager(pack, window=window, batch_size=256, target=Target(horizon=5), device="cpu") as one:
            for number, _ in zip(range(20), one.batches(), strict=False):
                assert number < 20
            peak = tracemalloc.get_traced_memory()[1]
            tables.add(one.plan.tables_nbytes - 4 * n)
            assert one.n_samples == n - (window - 1) - 6
        tracemalloc.stop()
        # The target, what computing it needs for a while, and a few tasks of 4 MiB of batches.
        assert peak < 128 << 20
    assert tables == {24}


def test_freqtrade_13475_symbols_meet_at_instants_not_at_positions() -> None:
    pack = panel(memory_pack({"A": range(20), "B": range(6, 26)}), Panel(columns=["close"]))
    with Stager(pack, window=3, batch_size=4, device="cpu") as one:
        for batch in one.batches():
            for x, time in zip(batch.x, batch.times.astype(np.int64), strict=True):
                minute = (time - START) // MINUTE - 1
                for back, (a, b) in enumerate(x[::-1, :, 0].tolist()):
                    assert a == (1e6 + minute - back if minute - back < 20 else pytest.approx(NAN, nan_ok=True))
                    assert b == (2e6 + minute - back - 6 if minute - back >= 6 else pytest.approx(NAN, nan_ok=True))


def test_vibe_trading_1392_pytorch_forecasting_992_the_end_without_a_label_is_no_sample() -> None:
    """Neither a label of class 0 nor a window filled up with zeros stands for what is not known yet."""
    target = Target(horizon=4, kind="direction")
    found = served(memory_pack({"A": range(30)}), target=target)
    assert sorted(minute for _, minute in found) == list(range(4, 25))
    assert {y for _, y in found.values()} == {1.0}
    assert all(np.frombuffer(x, np.float32).all() for x, _ in found.values())


def test_pytorch_forecasting_2263_gaps_stay_in_the_time_of_samples() -> None:
    found = served(memory_pack({"A": [*range(8), *range(100, 108)]}))
    assert sorted(minute for _, minute in found) == [4, 5, 6, 7, 104, 105, 106, 107]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 90), fill=st.booleans(), allow_filled=st.booleans())
def test_what_comes_later_changes_no_input(seed: int, cut: int, fill: bool, allow_filled: bool) -> None:
    """Every bar from the cut on altered, deleted or delayed, and everything built anew from the bars."""
    random = np.random.default_rng(seed)
    steps = {symbol: sorted(random.choice(95, random.integers(2, 95), replace=False).tolist()) for symbol in "ABC"}
    n = sum(map(len, steps.values()))
    table = bar_table(steps, close=100 + random.normal(size=n), contract=random.choice([1.0, 1.0, 2.0], n))
    stamps = table["time"].cast(pa.int64()).to_numpy()
    later = stamps >= START + cut * MINUTE
    mean = Feature("mean", lambda bars: np.convolve(bars["close"].to_numpy(), [0.5, 0.5])[: bars.num_rows], lookback=1)
    recipe = Derive(
        ["log_return", TimeFrame("5min"), mean, "time_of_day"],
        fill="previous" if fill else "none",
        cap=2 if fill else None,
        keep=["contract"] if fill else (),
        session="00:05-01:25 UTC",
        rolls="contract",
    )
    instants = pa.array(START + np.array([0, 20, 30]) * MINUTE, pa.timestamp("ns", "UTC"))
    universe = pa.table({"symbol": ["A", "B", "C"], "start": instants, "end": pa.nulls(3, pa.timestamp("ns", "UTC"))})
    select = Select(
        session="00:05-01:25 UTC",
        rolls="contract",
        universe=universe,
        stride=2,
        min_history=12,
        max_gap=2,
        allow_filled=allow_filled,
    )

    def inputs(table: pa.Table) -> dict[tuple[str, int], bytes]:
        if not table.num_rows:
            return {}
        try:
            pack: Pack = derive(pack_in_memory(table, ReadOptions(interval="1min")), recipe)
            found = served(pack, window=3, select=select, normalize="last")
        except SampleError as error:
            assert "no sample" in str(error) or "none of the" in str(error)  # noqa: PT017
            return {}
        return {key: x for key, (x, _) in found.items() if key[1] < cut}

    whole = inputs(table)
    for name in ("open", "high", "low", "close", "volume", "contract"):
        values = table[name].to_numpy()
        changed = [np.where(later, values * 1.5, values)]
        assert inputs(table.set_column(table.column_names.index(name), name, changed)) == whole
    delayed = pa.array(np.where(later, stamps + 11 * MINUTE, stamps)).cast(pa.timestamp("ns", "UTC"))
    assert inputs(table.set_column(1, "time", [delayed])) == whole
    early = inputs(table.filter(pa.array(~later)))
    # Bars are filled up to the last instant of the pack, which is earlier then.
    assert {key: whole[key] for key in early} == early
    if not (fill and allow_filled):
        assert early == whole
