"""Time-grouped batches: whole decision instants, in a keyed order."""

from __future__ import annotations

import numpy as np
import pytest
from bars_fixtures import MINUTE, START, bar_table, memory_pack
from hypothesis import given, settings
from hypothesis import strategies as st

import stager
from stager import Combinatorial, PurgedKFold, Select, Stager, Target, WalkForward
from stager.batches import host
from stager.errors import SampleError
from stager.samples.order import Order

TARGETS = (None, Target(horizon=1, delay=0), [Target(horizon=1), Target(horizon=2)])
STEPS = {"B": [*range(80), *range(83, 150)], "A": range(90), "C": [*range(5), *range(7, 160)]}


def facts_of(part, epoch=0, start=0):
    """What the batches of an epoch hold, one dictionary a batch."""
    return [
        {"x": batch.x, "y": batch.y, "ids": batch.sample_ids, "times": batch.times.view(np.int64).tolist(),
         "symbols": batch.symbols, "number": batch.number}
        for batch in part.batches(epoch, start=start)
    ]  # fmt: skip


def keys_of(batches):
    return [key for batch in batches for key in zip(batch["times"], batch["symbols"], strict=True)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_sample_comes_once_and_no_instant_is_torn(data):
    steps = {
        f"S{k}": sorted(data.draw(st.sets(st.integers(0, 30), min_size=1))) for k in range(data.draw(st.integers(1, 5)))
    }
    options = {
        "window": data.draw(st.integers(1, 4)),
        "target": data.draw(st.sampled_from(TARGETS)),
        "select": Select(stride=data.draw(st.sampled_from([1, 3])), max_gap=data.draw(st.sampled_from([0, 2]))),
        "seed": data.draw(st.integers(0, 9)),
        "device": "cpu",
    }  # fmt: skip
    pack, batch_size, epoch = memory_pack(steps), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 4))
    try:
        plain = Stager(pack, batch_size=1, shuffle=False, **options)
    except SampleError:
        return
    with plain, Stager(pack, batch_size=batch_size, shuffle="time", **options) as one:
        singles = facts_of(plain)
        whole = {
            key: (batch["x"][0], None if batch["y"] is None else batch["y"][0])
            for key, batch in zip(keys_of(singles), singles, strict=True)
        }
        batches = facts_of(one, epoch)
        served = keys_of(batches)
        assert len(served) == len(set(served)) == one.n_samples == plain.n_samples
        assert set(served) == set(whole)
        # The instants, in the order that the same bijection gives, whole ones in each batch, symbols in their order.
        instants = sorted({time for time, _ in served})
        chosen = Order(len(instants), options["seed"], epoch).sample_ids(0, len(instants))
        wanted = [(instants[k], symbol) for k in chosen for symbol in pack.symbols if (instants[k], symbol) in whole]
        assert served == wanted
        assert len(batches) == len(one) == -(-len(instants) // batch_size)
        assert [len(set(batch["times"])) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        ids = np.concatenate([batch["ids"] for batch in batches])
        assert sorted(ids) == list(range(one.n_samples))
        for batch in batches:
            for place, key in enumerate(keys_of([batch])):
                x, y = whole[key]
                np.testing.assert_array_equal(batch["x"][place], x)
                if y is not None:
                    np.testing.assert_array_equal(batch["y"][place], y)
                assert one.sample_id(epoch, batch["number"], place) == batch["ids"][place]
                assert one.locate(key[1], np.datetime64(key[0], "ns")) == batch["ids"][place]
            with pytest.raises(SampleError, match="there is no sample"):
                one.sample_id(epoch, batch["number"], len(batch["ids"]))
        k = data.draw(st.integers(0, len(one)))
        rest = facts_of(one, epoch, k)
        assert [batch["number"] for batch in rest] == list(range(k, len(one)))
        assert keys_of(rest) == keys_of(batches[k:])


def test_many_tasks_and_threads_serve_the_same(monkeypatch):
    options = {"window": 7, "batch_size": 3, "shuffle": "time", "target": Target(horizon=2), "device": "cpu"}
    with Stager(bar_table(STEPS), **options) as one:
        whole = facts_of(one, 1)
        monkeypatch.setattr(host, "_TASK_NBYTES", 3000)
        monkeypatch.setattr(host, "_ORDER_POSITIONS", 16)
        for batch, other in zip(facts_of(one, 1), whole, strict=True):
            assert batch["symbols"] == other["symbols"]
            np.testing.assert_array_equal(batch["x"], other["x"])
            np.testing.assert_array_equal(batch["y"], other["y"])


def test_views_and_epochs():
    with Stager(bar_table(STEPS), window=7, batch_size=4, shuffle="time", seed=2, device="cpu") as one:
        first, again, second = facts_of(one, 0), facts_of(one, 0), facts_of(one, 1)
        assert keys_of(first) == keys_of(again)
        assert keys_of(first) != keys_of(second)
        for number in (0, 5, len(one) - 1):
            for place, x in enumerate(second[number]["x"]):
                np.testing.assert_array_equal(one.view(1, number, place), x)
        np.testing.assert_array_equal(np.sort(np.concatenate([batch["ids"] for batch in first])), range(one.n_samples))


def test_the_last_batch_is_kept_or_dropped():
    steps = {"A": range(10), "B": range(3)}
    keep = Stager(bar_table(steps), window=1, batch_size=4, shuffle="time", device="cpu")
    drop = Stager(bar_table(steps), window=1, batch_size=4, shuffle="time", last="drop", device="cpu")
    assert (len(keep), len(drop)) == (3, 2)
    assert keys_of(facts_of(drop)) == keys_of(facts_of(keep)[:2])
    with pytest.raises(SampleError, match="10 decision instants fill no batch of 11"):
        Stager(bar_table(steps), window=1, batch_size=11, shuffle="time", last="drop", device="cpu")
    with Stager(bar_table(steps), window=1, batch_size=1 << 61, shuffle="time", device="cpu") as all_in_one:
        (batch,) = all_in_one.batches()
        assert len(batch) == 13


def test_the_plan_says_what_a_batch_is():
    with Stager(bar_table(STEPS), window=7, batch_size=4, shuffle="time", device="cpu") as one:
        n_instants = len({key[0] for key in keys_of(facts_of(one))})
        assert one.plan.n_instants == n_instants
        assert f"of 4 of {n_instants} instants an epoch" in str(one.plan)
        assert one.plan.batch_nbytes == one.n_samples * 4 // n_instants * 7 * 5 * 4
        assert one.plan.n_batches == len(one)


@pytest.mark.parametrize("scheme", [WalkForward(3), PurgedKFold(4), Combinatorial(5, 2, embargo="6min")])
def test_folds_keep_instants_whole(scheme):
    options = {"window": 7, "target": Target(horizon=3), "batch_size": 5, "seed": 3, "device": "cpu"}
    with Stager(bar_table(STEPS), **options) as plain, Stager(bar_table(STEPS), shuffle="time", **options) as one:
        for fold, other in zip(one.split(scheme), plain.split(scheme), strict=True):
            assert fold.describe() == other.describe()
            for name in ("train", "test"):
                batches = facts_of(getattr(fold, name), 2)
                assert set(keys_of(batches)) == set(keys_of(facts_of(getattr(other, name))))
                times = [set(batch["times"]) for batch in batches]
                assert sum(map(len, times)) == len(set.union(*times))
                assert [len(found) for found in times[:-1]] == [5] * (len(times) - 1)
            assert [time for time, _ in keys_of(batches)] == sorted(time for time, _ in keys_of(batches))
            by_id = np.arange(fold.train.n_samples)
            np.testing.assert_array_equal(
                fold.train._about.weights(by_id),
                other.train._about.weights(
                    np.array([other.train.locate(s, t) for s, t in zip(fold.train._about.symbols(by_id),
                                                                      fold.train._about.times(by_id), strict=True)])
                ),
            )  # fmt: skip


def test_the_newest_windows_and_a_table_of_predictions():
    with Stager(bar_table(STEPS), window=7, batch_size=4, shuffle="time", device="cpu") as one:
        assert one.latest().symbols == ["A", "B", "C"]
        table = one.to_table(np.arange(one.n_samples, dtype=np.float32))
        decisions = table["decision"].cast("int64").to_numpy()
        assert (np.diff(decisions) >= 0).all()
        for batch in one.batches():
            np.testing.assert_array_equal(decisions[batch.sample_ids], batch.times.view(np.int64))


def test_other_shuffles_are_refused():
    for wrong in ("instant", True, 0, None):
        with pytest.raises(SampleError, match="there are 'full', 'block', 'time' and False"):
            Stager(bar_table({"A": range(9)}), window=1, batch_size=1, shuffle=wrong, device="cpu")


def test_a_resident_serves_both_ways():
    with (
        stager.stage(bar_table(STEPS), device="cpu") as rows,
        Stager(rows, window=3, batch_size=8) as plain,
        Stager(rows, window=3, batch_size=8, shuffle="time") as one,
    ):
        assert set(keys_of(facts_of(plain))) == set(keys_of(facts_of(one)))
        assert min(time for time, _ in keys_of(facts_of(one))) == START + 3 * MINUTE
