"""Folds, weights and provenance through the facade, on NumPy."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import DAY, MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import Combinatorial, Normalize, PurgedKFold, Select, Stager, Target, WalkForward
from stager.errors import ClosedError, SampleError
from stager.samples.building import build_index
from stager.samples.index import SampleIndex
from stager.samples.uniqueness import uniqueness

STEPS = {"B": [*range(80), *range(83, 150)], "A": range(90), "C": [*range(5), *range(7, 160)]}
TARGET = Target(horizon=3)
SCHEMES = (WalkForward(3), PurgedKFold(4), Combinatorial(5, 2, embargo="6min"))


@pytest.fixture
def one():
    with Stager(bar_table(STEPS), window=7, target=TARGET, batch_size=16, seed=3, device="cpu") as made:
        yield made


def everything(part: Stager, epoch: int = 0) -> dict[str, np.ndarray]:
    batches = list(part.batches(epoch))
    facts = {name: np.concatenate([getattr(batch, name) for batch in batches])
             for name in ("x", "y", "times", "label_times", "sample_ids", "weight")}  # fmt: skip
    return facts | {"symbols": np.array([symbol for batch in batches for symbol in batch.symbols])}


def keys(facts: dict[str, np.ndarray]) -> list[tuple[str, int]]:
    return list(zip(facts["symbols"].tolist(), facts["times"].astype(np.int64).tolist(), strict=True))


# -------------------------------------------------------------------------------- what is fitted on a fold


@pytest.mark.parametrize("scheme", SCHEMES)
def test_normalisation_is_fitted_on_the_training_samples_of_each_fold(scheme):
    normalize = Normalize("zscore", "none", fit="train")
    options = {"window": 7, "target": TARGET, "batch_size": 16, "seed": 3, "device": "cpu"}
    with (
        Stager(bar_table(STEPS), **options) as plain,
        Stager(bar_table(STEPS), normalize=normalize, **options) as one,
    ):
        for raw, fold in zip(plain.split(scheme), one.split(scheme), strict=True):
            train = everything(raw.train)["x"].astype(np.float64)
            mean, deviation = train[:, -1, :4].mean(axis=0), train[:, -1, :4].std(axis=0)
            for part in ("train", "test"):
                x, right = everything(getattr(fold, part))["x"], everything(getattr(raw, part))["x"].astype(np.float64)
                np.testing.assert_allclose(x[:, :, :4], (right[:, :, :4] - mean) / deviation, rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(x[:, :, 4], right[:, :, 4])
            assert "fitted on what trains" in fold.test.plan.normalize


def test_bars_after_the_training_samples_change_no_fit():
    """All bars that the purge and the test end at are altered: training inputs stay bit for bit.

    Decisions end with row 195; those of the last 100 minutes begin with row 96, and labels end 4 bars after them.
    """
    random = np.random.default_rng(2)
    steps = {"A": range(200), "B": range(200)}
    close = 100 + random.normal(size=400).cumsum()
    options = {"window": 5, "target": TARGET, "batch_size": 32, "device": "cpu", "shuffle": False}
    trained = []
    for factor in (1.0, 9.0):
        changed = np.where(np.tile(np.arange(200), 2) >= 93, close * factor, close)
        table = bar_table(steps, close=changed, high=changed + 1, low=changed - 1, open=changed)
        with Stager(table, normalize=Normalize("zscore", "zscore", fit="train"), **options) as one:
            fold = one.split(WalkForward(1, test="100min"))[0]
            trained.append(everything(fold.train)["x"])
            tested = everything(fold.test)["x"]
    np.testing.assert_array_equal(trained[0].view(np.uint32), trained[1].view(np.uint32))
    assert len(trained[0]) == 2 * (92 - 4 + 1)
    assert np.abs(tested).max() > 50


# -------------------------------------------------------------------------------- folds


@pytest.mark.parametrize("scheme", SCHEMES)
def test_folds_serve_samples_of_the_whole_set(one, scheme):
    facts = everything(one)
    whole = {key: place for place, key in enumerate(keys(facts))}
    for fold in one.split(scheme):
        for part in (fold.train, fold.test):
            served = everything(part, epoch=2)
            places = [whole[key] for key in keys(served)]
            assert len(set(places)) == len(places) == part.n_samples
            assert sorted(served["sample_ids"]) == list(range(part.n_samples))
            for name in ("x", "y", "label_times"):
                np.testing.assert_array_equal(served[name], facts[name][places])
            assert part.plan.n_samples + sum(part.plan.reasons.values()) == part.plan.n_rows == one.plan.n_rows
        assert not set(keys(everything(fold.train))) & set(keys(everything(fold.test)))
        assert sum(fold.counts.values()) == one.n_samples
        assert fold.counts["train"] == fold.train.n_samples
        assert fold.counts["test"] == fold.test.n_samples


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_training_label_meets_a_test_label(one, scheme):
    for fold in one.split(scheme):
        train, test = everything(fold.train), everything(fold.test)
        for decision, end in zip(test["times"], test["label_times"], strict=True):
            assert not np.any((train["times"] < end) & (train["label_times"] > decision))


def test_tests_come_in_the_order_of_time_and_each_once(one):
    for fold in one.split(PurgedKFold(3)):
        served = everything(fold.test, epoch=5)
        assert (np.diff(served["times"]) >= np.timedelta64(0)).all()
        assert keys(served) == sorted(keys(served), key=lambda key: (key[1], key[0]))
        assert served["sample_ids"].tolist() == list(range(fold.test.n_samples))


def test_training_is_shuffled_as_the_whole_set_is_and_tests_keep_the_last_batch():
    with Stager(bar_table(STEPS), window=7, batch_size=16, last="drop", device="cpu") as one:
        (fold,) = one.split(WalkForward(1))
        ids = [batch.sample_ids for batch in fold.train.batches(1)]
        assert {len(some) for some in ids} == {16}
        assert sorted(np.concatenate(ids)) != np.concatenate(ids).tolist()
        assert sum(len(batch) for batch in fold.test.batches()) == fold.test.n_samples
        assert fold.test.n_samples % 16


def test_all_folds_lie_in_the_same_memory(one):
    for fold in one.split(PurgedKFold(3)):
        for part in (fold.train, fold.test):
            assert part.resident is one.resident
            assert part._index.y is one._index.y
            for batch in part.batches(1):
                view = part.view(1, batch.number, len(batch) - 1)
                assert np.shares_memory(view, one.resident.rows)
                np.testing.assert_array_equal(view, batch.x[-1])
        assert fold.train is fold.train
        fold.train.close()
        with pytest.raises(ClosedError):
            fold.train.batches()
        assert not one.resident.closed


def test_folds_end_with_the_rows():
    one = Stager(bar_table(STEPS), window=7, batch_size=16, device="cpu")
    first, second = one.split(PurgedKFold(2))
    served = first.train.batches()
    next(served)
    one.close()
    with pytest.raises(ClosedError):
        next(served)
    with pytest.raises(ClosedError):
        _ = second.train
    with pytest.raises(ClosedError):
        one.split(PurgedKFold(2))


def test_the_plan_of_a_fold_tells_its_own_reasons(one):
    fold = one.split(PurgedKFold(4))[1]
    plan = fold.train.plan
    assert list(plan.reasons)[-3:] == ["outside the fold", "purge", "embargo"]
    assert plan.reasons["purge"] == fold.counts["purge"] > 0
    assert plan.reasons["embargo"] == fold.counts["embargo"] > 0
    assert {r: n for r, n in plan.reasons.items() if r in one.plan.reasons} == one.plan.reasons
    assert plan.usable == plan.n_samples / (plan.n_samples + plan.reasons["purge"] + plan.reasons["embargo"])
    assert str(plan).startswith("fold ")
    assert "2 of 4, train" in str(plan).splitlines()[0]
    assert "- purge" in str(plan)
    assert "at max_gap" not in str(plan)
    assert fold.test.plan.usable == 1
    assert fold.test.plan.warnings == ()
    assert json.loads(json.dumps(plan.as_dict()))["fold"] == "2 of 4, train"
    tight = one.split(PurgedKFold(4, embargo="75min"))[0].train.plan
    assert tight.warnings
    assert "of the samples of the fold are left; most are lost to: embargo" in tight.warnings[0]


def test_what_a_fold_tells():
    pack = memory_pack({"A": range(100)})
    with Stager(pack, window=4, batch_size=8, target=Target(horizon=3), device="cpu") as one:
        folds = one.split(PurgedKFold(4))
        assert folds[1].describe().splitlines() == [
            "fold        2 of 4: PurgedKFold(folds=4, embargo=None)",
            "train       2024-01-01 00:04Z to 2024-01-01 00:24Z, 21 samples, labels known by 2024-01-01 00:28Z",
            "purge       2024-01-01 00:25Z to 2024-01-01 00:27Z, 3 samples, labels known by 2024-01-01 00:31Z",
            "test        2024-01-01 00:28Z to 2024-01-01 00:50Z, 23 samples, labels known by 2024-01-01 00:54Z",
            "purge       2024-01-01 00:51Z to 2024-01-01 00:53Z, 3 samples, labels known by 2024-01-01 00:57Z",
            "embargo     2024-01-01 00:54Z to 2024-01-01 00:57Z, 4 samples, labels known by 2024-01-01 01:01Z",
            "train       2024-01-01 00:58Z to 2024-01-01 01:36Z, 39 samples, labels known by 2024-01-01 01:40Z",
            "embargo is  the clock span of each window",
            "samples     train 60, test 23, purge 6, embargo 4, outside the fold 0",
        ]
        told = json.loads(json.dumps(folds[1].as_dict()))
        assert (told["number"], told["n_folds"]) == (1, 4)
        assert told["zones"][2] == {
            "kind": "test",
            "first": "2024-01-01T00:28:00.000000000Z",
            "last": "2024-01-01T00:50:00.000000000Z",
            "label_end": "2024-01-01T00:54:00.000000000Z",
            "n_samples": 23,
        }
        assert "2 of 4: train 60, test 23" in repr(folds[1])
        assert "embargo is  0:07:00" in one.split(PurgedKFold(4, embargo="7min"))[0].describe()
        assert "embargo is  90 ns" in one.split(PurgedKFold(4, embargo="90ns"))[0].describe()
        assert "embargo is  no training follows a test" in one.split(WalkForward(2))[0].describe()


def test_the_split_of_a_fold_is_nested(one):
    outer = one.split(WalkForward(2))[1]
    for inner in outer.train.split(PurgedKFold(3)):
        assert set(keys(everything(inner.test))) <= set(keys(everything(outer.train)))
        for part in (inner.train, inner.test):
            assert part.plan.n_samples + sum(part.plan.reasons.values()) == part.plan.n_rows


@pytest.mark.parametrize("scheme", [None, 5, "walk_forward", WalkForward])
def test_what_is_no_scheme_is_refused(one, scheme):
    with pytest.raises(SampleError, match=r"give WalkForward\(5\).*table \[split\]"):
        one.split(scheme)


def test_a_configured_set_can_be_split(tmp_path):
    stager.pack(bar_table(STEPS), tmp_path / "bars.pack")
    (tmp_path / "x.toml").write_text('source = "bars.pack"\n[batches]\nwindow = 7\nbatch_size = 8\n')
    with Stager.from_config(tmp_path / "x.toml", device="cpu") as one:
        assert len(one.split(PurgedKFold(3))) == 3


# -------------------------------------------------------------------------------- weights


def plain_weights(pack: Any, index: SampleIndex, ends: Any) -> dict[int, float]:
    """By counting, for each step from bar to bar, the labels over it."""
    found = {}
    rows = index.rows(np.arange(index.n_samples)).tolist()
    for symbol in range(len(pack.symbols)):
        first, stop = int(pack.first_rows[symbol]), int(pack.first_rows[symbol] + pack.counts[symbol])
        steps = {}
        for row in (row for row in rows if first <= row < stop):
            end = int(ends(np.array([row]))[0])
            covered = [step for step in range(row, stop - 1) if pack.times[step + 1] < end]
            steps[row] = covered or [row]
        for row, covered in steps.items():
            found[row] = np.mean([1 / sum(step in other for other in steps.values()) for step in covered])
    mean = sum(found.values()) / len(found)
    return {row: value / mean for row, value in found.items()}


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_weights_are_those_of_counting(data):
    steps = {name: sorted(data.draw(st.sets(st.integers(0, 30), min_size=1))) for name in "AB"} | {"C": range(12)}
    pack = memory_pack(steps)
    target = Target(horizon=data.draw(st.integers(1, 4)), delay=data.draw(st.integers(0, 2)),
                    exit=data.draw(st.sampled_from(["close", "open"])))  # fmt: skip
    index = build_index(pack, data.draw(st.integers(1, 3)), target, Select())
    with Stager(pack, window=index.window, target=target, batch_size=1000, device="cpu") as one:
        ends = one._about.ends
        if data.draw(st.booleans()):
            lengths = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 9, pack.n_rows) * MINUTE
            weights = uniqueness(pack, index, lambda rows: pack.available_at(rows) + lengths[rows])
            wanted = plain_weights(pack, index, lambda rows: pack.available_at(rows) + lengths[rows])
        else:
            (batch,) = one.batches()
            weights = np.zeros(pack.n_rows, np.float32)
            weights[index.rows(batch.sample_ids)] = batch.weight
            wanted = plain_weights(pack, index, ends)
    rows = list(wanted)
    np.testing.assert_allclose(weights[rows], list(wanted.values()), rtol=1e-6)
    assert np.count_nonzero(weights) == len(rows)


def test_weights_are_of_mean_one_and_of_the_fold(one):
    assert everything(one)["weight"].dtype == np.float32
    for fold in one.split(PurgedKFold(4)):
        for part in (fold.train, fold.test):
            facts = everything(part)
            assert facts["weight"].mean() == pytest.approx(1, abs=1e-6)
            wanted = plain_weights(one.resident.pack, part._index, part._about.ends)
            rows = part._index.rows(facts["sample_ids"]).tolist()
            np.testing.assert_allclose(facts["weight"], [wanted[row] for row in rows], rtol=1e-6)


def test_labels_that_stand_alone_weigh_more():
    """A label that shares half its steps with one other weighs 0.75 of one that shares none."""
    pack = memory_pack({"A": range(8), "B": range(5)})
    index = build_index(pack, 1, Target(horizon=4, delay=0), Select())
    # Rows 0 to 3 of A: each of 4 steps; the only row of B stands alone.
    weights = uniqueness(pack, index, lambda rows: pack.available_at(rows + 4))
    shares = np.array([(1 + 1 / 2 + 1 / 3 + 1 / 4), (1 / 2 + 1 / 3 + 1 / 4 + 1 / 3)]) / 4
    assert weights[0] / weights[8] == pytest.approx(shares[0], rel=1e-6)
    assert weights[1] / weights[8] == pytest.approx(shares[1], rel=1e-6)
    assert weights[3] == pytest.approx(weights[0], rel=1e-6)


def test_without_a_target_all_weigh_the_same():
    with Stager(bar_table(STEPS), window=7, batch_size=16, device="cpu") as one:
        assert {value for batch in one.batches() for value in batch.weight.tolist()} == {1.0}


# -------------------------------------------------------------------------------- provenance


def test_every_sample_is_located(one):
    for part in (one, one.split(PurgedKFold(3))[1].train, one.split(PurgedKFold(3))[1].test):
        facts = everything(part)
        for (symbol, _), time, sample in zip(keys(facts), facts["times"], facts["sample_ids"], strict=True):
            assert part.locate(symbol, time) == sample


def test_decisions_are_written_in_any_way(one):
    sample = one.locate("A", np.datetime64(START + 10 * MINUTE, "ns"))
    assert one.locate("A", "2024-01-01T00:10") == one.locate("A", "2024-01-01T01:10+01:00") == sample


@pytest.mark.parametrize(
    ("symbol", "time", "words"),
    [
        ("Z", "2024-01-01T00:10", "no symbol 'Z'; it has 3: A, B, C"),
        (3, "2024-01-01T00:10", "no symbol 3"),
        ("A", "soon", "'soon' is no instant"),
        (
            "A",
            "2024-01-01T00:10:30",
            "no bar that closes at 2024-01-01 00:10:30Z; next to it are 2024-01-01 00:10Z",
        ),
        ("A", "2023-01-01", "no bar that closes at"),
        ("A", "2025-01-01", "no bar that closes at"),
        ("B", "2024-01-01T01:22", "no bar that closes at"),
        ("A", "2024-01-01T00:06", "closes at 2024-01-01 00:06Z ends no sample here"),
        ("A", "2024-01-01T01:30", "ends no sample here"),
        ("B", "2024-01-01T01:26", "ends no sample here"),
    ],
)
def test_what_is_not_there_is_not_located(one, symbol, time, words):
    with pytest.raises(SampleError, match=words):
        one.locate(symbol, time)


@pytest.mark.parametrize("which", ["whole", "train", "test"])
def test_a_table_of_predictions(one, which):
    fold = one.split(WalkForward(2))[1]
    part = one if which == "whole" else getattr(fold, which)
    facts = everything(part)
    predictions = np.empty(part.n_samples, np.float32)
    predictions[facts["sample_ids"]] = facts["x"][:, -1, 3]
    table = part.to_table(predictions)
    assert table.column_names == ["symbol", "time", "decision", "label_end", "target", "prediction"]
    assert table.schema.field("time").type == table.schema.field("label_end").type == pa.timestamp("ns", "UTC")
    order = np.argsort(facts["sample_ids"])
    assert table["symbol"].to_pylist() == facts["symbols"][order].tolist()
    np.testing.assert_array_equal(table["decision"].to_numpy(), facts["times"][order])
    np.testing.assert_array_equal(table["time"].to_numpy(), facts["times"][order] - np.timedelta64(1, "m"))
    np.testing.assert_array_equal(table["label_end"].to_numpy(), facts["label_times"][order])
    np.testing.assert_array_equal(table["target"].to_numpy(), facts["y"][order])
    np.testing.assert_array_equal(table["prediction"].to_numpy(), facts["x"][order, -1, 3])
    assert table["prediction"].type == pa.float32()


def test_predictions_of_a_test_are_those_of_its_batches(one):
    test = one.split(WalkForward(1))[0].test
    table = test.to_table(np.concatenate([batch.y for batch in test.batches()]))
    assert table["prediction"].equals(table["target"])
    assert test.to_table([1.5] * test.n_samples)["prediction"].to_pylist() == [1.5] * test.n_samples
    two = test.to_table(np.ones((test.n_samples, 2)))
    assert two.column_names[-2:] == ["prediction_0", "prediction_1"]
    assert test.to_table().column_names[-1] == "target"


@pytest.mark.parametrize("shape", [(3,), (), (1, 2, 3)])
def test_predictions_that_do_not_fit_are_refused(one, shape):
    with pytest.raises(SampleError, match="predictions have shape"):
        one.to_table(np.zeros(shape))
    with pytest.raises(SampleError, match="concatenate them"):
        one.to_table([batch.y for batch in one.batches()])
    with pytest.raises(SampleError, match="takes numbers"):
        one.to_table(np.array(["up"] * one.n_samples))


def test_without_a_target_the_table_says_so():
    with Stager(bar_table(STEPS), window=7, batch_size=16, device="cpu") as one:
        table = one.to_table(np.zeros(one.n_samples))
        assert table["label_end"].null_count == table["target"].null_count == one.n_samples


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_newest_window_of_every_symbol(last):
    steps = STEPS | {"D": range(3), "E": range(100, 107)}
    with Stager(bar_table(steps), window=7, batch_size=16, last=last, device="cpu") as one:
        batch = one.latest()
        assert batch.symbols == ["A", "B", "C", "E"]
        newest = [steps[symbol][-1] for symbol in batch.symbols]
        np.testing.assert_array_equal(batch.times.astype(np.int64), [START + (step + 1) * MINUTE for step in newest])
        for x, symbol, time in zip(batch.x, batch.symbols, batch.times, strict=True):
            facts = [(b.x[i], b.times[i]) for b in one.batches() for i in range(len(b)) if b.symbols[i] == symbol]
            if last == "keep":
                np.testing.assert_array_equal(x, max(facts, key=lambda fact: fact[1])[0])
            assert x[-1, 3] % 1e6 == len(steps[symbol]) - 1
            assert time >= max(fact[1] for fact in facts)
        assert len(one) == len(list(one.batches()))


def test_the_newest_window_skips_what_is_no_window():
    closes = [float(row) for row in range(1, 11)]
    table = bar_table({"A": range(10)}, vwap=[*closes[:7], math.nan, *closes[8:]])
    with Stager(table, window=3, batch_size=4, device="cpu") as one:
        assert one.latest().times.astype(np.int64).tolist() == [START + 7 * MINUTE]


def test_with_a_target_there_is_no_newest_window(one):
    with pytest.raises(SampleError, match="target=None"):
        one.latest()


def test_samples_of_months_are_located():
    months = (np.datetime64("2020-01") + np.arange(12)).astype("datetime64[ns]").astype(np.int64)
    pack = memory_pack({"M": (months - START).tolist()}, interval="1mo", unit=1)
    with Stager(pack, window=2, batch_size=4, device="cpu") as one:
        for batch in one.batches():
            for time, sample in zip(batch.times, batch.sample_ids, strict=True):
                assert one.locate("M", time) == sample
        assert one.locate("M", "2020-03-01") == 0
        with pytest.raises(SampleError, match="no bar that closes at"):
            one.locate("M", "2020-03-02")
        assert [fold.test.n_samples for fold in one.split(WalkForward(2))] == [3, 3]


def test_samples_of_nanoseconds_are_located_and_told():
    pack = memory_pack({"A": range(200)}, interval="100ns", unit=100)
    with Stager(pack, window=2, batch_size=16, target=Target(horizon=1), device="cpu") as one:
        for batch in one.batches():
            for time, sample in zip(batch.times, batch.sample_ids, strict=True):
                assert one.locate("A", time) == one.locate("A", f"{time}Z") == sample
        fold = one.split(PurgedKFold(4))[1]
        assert "2024-01-01 00:00:00.0000052Z" in fold.describe()


def test_days_are_told_as_dates():
    pack = memory_pack({"A": range(60)}, interval="1d", unit=DAY)
    with Stager(pack, window=5, batch_size=8, target=Target(horizon=1), device="cpu") as one:
        told = one.split(WalkForward(2, test="10d"))[0].describe()
        assert "2024-02-09 00:00Z to 2024-02-18 00:00Z, 10 samples, labels known by 2024-02-20 00:00Z" in told
