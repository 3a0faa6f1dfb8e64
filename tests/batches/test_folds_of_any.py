"""Folds of samples with several targets, given labels, a stride, chosen columns and normalised windows."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from bars_fixtures import MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from stager import Combinatorial, Labels, PurgedKFold, Select, Stager, Target, WalkForward
from stager.errors import SampleError

STEPS = {"B": [*range(80), *range(83, 150)], "A": range(90), "C": [*range(5), *range(7, 160)]}
SCHEMES = (WalkForward(3), PurgedKFold(4), Combinatorial(4, 2, embargo="6min"))


def facts_of(part, epoch=1):
    batches = list(part.batches(epoch))
    found = {name: np.concatenate([getattr(batch, name) for batch in batches])
             for name in ("x", "y", "times", "label_times", "sample_ids", "weight")}  # fmt: skip
    symbols = [symbol for batch in batches for symbol in batch.symbols]
    return found, list(zip(symbols, found["times"].astype(np.int64).tolist(), strict=True))


def given_labels():
    """A label for every third bar, each known after another number of minutes."""
    rng = np.random.default_rng(4)
    rows = [(symbol, step) for symbol, steps in STEPS.items() for step in list(steps)[::3]]
    ends = [START + (step + 1 + int(rng.integers(0, 20))) * MINUTE for _, step in rows]
    return Labels(
        pa.table(
            {
                "symbol": [symbol for symbol, _ in rows],
                "time": pa.array([START + step * MINUTE for _, step in rows], pa.timestamp("ns", "UTC")),
                "label": rng.random(len(rows)),
                "label_end": pa.array(ends, pa.timestamp("ns", "UTC")),
            }
        )
    )


CASES = {
    "several": {"target": [Target(horizon=2), Target(horizon=9), Target(horizon=20)]},
    "given": {"target": given_labels()},
    "given and computed": {"target": [given_labels(), Target(horizon=3)]},
    "stride": {"target": Target(horizon=3), "select": Select(stride=4)},
    "columns": {"target": Target(horizon=3), "select": Select(columns=("close", "volume"))},
    "normalised": {"target": Target(horizon=3), "normalize": "last"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", CASES)
def test_folds_serve_samples_of_the_whole_set_and_none_that_knows_too_much(case, scheme):
    with Stager(bar_table(STEPS), window=7, batch_size=16, seed=3, device="cpu", **CASES[case]) as one:
        facts, keys = facts_of(one)
        whole = {key: place for place, key in enumerate(keys)}
        for fold in one.split(scheme):
            served = {}
            for name in ("train", "test"):
                part = getattr(fold, name)
                found, there = facts_of(part)
                places = [whole[key] for key in there]
                assert len(set(places)) == part.n_samples == fold.counts[name]
                for fact in ("x", "y", "label_times"):
                    np.testing.assert_array_equal(found[fact], facts[fact][places])
                assert found["weight"].mean() == pytest.approx(1, abs=1e-6)
                assert part.n_samples + sum(part.plan.reasons.values()) == part.plan.n_rows
                rows = part._index.rows(np.arange(part.n_samples))
                np.testing.assert_array_equal(part._index.rows_between(0, part.n_samples), rows)
                for (symbol, time), sample in list(zip(there, found["sample_ids"], strict=True))[::7]:
                    time = np.datetime64(time, "ns")
                    assert part.locate(symbol, time) == sample
                ends = found["label_times"].view(np.int64).reshape(len(rows), -1).max(axis=1)
                served[name] = found["times"].view(np.int64), ends
            starts, ends = served["train"]
            for decision, end in zip(*served["test"], strict=True):
                assert not np.any((starts < end) & (ends > decision))
            assert (np.diff(served["test"][0]) >= 0).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_parts_of_strided_samples(data):
    steps = {name: sorted(data.draw(st.sets(st.integers(0, 60), min_size=40))) for name in "AB"}
    stride, n = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 3))
    pack = memory_pack(steps)
    with Stager(pack, window=1, batch_size=7, select=Select(stride=stride), device="cpu") as one:
        whole = one._index.rows(np.arange(one.n_samples))
        served = []
        for fold in one.split(PurgedKFold(n, embargo="0")):
            train, test = fold.train._index, fold.test._index
            rows = [index.rows(np.arange(index.n_samples)) for index in (train, test)]
            assert sorted(np.concatenate(rows)) == whole.tolist()
            served.append(rows[1])
        assert sorted(np.concatenate(served)) == whole.tolist()


def test_the_newest_of_strided_windows_and_of_chosen_columns():
    with Stager(bar_table(STEPS), window=7, batch_size=16, select=Select(stride=4, columns=("close",)),
                normalize="none", device="cpu") as one:  # fmt: skip
        batch = one.latest()
        assert batch.symbols == ["A", "B", "C"]
        assert batch.x.shape == (3, 7, 1)
        facts = [(b.symbols[i], b.times[i], b.x[i]) for b in one.batches() for i in range(len(b))]
        for symbol, time, x in zip(batch.symbols, batch.times, batch.x, strict=True):
            newest = max((fact for fact in facts if fact[0] == symbol), key=lambda fact: fact[1])
            assert newest[1] == time
            np.testing.assert_array_equal(newest[2], x)


def test_a_table_has_a_column_for_each_target():
    with Stager(bar_table(STEPS), window=7, batch_size=16, device="cpu", **CASES["given and computed"]) as one:
        table = one.to_table(np.zeros(one.n_samples))
        assert table.column_names == [
            "symbol", "time", "decision", "label_end_0", "label_end_1", "target_0", "target_1", "prediction",
        ]  # fmt: skip
        assert table["target_0"].null_count == table["label_end_0"].null_count > 0


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_admissible_sample_comes_once_for_any_batch_size_stride_fold_and_seed(data):
    steps = {name: sorted(data.draw(st.sets(st.integers(0, 80), min_size=50))) for name in "ABC"}
    window, stride, gap = (data.draw(st.integers(lo, hi)) for lo, hi in ((1, 4), (1, 3), (0, 2)))
    reach = data.draw(st.integers(1, 3))
    admissible = set()
    for symbol, minutes in steps.items():
        for place in range(window - 1, len(minutes) - reach):
            span = minutes[place - window + 1 : place + reach + 1]
            whole = all(b - a - 1 <= gap for a, b in itertools.pairwise(span))
            if whole and (START // MINUTE + minutes[place] + 1) % stride == 0:
                admissible.add((symbol, START + (minutes[place] + 1) * MINUTE))
    options = {
        "batch_size": data.draw(st.integers(1, 40)),
        "seed": data.draw(st.integers(0, 2**63 - 1)),
        "shuffle": data.draw(st.sampled_from(["full", "time", False])),
        "select": Select(stride=stride, max_gap=gap),
        "target": Target(horizon=reach, delay=0),
    }
    try:
        one = Stager(memory_pack(steps), window=window, device="cpu", **options)
    except SampleError:
        assert not admissible
        return
    epoch = data.draw(st.integers(0, 5))
    with one:
        _, keys = facts_of(one, epoch)
        assert len(keys) == len(admissible)
        assert set(keys) == admissible
        try:
            folds = one.split(data.draw(st.sampled_from([WalkForward(2), PurgedKFold(3), Combinatorial(4, 2)])))
        except SampleError:
            return
        for fold in folds:
            kept = []
            for part in (fold.train, fold.test):
                _, there = facts_of(part, epoch)
                assert len(set(there)) == len(there) == part.n_samples
                kept += there
            assert len(set(kept)) == len(kept)
            assert set(kept) <= admissible
            assert len(admissible) - len(kept) == sum(fold.counts[k] for k in ("purge", "embargo", "outside the fold"))
